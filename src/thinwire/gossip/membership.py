"""Which ranks are alive, as far as this rank knows. Updates travel with the messages; there is no central list."""

from __future__ import annotations

from collections.abc import Mapping

from .message import MemberStatus

_INITIAL = MemberStatus()


class Membership:
    """The last known status of every rank. All start alive, in their first incarnation.

    >>> members = Membership(4, rank=0)
    >>> members.mark_dead(2)
    >>> members.alive(), members.updates()
    (frozenset({0, 1, 3}), {2: MemberStatus(incarnation=1, alive=False)})
    >>> members.merge({2: MemberStatus(2, alive=True)})  # it was started again
    >>> members.alive()
    frozenset({0, 1, 2, 3})
    """

    def __init__(self, ranks: int, *, rank: int, incarnation: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        # Only what differs from the initial status is stored: otherwise n ranks in one process store n * n.
        self._changed: dict[int, MemberStatus] = {}
        self._set(rank, MemberStatus(incarnation, True))

    def alive(self) -> frozenset[int]:
        dead = {rank for rank, status in self._changed.items() if not status.alive}
        return frozenset(rank for rank in range(self._ranks) if rank not in dead)

    def status(self, rank: int) -> MemberStatus:
        return self._changed.get(rank, _INITIAL)

    def mark_dead(self, rank: int) -> None:
        self._set(rank, MemberStatus(self.status(rank).incarnation, False))

    def mark_alive(self, rank: int, incarnation: int) -> None:
        if incarnation >= self.status(rank).incarnation:
            self._set(rank, MemberStatus(incarnation, True))

    def merge(self, updates: Mapping[int, MemberStatus]) -> None:
        """Accept newer statuses: a later incarnation, or the death of this one. A rank ignores updates about itself."""
        for rank, status in updates.items():
            if 0 <= rank < self._ranks and rank != self._rank and status.newer_than(self.status(rank)):
                self._set(rank, status)

    def updates(self) -> dict[int, MemberStatus]:
        """Every status that differs from the initial one."""
        return dict(sorted(self._changed.items()))

    def _set(self, rank: int, status: MemberStatus) -> None:
        if status == _INITIAL:
            self._changed.pop(rank, None)
        else:
            self._changed[rank] = status
