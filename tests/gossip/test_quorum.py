"""No rank trains alone without being told to, and the run survives the loss and return of any rank."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from support.gossip_processes import free_address, killed_and_returned
from support.gossip_threads import errors_of, goals, on_threads, train, trainer
from thinwire.comm.peers import GlooTransport, LocalTransport, peers_at
from thinwire.comm.peers.serve import serve
from thinwire.errors import ExchangeError, OptionError, StateError
from thinwire.gossip.topology import ring

DCD: dict[str, Any] = {"algorithm": "dcd", "codec": "min_max:4,block=64", "momentum": 0.0}


def test_a_rank_that_meets_nobody_raises_after_start_seconds() -> None:
    transport = peers_at("tcp://127.0.0.1:0", rank=0, world_size=4)
    begin = time.monotonic()
    with pytest.raises(ExchangeError, match="rank 0 met 0 other ranks within 1 s, and training needs 2 ranks"):
        trainer(transport, torch.zeros(32), start_seconds=1.0, **DCD)
    assert time.monotonic() - begin < 10


def test_min_ranks_1_permits_training_alone() -> None:
    transport = peers_at("tcp://127.0.0.1:0", rank=0, world_size=4)
    model, optimizer = trainer(transport, torch.ones(32), start_seconds=0.2, min_ranks=1, **DCD)
    train(model, optimizer, 3)
    with optimizer.averaged():
        assert torch.isfinite(model.value()).all()
    optimizer.close()


@pytest.mark.parametrize(("min_ranks", "left"), [(None, 1), (3, 2)])
def test_ranks_that_are_too_few_raise_at_once_where_none_can_return(min_ranks: int | None, left: int) -> None:
    """`left` ranks stay. They raise in a step, and so does an average."""
    targets = goals(3, 32)

    def one(transport: LocalTransport) -> None:
        model, optimizer = trainer(
            transport, targets[transport.rank], topology=ring(), deadline=5.0, min_ranks=min_ranks, **DCD
        )
        train(model, optimizer, 5)
        if transport.rank >= left:
            optimizer.close()
            return
        with pytest.raises(ExchangeError, match=f"connected to {left} of at least {min_ranks or 2} ranks: start"):
            train(model, optimizer, 10)
        with pytest.raises(ExchangeError, match="connected to"), optimizer.averaged():
            pass
        raise ExchangeError("as expected")

    found = errors_of(LocalTransport.of(3), one)
    assert [str(error) for error in found[:left]] == ["as expected"] * left
    assert found[left:] == [None] * (3 - left)


@pytest.mark.parametrize("min_ranks", [0, 4])
def test_min_ranks_must_be_a_number_of_ranks(min_ranks: int) -> None:
    with pytest.raises(OptionError, match="min_ranks must be from 1 to the number of ranks, 3"):
        trainer(LocalTransport.of(3)[0], torch.zeros(8), min_ranks=min_ranks, **DCD)


def test_a_rank_that_does_not_come_costs_no_other_edge() -> None:
    """A ring of 6 over gloo without rank 1: all edges between the five others connect."""
    store, absent = HashStore(), 1

    def one(place: LocalTransport) -> list[int]:
        if place.rank == absent:
            return []
        time.sleep(0.1 * (6 - place.rank))
        transport = GlooTransport(store, place.rank, 6)
        found = transport.connect(ring(6).all_neighbours(place.rank), seconds=2.0)
        transport.close()
        return found

    found = on_threads(LocalTransport.of(6), one)
    for rank, connected in enumerate(found):
        if rank != absent:
            assert sorted(connected) == sorted(set(ring(6).all_neighbours(rank)) - {absent})


@pytest.fixture(params=["tcp", pytest.param("file", marks=pytest.mark.slow)])
def external_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a store that no rank serves."""
    if request.param == "file":
        yield f"file://{tmp_path / 'store'}"
        return
    address = free_address()
    server = subprocess.Popen([sys.executable, "-m", "thinwire.comm.peers.serve", address.rpartition(":")[2]])
    time.sleep(0.1)
    _wait_for(address)
    yield address
    server.terminate()
    assert server.wait(20) == 0


