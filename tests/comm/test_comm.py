"""The door to the network: names of collectives, counts of bytes, errors, and torch.distributed without warnings."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from thinwire import OptionError
from thinwire.comm.communicator import Communicator, collective
from thinwire.comm.local import LocalNetwork, on_all_ranks
from thinwire.comm.network import Network, Traffic, Wait
from thinwire.errors import ExchangeError

WORLD_SIZES = (1, 2, 3, 5)


# ------------------------------------------------------------------------------------------------------- names


def module(*names: str) -> ModuleType:
    """A torch.distributed that has these functions only."""
    found = ModuleType("torch.distributed")
    for name in names:
        setattr(found, name, SimpleNamespace(__name__=name))
    return found


COMMON = ("all_reduce", "all_to_all_single", "broadcast", "batch_isend_irecv")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("all_gather_into_tensor",), "all_gather_into_tensor"),
        (("all_gather_single",), "all_gather_single"),
        (("all_gather_into_tensor", "all_gather_single"), "all_gather_single"),
        (("all_gather_single", "all_gather_into_tensor", "all_gather"), "all_gather_single"),
    ],
)
def test_the_newest_name_that_torch_has_is_taken(names: tuple[str, ...], expected: str) -> None:
    torch_of_some_day = module(*COMMON, *names)
    assert collective("all_gather", torch_of_some_day).__name__ == expected
    for kind, name in zip(("all_reduce", "all_to_all", "broadcast", "swap"), COMMON, strict=True):
        assert collective(kind, torch_of_some_day).__name__ == name


def test_a_torch_without_the_collective_is_refused() -> None:
    with pytest.raises(OptionError, match="none of all_gather_single, all_gather_into_tensor: install torch"):
        collective("all_gather", module(*COMMON, "all_gather"))


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast", "swap"])
def test_this_torch_has_every_collective(kind: str) -> None:
    assert callable(collective(kind))


# ------------------------------------------------------------------------------------------- what collectives do


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_mean_what_they_say_and_count_what_they_send(world_size: int) -> None:
    """Ring all-reduce 2 (n-1)/n, all-gather n-1 times, all-to-all (n-1)/n of the bytes; alone nothing is sent."""
    n = world_size

    def work(network: LocalNetwork) -> dict[str, Traffic]:
        rank, ranks = network.rank, torch.arange(n, dtype=torch.float32)
        x = torch.full((7,), rank + 1.0)
        assert network.all_reduce(x) is x
        assert torch.equal(x, torch.full((7,), n * (n + 1) / 2))
        assert torch.equal(network.all_reduce(torch.tensor([rank, -rank]), op="max"), torch.tensor([n - 1, 0]))
        out = torch.empty(n * 3)
        rows = network.all_gather(torch.full((3,), float(rank)), out=out)
        assert torch.equal(rows, ranks[:, None].expand(n, 3))
        assert torch.equal(out.view(n, 3), rows)
        mine = 10.0 * rank + ranks[:, None].repeat(1, 2)
        assert torch.equal(network.all_to_all(mine), (10 * ranks + rank)[:, None].expand(n, 2))
        shuffled = mine.T.contiguous().T  # rows that do not lie one after the other
        assert torch.equal(network.all_to_all(shuffled), (10 * ranks + rank)[:, None].expand(n, 2))
        for source in range(n):
            assert network.broadcast(torch.tensor([rank], dtype=torch.uint8), source=source).item() == source
        received = torch.empty(4)
        to, back = (rank + 1) % n, (rank - 1) % n
        network.swap({to: torch.full((4,), float(rank))} if n > 1 else {}, {back: received} if n > 1 else {})
        assert n == 1 or torch.equal(received, torch.full((4,), float(back)))
        return network.traffic_by_kind()

    networks = LocalNetwork.of(n)
    for kinds in on_all_ranks(networks, work):
        if n == 1:
            assert kinds == {}
            continue
        sent = {kind: (traffic.calls, traffic.bytes) for kind, traffic in kinds.items()}
        assert sent == {
            "all_reduce": (2, 2 * 28 * (n - 1) // n + 2 * 16 * (n - 1) // n),
            "all_gather": (1, 12 * (n - 1)),
            "all_to_all": (2, 2 * (8 * n * (n - 1) // n)),
            "broadcast": (n, n * (1 * (n - 1) // n)),
            "swap": (1, 16),
        }
    for network in networks:
        total = network.traffic
        assert total.calls == sum(traffic.calls for traffic in network.traffic_by_kind().values())
        assert total.bytes == sum(traffic.bytes for traffic in network.traffic_by_kind().values())
        assert (total.seconds > 0) == (n > 1)


def test_traffic_between_two_moments_is_a_difference() -> None:
    assert Traffic(5, 700, 2.0) - Traffic(2, 300, 0.5) == Traffic(3, 400, 1.5)


def test_counts_are_copies() -> None:
    network = LocalNetwork.of(2)[0]
    network._count("all_reduce", 8, time.perf_counter() - 0.5)
    counted = network.traffic
    network.traffic_by_kind()["all_reduce"].bytes = 99
    network.traffic.bytes = 99
    assert network.traffic == counted
    assert (counted.calls, counted.bytes) == (1, 8)


def test_time_with_several_under_way_passes_once() -> None:
    network, now = LocalNetwork.of(2)[0], time.perf_counter()
    for begin in (now - 0.5, now - 0.4, now - 0.1):
        network._count("all_to_all", 8, begin)
    assert 0.5 <= network.traffic.seconds == pytest.approx(time.perf_counter() - now + 0.5, abs=0.05)


def test_several_collectives_may_be_under_way() -> None:
    def work(network: LocalNetwork) -> tuple[float, float, int]:
        first, second = torch.tensor([1.0]), torch.tensor([10.0])
        pending = [network.start_all_reduce(first), network.start_all_reduce(second, op="max")]
        assert network.traffic.calls == 0  # counted when they have come to their end
        for each in pending:
            each.wait()
            each.wait()  # once more changes nothing
        return first.item(), second.item(), network.traffic.calls

    assert on_all_ranks(LocalNetwork.of(3), work) == [(3.0, 10.0, 2)] * 3


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_all_to_all_needs_a_row_for_every_rank(rows: int) -> None:
    with pytest.raises(OptionError, match=f"one row for each of 2 ranks, got {rows}"):
        LocalNetwork.of(2)[0].all_to_all(torch.zeros(rows, 4))


class Echo(LocalNetwork):
    """Both ranks send the same. Writes rows one after the other into memory, as gloo does whatever the strides are."""

    def _all_to_all(self, out: Tensor, rows: Tensor) -> Wait:
        mine = torch.stack([rows[self.rank]] * self.world_size).view(-1)
        return lambda: torch.as_strided(out, mine.shape, (1,)).copy_(mine)


def test_rows_in_any_layout_come_back_as_rows() -> None:
    """Column-major rows must not leave gloo scrambled: where it writes has to be row-major."""
    network, rows = Echo.of(2)[1], torch.arange(6.0).view(2, 3)
    assert torch.equal(network.all_to_all(rows), rows[1].expand(2, 3))
    assert torch.equal(network.all_to_all(rows.T.contiguous().T), rows[1].expand(2, 3))


class Failing(Network):
    """A network whose collectives fail at once, or when they are waited for."""

    def __init__(self, *, late: bool) -> None:
        super().__init__(rank=1, world_size=4)
        self.late = late

    def _fail(self) -> Wait:
        def fail() -> None:
            raise RuntimeError("peer\n  went away")

        if not self.late:
            fail()
        return fail

    def _all_reduce(self, tensor: Tensor, op: Literal["sum", "max"]) -> Wait:
        return self._fail()

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Wait:
        return self._fail()

    def _all_to_all(self, out: Tensor, rows: Tensor) -> Wait:
        return self._fail()

    def _broadcast(self, tensor: Tensor, source: int) -> Wait:
        return self._fail()

    def _swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Wait:
        return self._fail()


@pytest.mark.parametrize("late", [False, True])
def test_a_collective_that_fails_says_which_and_where(late: bool) -> None:
    x, rows = torch.zeros(2), torch.zeros(4, 2)
    calls: dict[str, Callable[[Network], object]] = {
        "all_reduce": lambda network: network.all_reduce(x),
        "all_gather": lambda network: network.all_gather(x),
        "all_to_all": lambda network: network.all_to_all(rows),
        "broadcast": lambda network: network.broadcast(x, source=0),
        "swap": lambda network: network.swap({0: x}, {}),
    }
    for kind, call in calls.items():
        with pytest.raises(ExchangeError, match=f"^{kind} between 4 ranks failed on rank 1: peer went away$"):
            call(Failing(late=late))


def test_the_error_of_one_rank_is_told_and_nobody_waits_for_it() -> None:
    def work(network: LocalNetwork) -> None:
        if network.rank == 2:
            raise ValueError("only here")
        network.all_reduce(torch.zeros(1))

    before = threading.active_count()
    with pytest.raises(ValueError, match="only here"):
        on_all_ranks(LocalNetwork.of(4), work)
    assert threading.active_count() == before


# --------------------------------------------------------------------------------------------- torch.distributed


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


def test_without_a_process_group_there_is_no_communicator() -> None:
    with pytest.raises(OptionError, match=r"call torch\.distributed\.init_process_group first"):
        Communicator()


@pytest.mark.usefixtures("gloo")
def test_a_communicator_warns_of_nothing() -> None:
    """Alone it calls no collective, so the calls into torch are made here as they are made between ranks."""
    x, rows = torch.tensor([1.0, -2.0]), torch.tensor([[3.0, 4.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = Communicator()
        assert (comm.rank, comm.world_size) == (0, 1)
        for op in ("sum", "max"):
            assert torch.equal(comm.all_reduce(x.clone(), op=op), x)
            reduced = x.clone()
            comm._all_reduce(reduced, op)()
            assert torch.equal(reduced, x)
        gathered, exchanged = torch.empty(1, 2), torch.empty(1, 2)
        comm._all_gather(gathered, x)()
        comm._all_to_all(exchanged, rows)()
        comm._broadcast(x, 0)()
        assert torch.equal(gathered, x[None])
        assert torch.equal(exchanged, rows)
        assert torch.equal(comm.all_gather(x), x[None])
        assert torch.equal(comm.all_to_all(rows), rows)
        assert torch.equal(comm.broadcast(x, source=0), x)
        comm.swap({}, {})
    assert comm.traffic == Traffic()
    assert comm.traffic_by_kind() == {}


@pytest.mark.usefixtures("gloo")
def test_a_closed_communicator_says_so() -> None:
    comm = Communicator()
    comm.close()
    comm.close()
    with pytest.raises(ExchangeError, match="this communicator was closed"):
        _ = comm.group
    comm.world_size = 2  # alone it would not have to ask anybody
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(torch.zeros(1)),
        lambda: comm.all_gather(torch.zeros(1)),
    ]
    for call in calls:
        with pytest.raises(ExchangeError, match="this communicator was closed"):
            call()
    assert dist.is_initialized()  # the group was not its own
    assert Communicator().group is dist.group.WORLD


@pytest.mark.usefixtures("gloo")
def test_a_twin_has_a_group_of_its_own_and_takes_it_along() -> None:
    comm = Communicator()
    twin = comm.twin()
    assert (twin.rank, twin.world_size) == (comm.rank, comm.world_size)
    assert twin.group is not comm.group
    assert twin.timeout == comm.timeout == timedelta(seconds=77)
    group = twin.group
    twin.close()
    assert group not in dist.distributed_c10d._world.pg_map
    assert comm.group in dist.distributed_c10d._world.pg_map


@pytest.mark.usefixtures("gloo")
def test_a_communicator_of_a_group_is_of_that_group() -> None:
    group = dist.new_group([0])
    assert Communicator(group).group is group


@pytest.mark.usefixtures("gloo")
def test_a_twin_may_be_closed_after_everything_was_destroyed() -> None:
    twin = Communicator().twin()
    dist.destroy_process_group()
    twin.close()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # the fixture ends this one
