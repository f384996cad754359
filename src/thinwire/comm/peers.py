"""Letters between two ranks, where the collectives of `comm` need all of them: what gossip travels by.

Every edge is a gloo group of its own, of two ranks. gloo closes all connections of a group when one of them is too late
or breaks; so a neighbour that dies takes one edge with it and not the others. A letter is a flat uint8 tensor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ..errors import ExchangeError, OptionError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_FOREVER = timedelta(days=30)
_LOOK_EVERY = 0.5  # seconds between two looks for ranks that want to come back
_FAREWELL = 5.0  # seconds that all the others together may take to say goodbye
_SIZE = torch.int64
_ROOMS = 4  # sizes of letters for which room is kept ready on an edge


class GoneError(ExchangeError):
    """A neighbour has ended or cannot be reached any more."""


class Mail(ABC):
    """Sends letters to peers and receives theirs, in the order in which each of them sent."""

    def __init__(self, rank: int, world_size: int, *, life: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.life = life  # 1 for a process that was there from the beginning, more for one that came back
        self.sent_bytes = 0

    same_start: ClassVar[bool] = False  # one program makes all ranks from one model: there is nothing to spread

    def now(self) -> float:
        """The clock that deadlines are read from, in seconds."""
        return time.monotonic()

    def shared(self, read: Callable[[Tensor], _T]) -> Callable[[Tensor], _T]:
        """`read`, or one that reads a letter once for all who got it, where they are in one process."""
        return read

    @abstractmethod
    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        """Meet these peers; those that came within so many seconds."""

    @abstractmethod
    def send(self, peer: int, letter: Tensor) -> None:
        """Take a letter along; it must not be changed any more. Returns at once."""

    @abstractmethod
    def receive(self, peer: int, *, until: float) -> Tensor | None:
        """The next letter of a peer, or None if there is none before `now()` is `until`. GoneError if gone."""

    @abstractmethod
    def drop(self, peer: int) -> None:
        """Have no more to do with a peer."""

    @abstractmethod
    def arrivals(self) -> list[int]:
        """Peers that have come (back) since the last call; each has an edge again."""

    def expect(self, peers: Iterable[int]) -> None:
        """Look out for these peers, which are not there now."""
        return

    def knock(self, peers: Iterable[int]) -> None:
        """Tell peers that look out for this rank that it has come."""
        return

    @abstractmethod
    def close(self) -> None:
        """Leave."""


def _seconds(until: float) -> float:
    """From now until then, as queues can bear it."""
    return min(max(0.0, until - time.monotonic()), 1e6)


# ---------------------------------------------------------------------------------------------------- in one process


class LocalMail(Mail):
    """Letters between threads of one process, for trying out and for tests.

    >>> a, b = LocalMail.of(2)
    >>> a.send(1, torch.tensor([7], dtype=torch.uint8))
    >>> b.receive(0, until=time.monotonic() + 1)
    tensor([7], dtype=torch.uint8)
    """

    def __init__(self, rank: int, boxes: list[list[queue.Queue[Tensor | None]]]) -> None:
        super().__init__(rank, len(boxes))
        self._boxes = boxes  # [to][from]

    @classmethod
    def of(cls, world_size: int) -> list[LocalMail]:
        boxes: list[list[queue.Queue[Tensor | None]]] = [
            [queue.Queue() for _ in range(world_size)] for _ in range(world_size)
        ]
        return [cls(rank, boxes) for rank in range(world_size)]

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        return list(peers)

    def send(self, peer: int, letter: Tensor) -> None:
        self.sent_bytes += letter.numel()
        self._boxes[peer][self.rank].put(letter)

    def receive(self, peer: int, *, until: float) -> Tensor | None:
        try:
            letter = self._boxes[self.rank][peer].get(timeout=_seconds(until))
        except queue.Empty:
            return None
        if letter is None:
            raise GoneError(f"rank {peer} has left")
        return letter

    def drop(self, peer: int) -> None:
        pass

    def arrivals(self) -> list[int]:
        return []

    def close(self) -> None:
        for boxes in self._boxes:
            boxes[self.rank].put(None)


# ------------------------------------------------------------------------------------------------- between processes


class GlooMail(Mail):
    """Letters between processes that share a store of torch.distributed; the store is asked when ranks come, not else.

    A process that starts again with the rank of one that died comes back: its neighbours hear of it from the store.
    `name` tells several in one store apart. `hold(bytes)` may say how many seconds a letter of so many bytes is to be
    held back (an emulated line).
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "run",
        hold: Callable[[int], float] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise OptionError(f"a rank is from 0 to {world_size - 1}, not {rank}")
        self._store = PrefixStore(f"thinwire-mail/{name}", store)
        super().__init__(rank, world_size, life=int(self._store.add(f"life/{rank}", 1)))
        self._hold = hold
        self._edges: dict[int, _Line] = {}
        self._missing: set[int] = set()
        self._came: list[int] = []
        self._lock = threading.Lock()
        self._device = _device()
        self._ended = threading.Event()
        self._doorman: threading.Thread | None = None
        # Also at exit: a thread that comes back from gloo when Python is half gone ends the process with an abort.
        self._farewell = weakref.finalize(self, _say_goodbye, self._edges, self._ended)

    @classmethod
    def here(cls, *, hold: Callable[[int], float] | None = None) -> GlooMail:
        """Between the ranks of the default process group."""
        if not dist.is_initialized():
            raise OptionError(
                "there is no process group: call torch.distributed.init_process_group first, or give mail=mail_at(...)"
            )
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        # Ranks of a process group cannot come back to it; so whoever asks again wants another mail.
        number = store.add(f"thinwire-mails/{rank}", 1)
        return cls(store, rank, dist.get_world_size(), name=f"group-{number}", hold=hold)

    # ------------------------------------------------------------------------------------------------------ meeting

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        """One edge after the other, in an order that is the same for all, so that nobody waits in a circle."""
        until = time.monotonic() + seconds
        found = []
        for peer in sorted(peers, key=lambda other: (min(other, self.rank), max(other, self.rank))):
            left = max(0.1, until - time.monotonic())
            with contextlib.suppress(RuntimeError):
                self._meet(peer, left)
                found.append(peer)
        return found

    def knock(self, peers: Iterable[int]) -> None:
        for peer in peers:
            self._store.set(f"knock/{peer}/{self.rank}", str(self.life))

    def _meet(self, peer: int, seconds: float) -> None:
        low, high = min(peer, self.rank), max(peer, self.rank)
        wait = timedelta(seconds=seconds)
        # Which life of the peer: known once it has begun. A number of its own for every pair of lives.
        self._store.wait([f"life/{peer}"], wait)
        lives = {self.rank: self.life, peer: int(self._store.add(f"life/{peer}", 0))}
        name = f"edge/{low}-{high}/{lives[low]}.{lives[high]}"
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [self._device], wait
        group = gloo(PrefixStore(name, self._store), int(self.rank == high), 2, options)
        with self._lock:
            self._edges[peer] = _Line(group, int(self.rank != high), peer, self._hold)
            self._missing.discard(peer)

    def expect(self, peers: Iterable[int]) -> None:
        with self._lock:
            self._missing.update(peers)
        if self._missing and self._doorman is None:
            self._doorman = threading.Thread(target=self._watch, name="thinwire-doorman", daemon=True)
            self._doorman.start()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY):
            for peer in sorted(self._missing):
                key = f"knock/{self.rank}/{peer}"
                try:
                    if self._store.check([key]):
                        self._store.delete_key(key)
                        self._meet(peer, 30.0)
                        with self._lock:
                            self._came.append(peer)
                except RuntimeError as problem:  # the store is gone, or the newcomer: nobody can come, training goes on
                    _log.debug("rank %d could not meet rank %d: %s", self.rank, peer, problem)

    def arrivals(self) -> list[int]:
        with self._lock:
            came, self._came = self._came, []
            return came

    # ------------------------------------------------------------------------------------------------------ letters

    def send(self, peer: int, letter: Tensor) -> None:
        with self._lock:
            line = self._edges.get(peer)
        if line is not None:
            self.sent_bytes += letter.numel()
            line.send(letter)

    def receive(self, peer: int, *, until: float) -> Tensor | None:
        with self._lock:
            line = self._edges.get(peer)
        if line is None:
            raise GoneError(f"rank {peer} is not there")
        return line.receive(until)

    def drop(self, peer: int) -> None:
        with self._lock:
            line = self._edges.pop(peer, None)
        if line is not None:
            line.leave()

    def close(self) -> None:
        self._farewell()


