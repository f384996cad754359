"""Streams and events of a device. All of thinwire reaches them here, so that tests can put a fake in their place.

A device is *resident* if its values stay on it within a step: code that runs on such a device enqueues work and never
reads a value on the host. CUDA is resident, the CPU is not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """What thinwire asks of a device."""

    def resident(self, device: torch.device) -> bool:
        """Whether values must stay on the device within a step."""

    def side(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Work in this block goes to the one side stream of the device."""

    def record(self, device: torch.device) -> Any:
        """An event on the current stream of the device."""

    def wait(self, event: Any, device: torch.device) -> None:
        """The current stream goes on after the event. The host does not wait."""

    def use(self, tensor: Tensor) -> None:
        """The current stream uses a tensor of another stream: its memory must not be given away before."""

    def passed(self, event: Any) -> bool:
        """Whether the event has happened. Does not wait."""


class CudaStreams:
    """The streams of torch.cuda; on other devices nothing is resident and nothing has to wait."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def resident(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def side(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._side[device])

    def record(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, event: torch.cuda.Event, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def use(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def passed(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]


class _Active:
    """The streams in use, in one place that tests can replace."""

    streams: Streams = CudaStreams()


def active() -> Streams:
    """The streams that thinwire uses now."""
    return _Active.streams


def resident(device: torch.device) -> bool:
    """Whether values must stay on this device within a step.

    >>> resident(torch.device("cpu")), resident(torch.device("cuda", 0))
    (False, True)
    """
    return _Active.streams.resident(device)


@contextlib.contextmanager
def replaced(streams: Streams) -> Iterator[Streams]:
    """Use other streams inside the block: for tests."""
    before, _Active.streams = _Active.streams, streams
    try:
        yield streams
    finally:
        _Active.streams = before


def wait_until_passed(event: Any, *, seconds: float, poll: float = 0.001) -> bool:
    """Let the host wait for an event, but not for ever; whether it has happened."""
    end = time.monotonic() + seconds
    while not _Active.streams.passed(event):
        if time.monotonic() > end:
            return False
        time.sleep(poll)
    return True
