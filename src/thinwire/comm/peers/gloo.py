"""A peer transport between processes: one gloo group of two ranks for each pair of neighbours.

gloo closes all connections of a group when one of them breaks or times out. With one group for each pair, a rank that
fails takes its own connections with it and no others.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from ...errors import ExchangeError, OptionError
from .connection import Connection, gloo_device
from .transport import PeerGoneError, PeerTransport

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5  # between two looks into the store for peers that have started again
_START_POLL_SECONDS = 0.1  # between two looks for a peer that has not started yet
_CONNECT_SECONDS = 30.0  # for such a peer to complete its connection
_LEAST_SECONDS = 5.0  # for a peer that is there to complete its connection
_CLOSE_SECONDS = 5.0  # for all peers together to confirm that this rank leaves


class GlooTransport(PeerTransport):
    """Messages between processes that share a store of torch.distributed.

    Only connecting needs the store. A process that starts with the rank of a dead one gets the next incarnation number;
    its neighbours learn of it from the store. `name` separates several transports in one store. `delay(bytes)` gives
    the seconds to hold a message back, to emulate a link. `reopen()` connects to the store again if the process that
    served it was replaced, or returns None.

    >>> store = dist.HashStore()
    >>> [GlooTransport(store, 0, 1).incarnation for _ in range(2)]
    [1, 2]
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "run",
        delay: Callable[[int], float] | None = None,
        restartable: bool = True,
        reopen: Callable[[], Store | None] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise OptionError(f"rank must be from 0 to {world_size - 1}, not {rank}")
        self._prefix, self._reopen = f"thinwire-peers/{name}", reopen
        self._store = PrefixStore(self._prefix, store)
        super().__init__(rank, world_size, incarnation=int(self._store.add(f"incarnation/{rank}", 1)))
        self.restartable = restartable
        self._delay = delay
        self._most_bytes: int | None = None
        self._connections: dict[int, Connection] = {}
        self._leaving: list[Connection] = []  # to peers that were given up and have not answered
        self._absent: set[int] = set()
        self._rejoined: list[int] = []
        self._lock = threading.Lock()
        self._device = gloo_device()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        # Also at exit: a thread that returns from gloo while the interpreter shuts down aborts the process.
        self._close = weakref.finalize(self, _close_all, self._connections, self._leaving, self._closed)

    @classmethod
    def of_default_group(cls, *, delay: Callable[[int], float] | None = None) -> GlooTransport:
        """Between the ranks of the default process group."""
        if not dist.is_initialized():
            raise OptionError(
                "there is no process group: call torch.distributed.init_process_group first, or give "
                "transport=peers_at(...)"
            )
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        # A rank cannot rejoin a process group. So a second call means a second transport, with a name of its own.
        number = store.add(f"thinwire-peers-of-group/{rank}", 1)
        return cls(store, rank, dist.get_world_size(), name=f"group-{number}", delay=delay, restartable=False)

    # ------------------------------------------------------------------------------------------------------- notes

    def note(self, name: str, text: str) -> str:
        try:
            if self._store.add(f"notes/{name}/count", 1) == 1:
                self._store.set(f"notes/{name}/text", text)
            return bytes(self._store.get(f"notes/{name}/text")).decode()
        except RuntimeError as problem:
            _log.warning("rank %d could not compare %s with the others: %s", self.rank, name, problem)
            return text

    def peek(self, name: str) -> str | None:
        try:
            return self._peek(self._store, name)
        except RuntimeError:  # training needs no store
            return None

    @staticmethod
    def _peek(store: Store, name: str) -> str | None:
        return bytes(store.get(f"notes/{name}/text")).decode() if store.check([f"notes/{name}/text"]) else None

    # --------------------------------------------------------------------------------------------------- connecting

    def limit(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        """All pairs at once, so that a peer that does not come costs no other pair its time."""
        until = time.monotonic() + seconds
        # The same order on all ranks, so that no ranks wait for each other in a cycle where pairs have to take turns.
        ordered = sorted(peers, key=lambda other: (min(other, self.rank), max(other, self.rank)))
        if not ordered:
            return []
        self._store.set(f"ready/{self.rank}", str(self.incarnation))
        stores = _clones(self._store, len(ordered))

        def one(peer: int, store: Store) -> bool | ExchangeError:
            try:
                self._connect(store, peer, until)
            except ExchangeError as refusal:
                return refusal
            except RuntimeError as problem:
                _log.debug("rank %d could not connect to rank %d: %s", self.rank, peer, problem)
                return False
            return True

        with ThreadPoolExecutor(len(stores), "thinwire-connect") as pool:
            found = list(pool.map(one, ordered, itertools.cycle(stores)))
        for answer in found:
            if isinstance(answer, ExchangeError):
                raise answer
        return [peer for peer, connected in zip(ordered, found, strict=True) if connected]

    def announce(self, peers: Iterable[int]) -> None:
        self._store.set(f"ready/{self.rank}", str(self.incarnation))
        for peer in peers:
            self._store.set(f"announce/{peer}/{self.rank}", str(self.incarnation))

    def _connect(self, store: Store, peer: int, until: float) -> None:
        low, high = min(peer, self.rank), max(peer, self.rank)
        # A peer is ready once its options were compared. Each pair of incarnations has its own group.
        while not store.check([f"ready/{peer}"]):
            if self.incarnation == 1 and store.check([f"running/{peer}"]):
                raise ExchangeError(
                    f"rank {peer} trains already, and the store that knew the run has died with the process of rank 0: "
                    "give peers_at a store outside of the training processes (file://..., or python -m "
                    "thinwire.comm.peers.serve) and start all ranks again"
                )
            if time.monotonic() > until or self._peek(store, "conflict") is not None:
                raise RuntimeError(f"rank {peer} has not started")
            time.sleep(_START_POLL_SECONDS)
        numbers = {self.rank: self.incarnation, peer: int(store.get(f"ready/{peer}"))}
        name = f"pair/{low}-{high}/{numbers[low]}.{numbers[high]}"
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [self._device]
        options._timeout = timedelta(seconds=max(_LEAST_SECONDS, until - time.monotonic()))
        group = gloo(PrefixStore(name, store), int(self.rank == high), 2, options)
        with self._lock:
            self._connections[peer] = Connection(
                group, int(self.rank != high), peer, self._delay, most_bytes=self._most_bytes
            )
            self._absent.discard(peer)

    def watch_for(self, peers: Iterable[int]) -> None:
        with self._lock:
            self._absent.update(peers)
        if self._absent and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="thinwire-watcher", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            for peer in sorted(self._absent):
                key = f"announce/{self.rank}/{peer}"
                try:
                    if self._store.check([key]):
                        self._store.delete_key(key)
                        self._connect(self._store, peer, time.monotonic() + _CONNECT_SECONDS)
                        with self._lock:
                            self._rejoined.append(peer)
                except RuntimeError as problem:  # the store or the peer is gone: training goes on without it
                    _log.debug("rank %d could not connect to rank %d: %s", self.rank, peer, problem)
                    self._report_to_new_store()

    def _report_to_new_store(self) -> None:
        """A rank that serves an empty store was restarted: tell it that this rank trains already."""
        try:
            store = None if self._reopen is None else self._reopen()
            if store is not None:
                self._store = PrefixStore(self._prefix, store)
                self._store.set(f"running/{self.rank}", "1")
        except RuntimeError as problem:
            _log.debug("rank %d could not open the store again: %s", self.rank, problem)

    def rejoined(self) -> list[int]:
        with self._lock:
            found, self._rejoined = self._rejoined, []
            return found

    # ----------------------------------------------------------------------------------------------------- messages

    def send(self, peer: int, message: Tensor) -> None:
        with self._lock:
            connection = self._connections.get(peer)
        if connection is not None:
            self.sent_bytes += message.numel()
            connection.send(message)

    def receive(self, peer: int, *, until: float) -> Tensor | None:
        with self._lock:
            connection = self._connections.get(peer)
        if connection is None:
            raise PeerGoneError(f"rank {peer} is not connected")
        return connection.receive(until)

    def disconnect(self, peer: int) -> None:
        with self._lock:
            connection = self._connections.pop(peer, None)
            if connection is not None:
                self._leaving[:] = [*(one for one in self._leaving if one.open), connection]
        if connection is not None:
            connection.leave()

    def close(self) -> None:
        self._close()


def _clones(store: Store, number: int) -> list[Store]:
    """Clients of one store for threads, because a client has one request at a time; only `store` if it has no clones.

    >>> len(_clones(dist.HashStore(), 3)), len(_clones(dist.Store(), 3))
    (3, 1)
    """
    try:
        clones: list[Store] = [store.clone() for _ in range(number)]  # type: ignore[attr-defined]  # newer than 2.6
        return clones
    except (AttributeError, RuntimeError, NotImplementedError):
        return [store]


def _close_all(connections: dict[int, Connection], given_up: list[Connection], closed: threading.Event) -> None:
    closed.set()
    leaving = list(connections.values())
    connections.clear()
    for connection in leaving:
        connection.leave()
    until = time.monotonic() + _CLOSE_SECONDS
    for connection in leaving:
        connection.join(until)
    for connection in given_up:  # their answer is not waited for
        connection.join(time.monotonic())
    given_up.clear()
