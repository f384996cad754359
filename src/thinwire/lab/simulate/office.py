"""Letters between workers of one process, by a clock that is not real: a `Mail` for each, one office for all.

Workers are driven step by step, so that every letter of a round is posted before anyone asks for it. Then the office
works out when each arrives (`dispatch`). Who receives one is at that time or later; who waits in vain is at its
deadline. Nothing depends on the order in which the workers of a step are driven.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from ...comm.peers import GoneError, Mail
from ...errors import ExchangeError
from .letters import Ways, deliver
from .links import Floats, Links, Occupied

_T = TypeVar("_T")


@dataclass
class Posted:
    """A letter on its way."""

    source: int
    target: int
    letter: Tensor
    at: float = 0.0  # when it is there
    phases: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # of the way: queued, transfer, latency, downlink


class Office:
    """The boxes of all workers, and their clocks."""

    def __init__(self, links: Links, *, seed: int = 0) -> None:
        self.links, self._seed = links, seed
        self.now: Floats = np.zeros(links.workers)
        self.occupied = Occupied.none(links)
        self.received: Floats = np.zeros(links.workers)
        self.lost_bytes = 0.0
        self.cause: list[Posted | None] = [None] * links.workers  # the letter that a worker waited for last
        self.away: set[int] = set()
        self.ends: dict[int, tuple[int, float]] = {}  # how often a worker has left, and when it did last
        self.came: dict[int, list[tuple[int, float]]] = {}  # to whom: who knocked, when
        self.boxes: dict[tuple[int, int], deque[Posted]] = {}
        self._posted: list[list[Posted]] = [[] for _ in range(links.workers)]
        self._rounds = 0
        self._known: dict[tuple[str, int], tuple[Tensor, Any]] = {}
        self._lock = threading.Lock()

    def mail(self, rank: int, *, life: int = 1) -> SimMail:
        return SimMail(self, rank, life=life)

    def post(self, source: int, target: int, letter: Tensor) -> None:
        self._posted[source].append(Posted(source, target, letter))

    def dispatch(self) -> None:
        """Send off all that was posted: from here on it is known when each letter arrives, or that it never does."""
        on_the_way = [one for worker in self._posted for one in sorted(worker, key=lambda one: one.target)]
        self._posted = [[] for _ in range(self.links.workers)]
        self._known.clear()
        self._rounds += 1
        if not on_the_way:
            return
        source = np.array([one.source for one in on_the_way])
        target = np.array([one.target for one in on_the_way])
        size = np.array([float(one.letter.numel()) for one in on_the_way])
        found = deliver(self.occupied, Ways(self.links, source, target), size, self.now)
        lost = self._lost(len(on_the_way))
        phases = found.phases(np.arange(len(on_the_way))).tolist()
        for one, at, gone, passed in zip(on_the_way, found.at.tolist(), lost.tolist(), phases, strict=True):
            if gone:
                self.lost_bytes += one.letter.numel()
                continue
            one.at, one.phases = at, tuple(passed)
            self.boxes.setdefault((one.target, one.source), deque()).append(one)

    def _lost(self, letters: int) -> Any:
        if not self.links.loss:
            return np.zeros(letters, dtype=bool)
        key = np.array([self._seed, (1 << 32) + self._rounds], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).random(letters) < self.links.loss

    def once(self, read: Callable[[Tensor], _T], what: str) -> Callable[[Tensor], _T]:
        """`read`, which many do with the same bytes, done once until the next dispatch."""

        def known(letter: Tensor) -> _T:
            key = (what, letter.data_ptr())
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = (letter, read(letter))  # the bytes stay where they are while they are known
            result: _T = found[1]
            return result

        return known

    def throw_away(self, target: int, source: int) -> None:
        """Letters that nobody will read."""
        thrown = sum(one.letter.numel() for one in self.boxes.pop((target, source), ()))
        with self._lock:
            self.lost_bytes += thrown

    @property
    def under_way(self) -> float:
        """Bytes that have been sent and neither received nor lost."""
        return float(sum(one.letter.numel() for box in self.boxes.values() for one in box))


class SimMail(Mail):
    """One worker's side of an office.

    >>> import torch
    >>> office = Office(Links.named("8mbit,10ms", workers=2))
    >>> a, b = office.mail(0), office.mail(1)
    >>> a.send(1, torch.zeros(1000, dtype=torch.uint8))
    >>> office.dispatch()
    >>> b.receive(0, until=1.0).numel(), round(b.now(), 6)
    (1000, 0.011)
    """

    same_start: ClassVar[bool] = True

    def __init__(self, office: Office, rank: int, *, life: int) -> None:
        super().__init__(rank, office.links.workers, life=life)
        self._office = office
        self._noticed = {peer: often for peer, (often, _) in office.ends.items()}  # ends of others

    def now(self) -> float:
        return float(self._office.now[self.rank])

    def shared(self, read: Callable[[Tensor], _T]) -> Callable[[Tensor], _T]:
        return self._office.once(read, "letter")

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        return [peer for peer in peers if peer not in self._office.away]

    def send(self, peer: int, letter: Tensor) -> None:
        if peer in self._office.away:
            return
        self.sent_bytes += letter.numel()
        self._office.post(self.rank, peer, letter)

    def receive(self, peer: int, *, until: float) -> Tensor | None:
        office, rank = self._office, self.rank
        box = office.boxes.get((rank, peer))
        if box and box[0].at <= until:
            found = box.popleft()
            if found.at > office.now[rank]:
                office.now[rank] = found.at
                office.cause[rank] = found
            office.received[rank] += found.letter.numel()
            return found.letter
        often, left = office.ends.get(peer, (0, 0.0))
        if not box and often > self._noticed.get(peer, 0) and left <= until:
            office.now[rank] = max(office.now[rank], left)
            raise GoneError(f"rank {peer} has left")
        if until == float("inf"):
            raise ExchangeError(f"rank {rank} would wait for ever for a letter of rank {peer}: give a deadline")
        office.now[rank] = max(office.now[rank], until)
        return None

    def drop(self, peer: int) -> None:
        self._office.throw_away(self.rank, peer)
        self._noticed[peer] = self._office.ends.get(peer, (0, 0.0))[0]

    def arrivals(self) -> list[int]:
        knocked = self._office.came.get(self.rank, [])
        ends = self._office.ends
        came = [peer for peer, at in knocked if at <= self.now() and ends[peer][0] == self._noticed.get(peer, 0)]
        self._office.came[self.rank] = [one for one in knocked if one[0] not in came]
        return sorted(came)

    def knock(self, peers: Iterable[int]) -> None:
        """Nothing: a worker that comes back has knocked before it is made (`come_back`)."""
        return

    def close(self) -> None:
        often, _ = self._office.ends.get(self.rank, (0, 0.0))
        self._office.ends[self.rank] = (often + 1, self.now())
        self._office.away.add(self.rank)


def come_back(office: Office, rank: int, peers: Iterable[int], *, at: float) -> None:
    """A worker that was away is there again: its neighbours hear of it in the first step that ends later."""
    office.away.discard(rank)
    office.now[rank] = at
    for peer in peers:
        office.throw_away(rank, peer)
        office.throw_away(peer, rank)
        if peer not in office.away:
            office.came.setdefault(peer, []).append((rank, at))
