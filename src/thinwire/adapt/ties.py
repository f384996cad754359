"""Candidates of one family that predictions cannot tell apart: each runs for a few steps, and the better one stays."""

from __future__ import annotations

from collections.abc import Iterable

_TIE = 0.02  # predicted to cost at most so much more than what runs
Choice = tuple[int, ...]


class Ties:
    """What has run on this line, and which trial is under way.

    >>> ties, one, other = Ties(), (1, 1, 1), (2, 2, 2)
    >>> ties.challenger(one, 0.100, [(other, 0.101)])
    (2, 2, 2)
    >>> ties.better_before(other, 0.110, noise=0.01)  # it was not as good as predicted
    (1, 1, 1)
    >>> ties.challenger(one, 0.100, [(other, 0.101)])  # and is not tried again
    """

    def __init__(self) -> None:
        self._ran: set[Choice] = set()
        self._challenged: tuple[Choice, float] | None = None

    def forget(self) -> None:
        """The line has changed."""
        self._ran.clear()
        self._challenged = None

    def better_before(self, current: Choice, cost: float, *, noise: float) -> Choice | None:
        """What ran before the trial that ends now, if its steps cost less."""
        challenged, self._challenged = self._challenged, None
        self._ran.add(current)
        return challenged[0] if challenged is not None and challenged[1] * (1 + noise) < cost else None

    def challenger(self, current: Choice, cost: float, predicted: Iterable[tuple[Choice, float]]) -> Choice | None:
        """The best that has not run and is predicted to cost about as much as what runs; its trial begins."""
        self._ran.add(current)
        close = [(one, choice) for choice, one in predicted if choice not in self._ran and one <= (1 + _TIE) * cost]
        if not close:
            return None
        self._challenged = (current, cost)
        return min(close)[1]
