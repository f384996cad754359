"""Detects a sudden change of the exchange time from numbers that all ranks share, so that all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

_SUDDEN = 1.4  # ratio of two exchange times that counts as a change
_RELEVANT = 0.25  # of a step: smaller changes are ignored
_HURRIED_ROUNDS = 3  # rounds after an alarm that follow one step after another


def steady(exchange: Sequence[float], *, enough: int = 3) -> bool | None:
    """Whether the exchange times of the last steps agree; None if there are fewer than `enough`.

    >>> steady([1.0, 1.1, 0.9]), steady([1.0, 1.0, 9.0]), steady([1.0])
    (True, False, None)
    """
    return None if len(exchange) < enough else max(exchange) < _SUDDEN * min(exchange)


class Alarm:
    """Compares the exchange time of each round with that of the round before.

    On a link that becomes slow, a step may take ten times as long. Waiting for a round that was scheduled at the old
    pace would then cost more than the decision saves.

    >>> alarm = Alarm()
    >>> [alarm.update([seconds, 2 * seconds], step=0.6) for seconds in (0.1, 0.16, 0.5, 0.5, 0.5, 0.5)]
    [False, False, True, True, True, False]
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._hurried = 0

    def update(self, exchange: Sequence[float], *, step: float) -> bool:
        """Whether the ranks should hurry, given each rank's exchange time in its last step.

        The rank that waited least shows the link; the others also wait for slow ranks. `step` is the duration of a
        step: where messages are a small part of it, their time often doubles by chance.
        """
        before, now = self._last, min(exchange)
        self._hurried = max(0, self._hurried - 1)
        if now > 0:  # 0 if no step was timed
            self._last = now
            sudden = before > 0 and not 1 / _SUDDEN < now / before < _SUDDEN
            if sudden and abs(now - before) > _RELEVANT * step:
                self._hurried = _HURRIED_ROUNDS
        return self._hurried > 0
