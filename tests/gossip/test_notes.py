"""Ranks that were given different options, models or checkpoints raise, and say what two of them have."""

from __future__ import annotations

import multiprocessing as mp
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from support.gossip_processes import free_address
from support.gossip_threads import errors_of, goals, train, trainer
from thinwire.comm.local import LocalNetwork
from thinwire.comm.peers import LocalTransport
from thinwire.errors import AttachError, ExchangeError, StateError
from thinwire.gossip import decentralize, notes
from thinwire.gossip.topology import complete, ring

BASE: dict[str, Any] = {"algorithm": "dcd", "codec": "min_max:4,block=64", "topology": ring(), "deadline": 20.0}


@pytest.mark.parametrize(("other", "sentence"), [
    ({"algorithm": "naive"}, "disagree on the algorithm: rank . has (dcd|naive), rank . has (dcd|naive)"),
    ({"algorithm": "ecd"}, "disagree on the algorithm"),
    ({"codec": "min_max:8,block=64"}, "disagree on the codec: rank . has min_max"),
    ({"topology": complete()}, r"disagree on the topology: rank . has (ring|complete)\(5\)"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_different_options_raise_on_every_rank(other: dict[str, Any], sentence: str) -> None:
    targets = goals(5, 64)

    def one(transport: LocalTransport) -> None:
        options = BASE | (other if transport.rank == 2 else {})
        model, optimizer = trainer(transport, targets[transport.rank], **options)
        train(model, optimizer, 3)

    for error in errors_of(LocalTransport.of(5), one):
        assert isinstance(error, AttachError)
        assert re.search(sentence, str(error))


def test_models_of_equal_size_with_other_shapes_raise() -> None:
    def one(transport: LocalTransport) -> None:
        net = nn.Linear(4, 8, bias=False) if transport.rank else nn.Linear(8, 4, bias=False)
        base = torch.optim.SGD(net.parameters(), lr=0.1)
        decentralize(net, base, transport=transport, **BASE)

    for error in errors_of(LocalTransport.of(3), one):
        assert re.search(r"disagree on the parameters: rank . has weight \(", str(error))


def test_another_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = LocalTransport.of(2)
    facts: dict[str, Any] = {"codec": None, "topology": None, "parameters": {}, "buffers": 0}
    notes.compare(a, "start", notes.facts_of("dcd", **facts), remedy="install one version")
    monkeypatch.setattr(notes, "__version__", "9.9")
    with pytest.raises(AttachError, match=rf"version: rank 0 has {thinwire.__version__}, rank 1 has 9\.9"):
        notes.compare(b, "start", notes.facts_of("dcd", **facts), remedy="install one version")


def test_checkpoints_of_different_rounds_raise() -> None:
    targets = goals(3, 64)
    saved: dict[int, dict[str, Any]] = {}

    def save(transport: LocalTransport) -> None:
        model, optimizer = trainer(transport, targets[transport.rank], **BASE)
        for number in (1, 2):
            train(model, optimizer, 4)
            if (transport.rank == 1) == (number == 2):
                saved[transport.rank] = optimizer.state_dict()
            else:
                optimizer.state_dict()

    def load(transport: LocalTransport) -> None:
        model, optimizer = trainer(transport, targets[transport.rank], **BASE)
        optimizer.load_state_dict(saved[transport.rank])
        train(model, optimizer, 3)

    assert errors_of(LocalTransport.of(3), save) == [None] * 3
    found = errors_of(LocalTransport.of(3), load)
    for error in found:
        assert re.search("disagree on the round: rank . has (4|8), rank . has (4|8)", str(error))


def test_the_ranks_of_allreduce_compare_models_and_rounds() -> None:
    def build(network: Any) -> Any:
        net = nn.Linear(4, 8, bias=False) if network.rank else nn.Linear(8, 4, bias=False)
        return decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), algorithm="allreduce", network=network)

    def resume(network: Any) -> None:
        net = nn.Linear(4, 4)
        made = decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), algorithm="allreduce", network=network)
        state = made.state_dict()
        made.load_state_dict(state)
        made.load_state_dict(state | {"round": network.rank})

    def wrong(network: Any) -> None:
        net = nn.Linear(4, 4)
        made = decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), algorithm="allreduce", network=network)
        made.load_state_dict({"algorithm": "dcd"})

    for work, sentence in ((build, "disagree on the parameters"), (resume, "disagree on the round of the state")):
        for error in errors_of(LocalNetwork.of(2), work):
            assert re.search(sentence, str(error))
    for error in errors_of(LocalNetwork.of(2), wrong):
        assert isinstance(error, StateError)


