"""What steps really took: the last ones, how far every group missed its predictions, and which groups disappointed.

A group are those who miss their predictions alike: a family, but for dense, which has no codec to take longer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from .learner import spread

ENOUGH = 3  # observations after a change before the next
_RECENT = 10  # observations that say how long a step takes
_BAN = 100  # steps, doubled with every failure
_NOISE_AT_FIRST = 0.05
_OWN, _OTHERS = 0.5, 0.1  # of a prediction: how far it is corrected at most


class Experience:
    """Filled by observations, asked by decisions.

    >>> experience = Experience()
    >>> for step in range(4):
    ...     experience.note(0.5, missed=0.1, group="dense", step=step)
    >>> experience.median(), experience.settled
    (0.5, True)
    >>> round(experience.correction("dense", predicted=0.4, running="dense"), 2)  # half of the way at each of them
    0.09
    """

    def __init__(self) -> None:
        self.noise = _NOISE_AT_FIRST  # of a step: its standard deviation over its mean
        self.observations = 0  # since the last change
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._before = math.inf  # the median when the line changed
        self._missed: dict[str, tuple[float, int]] = {}  # by group: measured - predicted seconds, at which step
        self._banned: dict[str, tuple[int, int]] = {}  # by group: until which step, after how many failures

    # ------------------------------------------------------------------------------------------------- observing

    def note(self, seconds: float, *, missed: float, group: str, step: int) -> None:
        """A step took so long, of which so much was not predicted."""
        self._recent.append(seconds)
        if len(self._recent) == _RECENT:
            self.noise += 0.2 * (spread(list(self._recent)) - self.noise)
        self.observations += 1
        old = self._missed.get(group, (0.0, 0))[0]
        pull = 0.5 if self.observations <= ENOUGH else 0.2
        self._missed[group] = (old + pull * (missed - old), step)

    def line_changed(self) -> None:
        """What was not better on the old line may be on this one."""
        self._before = self.median()
        self._recent.clear()
        self._banned.clear()

    def recipe_changed(self) -> None:
        self._before, self.observations = math.inf, 0
        self._recent.clear()

    def failed(self, group: str, step: int) -> None:
        """Leave it alone for a while, longer every time."""
        failures = self._banned.get(group, (0, 0))[1] + 1
        self._banned[group] = (step + _BAN * 2**failures, failures)

    # ---------------------------------------------------------------------------------------------------- asking

    @property
    def settled(self) -> bool:
        """Whether enough steps were measured since the line or the recipe changed."""
        return len(self._recent) >= ENOUGH

    @property
    def last(self) -> float:
        return self._recent[-1] if self._recent else 0.0

    @property
    def standard_error(self) -> float:
        """Of the median of the last steps, relative."""
        return self.noise / math.sqrt(max(1, len(self._recent)))

    def recent(self) -> float | None:
        """The median of what was measured since the line or the recipe changed, however little."""
        return statistics.median(self._recent) if self._recent else None

    def median(self) -> float:
        """Of the last steps, or of those before the line changed if it just did."""
        return statistics.median(self._recent) if self.settled else self._before

    def correction(self, group: str, *, predicted: float, running: str) -> float:
        """What its group missed, or else what runs. Seconds of a long step say little of a short one."""
        own = group in self._missed
        limit = (_OWN if own else _OTHERS) * predicted
        missed = self._missed.get(group if own else running, (0.0, 0))[0]
        return min(max(missed, -limit), limit)

    def ran_since(self, group: str, step: int) -> bool:
        return group in self._missed and self._missed[group][1] >= step

    def banned(self, step: int) -> set[str]:
        return {group for group, (until, _) in self._banned.items() if until > step}

    # --------------------------------------------------------------------------------------------------- keeping

    def state(self) -> dict[str, Any]:
        return {
            "residual": {group: list(pair) for group, pair in self._missed.items()},
            "banned": {group: list(pair) for group, pair in self._banned.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._missed = {group: (float(a), int(b)) for group, (a, b) in state["residual"].items()}
        self._banned = {group: (int(a), int(b)) for group, (a, b) in state["banned"].items()}
