"""A slow network inside the process: gloo over loopback, whose collectives end when a slow link would have ended them.

For machines that allow no emulated network. Each process has one link that all its groups share. A collective begins
when its last rank has arrived and the link is free. It occupies the link for the bytes of its schedule
(`predict/collectives.py`) and ends after the latencies of its rounds. Jitter, loss and TCP are not modelled.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.futures import Future

from ...predict.collectives import Name, schedule
from ...predict.spec import NetworkSpec, Phase, parse_network

BACKEND = "paced"
SPEC_VARIABLE, CLOCK_VARIABLE = "THINWIRE_PACED", "THINWIRE_PACED_CLOCK"

# Methods of a process group: the schedule that gloo follows, and which argument is the payload. Newer names of torch
# stand beside older ones.
_METHODS: dict[str, tuple[Name, int | None]] = {
    "allreduce": ("ring_all_reduce", 0),
    "allreduce_coalesced": ("ring_all_reduce", 0),
    "allgather": ("ring_all_gather", 1),
    "allgather_coalesced": ("ring_all_gather", 1),
    "allgather_into_tensor_coalesced": ("ring_all_gather", 1),
    "all_gather_single_coalesced": ("ring_all_gather", 1),
    "_allgather_base": ("ring_all_gather", 1),
    "all_gather_single": ("ring_all_gather", 1),
    "reduce_scatter": ("ring_reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("ring_reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("ring_reduce_scatter", 1),
    "_reduce_scatter_base": ("ring_reduce_scatter", 1),
    "reduce_scatter_single": ("ring_reduce_scatter", 1),
    "alltoall": ("direct_all_to_all", 1),
    "alltoall_base": ("direct_all_to_all", 1),
    "all_to_all_single": ("direct_all_to_all", 1),
    "broadcast": ("tree_broadcast", 0),
    "reduce": ("tree_broadcast", 0),
    "gather": ("direct_gather", 1),
    "scatter": ("direct_gather", 0),
    "barrier": ("tree_barrier", None),
}


class PacedLink:
    """The link of this process: when it is free, by time.monotonic(), which all processes of a machine share.

    >>> link = PacedLink(parse_network("80mbit,10ms"))  # 10 MB/s
    >>> end = link.occupy(begin=100.0, sent=1e6, rounds=2)
    >>> round(end, 3), round(link.occupy(begin=100.0, sent=1e6, rounds=2), 3)  # the second waits for the first
    (100.12, 100.22)
    """

    def __init__(self, network: NetworkSpec, *, clock: int | None = None) -> None:
        self._network, self._clock = network, clock
        self._epoch: float | None = None
        self._free = 0.0
        self._lock = threading.Lock()

    def phase(self, now: float) -> Phase:
        """The phase in force now; the clock of a schedule is a file that the parent writes."""
        if self._epoch is None and self._clock is not None and len(self._network.phases) > 1:
            try:
                text = os.pread(self._clock, 64, 0)
            except OSError:
                text = b""
            self._epoch = float(text) if text else None
        return self._network.at(0.0 if self._epoch is None else now - self._epoch)

    def occupy(self, *, begin: float, sent: float, rounds: int) -> float:
        """Send `sent` bytes from `begin` on, or as soon as the link is free; the time at which the last arrives."""
        with self._lock:
            phase = self.phase(begin)
            begin = max(begin, self._free)
            self._free = begin + (0.0 if phase.rate_bits is None else 8 * sent / phase.rate_bits)
            return self._free + rounds * phase.delay_seconds


_links: dict[str, PacedLink] = {}


def hold_here() -> Callable[[int], float] | None:
    """For messages between two ranks: a function from bytes to seconds until arrival; None on a real network."""
    text = os.environ.get(SPEC_VARIABLE)
    if text is None:
        return None
    link = _link_here(text)
    return lambda size: link.occupy(begin=time.monotonic(), sent=float(size), rounds=1) - time.monotonic()


def backend_here() -> str:
    """The backend for `init_process_group` in a worker: `gloo`, or `paced` where no network could be emulated.

    >>> backend_here()
    'gloo'
    """
    text = os.environ.get(SPEC_VARIABLE)
    if text is None:
        return "gloo"
    _link_here(text)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    return BACKEND


def _link_here(text: str) -> PacedLink:
    if text not in _links:
        clock = os.environ.get(CLOCK_VARIABLE, "")
        _links.clear()
        _links[text] = PacedLink(parse_network(text), clock=int(clock) if clock.isdigit() else None)
    return _links[text]


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> PacedGroup:
    return PacedGroup(store, rank, size, timeout, link=next(iter(_links.values())))


class PacedWork(dist.Work):
    """A collective under way. It ends when its transfer over the link would end."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.future: Future[list[Tensor]] = Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()

    def is_success(self) -> bool:
        return self.future.done() and self.exception() is None

    def exception(self) -> Exception | None:
        if self.future.done():
            try:
                self.future.value()
            except Exception as problem:
                return problem
        return None

    def result(self) -> list[Tensor]:
        return self.tensors

    def synchronize(self) -> None:
        self.wait()

    def finish(self, carry: Callable[[], float]) -> None:
        """Complete it at the time that `carry` returns, or with the error that it raises."""
        try:
            end = carry()
            time.sleep(max(0.0, end - time.monotonic()))
        except Exception as problem:
            self.future.set_exception(problem)  # type: ignore[arg-type]  # its annotation is that of a result
        else:
            self.future.set_result(self.tensors)


