"""Canaries: single buckets sent by another candidate for one step, to check a family before switching to it."""

from __future__ import annotations

from collections import deque

_NEEDED, _FRESH = 2, 60  # confirmations that a switch needs, and their age limit in steps
_AS_PREDICTED = (0.5, 2.0)  # range of measured over expected time that confirms a prediction
_BUDGET = 0.02  # of the training time
_CREDIT = 25  # steps whose budget may be spent in advance
_EVERY, _RARELY = 25, 325  # steps between canaries, for families as good as the current one, and for much worse ones
_HOPELESS = 0.25  # relative extra cost above which a family gets no canaries
_LOST = 20  # steps after which an answer is no longer expected


class Canaries:
    """Which families were tried, with what result, and at what cost.

    >>> canaries = Canaries()
    >>> for step in (3, 6):
    ...     canaries.send("two_shot", step, excess=0.01)
    ...     canaries.answer("two_shot", step + 2, ratio=1.1)
    >>> canaries.confirmed("two_shot", 8), canaries.confirmed("two_shot", 100)
    (True, False)
    """

    def __init__(self) -> None:
        self.spent = 0.0  # extra seconds over steps without a canary
        self._confirmations: dict[str, deque[int]] = {}  # by family: steps at which a prediction was confirmed
        self._last_sent: dict[str, int] = {}
        self._waiting = False

    def in_flight(self, step: int) -> bool:
        """Whether a canary was sent whose answer may still arrive."""
        return self._waiting and step - max(self._last_sent.values(), default=step) < _LOST

    def affordable(self, excess: float, *, elapsed: float, step_seconds: float) -> bool:
        return self.spent + excess <= _BUDGET * (elapsed + _CREDIT * step_seconds)

    def send(self, family: str, step: int, *, excess: float) -> None:
        self._waiting = True
        self.spent += excess
        self._last_sent[family] = step

    def answer(self, family: str, step: int, *, ratio: float) -> None:
        """A canary of `family` took `ratio` times the expected time."""
        self._waiting = False
        confirmations = self._confirmations.setdefault(family, deque(maxlen=_NEEDED))
        if _AS_PREDICTED[0] < ratio < _AS_PREDICTED[1]:
            confirmations.append(step)
        else:
            confirmations.clear()

    def confirmed(self, family: str, step: int) -> bool:
        """Whether enough recent canaries took the predicted time."""
        return len([at for at in self._confirmations.get(family, ()) if step - at <= _FRESH]) >= _NEEDED

    def due(self, family: str, step: int, *, gap: float) -> bool:
        """Whether to try a family whose best candidate costs `gap` more than the current one, relatively."""
        wait = min(_EVERY * (1 + 12 * max(0.0, gap)), _RARELY)
        return gap <= _HOPELESS and step - self._last_sent.get(family, -_RARELY) >= wait
