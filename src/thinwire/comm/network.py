"""The interface of collectives that exchanges use, with a count of bytes and seconds.

Bytes are what this rank sends under the textbook algorithm (ring all-reduce and all-gather, direct all-to-all), so that
they can be predicted; a broadcast is counted as the mean over the ranks.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ExchangeError, OptionError
from . import streams

Op = Literal["sum", "max"]
Wait = Callable[[], object]

# gloo gathers and adds in a ring, n - 1 trips and 2 (n - 1). Where ranks are few and messages are small, they are there
# sooner when each is sent to everyone at once: as many bytes, but one trip, or two (4 ranks, 10 ms: an all-gather takes
# 21 ms instead of 69, an all-reduce of 126 kB 58 ms instead of 134).
FEW_RANKS, SMALL_SUM = 8, 128 << 10
_GLANCE = timedelta(seconds=0.25)  # that a wait in the main thread is inside torch at most


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
        self._on_device = wait is not None and streams.resident(result.device)
        self._event = streams.active().record(result.device) if self._on_device else None
        self._end = _End.of(wait) if network.spans is not None and not self._on_device else None
        self._number = network.messages if kind == "all_to_all" and wait is not None else 0

    def done(self) -> bool:
        """Whether it is over, where that is known without waiting."""
        return not isinstance(self._wait, Waiter) or bool(self._wait.work.is_completed())

    def abandon(self) -> None:
        """Wait for it no longer, although it is not over."""
        wait, self._wait = self._wait, None
        if wait is not None:
            self._network.abandon(wait)

    def wait(self) -> Tensor:
        result, number, self._number = self._received(), self._number, 0
        if number:
            self._network.add_words(result, number, received=True)
        return result

    def _received(self) -> Tensor:
        wait, self._wait = self._wait, None
        if wait is not None:
            try:
                wait()
            except RuntimeError as failure:
                raise self._network.failure(self._kind, failure) from failure
            except KeyboardInterrupt:
                self._network.abandon(wait)
                raise
            finally:
                if self._on_device:  # the stream waits, the host does not: only events tell how long it took
                    end = streams.active().record(self._result.device)
                    self._network._count_on_device(self._kind, self._sent, self._event, end)
                else:
                    ended = None if self._end is None else self._end.at
                    self._network._count(self._kind, self._sent, self._begin, ended)
        return self._result


class _End:
    """When a collective was over, which may be long before anyone waits for it."""

    def __init__(self) -> None:
        self.at: float | None = None

    @classmethod
    def of(cls, wait: Wait | None) -> _End | None:
        if not isinstance(wait, Waiter):
            return None
        end = cls()
        wait.work.get_future().add_done_callback(end._note)
        return end

    def _note(self, future: object) -> None:
        self.at = time.perf_counter()


class Network(ABC):
    """Collectives over `world_size` ranks, of which this is `rank`. All ranks call the same ones in the same order."""

    between_processes: ClassVar[bool] = False
    device: torch.device = torch.device("cpu")  # where what ranks tell each other lies

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.first_start: float | None = None  # time.perf_counter() of the first collective of this lap
        self.spans: list[tuple[float, float]] | None = None  # a list to have every collective's begin and end in it
        self.sums_messages = False  # add up the words of every all-to-all, so that ranks can compare them
        self.messages = 0  # that were added up
        self._message_sums: Tensor | None = None
        self._traffic: dict[str, Traffic] = {}
        self._counted_until = 0.0
        self._lock = threading.Lock()
        self._device_spans: list[tuple[str, Any, Any]] = []  # kind, begin and end as events, until these have happened
        self._anchor: tuple[Any, float] | None = None  # an event and when it was recorded

    # ------------------------------------------------------------------------------------------- collectives

    def start_all_reduce(self, tensor: Tensor, *, op: Op = "sum", soon: bool = False) -> Pending:
        """Begin to replace `tensor` by its sum or maximum over the ranks; the result has the same bits everywhere.

        These are the bits of torch's own all-reduce, but not with `soon`: then it is waited for with little else to do,
        and a small tensor may take a shorter way whose second half begins at `wait`.
        """
        sent = 2 * size_of(tensor) * (self.world_size - 1) // self.world_size
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
        sent = size_of(tensor) * (self.world_size - 1)
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
        sent, rows = size_of(rows) * (self.world_size - 1) // self.world_size, rows.contiguous()
        if self.sums_messages and self.world_size > 1:
            self.messages += 1
            self.add_words(rows, self.messages, received=False)
        return self._start("all_to_all", sent, out, lambda: self._all_to_all(out, rows))

    def all_to_all(self, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Row j goes to rank j; what comes back has the row from rank j in place j."""
        return self.start_all_to_all(rows, out=out).wait()

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """The sum over the ranks of this rank's row; half of what an all-reduce of the rows sends."""
        if rows.shape[0] != self.world_size:
            raise OptionError(f"reduce_scatter needs one row for each of {self.world_size} ranks, got {rows.shape[0]}")
        if self.world_size == 1:
            return rows[0]
        sent = size_of(rows) * (self.world_size - 1) // self.world_size
        out = torch.empty_like(rows[0])
        direct = self._reduce_scatter(out, rows.contiguous())
        if direct is not None:
            return self._start("reduce_scatter", sent, out, lambda: direct).wait()
        # gloo adds few types: send the rows and add them here, floats in float32, in rank order.
        received = self.all_to_all(rows)
        total = received[0].to(torch.float32) if rows.is_floating_point() else received[0].clone()
        for row in received[1:]:
            total += row
        return total

    def broadcast(self, tensor: Tensor, *, source: int) -> Tensor:
        """`tensor`, in place, as rank `source` has it."""
        sent = size_of(tensor) * (self.world_size - 1) // self.world_size
        return self._start("broadcast", sent, tensor, lambda: self._broadcast(tensor, source)).wait()

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send to some ranks and receive from some, all at once: what neighbours in a graph do."""
        if outgoing.keys() or incoming.keys():
            sent = sum(map(size_of, outgoing.values()))
            self._start("swap", sent, torch.empty(0), lambda: self._swap(outgoing, incoming)).wait()

    def add_words(self, rows: Tensor, number: int, *, received: bool) -> None:
        """Add the words of messages to the sums of the ranks that they go to, or come from.

        Times a number of their own: what damages the same bit of every message must not cancel out.
        """
        if self._message_sums is None:
            self._message_sums = torch.zeros(2, self.world_size, dtype=torch.int64, device=rows.device)
        if rows.numel():
            sums = words(rows).sum(dim=1, dtype=torch.int32)  # it may wrap, and is four times as fast as in int64
            self._message_sums[int(received)].add_(sums, alpha=2 * number + 1)

    def take_message_sums(self) -> Tensor:
        """Sums of the words sent to each rank, and received from each, since the last call: two rows."""
        sums, self._message_sums, self.messages = self._message_sums, None, 0
        return torch.zeros(2, self.world_size, dtype=torch.int64, device=self.device) if sums is None else sums

    @property
    def timeout(self) -> timedelta | None:
        """How long a collective may take, where that is known."""
        return None

    def control(self) -> Network:
        """A network of the same ranks for values that the host reads, in an order of their own.

        It is this one where nobody else sends over it. Close it if it is another.
        """
        return self

    def abort(self) -> None:  # noqa: B027  # most networks have nothing to give up
        """Let no collective under way be waited for any longer: a rank is lost."""

    def abandon(self, wait: Wait) -> None:  # noqa: B027  # most networks have nothing that outlives a wait
        """A collective is still under way and the program no longer waits for it, for example after Ctrl-C."""

    def take_spans(self) -> list[tuple[float, float]]:
        """Begin and end of the collectives since the last call, if `spans` is a list."""
        self._harvest()
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

    def _reduce_scatter(self, out: Tensor, rows: Tensor) -> Wait | None:
        """None where the network has no such collective for this type."""
        return None

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

    def _count_on_device(self, kind: str, sent: int, begin: Any, end: Any) -> None:
        with self._lock:
            self._anchor = self._anchor or (begin, time.perf_counter())
            self._device_spans.append((kind, begin, end))
            traffic = self._traffic.setdefault(kind, Traffic())
            traffic.calls += 1
            traffic.bytes += sent

    def _harvest(self) -> None:
        """Count the seconds of collectives on a device that are over by now."""
        with self._lock:
            clock, waiting = streams.active(), []
            for kind, begin, end in self._device_spans:
                if not clock.passed(end):
                    waiting.append((kind, begin, end))
                    continue
                self._traffic[kind].seconds += clock.seconds(begin, end)
                if self.spans is not None and self._anchor is not None:
                    event, at = self._anchor
                    self.spans.append((at + clock.seconds(event, begin), at + clock.seconds(event, end)))
            self._device_spans = waiting

    @property
    def traffic(self) -> Traffic:
        """Everything so far; subtract two of them to know what went between."""
        if self._device_spans:
            self._harvest()
        with self._lock:
            kinds = list(self._traffic.values())
            return Traffic(sum(t.calls for t in kinds), sum(t.bytes for t in kinds), sum(t.seconds for t in kinds))

    def traffic_by_kind(self) -> dict[str, Traffic]:
        """The same for each collective."""
        with self._lock:
            return {kind: dataclasses.replace(traffic) for kind, traffic in self._traffic.items()}


class Waiter:
    """Waits for a collective of torch, and lets Ctrl-C through where the host is what waits."""

    def __init__(self, work: dist.Work, *, on_host: bool = False) -> None:
        self.work, self._on_host = work, on_host

    def __call__(self) -> object:
        # Python runs handlers of signals in its main thread, and not while that one is inside torch.
        while self._on_host and threading.current_thread() is threading.main_thread():
            try:
                return self.work.wait(_GLANCE)
            except RuntimeError:
                if self.work.is_completed():
                    break  # it has failed; else that was only the end of a glance
        return self.work.wait()


def size_of(tensor: Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def words(rows: Tensor) -> Tensor:
    """The bytes of every row as int32, or as they are where a row has no whole number of words.

    >>> words(torch.ones(2, 8, dtype=torch.uint8)).tolist()
    [[16843009, 16843009], [16843009, 16843009]]
    """
    flat = rows.view(len(rows), -1).view(torch.uint8)
    whole = flat.shape[1] % 4 == 0 and flat.storage_offset() % 4 == 0
    return flat.view(torch.int32) if whole else flat
