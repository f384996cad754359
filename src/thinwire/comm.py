"""The door to the network: the collectives that exchanges use, with a count of bytes and seconds.

`Network` is what an exchange sees; `Communicator` is one over a torch.distributed group, the only file that calls
collectives. Bytes are what this rank sends under the textbook algorithm (ring all-reduce and all-gather, direct
all-to-all), so that they can be predicted; a broadcast is counted as the mean over the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from .errors import ExchangeError, OptionError

Op = Literal["sum", "max"]
Wait = Callable[[], object]

# gloo gathers and adds in a ring, n - 1 trips and 2 (n - 1). Where ranks are few and messages are small, they are there
# sooner when each is sent to everyone at once: as many bytes, but one trip, or two (4 ranks, 10 ms: an all-gather takes
# 21 ms instead of 69, an all-reduce of 126 kB 58 ms instead of 134).
FEW_RANKS, SMALL_SUM = 8, 128 << 10

# Newest first: torch renames collectives and warns about the old names.
_NAMES = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "all_to_all": ("all_to_all_single",),
    "broadcast": ("broadcast",),
    "swap": ("batch_isend_irecv",),
}


def collective(kind: str, module: ModuleType = dist) -> Callable[..., Any]:
    """The function of `torch.distributed` that does this, under the newest name that this version of torch has.

    >>> collective("all_reduce").__name__
    'all_reduce'
    """
    for name in _NAMES[kind]:
        if hasattr(module, name):
            found: Callable[..., Any] = getattr(module, name)
            return found
    raise OptionError(f"this torch has none of {', '.join(_NAMES[kind])}: install torch 2.6 or newer")


@dataclasses.dataclass
class Traffic:
    """What has been sent: calls, bytes of this rank, seconds with anything under way."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.calls - earlier.calls, self.bytes - earlier.bytes, self.seconds - earlier.seconds)


class Pending:
    """A collective under way. `wait()` returns its result when that may be used, and counts it."""

    def __init__(self, network: Network, kind: str, sent: int, wait: Wait | None, result: Tensor) -> None:
        self._network, self._kind, self._sent, self._wait = network, kind, sent, wait
        self._result = result
        self._begin = time.perf_counter()
        self._end = _End.of(wait) if network.spans is not None else None

    def wait(self) -> Tensor:
        wait, self._wait = self._wait, None
        if wait is not None:
            try:
                wait()
            except RuntimeError as failure:
                raise self._network.failure(self._kind, failure) from failure
            finally:
                ended = None if self._end is None else self._end.at
                self._network._count(self._kind, self._sent, self._begin, ended)
        return self._result


class _End:
    """When a collective was over, which may be long before anyone waits for it."""

    def __init__(self) -> None:
        self.at: float | None = None

    @classmethod
    def of(cls, wait: Wait | None) -> _End | None:
        if not isinstance(wait, _Waiter):
            return None
        end = cls()
        wait.work.get_future().add_done_callback(end._note)
        return end

    def _note(self, future: object) -> None:
        self.at = time.perf_counter()


