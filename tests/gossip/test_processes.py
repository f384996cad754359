"""Ranks as real processes on gloo: the bits of threads; one is killed, comes back, or is stopped for a while."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

from support.gossip_processes import free_address, killed_and_returned
from support.gossip_threads import goals, on_threads, train, trainer
from thinwire.comm.peers import LocalTransport
from thinwire.gossip.topology import ring

DCD: dict[str, Any] = {"algorithm": "dcd", "codec": "min_max:4,block=64", "momentum": 0.0}


def test_processes_have_the_bits_of_threads(start: Any) -> None:
    address, ranks, steps = free_address(), 4, 25
    processes = [start(address=address, rank=rank, ranks=ranks, steps=steps, **DCD) for rank in range(ranks)]
    found = torch.tensor([one.until("own")["own"] for one in processes])
    targets = goals(ranks, 256)

    def one(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = trainer(transport, targets[transport.rank], lr=0.02, topology=ring(), **DCD)
        train(model, optimizer, steps)
        return model.value()

    assert torch.equal(found, torch.stack(on_threads(LocalTransport.of(ranks), one)))
    assert [one.process.wait(30) for one in processes] == [0] * ranks


OTHERS: list[dict[str, Any]] = [{"algorithm": "dpsgd"}, {"algorithm": "choco", "codec": "sign:64"}]


@pytest.mark.parametrize(
    "algorithm",
    [DCD, *(pytest.param({**options, "momentum": 0.0}, marks=pytest.mark.slow) for options in OTHERS)],
    ids=lambda options: options["algorithm"],
)
def test_the_others_go_on_when_one_is_killed(start: Any, algorithm: dict[str, Any]) -> None:
    address, ranks = free_address(), 5
    options = {"ranks": ranks, "steps": 150, "pause": 0.01, "deadline": 20.0, **algorithm}
    processes = [start(address=address, rank=rank, **options) for rank in range(ranks)]
    processes[2].until("step", least=30)
    begin = time.monotonic()
    processes[2].process.send_signal(signal.SIGKILL)
    left = [one.until("own") for number, one in enumerate(processes) if number != 2]
    assert time.monotonic() - begin < 60
    for report in left:
        assert report["stats"]["gossip/alive"] == 4
        assert report["mean"] == left[0]["mean"]
    mean = torch.tensor(left[0]["mean"])
    assert torch.allclose(mean, torch.tensor([report["own"] for report in left]).mean(0), atol=1e-5)
    rest = torch.stack([goal for rank, goal in enumerate(goals(ranks, 256)) if rank != 2]).mean(0)
    assert (mean - rest).norm() < 0.35 * rest.norm()  # they learn what is best for those that are left


def test_a_rank_that_was_killed_comes_back(start: Any) -> None:
    killed_and_returned(start, rank=1, other=0, address=free_address(), ranks=4, steps=400, **DCD)


def test_a_rank_that_is_stopped_for_a_while_is_waited_for_and_goes_on(start: Any) -> None:
    address, ranks = free_address(), 3
    options = {"address": address, "ranks": ranks, "steps": 120, "pause": 0.01, "deadline": 1.5, **DCD}
    processes = [start(rank=rank, **options) for rank in range(ranks)]
    processes[1].until("step", least=30)
    processes[1].process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    processes[1].process.send_signal(signal.SIGCONT)
    reports = [one.until("own") for one in processes]
    assert sum(one["stats"]["gossip/skipped"] for one in reports) > 0
    assert all(one["stats"]["gossip/neighbours"] == 2 for one in reports)
    assert all(one["mean"] == reports[0]["mean"] for one in reports)
