"""Who is there: what each rank has heard of all others. News travels with the letters, nobody keeps a list for all."""

from __future__ import annotations

from collections.abc import Mapping

from .letter import Standing


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
        self._rank = rank
        self._of = {other: Standing() for other in range(ranks)}
        self._of[rank] = Standing(life, True)

    def alive(self) -> frozenset[int]:
        return frozenset(rank for rank, standing in self._of.items() if standing.alive)

    def standing(self, rank: int) -> Standing:
        return self._of[rank]

    def died(self, rank: int) -> None:
        self._of[rank] = Standing(self._of[rank].life, False)

    def came(self, rank: int, life: int) -> None:
        if life >= self._of[rank].life:
            self._of[rank] = Standing(life, True)

    def hear(self, news: Mapping[int, Standing]) -> None:
        """Believe what is newer: a later life, or the end of this one. Nobody has to be told of its own end."""
        for rank, standing in news.items():
            if rank in self._of and rank != self._rank and standing.newer_than(self._of[rank]):
                self._of[rank] = standing

    def news(self) -> dict[int, Standing]:
        """All that is not as it was at the beginning."""
        return {rank: standing for rank, standing in self._of.items() if standing != Standing()}
