"""Whole simulations: conservation, repeatability, faults, and training against time alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.errors import ThinwireError
from thinwire.gossip.absolute import gossip_codec
from thinwire.gossip.topology import named_topology
from thinwire.lab.compare.workloads import workload
from thinwire.lab.simulate import Settings, simulate
from thinwire.lab.simulate.churn import Absence
from thinwire.lab.simulate.gossip_run import GossipRun
from thinwire.lab.simulate.learners import Batched
from thinwire.lab.simulate.links import Links
from thinwire.lab.simulate.pace import Pace
from thinwire.lab.simulate.transport import SimTransport

CODEC = "min_max:4,block=512"


def made(workers: int, *, steps: int, network: str = "home-1000", loss: float = 0.0, **options: Any) -> GossipRun:
    links = Links.named(network, workers=workers).with_loss(loss)
    learner = Batched(workload("mlp-100k"), workers=workers, seed=0)
    pace = options.pop("pace", Pace(0.1, straggle=0.2))
    topology = named_topology(options.pop("topology", "ring"))
    return GossipRun(
        learner, SimTransport(links), pace, topology, algorithm=options.pop("algorithm", "dcd"),
        codec=gossip_codec(CODEC), coding=lambda neighbours: 1e-3, steps=steps, **options,
    )  # fmt: skip


def after(run: GossipRun, steps: int) -> GossipRun:
    for _ in range(steps):
        run.step()
    return run


def conserved(run: GossipRun) -> None:
    transport = run.transport
    assert transport.occupied.sent.sum() == transport.received.sum() + transport.in_flight + transport.lost_bytes


def test_what_is_sent_is_received_and_the_critical_path_is_all_of_the_time() -> None:
    run = after(made(12, steps=8, topology="exponential"), 8)
    conserved(run)
    assert run.path.seconds() == pytest.approx(run.transport.now)
    assert run.transport.lost_bytes == 0


def test_the_same_seed_gives_the_same_trace_whoever_is_driven_first() -> None:
    a, b = after(made(9, steps=6), 6), made(9, steps=6)
    b.order = lambda workers: sorted(workers, key=lambda worker: (worker * 5) % 9)
    after(b, 6)
    assert (a.transport.now == b.transport.now).all()
    assert torch.equal(a.learner.matrix, b.learner.matrix)  # type: ignore[attr-defined]


def test_a_straggler_delays_its_neighbours_first_and_others_step_by_step() -> None:
    class Slow(Pace):
        def seconds(self, step: int, *, workers: int) -> Any:
            found = np.full(workers, 0.1)
            found[0] += 5.0 if step == 0 else 0.0
            return found

    run = made(9, steps=4, network="1gbit,1ms", pace=Slow(0.1))
    reached = []
    for _ in range(4):
        run.step()
        reached.append({worker for worker in range(9) if run.transport.now[worker] > 4.0})
    # A step that has begun does not wait: its messages are used by the next one.
    assert reached[0] == {0}
    assert reached[1] == {8, 0, 1}
    assert reached[2] == {7, 8, 0, 1, 2}
    assert reached[3] == {6, 7, 8, 0, 1, 2, 3}


def test_lost_messages_are_made_good() -> None:
    run = after(made(8, steps=25, network="1gbit,1ms", loss=0.05, deadline=2.0), 25)
    conserved(run)
    stats = [optimizer.stats() for optimizer in run.optimizers.values()]
    assert sum(one["gossip/resyncs"] for one in stats) > 0
    assert sum(one["gossip/mismatches"] for one in stats) == 0
    look = run.look()
    assert look["consensus_distance"] is not None
    assert look["consensus_distance"] < 0.3
    assert look["averaged_loss"] is not None
    assert look["averaged_loss"] < 2.2


def test_workers_leave_and_come_back_with_a_model_of_a_neighbour() -> None:
    trace = [Absence(0.5, 1.2, 2), Absence(0.8, float("inf"), 5)]
    run = made(8, steps=30, network="1gbit,1ms", topology="exponential", deadline=2.0, trace=trace)
    there = []
    for _ in range(30):
        run.step()
        there.append(len(run.optimizers))
    conserved(run)
    assert min(there) == 6
    assert there[-1] == 7
    assert 2 in run.optimizers
    assert 5 not in run.optimizers
    look = run.look()
    assert look["consensus_distance"] is not None
    assert look["consensus_distance"] < 0.3
    newcomer = run.learner.flat(2)
    assert float((newcomer - run.learner.flat(0)).norm() / newcomer.norm()) < 0.3


@pytest.mark.parametrize(
    "names", [{"algorithms": ("dpsgd", "dcd")}, {"algorithms": (), "recipes": ("ddp", "two-shot-2")}]
)
def test_time_and_bytes_are_the_same_with_and_without_training(names: dict[str, Any]) -> None:
    common = {"workers": 6, "network": "home-1000", "steps": 4, **names}
    learnt, costed = simulate(Settings(**common)), simulate(Settings(**common, cost_only=True))
    for a, b in zip(learnt["rows"], costed["rows"], strict=True):
        assert a["virtual_seconds"] == pytest.approx(b["virtual_seconds"], rel=1e-9)
        assert a["bytes"] == pytest.approx(b["bytes"], rel=1e-3)
        assert a["curve"]
        assert not b["curve"]


def test_a_result_has_what_others_build_on() -> None:
    found = simulate(Settings(workers=4, network="50mbit,20ms", steps=4, lap=2))
    assert {"virtual_seconds", "real_seconds", "bytes", "loss", "peak_memory_bytes"} <= found.keys()
    assert [point["step"] for point in found["loss"]] == [2, 4]
    assert found["loss"][-1]["seconds"] == found["virtual_seconds"] > 0.4
    assert found["peak_memory_bytes"] > 1e7
    assert len(found["rows"][0]["utilisation"]["workers"]) == 4
    assert found["growth"][0]["workers"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "1 worker or more"),
        ({"network": "dsl-9000"}, "home-1000"),
        ({"algorithms": ("dcb",)}, "dcb"),
        ({"algorithms": (), "recipes": ()}, "nothing to simulate"),
        ({"loss": 0.1}, "--deadline"),
        ({"churn": "600/60", "deadline": 1.0, "recipes": ("ddp",)}, "all workers"),
        ({"parameters": 10}, "--cost-only"),
        ({"topology": "circle"}, "circle"),
        ({"steps": 0}, "--steps"),
    ],
)
def test_what_cannot_be_simulated_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ThinwireError, match=words):
        Settings(**{"workers": 4, "steps": 2, **options})
