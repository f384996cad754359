"""How a decision becomes the same on all ranks: it is part of a numbered round, and a step asks for its rounds.

In a round all ranks gather a row of numbers from each other: what they measured, and in that of rank 0 what it has
decided. A step that follows a round runs what the round says. So no rank runs a step before it has the round that the
step depends on; one that comes late is waited for, one that comes twice changes nothing, and one that is lost is a
collective that fails on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ExchangeError

KINDS = ("large", "embeddings", "small")  # of buckets, each with a candidate of its own
_SUDDEN = 1.4  # times as long or as short as in the round before
_FELT = 0.25  # of a step
_ALERT = 3  # rounds that then come after one step each


@dataclass(frozen=True)
class Decision:
    """Which candidate carries which kind of bucket, and what is only tried: one bucket for one step.

    >>> Decision.from_numbers(Decision(3, (1, 1, 0), every=2, canary=(4, 0)).numbers()).canary
    (4, 0)
    """

    number: int
    choice: tuple[int, ...]
    every: int = 1  # steps from one round to the next
    canary: tuple[int, int] | None = None  # candidate, bucket

    def numbers(self) -> list[float]:
        tried = (-1, -1) if self.canary is None else self.canary
        return [float(value) for value in (self.number, self.every, *tried, *self.choice)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Decision:
        number, every, candidate, bucket, *choice = (int(value) for value in numbers)
        return cls(number, tuple(choice), every, None if candidate < 0 else (candidate, bucket))


DECISION_NUMBERS = 4 + len(KINDS)


def main_kind(kinds: Sequence[str]) -> int:
    """The kind that speaks for all: the first of `KINDS` that there is.

    >>> main_kind(["small", "embeddings"]), main_kind([])
    (1, 0)
    """
    return next((number for number, kind in enumerate(KINDS) if kind in kinds), 0)


def of_buckets(choice: Sequence[int], kinds: Sequence[str], canary: tuple[int, int] | None = None) -> list[int]:
    """The candidate of every bucket, by its kind; the one that is tried has another.

    >>> of_buckets((4, 7, 0), ["large", "embeddings", "large"], canary=(9, 2))
    [4, 7, 9]
    """
    ways = [choice[KINDS.index(kind)] for kind in kinds]
    if canary is not None and canary[1] < len(ways):
        ways[canary[1]] = canary[0]
    return ways


class Agreement:
    """One rank's side. `take` the rounds, ask `for_step`; ranks with the same rounds have the same answers."""

    def __init__(self, first: Decision) -> None:
        self.current = first
        self.round = 0  # the next one to take
        self.due = 0  # the first step that needs it
        self._canary_step = -1

    def take(self, number: int, step: int, decision: Decision, *, soon: bool = False) -> bool:
        """The round that was gathered before `step`: whether it was news. Twice the same is taken once.

        With `soon` the next round follows one step later, whatever the decision says.
        """
        if number < self.round:
            return False
        if number > self.round:
            raise ExchangeError(f"round {self.round} of auto is missing and {number} has come: restart all ranks")
        self.round += 1
        self.due = step + (1 if soon else max(1, decision.every))
        self._canary_step = step
        news = decision.number != self.current.number
        self.current = decision
        return news

    def waits(self, step: int) -> bool:
        """Whether this step may not begin before another round was taken."""
        return step >= self.due

    def for_step(self, step: int) -> Decision:
        """What runs in this step."""
        if self.waits(step):
            raise ExchangeError(f"step {step} needs round {self.round} of auto, which has not come")
        decision = self.current
        if decision.canary is not None and step != self._canary_step:
            return Decision(decision.number, decision.choice, decision.every)
        return decision


def steady(exchange: Sequence[float], *, enough: int = 3) -> bool | None:
    """Whether the last steps agree on how long messages take; None if they are too few to tell.

    >>> steady([1.0, 1.1, 0.9]), steady([1.0, 1.0, 9.0]), steady([1.0])
    (True, False, None)
    """
    return None if len(exchange) < enough else max(exchange) < _SUDDEN * min(exchange)


class Alarm:
    """Whether messages suddenly take another time. Told from numbers that all ranks have, so all ranks say the same.

    A step on a line that has become slow may take ten times as long: to wait for a round that was set at the old pace
    would cost more than all that is decided in it.

    >>> alarm = Alarm()
    >>> [alarm.rings([seconds, 2 * seconds], step=0.6) for seconds in (0.1, 0.16, 0.5, 0.5, 0.5, 0.5)]
    [False, False, True, True, True, False]
    """

    def __init__(self) -> None:
        self._usual = 0.0
        self._alert = 0

    def rings(self, exchange: Sequence[float], *, step: float) -> bool:
        """Given how long each rank had messages under way in its last step, of which who waited least tells the line.

        `step`: what a step takes. Where messages are a small part of it, they are soon twice as long and tell nothing.
        """
        before, now = self._usual, min(exchange)
        self._alert = max(0, self._alert - 1)
        if now > 0:  # else there was no step to be timed
            self._usual = now
            sudden = before > 0 and not 1 / _SUDDEN < now / before < _SUDDEN
            if sudden and abs(now - before) > _FELT * step:
                self._alert = _ALERT
        return self._alert > 0


def check_rows(rows: Sequence[Sequence[float]], *, number: int) -> None:
    """Every rank must have sent the row of the same round after the same step."""
    for rank, row in enumerate(rows):
        if (row[0], row[1]) != (float(number), rows[0][1]):
            raise ExchangeError(
                f"rank {rank} is at round {row[0]:.0f}, step {row[1]:.0f} of auto where rank 0 is at round "
                f"{rows[0][0]:.0f}, step {rows[0][1]:.0f}: do all ranks take the same number of steps?"
            )