class Network(ABC):
    """Collectives over `world_size` ranks, of which this is `rank`. All ranks call the same ones in the same order."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.first_start: float | None = None  # time.perf_counter() of the first collective of this lap
        self.spans: list[tuple[float, float]] | None = None  # a list to have every collective's begin and end in it
        self._traffic: dict[str, Traffic] = {}
        self._counted_until = 0.0
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------- collectives

    def start_all_reduce(self, tensor: Tensor, *, op: Op = "sum", soon: bool = False) -> Pending:
        """Begin to replace `tensor` by its sum or maximum over the ranks; the result has the same bits everywhere.

        These are the bits of torch's own all-reduce, but not with `soon`: then it is waited for with little else to do,
        and a small tensor may take a shorter way whose second half begins at `wait`.
        """
        sent = 2 * _bytes(tensor) * (self.world_size - 1) // self.world_size
        how = self._all_reduce_soon if soon else self._all_reduce
        return self._start("all_reduce", sent, tensor, lambda: how(tensor, op))

    def all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Tensor:
        """`tensor`, in place, summed over the ranks (or the maximum)."""
        return self.start_all_reduce(tensor, op=op, soon=True).wait()

    def start_all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Pending:
        """Begin to collect the tensors of all ranks, which must stay as they are until the end."""
        shape = (self.world_size, *tensor.shape)
        out = tensor.new_empty(shape) if out is None else out.view(shape)
        if self.world_size == 1:
            out.copy_(tensor[None])
        sent = _bytes(tensor) * (self.world_size - 1)
        return self._start("all_gather", sent, out, lambda: self._all_gather(out, tensor.contiguous()))

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The tensors of all ranks as rows, in rank order."""
        return self.start_all_gather(tensor, out=out).wait()

    def start_all_to_all(self, rows: Tensor, *, out: Tensor | None = None) -> Pending:
        """Begin to send row j to rank j; the rows must stay as they are until the end."""
        if rows.shape[0] != self.world_size:
            raise OptionError(f"all_to_all needs one row for each of {self.world_size} ranks, got {rows.shape[0]}")
        out = torch.empty_like(rows, memory_format=torch.contiguous_format) if out is None else out
        if self.world_size == 1:
            out.copy_(rows)
        sent = _bytes(rows) * (self.world_size - 1) // self.world_size
        return self._start("all_to_all", sent, out, lambda: self._all_to_all(out, rows.contiguous()))

    def all_to_all(self, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Row j goes to rank j; what comes back has the row from rank j in place j."""
        return self.start_all_to_all(rows, out=out).wait()

    def broadcast(self, tensor: Tensor, *, source: int) -> Tensor:
        """`tensor`, in place, as rank `source` has it."""
        sent = _bytes(tensor) * (self.world_size - 1) // self.world_size
        return self._start("broadcast", sent, tensor, lambda: self._broadcast(tensor, source)).wait()

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send to some ranks and receive from some, all at once: what neighbours in a graph do."""
        if outgoing.keys() or incoming.keys():
            sent = sum(map(_bytes, outgoing.values()))
            self._start("swap", sent, torch.empty(0), lambda: self._swap(outgoing, incoming)).wait()

    def take_spans(self) -> list[tuple[float, float]]:
        """Begin and end of the collectives since the last call, if `spans` is a list."""
        with self._lock:
            spans, self.spans = self.spans or [], None if self.spans is None else []
            return spans

    def begin_lap(self) -> None:
        """Forget `first_start`: the next collective sets it."""
        self.first_start = None

    def _start(self, kind: str, sent: int, result: Tensor, launch: Callable[[], Wait]) -> Pending:
        self.first_start = self.first_start or time.perf_counter()
        if self.world_size == 1:
            return Pending(self, kind, 0, None, result)
        try:
            return Pending(self, kind, sent, launch(), result)
        except RuntimeError as failure:
            raise self.failure(kind, failure) from failure

    def failure(self, kind: str, cause: RuntimeError) -> ExchangeError:
        """What to raise when a collective did not come to its end."""
        why = " ".join(str(cause).split())
        return ExchangeError(f"{kind} between {self.world_size} ranks failed on rank {self.rank}: {why}")

    # ------------------------------------------------------------------------------------- what a network defines

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Op) -> Wait: ...

    def _all_reduce_soon(self, tensor: Tensor, op: Op) -> Wait:
        return self._all_reduce(tensor, op)

    @abstractmethod
    def _all_gather(self, out: Tensor, tensor: Tensor) -> Wait: ...

    @abstractmethod
    def _all_to_all(self, out: Tensor, rows: Tensor) -> Wait: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Wait: ...

    @abstractmethod
    def _swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Wait: ...

    # ---------------------------------------------------------------------------------------------- counting

    def _count(self, kind: str, sent: int, begin: float, end: float | None = None) -> None:
        now = time.perf_counter()
        with self._lock:
            if self.spans is not None:
                self.spans.append((begin, end or now))
            traffic = self._traffic.setdefault(kind, Traffic())
            traffic.calls += 1
            traffic.bytes += sent
            traffic.seconds += now - max(begin, self._counted_until)  # time with several under way passes once
            self._counted_until = now

    @property
    def traffic(self) -> Traffic:
        """Everything so far; subtract two of them to know what went between."""
        with self._lock:
            kinds = list(self._traffic.values())
            return Traffic(sum(t.calls for t in kinds), sum(t.bytes for t in kinds), sum(t.seconds for t in kinds))

    def traffic_by_kind(self) -> dict[str, Traffic]:
        """The same for each collective."""
        with self._lock:
            return {kind: dataclasses.replace(traffic) for kind, traffic in self._traffic.items()}


