"""Two candidates of a family that predictions cannot tell apart: the other runs for a few steps, the better stays."""

from __future__ import annotations

from collections.abc import Iterable

_TIE = 0.02  # predicted to cost at most so much more than what runs
Choice = tuple[int, ...]


class Ties:
    """Whether there was a trial on this line, and which is under way. There is one at most: trials cost time, too.

    >>> ties, one, other = Ties(), (1, 1, 1), (2, 2, 2)
    >>> ties.challenger(one, 0.100, [(other, 0.101)])
    (2, 2, 2)
    >>> ties.better_before(0.110, noise=0.01)  # it was not as good as predicted
    (1, 1, 1)
    >>> ties.challenger(one, 0.100, [(other, 0.101)])  # and is not tried again
    """

    def __init__(self) -> None:
        self._tried = False
        self._challenged: tuple[Choice, float] | None = None

    def forget(self) -> None:
        """The line has changed."""
        self._tried, self._challenged = False, None

    def better_before(self, cost: float, *, noise: float) -> Choice | None:
        """What ran before the trial that ends now, if its steps cost less."""
        challenged, self._challenged = self._challenged, None
        return challenged[0] if challenged is not None and challenged[1] * (1 + noise) < cost else None

    def challenger(self, current: Choice, cost: float, predicted: Iterable[tuple[Choice, float]]) -> Choice | None:
        """The best that is predicted to cost about as much as what runs; its trial begins."""
        close = [(one, choice) for choice, one in predicted if choice != current and one <= (1 + _TIE) * cost]
        if self._tried or not close:
            return None
        self._tried, self._challenged = True, (current, cost)
        return min(close)[1]
