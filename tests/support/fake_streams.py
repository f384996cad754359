"""A device that is not there: ops run on the CPU under a stream's name, and torch's race detector is told what they do.

`FakeDevice` stands in for `thinwire.comm.streams`. While it is watching, every op that torch dispatches is given to the
event handler of `torch.cuda._sanitizer` as a kernel on the current fake stream, with what it reads and writes.
Collectives run on a stream of their own, as NCCL's do. A host read of any tensor raises. Kernels run their definition
in plain torch, so that nothing hides from the detector.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire import kernels
from thinwire.comm import streams
from thinwire.comm.network import Network, Pending
from thinwire.kernels import reference
from thinwire.reduce.deferred import Deferred

COMPUTE, SIDE, COMMUNICATION = 0, 1, 2  # streams: training's own, ours, the network's
# Ops that need a value on the host, or whose result has a size that depends on values.
HOST_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::is_nonzero",
}
_METHODS = ("tolist", "numpy", "item", "cpu", "__bool__", "__float__", "__int__", "__index__")


class HostReadError(AssertionError):
    """A value of a step was read on the host."""


class RaceError(AssertionError):
    """Two streams use a tensor, one of them to write, and nothing orders them."""


class FakeDevice:
    """The streams of one rank."""

    def __init__(self) -> None:
        self.handler = EventHandler()
        self.errors: list[str] = []
        self.events = 0
        self.waits = 0
        self.skipped_wait: int | None = None  # this wait is forgotten: the test of the test
        self._stack = [COMPUTE]
        self._known = {COMPUTE}
        self._alive: dict[int, Any] = {}  # storages, so that no address is used twice
        self._made_on: dict[int, int] = {}
        self._may_use: dict[int, set[int]] = {}
        self.watching = False
        for stream in (SIDE, COMMUNICATION):
            self._meet(stream)

    def _meet(self, stream: int) -> None:
        if stream not in self._known:
            self._known.add(stream)
            self.handler._handle_stream_creation(stream)

    # ---------------------------------------------------------------------------- what `thinwire.comm.streams` asks

    def resident(self, device: torch.device) -> bool:
        return True

    @contextlib.contextmanager
    def side(self, device: torch.device) -> Iterator[None]:
        self._stack.append(SIDE)
        try:
            yield
        finally:
            self._stack.pop()

    def record(self, device: torch.device) -> int:
        return self.record_on(self._stack[-1])

    def record_on(self, stream: int) -> int:
        self.events += 1
        self.handler._handle_event_creation(self.events)
        self.handler._handle_event_record(self.events, stream)
        return self.events

    def wait(self, event: int, device: torch.device) -> None:
        self.waits += 1
        if self.waits != self.skipped_wait:
            self.handler._handle_event_wait(event, self._stack[-1])

    def use(self, tensor: Tensor) -> None:
        self._may_use.setdefault(_pointer(tensor), set()).add(self._stack[-1])

    def passed(self, event: int) -> bool:
        return event < self.events  # something was recorded after it: some time has gone by

    def seconds(self, begin: int, end: int) -> float:
        return 1e-3 * (end - begin)

    def to_host(self, tensor: Tensor) -> Tensor:
        with self.paused():
            return tensor.clone()

    # ---------------------------------------------------------------------------------------------------- watching

    def launch(self, name: str, stream: int, reads: list[Tensor], writes: list[Tensor], made: list[Tensor]) -> None:
        """A kernel runs on a stream."""
        pointers = {_pointer(tensor) for tensor in (*reads, *writes, *made)} - {0}
        for tensor in (*reads, *writes, *made):
            pointer = _pointer(tensor)
            if pointer and pointer not in self._alive:
                self._alive[pointer] = tensor.untyped_storage()
                self._made_on[pointer] = stream
        for pointer in pointers:
            foreign = {self._made_on[pointer], stream} == {COMPUTE, SIDE}
            if foreign and stream not in self._may_use.get(pointer, ()):
                where = "".join(traceback.format_stack()[-12:-2])
                self.errors.append(f"{name} uses memory of another stream that was not recorded for it\n{where}")
        written = {_pointer(tensor) for tensor in (*writes, *made)} - {0}
        read = {_pointer(tensor) for tensor in reads} - written - {0}
        aliases = {pointer: [name] for pointer in pointers}
        found = self.handler._handle_kernel_launch(stream, read, written, written, name, aliases)
        self.errors += [f"{name} on stream {stream}: {error}" for error in found]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is watched in this block: what a test does itself, what ranks tell each other between steps."""
        before, self.watching = self.watching, False
        try:
            yield
        finally:
            self.watching = before

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Every op in this block is part of a step."""
        before, self.watching = self.watching, True
        try:
            with _Ops(self):
                yield
        finally:
            self.watching = before

    def check(self) -> None:
        """Raise the first race."""
        if self.errors:
            raise RaceError(f"{len(self.errors)} races, the first: {self.errors[0]}")


class _Ops(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        device = self.device
        if not device.watching or name.startswith("c10d::"):
            return func(*args, **kwargs)
        if name in HOST_READS and _is_ours():
            raise HostReadError(f"{name} reads a value of a step on the host")
        reads, writes = _accesses(func._schema, args, kwargs)
        result = func(*args, **kwargs)
        known = {_pointer(tensor) for tensor in (*reads, *writes)}
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor) and _pointer(one) not in known]
        if not func.is_view and (reads or writes or made):
            device.launch(name, device._stack[-1], reads, writes, made)
        return result


def _is_ours() -> bool:
    """Whether thinwire asks: DDP itself reads which parameters are used."""
    frames = [frame.filename for frame in traceback.extract_stack(limit=40)]
    return any("/thinwire/" in name for name in frames)


def _pointer(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _accesses(schema: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    given = list(zip(schema.arguments, args, strict=False))
    given += [(one, kwargs[one.name]) for one in schema.arguments[len(args) :] if one.name in kwargs]
    for argument, value in given:
        tensors = [one for one in tree_leaves(value) if isinstance(one, Tensor)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors)
    return reads, writes


@contextlib.contextmanager
def fake_device(given: FakeDevice | None = None) -> Iterator[FakeDevice]:
    """Use a fake device for all of thinwire, in this thread's process, until the end of the block."""
    device, patch = given or FakeDevice(), pytest.MonkeyPatch()
    local = threading.get_ident()
    for name in vars(reference):
        if callable(getattr(kernels, name, None)) and hasattr(reference, name):
            patch.setattr(kernels, name, getattr(reference, name))
    start, wait = Network._start, Pending.wait

    def started(self: Network, kind: str, sent: int, result: Tensor, launch: Callable[[], Any]) -> Pending:
        with device.paused():
            pending = start(self, kind, sent, result, launch)
        if device.watching and self.world_size > 1:
            here = device.record_on(device._stack[-1])
            device.handler._handle_event_wait(here, COMMUNICATION)
            device.launch(kind, COMMUNICATION, [], [result], [])
            pending.fake_end = device.record_on(COMMUNICATION)  # type: ignore[attr-defined]
        return pending

    def waited(self: Pending) -> Tensor:
        with device.paused():
            result = wait(self)
        end = getattr(self, "fake_end", None)
        if end is not None:
            device.handler._handle_event_wait(end, device._stack[-1])
        return result

    run = Deferred.run

    def looked_at(self: Deferred) -> None:
        with device.paused():  # copies on the host, which have come
            run(self)

    patch.setattr(Deferred, "run", looked_at)
    patch.setattr(Network, "_start", started)
    patch.setattr(Pending, "wait", waited)
    for name in _METHODS:
        real = getattr(torch.Tensor, name)

        def guarded(self: Tensor, *args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
            if device.watching and threading.get_ident() == local:
                raise HostReadError(f"Tensor.{_name} reads a value of a step on the host")
            return _real(self, *args, **kwargs)

        patch.setattr(torch.Tensor, name, guarded, raising=False)
    try:
        with streams.replaced(device):
            yield device
    finally:
        patch.undo()