class _Line:
    """One edge: a thread that sends, a thread that receives. Sizes travel first; a size of -1 says goodbye.

    Letters of a size have a tag of their own. So room for one of the size that came last can be ready before it is
    announced, which saves the trip there and back that gloo makes to ask for it.
    """

    def __init__(self, group: Any, other: int, peer: int, hold: Callable[[int], float] | None) -> None:
        self._group, self._other, self._peer, self._hold = group, other, peer, hold
        self._out: queue.Queue[Tensor | None] = queue.Queue()
        self._in: queue.Queue[Tensor | GoneError] = queue.Queue()
        self._gone: GoneError | None = None
        names = (f"thinwire-to-{peer}", f"thinwire-from-{peer}")
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in zip((self._sends, self._receives), names, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, letter: Tensor) -> None:
        self._out.put(letter.cpu())

    def leave(self) -> None:
        self._out.put(None)

    def join(self, until: float) -> None:
        for thread in self._threads:
            thread.join(_seconds(until))

    def receive(self, until: float) -> Tensor | None:
        if self._gone is not None:
            raise self._gone
        try:
            found = self._in.get(timeout=_seconds(until))
        except queue.Empty:
            return None
        if isinstance(found, GoneError):
            self._gone = found
            raise found
        return found

    def _sends(self) -> None:
        try:
            while (letter := self._out.get()) is not None:
                if self._hold is not None:
                    time.sleep(max(0.0, self._hold(letter.numel())))
                size = self._group.send([torch.tensor([letter.numel()], dtype=_SIZE)], self._other, 0)
                body = self._group.send([letter], self._other, _tag(letter.numel()))
                self._wait(size)
                self._wait(body)
            self._wait(self._group.send([torch.tensor([-1], dtype=_SIZE)], self._other, 0))
        except RuntimeError as problem:
            self._end(problem)

    def _receives(self) -> None:
        size, before = torch.zeros(1, dtype=_SIZE), -1
        laid_out: dict[int, tuple[Any, Tensor]] = {}  # gloo sends nothing before it hears that there is room
        try:
            while True:
                self._wait(self._group.recv([size], self._other, 0))
                now = int(size)
                if now < 0:
                    # Goodbye in return, at once: else who leaves first would have a thread in gloo when its Python
                    # ends, which aborts the process.
                    self.leave()
                    raise RuntimeError("it has left")
                work, letter = laid_out.pop(now) if now in laid_out else self._room_for(now)
                self._wait(work)
                if now == before and len(laid_out) < _ROOMS:
                    laid_out[now] = self._room_for(now)
                before = now
                self._in.put(letter)
        except RuntimeError as problem:
            self._end(problem)

    def _room_for(self, size: int) -> tuple[Any, Tensor]:
        letter = torch.empty(size, dtype=torch.uint8)
        return self._group.recv([letter], self._other, _tag(size)), letter

    def _end(self, problem: RuntimeError) -> None:
        self._in.put(GoneError(f"rank {self._peer} is gone: {' '.join(str(problem).split())}"))

    @staticmethod
    def _wait(work: Any) -> None:
        work.wait(_FOREVER)


def _say_goodbye(edges: dict[int, _Line], ended: threading.Event) -> None:
    ended.set()
    lines = list(edges.values())
    edges.clear()
    for line in lines:
        line.leave()
    until = time.monotonic() + _FAREWELL
    for line in lines:
        line.join(until)


def _tag(size: int) -> int:
    return 1 + size % (1 << 30)


def _device() -> Any:
    gloo: Any = dist.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def mail_at(address: str, *, rank: int, world_size: int, seconds: float = 300.0) -> GlooMail:
    """Mail between processes that meet at `tcp://host:port`, without a process group: any may die and come back.

    The process of rank 0 keeps the store there, if none is there yet. Rounds do not need it, newcomers do.

    >>> mail = mail_at("tcp://127.0.0.1:0", rank=0, world_size=1)
    >>> mail.life
    1
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit():
        raise OptionError(f"{address} is no address to meet at: write tcp://10.0.0.1:29500")
    wait = timedelta(seconds=seconds)
    store: Store
    try:
        store = TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    except RuntimeError:
        if rank != 0:
            raise
        store = TCPStore(host, int(port), world_size, is_master=False, timeout=wait, wait_for_workers=False)
    return GlooMail(store, rank, world_size)
