"""Messages over gloo, without training: all of them arrive, and a rank can leave at any time."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from thinwire.comm.peers import GlooTransport, PeerGoneError

Pair = tuple[GlooTransport, GlooTransport]


@pytest.fixture
def pair() -> Pair:
    store = HashStore()
    found: dict[int, GlooTransport] = {}

    def meet(rank: int) -> None:
        transport = GlooTransport(store, rank, 2)
        assert transport.connect([1 - rank], seconds=30.0) == [1 - rank]
        found[rank] = transport

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found[0], found[1]


def message(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_messages_of_many_sizes_arrive_in_order(pair: Pair) -> None:
    a, b = pair
    sizes = [5, 5, 5, 100_000, 5, 1, 100_000, 100_000, 0, 7]
    for number, size in enumerate(sizes):
        a.send(1, torch.full((size,), number, dtype=torch.uint8))
    for number, size in enumerate(sizes):
        found = b.receive(0, until=time.monotonic() + 30)
        assert found is not None
        assert torch.equal(found, torch.full((size,), number, dtype=torch.uint8))
    assert a.sent_bytes == sum(sizes)
    assert b.receive(0, until=time.monotonic() + 0.01) is None
    a.close()
    b.close()


def test_the_rank_that_leaves_first_has_no_thread_in_gloo_although_the_other_stays(
    pair: tuple[GlooTransport, GlooTransport],
) -> None:
    a, b = pair
    a.send(1, message(7))
    mine = list(a._connections[1]._threads)
    begin = time.monotonic()
    a.close()
    assert time.monotonic() - begin < 4.0  # it did not have to wait until the other one leaves too
    assert not any(thread.is_alive() for thread in mine)
    found = b.receive(0, until=time.monotonic() + 30)
    assert found is not None
    assert found.tolist() == [7]
    with pytest.raises(PeerGoneError, match="left"):
        b.receive(0, until=time.monotonic() + 30)
    b.send(0, message(1))  # to nobody: no error, no hang
    b.close()


@pytest.mark.parametrize("given_up", [True, False])
def test_a_peer_that_never_answers_leaves_no_thread_behind(given_up: bool) -> None:
    """A process that is stopped keeps its sockets open and reads nothing. A bare group does the same."""
    store, gloo = HashStore(), dist.ProcessGroupGloo
    a, silent = GlooTransport(store, 0, 2), list[object]()

    def meet() -> None:
        store.set("thinwire-peers/run/ready/1", "1")
        name = "thinwire-peers/run/pair/0-1/1.1"
        silent.append(gloo(PrefixStore(name, store), 1, 2, timedelta(seconds=30)))

    thread = threading.Thread(target=meet)
    thread.start()
    assert a.connect([1], seconds=30.0) == [1]
    thread.join(30)
    threads = list(a._connections[1]._threads)
    a.send(1, torch.zeros(10_000_000, dtype=torch.uint8))  # more than the sockets take
    if given_up:
        a.disconnect(1)
    begin = time.monotonic()
    a.close()
    assert time.monotonic() - begin < (2.0 if given_up else 8.0)
    assert not any(thread.is_alive() for thread in threads)
    assert silent
