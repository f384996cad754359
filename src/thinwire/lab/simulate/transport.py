"""Messages between workers of one process on a virtual clock: one `SimTransport`, and a `SimEndpoint` for each worker.

Workers are driven step by step. All messages of a round are posted before any worker receives one. Then `dispatch`
computes the arrival time of each. A receive sets the worker's clock to the arrival time, if that is later; a receive
that times out sets it to the deadline. The order in which workers are driven within a step does not matter.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from ...comm.peers import PeerGoneError, PeerTransport
from ...errors import ExchangeError
from .arrivals import Routes, deliver
from .links import Floats, Links, Occupied

_T = TypeVar("_T")


@dataclass
class InFlight:
    """A message between two workers."""

    source: int
    target: int
    message: Tensor
    at: float = 0.0  # arrival time
    phases: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # seconds: queue, transfer, latency, downlink


class SimTransport:
    """The message queues of all workers, and their clocks."""

    def __init__(self, links: Links, *, seed: int = 0) -> None:
        self.links, self._seed = links, seed
        self.now: Floats = np.zeros(links.workers)
        self.occupied = Occupied.none(links)
        self.received: Floats = np.zeros(links.workers)
        self.lost_bytes = 0.0
        self.cause: list[InFlight | None] = [None] * links.workers  # the message that a worker last waited for
        self.absent: set[int] = set()
        self.departures: dict[int, tuple[int, float]] = {}  # of each worker: how many, and the time of the last
        self.announced: dict[int, list[tuple[int, float]]] = {}  # to each worker: which workers returned, and when
        self.queues: dict[tuple[int, int], deque[InFlight]] = {}  # (target, source)
        self._posted: list[list[InFlight]] = [[] for _ in range(links.workers)]
        self._rounds = 0
        self._parsed: dict[tuple[str, int], tuple[Tensor, Any]] = {}
        self._lock = threading.Lock()

    def endpoint(self, rank: int, *, incarnation: int = 1) -> SimEndpoint:
        return SimEndpoint(self, rank, incarnation=incarnation)

    def post(self, source: int, target: int, message: Tensor) -> None:
        self._posted[source].append(InFlight(source, target, message))

    def dispatch(self) -> None:
        """Send all posted messages: compute when each arrives, and which are lost."""
        sent = [one for worker in self._posted for one in sorted(worker, key=lambda one: one.target)]
        self._posted = [[] for _ in range(self.links.workers)]
        self._parsed.clear()
        self._rounds += 1
        if not sent:
            return
        source = np.array([one.source for one in sent])
        target = np.array([one.target for one in sent])
        size = np.array([float(one.message.numel()) for one in sent])
        arrivals = deliver(self.occupied, Routes(self.links, source, target), size, self.now)
        phases = arrivals.phases(np.arange(len(sent))).tolist()
        for one, at, lost, passed in zip(sent, arrivals.at.tolist(), self._lost(len(sent)), phases, strict=True):
            if lost:
                self.lost_bytes += one.message.numel()
                continue
            one.at, one.phases = at, tuple(passed)
            self.queues.setdefault((one.target, one.source), deque()).append(one)

    def _lost(self, messages: int) -> list[bool]:
        """Which messages of this round are lost."""
        if not self.links.loss:
            return [False] * messages
        key = np.array([self._seed, (1 << 32) + self._rounds], dtype=np.uint64)
        drawn: list[bool] = (np.random.Generator(np.random.Philox(key=key)).random(messages) < self.links.loss).tolist()
        return drawn

    def parse_once(self, parse: Callable[[Tensor], _T], kind: str) -> Callable[[Tensor], _T]:
        """`parse`, cached until the next dispatch: many workers parse the same bytes."""

        def cached(message: Tensor) -> _T:
            key = (kind, message.data_ptr())
            found = self._parsed.get(key)
            if found is None:
                found = self._parsed[key] = (message, parse(message))  # holding the message keeps its address unique
            result: _T = found[1]
            return result

        return cached

    def discard(self, target: int, source: int) -> None:
        """Drop all messages from `source` to `target`."""
        dropped = sum(one.message.numel() for one in self.queues.pop((target, source), ()))
        with self._lock:
            self.lost_bytes += dropped

    @property
    def in_flight(self) -> float:
        """Bytes that were sent and are neither received nor lost."""
        return float(sum(one.message.numel() for queued in self.queues.values() for one in queued))


class SimEndpoint(PeerTransport):
    """One worker's end of a SimTransport.

    >>> import torch
    >>> transport = SimTransport(Links.named("8mbit,10ms", workers=2))
    >>> a, b = transport.endpoint(0), transport.endpoint(1)
    >>> a.send(1, torch.zeros(1000, dtype=torch.uint8))
    >>> transport.dispatch()
    >>> b.receive(0, until=1.0).numel(), round(b.now(), 6)
    (1000, 0.011)
    """

    same_start: ClassVar[bool] = True

    def __init__(self, transport: SimTransport, rank: int, *, incarnation: int) -> None:
        super().__init__(rank, transport.links.workers, incarnation=incarnation)
        self._transport = transport
        self._noticed = {peer: count for peer, (count, _) in transport.departures.items()}  # departures of peers

    def now(self) -> float:
        return float(self._transport.now[self.rank])

    def parse_once(self, parse: Callable[[Tensor], _T]) -> Callable[[Tensor], _T]:
        return self._transport.parse_once(parse, "message")

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        return [peer for peer in peers if peer not in self._transport.absent]

    def send(self, peer: int, message: Tensor) -> None:
        if peer in self._transport.absent:
            return
        self.sent_bytes += message.numel()
        self._transport.post(self.rank, peer, message)

    def receive(self, peer: int, *, until: float) -> Tensor | None:
        transport, rank = self._transport, self.rank
        queued = transport.queues.get((rank, peer))
        if queued and queued[0].at <= until:
            found = queued.popleft()
            if found.at > transport.now[rank]:
                transport.now[rank] = found.at
                transport.cause[rank] = found
            transport.received[rank] += found.message.numel()
            return found.message
        count, left = transport.departures.get(peer, (0, 0.0))
        if not queued and count > self._noticed.get(peer, 0) and left <= until:
            transport.now[rank] = max(transport.now[rank], left)
            raise PeerGoneError(f"rank {peer} has left")
        if until == float("inf"):
            raise ExchangeError(f"rank {rank} would wait for ever for a message of rank {peer}: give a deadline")
        transport.now[rank] = max(transport.now[rank], until)
        return None

    def disconnect(self, peer: int) -> None:
        self._transport.discard(self.rank, peer)
        self._noticed[peer] = self._transport.departures.get(peer, (0, 0.0))[0]

    def rejoined(self) -> list[int]:
        announced = self._transport.announced.get(self.rank, [])
        departures = self._transport.departures
        found = [
            peer for peer, at in announced if at <= self.now() and departures[peer][0] == self._noticed.get(peer, 0)
        ]
        self._transport.announced[self.rank] = [one for one in announced if one[0] not in found]
        return sorted(found)

    def announce(self, peers: Iterable[int]) -> None:
        """Does nothing: `rejoin` has announced a returning worker before its endpoint is made."""
        return

    def close(self) -> None:
        count, _ = self._transport.departures.get(self.rank, (0, 0.0))
        self._transport.departures[self.rank] = (count + 1, self.now())
        self._transport.absent.add(self.rank)


def rejoin(transport: SimTransport, rank: int, peers: Iterable[int], *, at: float) -> None:
    """An absent worker returns. Its neighbours notice in their first step that ends after `at`."""
    transport.absent.discard(rank)
    transport.now[rank] = at
    for peer in peers:
        transport.discard(rank, peer)
        transport.discard(peer, rank)
        if peer not in transport.absent:
            transport.announced.setdefault(peer, []).append((rank, at))
