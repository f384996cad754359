"""Who is there: what each rank has heard of all others. News travels with the letters, nobody keeps a list for all."""

from __future__ import annotations

from collections.abc import Mapping

from .letter import Standing

_AT_FIRST = Standing()


class Membership:
    """The standing of every rank, as far as this one has heard; all begin in their first life, alive.

    >>> heard = Membership(4, rank=0)
    >>> heard.died(2)
    >>> heard.alive(), heard.news()
    (frozenset({0, 1, 3}), {2: Standing(life=1, alive=False)})
    >>> heard.hear({2: Standing(2, True)})  # it came back
    >>> heard.alive()
    frozenset({0, 1, 2, 3})
    """

    def __init__(self, ranks: int, *, rank: int, life: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        # Of those that are as at the beginning nothing is kept: a thousand ranks would keep a thousand each.
        self._changed: dict[int, Standing] = {}
        self._note(rank, Standing(life, True))

    def alive(self) -> frozenset[int]:
        gone = {rank for rank, standing in self._changed.items() if not standing.alive}
        return frozenset(rank for rank in range(self._ranks) if rank not in gone)

    def standing(self, rank: int) -> Standing:
        return self._changed.get(rank, _AT_FIRST)

    def died(self, rank: int) -> None:
        self._note(rank, Standing(self.standing(rank).life, False))

    def came(self, rank: int, life: int) -> None:
        if life >= self.standing(rank).life:
            self._note(rank, Standing(life, True))

    def hear(self, news: Mapping[int, Standing]) -> None:
        """Believe what is newer: a later life, or the end of this one. Nobody has to be told of its own end."""
        for rank, standing in news.items():
            if 0 <= rank < self._ranks and rank != self._rank and standing.newer_than(self.standing(rank)):
                self._note(rank, standing)

    def news(self) -> dict[int, Standing]:
        """All that is not as it was at the beginning."""
        return dict(sorted(self._changed.items()))

    def _note(self, rank: int, standing: Standing) -> None:
        if standing == _AT_FIRST:
            self._changed.pop(rank, None)
        else:
            self._changed[rank] = standing
