"""Saving and resuming: bit for bit on as many ranks as before, and with nothing lost on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.stateful import Stateful

from support.forced_auto import EXACT, MIXED
from support.ledger import grad_of
from support.pool import Pool, run_fresh
from support.runs import MANY, ONE, SAVED_AFTER, STEPS, Run, Tree, assert_same, parts_in, save
from thinwire import Link
from thinwire.errors import StateError

Pools = Callable[[int], Pool]
RECIPES = ["threshold-k", "top-k", "dgc", "ar-top-k", "two-shot-2-ef", "two-shot-top-k", "powersgd-4", "global-qsgd-8"]
SECOND_SHOT = "rotated:2|two_shot:3,feedback=true"  # owes what its second shot kept back, and has no memory else
OWING = [*(recipe for recipe in RECIPES if recipe != "global-qsgd-8"), SECOND_SHOT, EXACT]


Saved = Callable[..., tuple[Path, list[tuple[Tree, Tree]]]]


@pytest.fixture(scope="module")
def saved(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(world_size, recipe)`: a folder with a checkpoint, and what `save` returned on every rank."""
    known: dict[Any, tuple[Path, list[tuple[Tree, Tree]]]] = {}

    def checkpoint(world_size: int, recipe: str, cap: float = MANY, after: int = SAVED_AFTER) -> Any:
        key = world_size, recipe, cap, after
        if key not in known:
            folder = tmp_path_factory.mktemp("checkpoint")
            known[key] = folder, pools(world_size).run(save, recipe, folder, cap, after)
        return known[key]

    return checkpoint


# ------------------------------------------------------------------------------------------ on as many ranks as before


def resume(rank: int, world_size: int, recipe: str, folder: Path, cap: float) -> list[Tree]:
    """In four ways."""
    parts, ends = parts_in(folder), []
    ways: list[Callable[[Link], object]] = [
        lambda link: link.load_state_dict(parts[rank]["link"]),
        lambda link: link.load_state_dict([part["link"] for part in parts]),
        lambda link: link.load_checkpoint(str(folder / "dcp")),
        lambda link: load_distributed({"link": link}, checkpoint_id=folder / "dcp"),
    ]
    for way in ways:
        run = Run(recipe, rank, cap=cap, start=1)
        assert isinstance(run.link, Stateful)
        way(run.link)
        load_distributed({"model": run.net.state_dict()}, checkpoint_id=folder / "dcp")
        assert run.link.step == SAVED_AFTER
        ends.append(run.train(STEPS).end())
    return ends


def assert_resumed(resumed: list[list[Tree]], before: list[tuple[Tree, Tree]]) -> None:
    for rank, ends in enumerate(resumed):
        for way, end in enumerate(ends):
            assert_same(end, before[rank][1], f"rank {rank}, way {way}")
            assert_same(end["parameters"], ends[0]["parameters"])


@pytest.mark.parametrize("cap", [MANY, pytest.param(ONE, marks=pytest.mark.slow)], ids=["many", "one"])
@pytest.mark.parametrize("recipe", [*RECIPES, EXACT, MIXED])
def test_a_resumed_run_is_the_uninterrupted_one(pools: Pools, saved: Saved, recipe: str, cap: float) -> None:
    folder, before = saved(4, recipe, cap)
    assert_resumed(pools(4).run(resume, recipe, folder, cap), before)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["threshold-k", "two-shot-2-ef"])
def test_a_run_resumed_in_new_processes(saved: Saved, recipe: str) -> None:
    folder, before = saved(4, recipe)
    assert_resumed([value for _, value in run_fresh(4, resume, recipe, folder, MANY)], before)


def resume_with_scaler(rank: int, world_size: int, recipe: str, after: int) -> tuple[Tree, list[Tree]]:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)

    run = Run(recipe, rank, scaler=scaler()).train(after)
    assert run.scaler is not None
    link, model, scale = run.link.state_dict(), run.weights(), run.scaler.state_dict()
    ends = []
    for early in (True, False):
        again = scaler()
        if early:
            again.load_state_dict(scale)
        new = Run(recipe, rank, scaler=again, start=1)
        new.link.load_state_dict(link)
        again.load_state_dict(scale)
        new.net.load_state_dict(model)
        ends.append(new.train(STEPS).end())
    return run.train(STEPS).end(), ends


@pytest.mark.parametrize("recipe", ["two-shot-2-ef", "threshold-k", EXACT, MIXED])
@pytest.mark.parametrize("after", [3, 5, 6])  # the scale grows after every third step
def test_memories_are_resumed_at_their_loss_scale(pools: Pools, recipe: str, after: int) -> None:
    """Also where the scaler gets its state only after attach."""
    for whole, ends in pools(2).run(resume_with_scaler, recipe, after):
        for end in ends:
            assert_same(end, whole)


