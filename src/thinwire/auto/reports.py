"""The report of a rank in a round: its measurements as numbers, their check and their combination over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ExchangeError
from .agreement import DECISION_NUMBERS, Decision
from .candidates import DENSITIES
from .observation import Observation

_HEAD = 2 + DECISION_NUMBERS


@dataclass(frozen=True)
class Measurement:
    """The mean over one rank's steps since the last round; seconds, and 0 for what was not measured.

    >>> one = Measurement(steps=3, seconds=0.5, steady=True)
    >>> Measurement.from_numbers(one.numbers()) == one
    True
    """

    steps: int = 0  # without a canary step
    seconds: float = 0.0  # from forward to the last bucket
    forward: float = 0.0
    backward: float = 0.0
    rest: float = 0.0  # optimizer and data
    latency: float = 0.0  # of a round's own message
    canary: float = 0.0  # exchange time of the canary step
    offered: float = 0.0  # energy given to codecs, where sampled
    left: float = 0.0  # energy that codecs did not send, where sampled
    steady: bool | None = None  # whether the last exchange times agree
    exchange: float = 0.0  # the median of the last exchange times
    last_exchange: float = 0.0
    curve: tuple[float, ...] = (0.0,) * len(DENSITIES)  # energy kept at each density, where sampled

    def numbers(self) -> list[float]:
        times = [self.seconds, self.forward, self.backward, self.rest, self.latency, self.canary]
        steady = -1.0 if self.steady is None else float(self.steady)
        energies = [self.offered, self.left]
        return [float(self.steps), *times, *energies, steady, self.exchange, self.last_exchange, *self.curve]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Measurement:
        steps, seconds, forward, backward, rest, latency, canary, *more = numbers
        offered, left, steady, exchange, last, *curve = more
        times = (seconds, forward, backward, rest, latency, canary)
        agree = None if steady < 0 else bool(steady)
        return cls(int(steps), *times, offered, left, agree, exchange, last, tuple(curve))


@dataclass(frozen=True)
class RankReport:
    """One row of a round: where the rank is, its decision (only that of rank 0 counts) and its measurement."""

    round: int
    step: int
    decision: Decision
    measured: Measurement

    def numbers(self) -> list[float]:
        return [float(self.round), float(self.step), *self.decision.numbers(), *self.measured.numbers()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> RankReport:
        decision, measured = Decision.from_numbers(numbers[2:_HEAD]), Measurement.from_numbers(numbers[_HEAD:])
        return cls(int(numbers[0]), int(numbers[1]), decision, measured)


def check_reports(reports: Sequence[RankReport], *, number: int) -> None:
    """Raise if a rank reports another round or step than rank 0."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if (report.round, report.step) != (number, first.step):
            raise ExchangeError(
                f"auto: rank {rank} is at round {report.round}, step {report.step}, and rank 0 at round {first.round}, "
                f"step {first.step}: make all ranks take the same number of steps"
            )


def combined(step: int, measured: Sequence[Measurement], *, ready: tuple[float, ...]) -> Observation | None:
    """All ranks as one, or None without a timed step.

    The slowest rank determines the time of a step. The rank that waits least shows the exchange time of the link.
    """
    if not all(one.steps for one in measured) and not all(one.canary for one in measured):
        return None
    offered, left = sum(one.offered for one in measured), sum(one.left for one in measured)
    first = measured[0]
    return Observation(
        step=step,
        steps=first.steps,
        seconds=max(one.seconds for one in measured),
        forward=max(one.forward for one in measured),
        backward=max(one.backward for one in measured),
        rest=max(one.rest for one in measured),
        exchange=min(one.exchange for one in measured),
        ready=ready,
        steady=None if any(one.steady is None for one in measured) else all(one.steady for one in measured),
        latency=min(one.latency for one in measured) or None,
        canary=min(one.canary for one in measured) or None,
        energy_kept=1.0 - left / offered if offered > 0 else None,
        curve=first.curve if any(first.curve) else None,
    )
