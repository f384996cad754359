"""Measured step times, the prediction error of every group of choices, and groups that were slower than predicted.

Choices of one group have similar prediction errors (`Choices.group`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from .estimator import spread

ENOUGH = 3  # observations after a change before the next one
_RECENT = 10  # observations whose median is the current step time
_BAN = 100  # steps; doubled with every failure
_NOISE_AT_FIRST = 0.05
_OWN, _OTHERS = 0.5, 0.1  # limit of a correction relative to the prediction, by the group's own error or another's


class StepHistory:
    """Observations fill it, decisions read it.

    >>> history = StepHistory()
    >>> for step in range(4):
    ...     history.add(0.5, error=0.1, group="dense", step=step)
    >>> history.median(), history.settled
    (0.5, True)
    >>> round(history.correction("dense", predicted=0.4, running="dense"), 2)  # smoothed: half of the way each time
    0.09
    """

    def __init__(self) -> None:
        self.noise = _NOISE_AT_FIRST  # standard deviation of a step over its mean
        self.observations = 0  # since the last change of the recipe
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._before = math.inf  # the median before the link changed
        self._errors: dict[str, tuple[float, int]] = {}  # by group: measured - predicted seconds, and the step
        self._banned: dict[str, tuple[int, int]] = {}  # by group: until which step, after how many failures

    # ------------------------------------------------------------------------------------------------- writing

    def add(self, seconds: float, *, error: float, group: str, step: int) -> None:
        """A step took `seconds`, which is `error` more than predicted."""
        self._recent.append(seconds)
        if len(self._recent) == _RECENT:
            self.noise += 0.2 * (spread(list(self._recent)) - self.noise)
        self.observations += 1
        old = self._errors.get(group, (0.0, 0))[0]
        gain = 0.5 if self.observations <= ENOUGH else 0.2
        self._errors[group] = (old + gain * (error - old), step)

    def link_changed(self) -> None:
        """Lift all bans: a group that was slower on the old link may be faster on the new one."""
        self._before = self.median()
        self._recent.clear()
        self._banned.clear()

    def recipe_changed(self) -> None:
        self._before, self.observations = math.inf, 0
        self._recent.clear()

    def failed(self, group: str, step: int) -> None:
        """Ban a group, longer after every failure."""
        failures = self._banned.get(group, (0, 0))[1] + 1
        self._banned[group] = (step + _BAN * 2**failures, failures)

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def settled(self) -> bool:
        """Whether enough steps were measured since the link or the recipe changed."""
        return len(self._recent) >= ENOUGH

    @property
    def last(self) -> float:
        return self._recent[-1] if self._recent else 0.0

    @property
    def standard_error(self) -> float:
        """The relative standard error of the median step time."""
        return self.noise / math.sqrt(max(1, len(self._recent)))

    def recent(self) -> float | None:
        """The median step time since the link or the recipe changed, from any number of steps."""
        return statistics.median(self._recent) if self._recent else None

    def median(self) -> float:
        """The median step time; before it has settled, the one before the link changed."""
        return statistics.median(self._recent) if self.settled else self._before

    def correction(self, group: str, *, predicted: float, running: str) -> float:
        """Seconds to add to a prediction: the group's own error, or else that of the running group.

        The limit is relative, because the error of a long step says little about a short one.
        """
        own = group in self._errors
        limit = (_OWN if own else _OTHERS) * predicted
        error = self._errors.get(group if own else running, (0.0, 0))[0]
        return min(max(error, -limit), limit)

    def ran_since(self, group: str, step: int) -> bool:
        return group in self._errors and self._errors[group][1] >= step

    def banned(self, step: int) -> set[str]:
        return {group for group, (until, _) in self._banned.items() if until > step}

    # --------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers under the keys of 0.1, so that its checkpoints load."""
        return {
            "residual": {group: list(pair) for group, pair in self._errors.items()},
            "banned": {group: list(pair) for group, pair in self._banned.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._errors = {group: (float(a), int(b)) for group, (a, b) in state["residual"].items()}
        self._banned = {group: (int(a), int(b)) for group, (a, b) in state["banned"].items()}
