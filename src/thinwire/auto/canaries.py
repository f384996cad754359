"""Canaries: single buckets sent another way for one step, so that a family is known before it is entered."""

from __future__ import annotations

from collections import deque

_NEEDED, _FRESH = 2, 60  # so many that were as predicted, not older than so many steps
_AS_PREDICTED = (0.5, 2.0)  # times what was expected
_SHARE = 0.02  # of the time
_CREDIT = 25  # steps: what they would allow may be spent before
_EVERY, _RARELY = 25, 325  # steps, for families that promise as much as what runs, and much less
_HOPELESS = 0.25  # costs so much more that its messages would have to take next to nothing
_LOST = 20  # steps after which no answer comes any more


class Canaries:
    """Which families were tried, with what result, and what that has cost.

    >>> canaries = Canaries()
    >>> for step in (3, 6):
    ...     canaries.send("two_shot", step, excess=0.01)
    ...     canaries.answer("two_shot", step + 2, ratio=1.1)
    >>> canaries.vouch_for("two_shot", 8), canaries.vouch_for("two_shot", 100)
    (True, False)
    """

    def __init__(self) -> None:
        self.spent = 0.0  # seconds more than steps without them
        self._good: dict[str, deque[int]] = {}  # by family: the steps of those that were as predicted
        self._last: dict[str, int] = {}
        self._flying = False

    def in_flight(self, step: int) -> bool:
        """Whether one was sent whose answer may still come."""
        return self._flying and step - max(self._last.values(), default=step) < _LOST

    def affordable(self, excess: float, *, elapsed: float, step_seconds: float) -> bool:
        return self.spent + excess <= _SHARE * (elapsed + _CREDIT * step_seconds)

    def send(self, family: str, step: int, *, excess: float) -> None:
        self._flying = True
        self.spent += excess
        self._last[family] = step

    def answer(self, family: str, step: int, *, ratio: float) -> None:
        """One took so many times what was expected."""
        self._flying = False
        good = self._good.setdefault(family, deque(maxlen=_NEEDED))
        if _AS_PREDICTED[0] < ratio < _AS_PREDICTED[1]:
            good.append(step)
        else:
            good.clear()

    def vouch_for(self, family: str, step: int) -> bool:
        """Whether enough of them took what was predicted, lately."""
        return len([at for at in self._good.get(family, ()) if step - at <= _FRESH]) >= _NEEDED

    def due(self, family: str, step: int, *, gap: float) -> bool:
        """Whether to try a family whose best costs `gap` more than what runs, as a share of that."""
        wait = min(_EVERY * (1 + 12 * max(0.0, gap)), _RARELY)
        return gap <= _HOPELESS and step - self._last.get(family, -_RARELY) >= wait
