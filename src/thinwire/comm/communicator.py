"""The collectives of a torch.distributed group. No other module calls them."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from ..errors import ExchangeError, OptionError
from .network import FEW_RANKS, SMALL_SUM, Network, Op, Wait, Waiter, size_of

# Newest first: torch renames collectives and warns about the old names.
_NAMES = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "all_to_all": ("all_to_all_single",),
    "broadcast": ("broadcast",),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
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

    between_processes = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise OptionError("there is no process group: call torch.distributed.init_process_group first")
        self._group: dist.ProcessGroup | None = dist.group.WORLD if group is None else group
        super().__init__(dist.get_rank(self._group), dist.get_world_size(self._group))
        self._own = self._abandoned = False
        self.backend: str = dist.get_backend(self._group)
        if self.backend in ("undefined", "custom"):  # no backend was given, or one for each device
            self.backend = dist.get_backend_config(self._group)  # such as cpu:gloo,cuda:nccl
        on_cuda = torch.cuda.is_available() and ("gloo" not in self.backend or "nccl" in self.backend)
        self._sends_directly = self.world_size <= FEW_RANKS and "gloo" in self.backend and not on_cuda
        if on_cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())

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

    def control(self) -> Communicator:
        return self if self.world_size == 1 else self.twin(backend="gloo")

    def twin(self, *, backend: str | None = None) -> Communicator:
        """Another group of the same ranks, for another thread; all ranks call it at the same place.

        It shares the timeout but no queue, so that two threads can each keep their own order.
        """
        ranks = dist.get_process_group_ranks(self.group)
        # Ranks outside a subgroup do not know that its members make another one.
        alone = len(ranks) != dist.get_world_size()
        try:
            with _named(self._agreed_name()) if alone else contextlib.nullcontext():
                group = dist.new_group(
                    ranks, timeout=self.timeout, backend=backend or self.backend, use_local_synchronization=alone
                )
        except RuntimeError as failure:
            raise self.failure("new_group", failure) from failure
        twin = Communicator(group)
        twin._own, twin.sums_messages = True, self.sums_messages
        return twin

    def _agreed_name(self) -> str:
        """A name that no group had before, the same on all ranks."""
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8).to(self.device)
        return "thinwire-" + bytes(self.broadcast(drawn, source=0).tolist()).hex()

    def abort(self) -> None:
        """On a device: end what is under way, so that torch's watchdog finds nothing for which to end the process."""
        if self.device.type == "cuda" and self._group is not None:
            with contextlib.suppress(RuntimeError, AttributeError):  # whatever state it is in, it is given up
                self._group._get_backend(self.device).abort()

    def abandon(self, wait: Wait) -> None:
        """Keep the group until the collective is over, or the program: torch waits for it where a group is freed."""
        self._abandoned = True
        keep = threading.Thread(target=_outlast, args=(self._group, wait), name="abandoned-collective", daemon=True)
        keep.start()

    def close(self) -> None:
        """Release the connections, if this communicator made them."""
        group, self._group = self._group, None
        if self._abandoned:
            return  # torch would wait for the collective under way, until its timeout
        if self._own and group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the program has destroyed all groups and begun anew
                dist.destroy_process_group(group)

    # -------------------------------------------------------------------------------------- torch.distributed

    def _all_reduce(self, tensor: Tensor, op: Op) -> Wait:
        operation = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return _waiter(collective("all_reduce")(tensor, op=operation, group=self.group, async_op=True), tensor)

    def _all_reduce_soon(self, tensor: Tensor, op: Op) -> Wait:
        direct = self._sends_directly and tensor.device.type == "cpu"
        if direct and tensor.is_contiguous() and 0 < size_of(tensor) <= SMALL_SUM:
            return _TwoTrips(self, tensor.view(-1), op).wait
        return self._all_reduce(tensor, op)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Wait:
        flat = out.view(-1)  # gloo takes rows as one long tensor only
        if self._sends_directly and size_of(tensor) <= SMALL_SUM:
            rows = tensor.view(1, -1).expand(self.world_size, -1).contiguous()
            return self._all_to_all(flat.view_as(rows), rows)
        return _waiter(collective("all_gather")(flat, tensor.view(-1), group=self.group, async_op=True), tensor)

    def _reduce_scatter(self, out: Tensor, rows: Tensor) -> Wait | None:
        if "nccl" not in self.backend or rows.device.type != "cuda":
            return None
        return Waiter(collective("reduce_scatter")(out, rows.view(-1), group=self.group, async_op=True))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> Wait:
        return _waiter(collective("all_to_all")(out, rows, group=self.group, async_op=True), rows)

    def _broadcast(self, tensor: Tensor, source: int) -> Wait:
        root = dist.get_global_rank(self.group, source)
        return _waiter(collective("broadcast")(tensor, src=root, group=self.group, async_op=True), tensor)

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


def _waiter(work: dist.Work, tensor: Tensor) -> Waiter:
    return Waiter(work, on_host=tensor.device.type == "cpu")


def _outlast(group: dist.ProcessGroup | None, wait: Wait) -> None:
    """A thread that is in here when the program ends never lets go of the group."""
    with contextlib.suppress(RuntimeError):
        wait()


_naming = threading.Lock()


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Groups made in this block have this name.

    Torch names a group of some ranks by the number of groups that this process is in. Ranks that are in different
    numbers of groups never meet, and a name that was used before leads to addresses of a group that is gone.
    """
    module: Any = distributed_c10d
    with _naming:
        before = module._process_group_name
        module._process_group_name = lambda ranks, use_hashed_name: name
        try:
            yield
        finally:
            module._process_group_name = before


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