class PacedGroup(dist.ProcessGroup):
    """A process group over gloo whose collectives take as long as on a slow link."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, link: PacedLink) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows the longer form only
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        self._gloo = dist.ProcessGroup(store, rank, size)
        for group in (self._gloo, self):  # ours for its options, and for what is not paced
            group._register_backend(device, kind, gloo)
            group._set_default_backend(kind)
        self._link, self._ranks = link, size
        self._order = threading.Lock()
        # Collectives of a group end in order, in one thread. Messages between two ranks may overtake each other.
        self._collectives = _Worker()

    def getBackendName(self) -> str:  # noqa: N802  # torch calls it so
        return BACKEND

    def shutdown(self) -> None:
        self._collectives.jobs.put(None)
        self._gloo.shutdown()

    def _collective(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> PacedWork:
        algorithm, position = _METHODS[name]
        payload = [] if position is None else list(_tensors(arguments[position]))
        costs = schedule(algorithm, self._ranks)
        sent = costs.volume * _bytes(payload)
        work = PacedWork(list(_tensors(arguments[0])) if position is not None else [])
        came = torch.tensor([time.monotonic()], dtype=torch.float64)
        with self._order:
            # When did the last rank arrive? All are on one machine and have one clock.
            last = self._gloo.allreduce([came], dist.ReduceOp.MAX)
            done = getattr(self._gloo, name)(*arguments, **options)
            kept = self._link

            def carry() -> float:
                last.wait()
                end = kept.occupy(begin=float(came), sent=sent, rounds=costs.rounds)
                done.wait()
                return end

            self._collectives.jobs.put(lambda: work.finish(carry))
        return work

    # ------------------------------------------------------------------------------------------- between two ranks

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> PacedWork:
        done = self._gloo.send(tensors, dstRank, tag)

        def carry() -> float:
            end = self._link.occupy(begin=time.monotonic(), sent=_bytes(tensors), rounds=0)
            done.wait()
            return end

        return self._message(tensors, carry)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> PacedWork:
        return self._received(tensors, self._gloo.recv(tensors, srcRank, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> PacedWork:
        return self._received(tensors, self._gloo.recv_anysource(tensors, tag))

    def _received(self, tensors: list[Tensor], done: dist.Work) -> PacedWork:
        def carry() -> float:
            done.wait()
            now = time.monotonic()
            phase = self._link.phase(now)  # the sender counted its own link; this one is idle
            taken = 0.0 if phase.rate_bits is None else 8 * _bytes(tensors) / phase.rate_bits
            return now + taken + phase.delay_seconds

        return self._message(tensors, carry)

    def _message(self, tensors: list[Tensor], carry: Callable[[], float]) -> PacedWork:
        work = PacedWork(list(tensors))
        worker = _Worker()
        worker.jobs.put(lambda: work.finish(carry))
        worker.jobs.put(None)
        return work


def _paced(name: str) -> Callable[..., PacedWork]:
    def method(self: PacedGroup, *arguments: Any, **options: Any) -> PacedWork:
        return self._collective(name, arguments, options)

    method.__name__ = name
    return method


for _name in _METHODS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(PacedGroup, _name, _paced(_name))


class _Worker:
    """A thread that runs jobs in order, until None."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a rank that fails must be able to end while the others are missing.
        self.thread = threading.Thread(target=self._serve, name="thinwire-paced", daemon=True)
        self.thread.start()
        _workers.add(self)

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job  # its tensors go now, not when the next one comes


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _settle() -> None:
    """Let the threads end: one that is inside torch when Python exits would abort the process."""
    workers, end = list(_workers), time.monotonic() + 2.0
    for worker in workers:
        worker.jobs.put(None)
    for worker in workers:
        worker.thread.join(max(0.0, end - time.monotonic()))


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for part in nested:
            yield from _tensors(part)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
