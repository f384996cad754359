"""A policy says which recipe runs: anybody can write one, and without one nothing that chooses is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

import thinwire as tw
from thinwire import Reducer, parse
from thinwire.comm.local import LocalNetwork, on_all_ranks
from thinwire.recipe.compose import Recipe
from thinwire.reduce.policy import Fixed
from thinwire.reduce.step import Step

ALONE = """
import sys
import torch, torch.distributed as dist
import thinwire
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
link = thinwire.attach(model, "threshold-k")
model(torch.ones(1, 64)).sum().backward()
link.close()
print(sorted(name for name in sys.modules if name.startswith(("thinwire.auto", "thinwire.predict", "thinwire.lab"))))
"""


def test_without_a_policy_nothing_that_chooses_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


class Turns(Fixed):
    """Another recipe in every step, and one bucket by a third."""

    def __init__(self, recipes: list[str], other: str) -> None:
        super().__init__(parse(recipes[0]))
        self.recipes, self.other = [parse(text) for text in recipes], parse(other)
        self.asked: list[str] = []
        self.overrides: Mapping[str, Recipe] = {}

    def bind(self, reducer: Reducer) -> Turns:
        return Turns([str(recipe) for recipe in self.recipes], str(self.other))

    def before_step(self, step: int) -> None:
        self.asked.append(f"before {step}")
        self.recipe = self.recipes[step % len(self.recipes)]
        self.overrides = {"b": self.other} if step % 2 else {}

    def before_wait(self) -> None:
        self.asked.append("wait")

    def after_step(self, step: Step) -> None:
        self.asked.append(f"after {step.number}")

    def state_dict(self) -> dict[str, Any]:
        return {"asked": len(self.asked)}


def test_a_policy_of_ones_own_changes_recipes_and_loses_nothing() -> None:
    recipes = ["ef|top_k:0.1|all_gather", "dense", "ef|threshold_k:0.2|all_gather", "ef|top_k:0.1|shared_top_k"]
    policy = Turns(recipes, "ef|top_k:0.05|all_gather")
    steps = 9

    def work(network: LocalNetwork) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        reducer = Reducer("dense", group=network, policy=policy, check_every=1)
        given = {"a": torch.zeros(400), "b": torch.zeros(300)}
        sent = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
        numbers = torch.Generator().manual_seed(network.rank)
        for step in range(steps + 1):
            if step == steps:  # residuals go with a recipe that has no memory
                reducer.set_recipe("dense")
            for name, total in given.items():
                tensor = torch.zeros_like(total) if step == steps else torch.randn(total.shape, generator=numbers)
                total += tensor
                sent[name] += reducer.reduce(name, tensor)
            reducer.commit()
        return given, sent

    results = on_all_ranks(LocalNetwork.of(2), work)
    for name in ("a", "b"):
        mean = (results[0][0][name] + results[1][0][name]) / 2
        torch.testing.assert_close(results[0][1][name], mean, rtol=1e-4, atol=1e-4)
        assert torch.equal(results[0][1][name], results[1][1][name])


def test_a_policy_is_asked_in_order_and_not_after_set_recipe() -> None:
    policy = Turns(["dense", "bf16"], "bf16")
    reducer = Reducer("dense", group=LocalNetwork.alone(), policy=policy)
    bound = reducer.policy
    assert isinstance(bound, Turns)
    for _ in range(2):
        reducer.reduce("a", torch.ones(4))
        reducer.commit()
    assert bound.asked == ["before 0", "wait", "after 0", "before 1", "wait", "after 1"]
    assert reducer.state_dict()["0of1"]["info"].count('"asked": 6')
    reducer.set_recipe("bf16")
    reducer.reduce("a", torch.ones(4))
    reducer.commit()
    assert len(bound.asked) == 6


def test_auto_may_be_called_before_and_after_its_package_is_imported() -> None:
    import thinwire.auto  # noqa: F401  # which puts the package where the function was

    assert str(tw.auto(allow=["bf16"])).startswith("auto(dense,bf16")
