"""One backward pass: which buckets have come, what is under way, and the futures that DDP waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.futures import Future

from ..comm.network import Pending


@dataclasses.dataclass
class Step:
    """Open from the first bucket of a backward pass until everything is sent."""

    number: int
    whole: bool  # buckets are summed as they are
    measures: bool = False  # what codecs keep of what is offered
    queued: bool = False
    arrived: set[str] = dataclasses.field(default_factory=set)
    groups: list[list[str]] = dataclasses.field(default_factory=list)
    views: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    pending: list[tuple[str, Tensor, Pending]] = dataclasses.field(default_factory=list)
    finite: list[bool] = dataclasses.field(default_factory=list)
    energies: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # offered and left, where measured
    _futures: list[tuple[Future[Tensor], Tensor]] = dataclasses.field(default_factory=list)

    def expect(self, names: Sequence[str], buffer: Tensor) -> Future[Tensor]:
        """A bucket has come; its future holds the buffer when the step is complete."""
        self.arrived.update(names)
        self.groups.append(list(names))
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.device.type == "cuda" else None
        future: Future[Tensor] = Future(devices=devices)
        self._futures.append((future, buffer))
        return future

    def largest(self) -> Tensor | None:
        """The buffer with the most elements, which holds a mean once everything has arrived."""
        flat = [buffer for _, buffer in self._futures if not buffer.is_sparse]
        return max(flat, key=Tensor.numel, default=None)

    def complete(self) -> None:
        """DDP may copy the buffers into the gradients."""
        for future, buffer in self._futures:
            future.set_result(buffer)
