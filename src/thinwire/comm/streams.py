"""Streams and events of a device, reached by all of thinwire through this module, so that tests can replace them.

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

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two events that have happened."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Begin to copy a small tensor to the host, after what the current stream has to do. Does not wait."""


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
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, event: torch.cuda.Event, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def use(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def passed(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


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


def finish(device: torch.device) -> None:
    """Let the host wait for everything on a device: before a step is timed, never within one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_until_passed(event: Any, *, seconds: float, poll: float = 0.001) -> bool:
    """Let the host wait for an event, but not for ever; whether it has happened."""
    end = time.monotonic() + seconds
    while not _Active.streams.passed(event):
        if time.monotonic() > end:
            return False
        time.sleep(poll)
    return True
