"""min_ranks: a rank with too few live ranks around it waits for them to return, or ends with an error."""

from __future__ import annotations

import logging
import time

from ..errors import ExchangeError, OptionError
from .rounds import Rounds
from .topology import reachable

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1


class Quorum:
    """Raises ExchangeError while fewer than `min_ranks` live ranks are connected to this one, itself included.

    Where ranks may come back, it raises after `seconds`. Until then a rank trains on with the neighbours it has, and
    waits if it has none.
    """

    def __init__(self, rounds: Rounds, min_ranks: int | None, *, seconds: float) -> None:
        ranks = rounds.transport.world_size
        self.min_ranks = min(2, ranks) if min_ranks is None else min_ranks
        if not 1 <= self.min_ranks <= ranks:
            raise OptionError(f"min_ranks must be from 1 to the number of ranks, {ranks}, not {min_ranks}")
        self._rounds, self._seconds = rounds, seconds
        self._below_since: float | None = None

    def present(self) -> int:
        """The live ranks that are connected to this one, itself included."""
        rounds = self._rounds
        alive = rounds.membership.alive() | frozenset(rounds.edges)
        return len(reachable(rounds.topology, alive, rounds.transport.rank))

    def at_start(self) -> None:
        """Raise if too few ranks have come. The time to wait for them is over."""
        present = self.present()
        if present < self.min_ranks:
            raise ExchangeError(
                f"rank {self._rounds.transport.rank} met {present - 1} other ranks within {self._seconds:.0f} s, and "
                f"training needs {self.min_ranks} ranks: check the address and GLOO_SOCKET_IFNAME, or give min_ranks=1 "
                "to train alone"
            )

    def check(self) -> None:
        """Before a step or an average: return if there are enough ranks, wait if they may return, or raise."""
        rounds = self._rounds
        if 1 + len(rounds.edges) >= self.min_ranks:
            self._below_since = None
            return
        while (present := self.present()) < self.min_ranks:
            now = rounds.transport.now()
            if self._below_since is None:
                self._below_since = now
                _log.warning(
                    "rank %d is connected to %d of at least %d ranks", rounds.transport.rank, present, self.min_ranks
                )
            if not rounds.transport.restartable or now - self._below_since > self._seconds:
                waited = f" for {self._seconds:.0f} s" if rounds.transport.restartable else ""
                raise ExchangeError(
                    f"rank {rounds.transport.rank} has been connected to {present} of at least {self.min_ranks} "
                    f"ranks{waited}: start the others again, or give min_ranks={present} to train on"
                )
            if rounds.edges:
                return
            time.sleep(_POLL_SECONDS)
            rounds.admit()
        self._below_since = None
