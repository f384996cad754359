"""Runs a second candidate of a family for a few steps if predictions cannot separate two, and keeps the better."""

from __future__ import annotations

from collections.abc import Iterable

from .choices import Choice

_TIE = 0.02  # relative extra cost up to which predictions count as equal


class TieBreaker:
    """At most one trial per link, because a trial costs time too.

    >>> ties, one, other = TieBreaker(), (1, 1, 1), (2, 2, 2)
    >>> ties.challenger(one, 0.100, [(other, 0.101)])
    (2, 2, 2)
    >>> ties.better_before(0.110, noise=0.01)  # slower than predicted
    (1, 1, 1)
    >>> ties.challenger(one, 0.100, [(other, 0.101)])  # no second trial
    """

    def __init__(self) -> None:
        self._tried = False
        self._incumbent: tuple[Choice, float] | None = None  # and its cost, while a trial runs

    def reset(self) -> None:
        """The link has changed: allow another trial."""
        self._tried, self._incumbent = False, None

    def better_before(self, cost: float, *, noise: float) -> Choice | None:
        """End the trial: return the choice that ran before it if that cost less."""
        incumbent, self._incumbent = self._incumbent, None
        return incumbent[0] if incumbent is not None and incumbent[1] * (1 + noise) < cost else None

    def challenger(self, current: Choice, cost: float, predicted: Iterable[tuple[Choice, float]]) -> Choice | None:
        """Start a trial of the best choice whose predicted cost is about that of the current one."""
        close = [(one, choice) for choice, one in predicted if choice != current and one <= (1 + _TIE) * cost]
        if self._tried or not close:
            return None
        self._tried, self._incumbent = True, (current, cost)
        return min(close)[1]
