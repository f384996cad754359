"""When a fragment has its turn: after a number of steps, staggered over the round, or when a time has passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


class Schedule:
    """Turns are numbered; turn t belongs to fragment t % fragments. All ranks take the same turns in the same order.

    >>> schedule = Schedule(steps=10, seconds=None, fragments=3)
    >>> [schedule.boundary(turn) for turn in range(4)], [schedule.expected(turn) for turn in range(4)]
    ([3, 6, 10, 13], [3, 6, 10, 10])
    """

    def __init__(
        self,
        *,
        steps: int | None,
        seconds: float | None,
        fragments: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps, self.seconds, self.fragments, self.clock = steps, seconds, fragments, clock
        self.turn = 0  # the next one
        self.first = 0  # the turn with which counting began
        self.count = 0  # steps of this rank since then
        self.last = [0] * fragments  # the value of `count` at the fragment's last turn
        self.means = [1] * fragments  # steps that a rank took before the fragment's last turn, on average
        self._since = clock()

    def boundary(self, turn: int) -> int:
        """The count at which a turn begins."""
        assert self.steps is not None
        return (turn - self.first + 1) * self.steps // self.fragments

    def expected(self, turn: int) -> int:
        """The steps of a rank since the fragment's last turn: the same number on all ranks, whatever they took."""
        if self.steps is None:
            return self.means[turn % self.fragments]
        before = turn - self.fragments
        return self.boundary(turn) - (self.boundary(before) if before >= self.first else 0)

    @property
    def fragment(self) -> int:
        """Whose turn is next."""
        return self.turn % self.fragments

    @property
    def due(self) -> bool:
        if self.steps is not None:
            return self.count >= self.boundary(self.turn)
        assert self.seconds is not None
        return self.clock() - self._since >= self.seconds / self.fragments

    def taken(self) -> int:
        """The steps of this rank since the last turn of the fragment whose turn is next."""
        return self.count - self.last[self.fragment]

    def begin(self) -> None:
        """The next turn begins here."""
        self.last[self.fragment] = self.count
        self._since = self.clock()

    def end(self, mean_steps: float) -> None:
        """That turn is over, with so many steps of a rank on average."""
        self.means[self.fragment] = max(1, round(mean_steps))
        self.turn += 1

    def restart(self) -> None:
        """Count from here: all fragments had their turn, or the local steps since then are lost."""
        self.first, self.count, self.last = self.turn, 0, [0] * self.fragments
        self._since = self.clock()

    def state_dict(self) -> dict[str, Any]:
        names = ("turn", "first", "count", "last", "means")
        return {**{name: getattr(self, name) for name in names}, "since": self.clock() - self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.turn, self.first, self.count = state["turn"], state["first"], state["count"]
        self.last, self.means = list(state["last"]), list(state["means"])
        self._since = self.clock() - state["since"]