def test_processes_with_other_options_raise_within_seconds(start: Any) -> None:
    address, options = free_address(), {"algorithm": "dcd", "codec": "min_max:4,block=64", "momentum": 0.0}
    processes = [
        start(address=address, rank=rank, ranks=3, steps=20, topology="complete" if rank == 1 else "ring",
              **(options | ({"algorithm": "choco"} if rank == 1 else {})))
        for rank in range(3)
    ]  # fmt: skip
    for one in processes:
        assert one.process.wait(60) != 0
        assert "AttachError: the ranks disagree on the algorithm" in one.all_errors()


def test_a_rank_that_joins_with_other_options_is_refused_and_the_run_is_not(start: Any, tmp_path: Path) -> None:
    options = {"address": f"file://{tmp_path / 'store'}", "ranks": 3, "steps": 500, "pause": 0.02, "deadline": 20.0}
    options |= {"algorithm": "dcd", "codec": "min_max:4,block=64", "momentum": 0.0}
    processes = [start(rank=rank, **options) for rank in range(3)]
    processes[1].until("step", least=20)
    processes[1].process.kill()
    processes[1].process.wait()
    wrong = start(rank=1, **(options | {"codec": "min_max:8,block=64"}))
    assert wrong.process.wait(60) != 0
    assert "disagree on the codec: rank" in wrong.all_errors()
    processes[1] = start(rank=1, **options)
    assert processes[1].until("incarnation")["incarnation"] == 3
    reports = [one.until("own") for one in processes]
    assert [one["stats"]["gossip/alive"] for one in reports] == [3] * 3
    assert all(one["mean"] == reports[0]["mean"] for one in reports)


def _with_algorithm(rank: int, store: str, outcomes: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net = nn.Linear(4, 4)
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        decentralize(net, base, algorithm=("dcd", "allreduce")[rank], start_seconds=30.0)
        outcomes.put("no error")
    except Exception as error:
        outcomes.put(f"{type(error).__name__}: {error}")


def test_gossip_on_one_rank_and_allreduce_on_the_other_raise(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    outcomes = context.Queue()
    ranks = [
        context.Process(target=_with_algorithm, args=(rank, str(tmp_path / "store"), outcomes)) for rank in range(2)
    ]
    for one in ranks:
        one.start()
    found = [outcomes.get(timeout=60) for _ in ranks]
    for one in ranks:
        one.join(60)
    assert any("AttachError: the ranks disagree on the algorithm" in text for text in found)
    assert "no error" not in found


def test_an_average_after_different_steps_raises_without_a_wait() -> None:
    targets = goals(3, 64)

    def one(transport: LocalTransport) -> None:
        model, optimizer = trainer(transport, targets[transport.rank], **(BASE | {"deadline": 1.0}))
        train(model, optimizer, 5 if transport.rank == 1 else 6)
        with optimizer.averaged():
            pass

    begin = time.monotonic()
    found = errors_of(LocalTransport.of(3), one)
    assert time.monotonic() - begin < 10
    assert isinstance(found[1], ExchangeError)
    assert "call it on all ranks after the same step" in str(found[1])
    assert not any(isinstance(error, AssertionError) for error in found)
