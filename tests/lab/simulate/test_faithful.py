"""What is simulated is what real processes do: the same model, to the bit or nearly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from thinwire.gossip.absolute import gossip_codec
from thinwire.gossip.tensors import Flat
from thinwire.gossip.topology import ring
from thinwire.lab.compare.workloads import workload
from thinwire.lab.simulate.gossip_run import GossipRun
from thinwire.lab.simulate.learners import Each
from thinwire.lab.simulate.links import Links
from thinwire.lab.simulate.network import SimNetwork
from thinwire.lab.simulate.pace import Pace
from thinwire.lab.simulate.recipe_run import RecipeRun
from thinwire.lab.simulate.transport import SimTransport
from thinwire.recipe.compose import parse

STEPS = 12
ALGORITHMS = [
    ("dpsgd", "fp32", None), ("dcd", "min_max:4,block=512", None), ("dcd", "min_max:4,block=512", 60.0),
    ("ecd", "absolute:8,step=0.02", None), ("choco", "sign:512", None), ("naive", "min_max:8,block=512", 60.0),
]  # fmt: skip
GATHERED = ["threshold-k", "qsgd-4", "two-shot-2-ef"]
SUMMED = ["dense", "global-qsgd-8", "ar-top-k", "powersgd-4"]

PROCESS = Path(__file__).parents[2] / "support" / "simulated_process.py"


def real_runs(ranks: int, folder: Path) -> list[dict[str, Tensor]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(ranks):
        task = {"store": str(folder / "store"), "rank": rank, "ranks": ranks, "steps": STEPS, "out": str(folder)}
        task |= {"algorithms": ALGORITHMS, "recipes": GATHERED + SUMMED}
        command = [
            sys.executable,
            str(Path(__file__).parents[2] / "support" / "simulated_process.py"),
            json.dumps(task),
        ]
        processes.append(subprocess.Popen(command, env=environment))
    assert [process.wait(300) for process in processes] == [0] * ranks
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def simulated_gossip(ranks: int, name: str, codec: str, deadline: float | None) -> list[Tensor]:
    links = Links.named("50mbit,20ms", workers=ranks)
    learner = Each(workload("mlp-100k"), workers=ranks, seed=3)
    run = GossipRun(
        learner, SimTransport(links), Pace(0.1, straggle=0.3), ring(), algorithm=name, codec=gossip_codec(codec),
        coding=lambda neighbours: 0.001, deadline=deadline, steps=STEPS, seed=3,
    )  # fmt: skip
    for _ in range(STEPS):
        run.step()
    return [learner.flat(rank) for rank in range(ranks)]


def simulated_recipe(ranks: int, recipe: str) -> Tensor:
    """Nothing is exempt: what travels exact is summed by gloo, whose order of adding is its own."""
    networks = SimNetwork.on(Links.named("50mbit,20ms", workers=ranks))
    run = RecipeRun(
        workload("mlp-100k"), networks, Pace(0.1), parse(recipe),
        coding=[0.0], exempt=lambda name, parameter: False, compute="each", seed=3,
    )  # fmt: skip
    for _ in range(STEPS):
        run.step()
    return Flat(list(run.model.parameters())).read()


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_simulated_models_are_those_of_real_processes(ranks: int, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    real = real_runs(ranks, tmp_path)
    for name, codec, deadline in ALGORITHMS:
        found = simulated_gossip(ranks, name, codec, deadline)
        for rank in range(ranks):
            assert torch.equal(found[rank], real[rank][f"{name} {codec} {deadline}"]), (name, rank)
    for recipe in GATHERED:
        found_model = simulated_recipe(ranks, recipe)
        assert torch.equal(found_model, real[0][recipe]), recipe
    for recipe in SUMMED:
        torch.testing.assert_close(simulated_recipe(ranks, recipe), real[0][recipe], rtol=1e-5, atol=1e-5)
    torch.set_num_threads(threads)
