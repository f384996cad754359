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
_HEAD = 2  # round, step


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

    def take(self, number: int, step: int, decision: Decision) -> bool:
        """The round that was gathered before `step`: whether it was news. Twice the same is taken once."""
        if number < self.round:
            return False
        if number > self.round:
            raise ExchangeError(f"round {self.round} of auto is missing and {number} has come: restart all ranks")
        self.round += 1
        self.due = step + max(1, decision.every)
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


def check_rows(rows: Sequence[Sequence[float]], *, number: int) -> None:
    """Every rank must have sent the row of the same round after the same step."""
    for rank, row in enumerate(rows):
        if (row[0], row[1]) != (float(number), rows[0][1]):
            raise ExchangeError(
                f"rank {rank} is at round {row[0]:.0f}, step {row[1]:.0f} of auto where rank 0 is at round "
                f"{rows[0][0]:.0f}, step {rows[0][1]:.0f}: do all ranks take the same number of steps?"
            )
