"""A peer transport between processes: one gloo group of two ranks for each pair of neighbours.

gloo closes all connections of a group when one of them breaks or times out. With one group for each pair, a rank that
fails takes its own connections with it and no others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ...errors import OptionError
from .connection import Connection, gloo_device
from .transport import PeerGoneError, PeerTransport

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5  # between two looks into the store for peers that have started again
_CONNECT_SECONDS = 30.0  # for such a peer to complete its connection
_CLOSE_SECONDS = 5.0  # for all peers together to confirm that this rank leaves


class GlooTransport(PeerTransport):
    """Messages between processes that share a store of torch.distributed.

    Only connecting needs the store. A process that starts with the rank of a dead one gets the next incarnation number;
    its neighbours learn of it from the store. `name` separates several transports in one store. `delay(bytes)` gives
    the seconds to hold a message back, to emulate a link.

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
    ) -> None:
        if not 0 <= rank < world_size:
            raise OptionError(f"rank must be from 0 to {world_size - 1}, not {rank}")
        self._store = PrefixStore(f"thinwire-peers/{name}", store)
        super().__init__(rank, world_size, incarnation=int(self._store.add(f"incarnation/{rank}", 1)))
        self._delay = delay
        self._connections: dict[int, Connection] = {}
        self._absent: set[int] = set()
        self._rejoined: list[int] = []
        self._lock = threading.Lock()
        self._device = gloo_device()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        # Also at exit: a thread that returns from gloo while the interpreter shuts down aborts the process.
        self._close = weakref.finalize(self, _close_all, self._connections, self._closed)

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
        return cls(store, rank, dist.get_world_size(), name=f"group-{number}", delay=delay)

    # --------------------------------------------------------------------------------------------------- connecting

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        """One pair after the other, in the same order on all ranks: so no ranks wait for each other in a cycle."""
        until = time.monotonic() + seconds
        connected = []
        for peer in sorted(peers, key=lambda other: (min(other, self.rank), max(other, self.rank))):
            left = max(0.1, until - time.monotonic())
            with contextlib.suppress(RuntimeError):
                self._connect(peer, left)
                connected.append(peer)
        return connected

    def announce(self, peers: Iterable[int]) -> None:
        for peer in peers:
            self._store.set(f"announce/{peer}/{self.rank}", str(self.incarnation))

    def _connect(self, peer: int, seconds: float) -> None:
        low, high = min(peer, self.rank), max(peer, self.rank)
        wait = timedelta(seconds=seconds)
        # The peer's incarnation is in the store once it has started. Each pair of incarnations has its own group.
        self._store.wait([f"incarnation/{peer}"], wait)
        numbers = {self.rank: self.incarnation, peer: int(self._store.add(f"incarnation/{peer}", 0))}
        name = f"pair/{low}-{high}/{numbers[low]}.{numbers[high]}"
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [self._device], wait
        group = gloo(PrefixStore(name, self._store), int(self.rank == high), 2, options)
        with self._lock:
            self._connections[peer] = Connection(group, int(self.rank != high), peer, self._delay)
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
                        self._connect(peer, _CONNECT_SECONDS)
                        with self._lock:
                            self._rejoined.append(peer)
                except RuntimeError as problem:  # the store or the peer is gone: training goes on without it
                    _log.debug("rank %d could not connect to rank %d: %s", self.rank, peer, problem)

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
            connection.leave()

    def close(self) -> None:
        self._close()


def _close_all(connections: dict[int, Connection], closed: threading.Event) -> None:
    closed.set()
    leaving = list(connections.values())
    connections.clear()
    for connection in leaving:
        connection.leave()
    until = time.monotonic() + _CLOSE_SECONDS
    for connection in leaving:
        connection.join(until)


def peers_at(address: str, *, rank: int, world_size: int, seconds: float = 300.0) -> GlooTransport:
    """A transport between processes that find each other at `tcp://host:port`, without a process group.

    Any process may die and start again. Rank 0 starts the store at that address, unless one is there. Only connecting
    needs the store.

    >>> transport = peers_at("tcp://127.0.0.1:0", rank=0, world_size=1)
    >>> transport.incarnation
    1
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit():
        raise OptionError(f"{address} is not an address: write tcp://10.0.0.1:29500")
    wait = timedelta(seconds=seconds)
    store: Store
    try:
        store = TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    except RuntimeError:
        if rank != 0:
            raise
        store = TCPStore(host, int(port), world_size, is_master=False, timeout=wait, wait_for_workers=False)
    return GlooTransport(store, rank, world_size)
