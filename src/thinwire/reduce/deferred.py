"""Values of a device that the host reads some steps later, when their copies have arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm import streams

_MOST = 64  # values under way; then the oldest is waited for


class Deferred:
    """Copies to the host that are under way, each with what is to be done with it.

    >>> seen = []
    >>> later = Deferred()
    >>> later.add(torch.ones(1), torch.device("cpu"), lambda host: seen.append(float(host)))
    >>> later.run()
    >>> seen
    [1.0]
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor, Callable[[Tensor], None]]] = []

    def add(self, tensor: Tensor, device: torch.device, then: Callable[[Tensor], None]) -> None:
        """Begin to copy a small tensor, after what the current stream has to do; `then` gets the copy."""
        if not streams.resident(device):
            self._waiting.append((None, tensor, then))
            return
        host = streams.active().to_host(tensor)
        self._waiting.append((streams.active().record(device), host, then))

    def run(self) -> None:
        """Do what can be done now; does not wait, unless far too much is under way."""
        while self._waiting:
            event, host, then = self._waiting[0]
            if event is not None and not streams.active().passed(event):
                if len(self._waiting) < _MOST:
                    return
                streams.wait_until_passed(event, seconds=60.0)
            self._waiting.pop(0)
            then(host)

    def drain(self, *, seconds: float = 60.0) -> None:
        """Wait for everything: before a state is saved, or a reducer is closed."""
        while self._waiting:
            event, host, then = self._waiting.pop(0)
            if event is None or streams.wait_until_passed(event, seconds=seconds):
                then(host)