class Communicator(Network):
    """The collectives of a torch.distributed group (gloo or NCCL), None for the default group.

    >>> from torch.distributed import HashStore, init_process_group, destroy_process_group
    >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> comm = Communicator()
    >>> comm.all_gather(torch.tensor([1.0, 2.0]))
    tensor([[1., 2.]])
    >>> comm.traffic.bytes  # alone, nothing is sent
    0
    >>> destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise OptionError("there is no process group: call torch.distributed.init_process_group first")
        self._group: dist.ProcessGroup | None = dist.group.WORLD if group is None else group
        super().__init__(dist.get_rank(self._group), dist.get_world_size(self._group))
        self._own = False
        self._sends_directly = self.world_size <= FEW_RANKS and "gloo" in dist.get_backend(self._group)

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ExchangeError("this communicator was closed")
        return self._group

    @property
    def timeout(self) -> timedelta | None:
        """How long a collective of this group may take, where torch tells."""
        for device in self.group._device_types:
            options = getattr(self.group._get_backend(device), "options", None)
            if isinstance(found := getattr(options, "_timeout", None), timedelta):
                return found
        return None

    def twin(self) -> Communicator:
        """Another group of the same ranks, for another thread; all ranks call it at the same place.

        It shares the timeout but no queue, so that two threads can each keep their own order.
        """
        ranks = dist.get_process_group_ranks(self.group)
        # Ranks outside a subgroup do not know that its members make another one.
        alone = len(ranks) != dist.get_world_size()
        try:
            group = dist.new_group(
                ranks, timeout=self.timeout, backend=dist.get_backend(self.group), use_local_synchronization=alone
            )
        except RuntimeError as failure:
            raise self.failure("new_group", failure) from failure
        twin = Communicator(group)
        twin._own = True
        return twin

    def close(self) -> None:
        """Release the connections, if this communicator made them."""
        group, self._group = self._group, None
        if self._own and group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the program has destroyed all groups and begun anew
                dist.destroy_process_group(group)

    # -------------------------------------------------------------------------------------- torch.distributed

    def _all_reduce(self, tensor: Tensor, op: Op) -> Wait:
        operation = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return _Waiter(collective("all_reduce")(tensor, op=operation, group=self.group, async_op=True))

    def _all_reduce_soon(self, tensor: Tensor, op: Op) -> Wait:
        if self._sends_directly and tensor.is_contiguous() and 0 < _bytes(tensor) <= SMALL_SUM:
            return _TwoTrips(self, tensor.view(-1), op).wait
        return self._all_reduce(tensor, op)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Wait:
        flat = out.view(-1)  # gloo takes rows as one long tensor only
        if self._sends_directly and _bytes(tensor) <= SMALL_SUM:
            rows = tensor.view(1, -1).expand(self.world_size, -1).contiguous()
            return self._all_to_all(flat.view_as(rows), rows)
        return _Waiter(collective("all_gather")(flat, tensor.view(-1), group=self.group, async_op=True))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> Wait:
        return _Waiter(collective("all_to_all")(out, rows, group=self.group, async_op=True))

    def _broadcast(self, tensor: Tensor, source: int) -> Wait:
        root = dist.get_global_rank(self.group, source)
        return _Waiter(collective("broadcast")(tensor, src=root, group=self.group, async_op=True))

    def _swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Wait:
        def far(peer: int) -> int:
            return dist.get_global_rank(self.group, peer)

        operations = [dist.P2POp(dist.irecv, tensor, far(peer), self.group) for peer, tensor in incoming.items()]
        operations += [dist.P2POp(dist.isend, tensor, far(peer), self.group) for peer, tensor in outgoing.items()]
        works = collective("swap")(operations)

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


@contextlib.contextmanager
def joined(
    backend: str = "gloo", *, meet_at: str | None = None, rank: int = 0, world_size: int = 1, minutes: float = 5
) -> Iterator[Communicator]:
    """The processes that meet at an address (`env://` under torchrun), or this one alone, until the end of the block.

    >>> with joined() as alone:
    ...     alone.world_size
    1
    """
    if dist.is_initialized():
        raise OptionError("there is a process group already: leave it out here, or call this in a process of its own")
    timeout = timedelta(minutes=minutes)
    if meet_at is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif meet_at == "env://":
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method=meet_at, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield Communicator()
    finally:
        dist.destroy_process_group()


class _TwoTrips:
    """An all-reduce of a small tensor: to the owners of its pieces, then their results to everyone.

    A class and not a closure: a traceback keeps the functions of its frames even when they are cleared, and so what a
    closure holds, which here are sockets.
    """

    def __init__(self, communicator: Communicator, flat: Tensor, op: Op) -> None:
        self._communicator, self._flat, self._op = communicator, flat, op
        ranks = communicator.world_size
        self._rows = flat.new_zeros(ranks, -(-flat.numel() // ranks))
        self._rows.view(-1)[: flat.numel()] = flat
        self._came = torch.empty_like(self._rows)
        self._arrives = communicator._all_to_all(self._came, self._rows)

    def wait(self) -> None:
        self._arrives()
        total = self._came[0]
        for row in self._came[1:]:  # in rank order, by one rank for all
            total = total.add_(row) if self._op == "sum" else torch.maximum(total, row, out=total)
        self._communicator._all_gather(self._rows, total)()
        self._flat.copy_(self._rows.view(-1)[: self._flat.numel()])


class _Waiter:
    """Waits for a collective of torch."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def __call__(self) -> object:
        return self.work.wait()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