# ---------------------------------------------------------------------------------------------------- on other numbers


def resume_elsewhere(rank: int, world_size: int, folder: Path, way: str, recipe: str) -> tuple[Any, ...]:
    def resumed() -> Run:
        run = Run(recipe, rank, start=1)
        if way == "dcp":
            run.link.load_checkpoint(str(folder / "dcp"))
        else:
            run.link.load_state_dict([part["link"] for part in reversed(parts_in(folder))])
        run.net.load_state_dict(parts_in(folder)[0]["model"])
        return run

    run = resumed()
    owed, states = run.owed(), {name: dict(state) for name, state in run.link.reducer.residuals.states.items()}
    end = run.train(STEPS).end()
    # All that is owed goes out with a step that adds nothing to it.
    run = resumed()
    run.link.set_recipe("dense")
    (run.model(torch.zeros(1, 48)).sum() * 0.0).backward()
    assert run.link.reducer.residuals.memory is None
    delivered = {name: grad_of(run.net.get_parameter(name)).double() * world_size for name in owed}
    run.link.close()
    return owed, delivered, end["parameters"], states


def total(owed: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in owed]).sum(0) for name in owed[0]}


def assert_close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], what: str) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0.0, atol=1e-6 * float(b[name].abs().max()), msg=what)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (4, 3), (2, 4), (4, 4), pytest.param(8, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", OWING)
def test_nothing_is_lost_on_another_number_of_ranks(
    pools: Pools, saved: Saved, recipe: str, old: int, new: int
) -> None:
    folder, before = saved(old, recipe)
    expected = total([owed for owed, _ in before])
    owes = any if recipe == EXACT else all  # a bucket that went dense owes nothing
    assert owes(tensor.any() for tensor in expected.values())
    for way in {2: ["dcp"], 3: ["dcp", "parts"], 4: ["parts"]}[new]:
        results = pools(new).run(resume_elsewhere, folder, way, recipe)
        owed, delivered, parameters, states = zip(*results, strict=True)
        assert_close(total(list(owed)), expected, f"{way}: what is owed")
        assert_close(delivered[0], expected, f"{way}: what is delivered")
        for rank in range(1, new):
            assert_same(parameters[rank], parameters[0])
            if recipe == "powersgd-4":  # the ranks start their iteration from the same factor
                assert_same(states[rank], states[0])


@pytest.mark.parametrize(("was", "now"), [("two-shot-2-ef", "top-k"), (EXACT, "top-k"), ("two-shot-2-ef", EXACT)])
@pytest.mark.parametrize("new", [2, 4])
def test_another_recipe_takes_over_what_is_owed(pools: Pools, saved: Saved, new: int, was: str, now: str) -> None:
    folder, before = saved(4, was)
    results = pools(new).run(resume_elsewhere, folder, "parts", now)
    assert_close(total([result[0] for result in results]), total([owed for owed, _ in before]), "owed")


@pytest.mark.parametrize("recipe", ["dgc", "two-shot-2-ef", EXACT])
def test_nothing_is_lost_before_buckets_are_final(pools: Pools, saved: Saved, recipe: str) -> None:
    """The resumed run moves its memories to other buckets in its own second step."""
    folder, before = saved(4, recipe, MANY, 1)
    results = pools(4).run(resume_elsewhere, folder, "dcp", recipe)
    assert_close(total([result[0] for result in results]), total([owed for owed, _ in before]), "owed")
    for result in results:
        assert_same(result[2], results[0][2])


def save_before_flush(rank: int, world_size: int, recipe: str) -> tuple[Tree, Tree, str]:
    """The recipe has no memory, but the last one had, and its debt goes out with the next step."""
    run = Run(recipe, rank).train(SAVED_AFTER)
    run.link.set_recipe("bf16")
    state = run.link.state_dict()
    other = Run("bf16", rank)
    with pytest.raises(StateError) as refused:
        other.link.load_state_dict(state)
    other.link.close()
    new = Run(recipe, rank, start=1)
    new.link.load_state_dict(state)
    new.link.set_recipe("bf16")
    new.net.load_state_dict(run.weights())
    return run.train(STEPS).end(), new.train(STEPS).end(), str(refused.value)


@pytest.mark.parametrize("recipe", ["top-k", EXACT])
def test_a_debt_that_outlives_its_recipe_can_be_resumed(pools: Pools, recipe: str) -> None:
    for whole, end, told in pools(2).run(save_before_flush, recipe):
        assert_same(end, whole)
        assert "then call set_recipe" in told
        assert "attach with the saved recipe" not in told, "that one is bf16, which was just refused"
