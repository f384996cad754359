"""Numbered rounds give every rank the same decision at the same step, even if a round is late or repeated.

In a round all ranks gather one report from each other. The report of rank 0 holds its decision, and the steps after the
round run that decision. A step does not start without the round it depends on. A rank waits for a late round, ignores a
repeated one, and raises if one is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ExchangeError
from .choices import KINDS, Choice


@dataclass(frozen=True)
class Decision:
    """The candidate of every kind of bucket, and optionally a canary: one bucket that tries another for one step.

    >>> Decision.from_numbers(Decision(3, (1, 1, 0), every=2, canary=(4, 0)).numbers()).canary
    (4, 0)
    """

    number: int
    choice: Choice
    every: int = 1  # steps between rounds
    canary: tuple[int, int] | None = None  # candidate, bucket

    def numbers(self) -> list[float]:
        canary = (-1, -1) if self.canary is None else self.canary
        return [float(value) for value in (self.number, self.every, *canary, *self.choice)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Decision:
        number, every, candidate, bucket, *choice = (int(value) for value in numbers)
        return cls(number, tuple(choice), every, None if candidate < 0 else (candidate, bucket))

    def renumbered(self, numbers: Sequence[int]) -> Decision:
        """The same decision where candidates have other numbers: `numbers` holds the new one of each."""
        canary = None if self.canary is None else (numbers[self.canary[0]], self.canary[1])
        return Decision(self.number, tuple(numbers[one] for one in self.choice), self.every, canary)


DECISION_NUMBERS = 4 + len(KINDS)


class Agreement:
    """The state of one rank: `adopt` rounds, then ask `for_step`. Ranks that adopt the same rounds run the same.

    >>> agreement = Agreement(Decision(0, (0, 0, 0)))
    >>> agreement.needs_round(0), agreement.adopt(0, 0, Decision(1, (2, 2, 2), every=3)), agreement.needs_round(2)
    (True, True, False)
    """

    def __init__(self, first: Decision, *, due: int = 0) -> None:
        self.current = first
        self.round = 0  # the next round
        self.due = due  # the first step that needs it
        self._canary_step = -1

    def adopt(self, number: int, step: int, decision: Decision, *, hurry: bool = False) -> bool:
        """Adopt the round that was gathered before `step`. Return whether the decision is a new one.

        A repeated round changes nothing. With `hurry` the next round follows one step later.
        """
        if number < self.round:
            return False
        if number > self.round:
            raise ExchangeError(f"auto received round {number} before round {self.round}: restart all ranks")
        self.round += 1
        self.due = step + (1 if hurry else max(1, decision.every))
        self._canary_step = step
        changed = decision.number != self.current.number
        self.current = decision
        return changed

    def needs_round(self, step: int) -> bool:
        """Whether this step has to wait for the next round."""
        return step >= self.due

    def for_step(self, step: int) -> Decision:
        """The decision that this step runs. A canary lasts one step."""
        if self.needs_round(step):
            raise ExchangeError(f"step {step} needs round {self.round} of auto, which has not arrived")
        decision = self.current
        if decision.canary is not None and step != self._canary_step:
            return Decision(decision.number, decision.choice, decision.every)
        return decision
