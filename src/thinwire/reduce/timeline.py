"""The device timeline of a reducer: one side stream, in order, and no value of a step is read on the host.

The hook records an event where the gradient is ready and enqueues everything behind it: compression, collectives on one
communicator in the order of submission, the way back. Streams wait for each other, the host waits for none of them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm import streams
from ..errors import ExchangeError
from .job import Job
from .lanes import Inline, Lanes
from .residuals import Residuals
from .step import Step, Work

_AHEAD = 2  # steps that the host may be ahead of the device
_SHARE = 0.9  # of the group's timeout: then a step is given up, before torch's watchdog ends the process


class Timeline:
    """The device of a reducer; on a CPU everything is done by the host and there is none."""

    def __init__(self, *, timeout: float) -> None:
        self.device: torch.device | None = None
        self._timeout = timeout
        self._ends: deque[Any] = deque()

    def begin(self, device: torch.device) -> torch.device | None:
        """A step of tensors on this device begins."""
        self.device = device if streams.resident(device) else None
        return self.device

    def run(self, work: Work, job: Job, tensors: Mapping[str, Tensor], runner: Inline | Lanes) -> None:
        """Let a runner do a job: in a lane, or here and now on the side stream."""
        device = work.bucket.device
        if not streams.resident(device):
            work.ticket = runner.submit(work.bucket.index, job)
            return
        here = streams.active()
        ready = here.record(device)
        with here.side(device):
            here.wait(ready, device)
            for tensor in (*tensors.values(), *work.outputs.values()):
                here.use(tensor)
            runner.submit(0, job)
            work.event = here.record(device)

    def counts(self, step: Step, finite: bool | Tensor) -> bool | Tensor:
        """Whether a step counts: nothing was not finite, and the caller says so."""
        if step.device is None or step.plain:
            return bool(finite) and bool(step.all_finite())
        here = streams.active()
        now = here.record(step.device)
        with here.side(step.device):
            here.wait(now, step.device)
            if isinstance(finite, Tensor):
                here.use(finite)
            flag = torch.as_tensor(step.all_finite(), device=step.device)
            return flag.logical_and(torch.as_tensor(finite, device=step.device))

    def settle(self, step: Step, counts: bool | Tensor, residuals: Residuals) -> None:
        """End the step: on a device a flag selects old or new residuals, and the current stream follows."""
        if not isinstance(counts, Tensor) or step.device is None:
            residuals.settle(bool(counts))
            return
        here = streams.active()
        with here.side(step.device):
            residuals.settle(counts)
            done = here.record(step.device)
        here.wait(done, step.device)  # from here on the means may be used
        here.use(counts)
        self._ends.append(done)

    def keep_up(self, what: str) -> None:
        """Let the host be a few steps ahead and no more; if the device does not get there, a rank is lost."""
        while len(self._ends) > _AHEAD:
            if not streams.wait_until_passed(self._ends.popleft(), seconds=self._timeout):
                raise ExchangeError(f"{what} did not end within {self._timeout:.0f} s: a rank is lost, or hangs")

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Residuals of a device are used on its side stream, in order with what came before and what comes after."""
        device, here = self.device, streams.active()
        if device is None:
            yield
            return
        now = here.record(device)
        with here.side(device):
            here.wait(now, device)
            yield
            done = here.record(device)
        here.wait(done, device)


def on_side_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Work in this block follows what reducers do on the device; on a CPU nothing changes."""
    return streams.active().side(device) if streams.resident(device) else contextlib.nullcontext()


def patience(timeout: Any) -> float:
    """Seconds that the host waits for a device, from the timeout of a group.

    >>> from datetime import timedelta
    >>> patience(timedelta(minutes=10)), patience(None)
    (540.0, 1620.0)
    """
    return _SHARE * (1800.0 if timeout is None else float(timeout.total_seconds()))