def _wait_for(address: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    for _ in range(600):
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the store does not answer")


def test_rank_0_is_killed_and_comes_back_to_the_run(start: Any, external_store: str) -> None:
    killed_and_returned(start, rank=0, other=1, address=external_store, ranks=3, steps=500, **DCD)


def test_the_last_rank_waits_for_the_return_of_the_other(start: Any, tmp_path: Path) -> None:
    """Of two ranks one is killed: the other does not train alone meanwhile, and both end together."""
    options = {"address": f"file://{tmp_path / 'store'}", "ranks": 2, "steps": 200, "pause": 0.02, "deadline": 20.0}
    processes = [start(rank=rank, **options, **DCD) for rank in range(2)]
    processes[0].until("step", least=30)
    processes[0].process.send_signal(signal.SIGKILL)
    processes[0].process.wait()
    time.sleep(3.0)
    processes[0] = start(rank=0, **options, **DCD)
    again = processes[0].until("incarnation")
    assert (again["incarnation"], again["neighbours"]) == (2, [1])
    assert again["round"] < 150  # 3 s alone would be the whole run
    reports = [one.until("own") for one in processes]
    assert reports[0]["mean"] == reports[1]["mean"]
    assert [one["stats"]["gossip/alive"] for one in reports] == [2, 2]


def test_the_last_rank_raises_if_the_other_does_not_return(start: Any, tmp_path: Path) -> None:
    options = {"address": f"file://{tmp_path / 'store'}", "ranks": 2, "steps": 5000, "pause": 0.02, "deadline": 20.0}
    processes = [start(rank=rank, start_seconds=3 if rank else 60, **options, **DCD) for rank in range(2)]
    processes[0].until("step", least=10)
    processes[0].process.send_signal(signal.SIGKILL)
    assert processes[1].process.wait(60) != 0
    assert "ExchangeError: rank 1 has been connected to 1 of at least 2 ranks for 3 s" in processes[1].all_errors()


def test_a_restarted_rank_0_that_served_the_store_is_refused(start: Any) -> None:
    options = {"address": free_address(), "ranks": 3, "steps": 5000, "pause": 0.02, "deadline": 20.0, **DCD}
    processes = [start(rank=rank, **options) for rank in range(3)]
    processes[0].until("step", least=20)
    processes[0].process.send_signal(signal.SIGKILL)
    processes[0].process.wait()
    begin = time.monotonic()
    again = start(rank=0, **options)
    assert again.process.wait(50) != 0  # start_seconds is 60
    assert time.monotonic() - begin < 45
    assert "trains already, and the store that knew the run has died" in again.all_errors()
    assert processes[1].process.poll() is None  # the others train on


def test_a_state_does_not_go_into_a_rank_that_joined_a_run() -> None:
    model, optimizer = trainer(LocalTransport.of(1)[0], torch.zeros(8), **DCD)
    train(model, optimizer, 3)
    state = optimizer.state_dict()
    train(model, optimizer, 2)
    optimizer._transport.incarnation = 2
    with pytest.raises(StateError, match="joined a run at round 5, and the state is of round 3"):
        optimizer.load_state_dict(state)


def test_env_takes_the_address_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    store = serve(0)  # stands in for the store of torchrun's agent
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert [peers_at("env://", rank=0, world_size=2).incarnation for _ in range(2)] == [1, 2]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert peers_at("env://", rank=0, world_size=2).incarnation == 1
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(OptionError, match="start the program with torchrun"):
        peers_at("env://", rank=0, world_size=2)


@pytest.mark.parametrize(
    "address", ["tcp://nowhere", "file://relative", "file:///no/such/directory/store", "udp://a:1"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(OptionError, match="write"):
        peers_at(address, rank=0, world_size=2)
