"""What the controller is told, what it expected, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .learner import Learnt


@dataclass(frozen=True)
class Observation:
    """The mean of the steps since the last round, over all ranks: seconds of a step and of its parts."""

    step: int  # the next one
    steps: int  # without the one of the canary; what follows is of these
    seconds: float  # from forward to the last bucket, of the slowest rank
    forward: float
    backward: float  # until the last bucket was ready
    rest: float  # optimizer, data
    exchange: float  # with a message under way, of the rank that waited least; the median of the last steps
    ready: tuple[float, ...]  # of each bucket, as a share of backward
    steady: bool | None = None  # whether these steps agree; None if they are too few to tell
    trip: float | None = None  # of a message of next to no bytes
    canary: float | None = None  # with a message under way, of the step in which a bucket was sent another way
    kept: float | None = None  # energy sent over energy offered, of all ranks, where that was sampled
    curve: tuple[float, ...] | None = None  # of the mean gradient, where that was sampled


@dataclass(frozen=True)
class Event:
    """A decision, for the log, the statistics and the report."""

    step: int
    recipe: str
    text: str
    predicted_seconds: float
    mbit: float


@dataclass(frozen=True)
class Expected:
    """A prediction and where it was made."""

    choice: tuple[int, ...]
    line: Learnt
    compute: float
    step: float
    under_way: float
    latency_share: float
    exposed: float

    def far(self, line: Learnt, compute: float) -> bool:
        return not (0.85 < self._pace(line) < 1.15 and 0.85 * self.compute < compute < 1.15 * self.compute)

    def near(self, line: Learnt, compute: float) -> Expected:
        more = self.under_way * (self._pace(line) - 1.0)
        waits = more if self.exposed > more > -self.exposed or more > 0 < self.exposed else 0.0
        step = self.step + waits + compute - self.compute
        return replace(self, line=line, compute=compute, step=step, under_way=self.under_way + more)

    def _pace(self, line: Learnt) -> float:
        latency, byte = line.latency / self.line.latency, line.byte_seconds / self.line.byte_seconds
        return (self.latency_share * latency + (1 - self.latency_share) * byte) * line.factor / self.line.factor
