"""`auto` between real ranks: they change together, owe nothing twice and lose nothing, and go on after a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.forced_auto import Wish, forced
from support.ledger import Ledger, assert_nothing_lost, assert_same_on_all
from support.pool import Pool
from support.runs import MANY, Run, parts_in

Pools = Callable[[int], Pool]
STEPS = 16
TOUR = [
    "threshold-k 1.1 %",
    "dense",
    "two-shot-4",
    "ar-top-k 3.3 %",
    "bf16",
    "threshold-k 10 %",
    "two-shot-top-k 10 %",
    "global-qsgd-8",
]
EXACT = [TOUR[0], "dense", "ar-top-k 3.3 %", "two-shot-top-k 10 %", "threshold-k 10 %"]  # those that lose nothing


def written(script: list[tuple[str, str | None]]) -> list[Wish]:
    """A candidate for each round, and perhaps one that is tried on the first bucket."""
    return [Wish((name,), canary=None if tried is None else (tried, 0)) for name, tried in script]


def loss_of(rank: int, step: int) -> Callable[[nn.Module], torch.Tensor]:
    numbers = torch.randn(8, 48, generator=torch.Generator().manual_seed(1000 * step + rank))
    return lambda module: module(numbers).square().mean()


def tour(rank: int, world_size: int, script: list[tuple[str, str | None]]) -> tuple[dict[str, Any], list[str]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 40))
    ledger = Ledger(DistributedDataParallel(net, bucket_cap_mb=MANY), "auto")
    forced(ledger.link, written(script))
    ran = []
    for step in range(STEPS):
        ledger.step(loss_of(rank, step))
        ways = ledger.link.reducer.residuals.overrides
        ran.append(f"{ledger.link.recipe} {sorted((name, str(way)) for name, way in ways.items())}")
    return ledger.books(), ran


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_change_together_and_lose_nothing(pools: Pools, ranks: int) -> None:
    script = [(name, None) for name in EXACT for _ in range(3)]
    results = pools(ranks).run(tour, script)
    assert all(ran == results[0][1] for _, ran in results)
    assert len(set(results[0][1])) >= 4
    assert_nothing_lost([books for books, _ in results])


def test_what_is_tried_on_one_bucket_is_owed_and_paid(pools: Pools) -> None:
    script = [("dense", "threshold-k 1.1 %"), ("dense", None), ("threshold-k 10 %", "ar-top-k 1.1 %")] * 4
    results = pools(2).run(tour, script)
    assert all(ran == results[0][1] for _, ran in results)
    assert any("bucket0" in ran for ran in results[0][1])
    assert_nothing_lost([books for books, _ in results])


def tried_once(rank: int, world_size: int, main: str) -> tuple[dict[str, Any], list[str], bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 64))
    ledger = Ledger(DistributedDataParallel(net, bucket_cap_mb=MANY), "auto", exempt=())
    canary = ("two-shot-top-k 10 %", 0)
    forced(ledger.link, lambda step: Wish((main,), canary=canary if step == 2 else None))
    held = []
    for step in range(8):
        ledger.step(loss_of(rank, step))
        held.append(" ".join(ledger.link.reducer.residuals.backs))
    return ledger.books(), held, ledger.link.reducer.residuals.memory is None


@pytest.mark.parametrize("main", ["dense", "threshold-k 10 %"])
def test_what_a_canary_kept_back_goes_with_the_next_step(pools: Pools, main: str) -> None:
    """A second shot keeps a residual of its own, which a recipe without a second shot would never send."""
    books, held, forgot = zip(*pools(2).run(tried_once, main), strict=True)
    assert held[0] == ["", "", "", "bucket0", "", "", "", ""]
    assert forgot == (main == "dense",) * 2
    assert_nothing_lost(books)


def everywhere(rank: int, world_size: int) -> tuple[Any, list[str]]:
    run = Run("auto", rank)
    forced(run.link, [Wish((name,)) for name in TOUR for _ in range(2)])
    recipes = []
    for until in range(1, 2 * len(TOUR) + 5):
        run.train(until)
        recipes.append(str(run.link.recipe))
    weights = run.weights()
    run.link.close()
    return weights, recipes


def test_all_ranks_end_with_the_same_weights(pools: Pools) -> None:
    results = pools(3).run(everywhere)
    assert_same_on_all([weights for weights, _ in results])
    assert all(recipes == results[0][1] for _, recipes in results)
    assert len(set(results[0][1])) == len(TOUR)


def by_itself(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Any, dict[str, float], int, list[str]]:
    """Whatever it decides on this machine."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    run = Run(thinwire.auto(**options), rank, width=512)
    run.train(40)
    result = run.weights(), run.link.stats(), len(run.link.front()), told
    assert len(run.link.events()) == (run.link.stats()["auto/changes"] if rank == 0 else 0)
    run.link.close()
    return result


def test_it_trains_by_itself(pools: Pools) -> None:
    results = pools(2).run(by_itself, {})
    assert_same_on_all([weights for weights, *_ in results])
    _, stats, front, told = results[0]
    assert stats["auto/mbit"] > 0
    assert front > 0
    assert len(told) == stats["auto/changes"] == results[1][1]["auto/changes"]
    assert all(line.startswith("step ") for line in told)


def saved(rank: int, world_size: int, folder: Path) -> tuple[Any, str]:
    run = Run("auto", rank)
    forced(run.link, [Wish(("threshold-k 1.1 %",))])
    run.train(6)
    torch.save({"link": run.link.state_dict(), "model": run.weights()}, folder / f"{rank}.pt")
    result = run.owed(), str(run.link.recipe)
    run.link.close()
    return result


def resumed(rank: int, world_size: int, folder: Path) -> tuple[Any, str, str, Any]:
    run = Run("auto", rank, start=1)
    parts = parts_in(folder)
    run.net.load_state_dict(parts[0]["model"])
    run.link.load_state_dict([part["link"] for part in parts])
    forced(run.link, [Wish(("threshold-k 1.1 %",))])
    owed, recipe = run.owed(), str(run.link.recipe)
    run.train(9)
    result = owed, recipe, str(run.link.recipe), run.weights()
    run.link.close()
    return result


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_goes_on_after_a_restart(pools: Pools, tmp_path: Path, ranks: int) -> None:
    """Also on another number of ranks: what was owed is owed, by what ran then."""
    before = pools(2).run(saved, tmp_path)
    after = pools(ranks).run(resumed, tmp_path)
    assert "threshold_k" in before[0][1]
    for _, recipe, later, _ in after:
        assert recipe == later == before[0][1]
    assert_same_on_all([weights for *_, weights in after])
    for name in before[0][0]:
        total = sum(owed[name] for owed, _ in before)
        torch.testing.assert_close(sum(owed[name] for owed, *_ in after), total, rtol=1e-6, atol=1e-9)
        assert total.any()


def by_hand(rank: int, world_size: int) -> tuple[str, bool, int, Any]:
    run = Run("auto", rank)
    forced(run.link, [Wish(("two-shot-4",))])
    run.train(5)
    run.link.set_recipe("threshold-k")
    run.train(12)
    timings = sum(len(network.spans or ()) for network in run.link.reducer.networks)
    result = str(run.link.recipe), not run.link.chooses, timings, run.weights()
    run.link.close()
    return result


def test_who_sets_a_recipe_decides_from_then_on(pools: Pools) -> None:
    results = pools(2).run(by_hand)
    assert_same_on_all([weights for *_, weights in results])
    for recipe, ended, timings, _ in results:
        assert recipe == str(thinwire.parse("threshold-k"))
        assert ended
        assert timings == 0  # nobody would take them


def rescaled(rank: int, world_size: int, unused: bool) -> tuple[bool, list[Any]]:
    """Buckets by different codecs while the loss scale grows; with canaries."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.01, find_unused_parameters=unused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    link = thinwire.attach(model, "auto", scaler=scaler)
    main, others = "threshold-k 1.1 %", ("two-shot-4", "bf16", "ar-top-k 1.1 %")
    canaries = [(others[step % 3], step % 2) if step % 3 else None for step in range(6)]
    forced(link, [Wish((main, others[0], main), canary=canary) for canary in canaries], mixed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(14):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 64)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    mixed = len(link.reducer.residuals.states) > 0
    link.close()
    return mixed, [parameter.detach().tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("unused", [False, True])
def test_the_loss_scale_changes_while_buckets_travel_by_other_codecs(pools: Pools, unused: bool) -> None:
    first, second = pools(2).run(rescaled, unused)
    assert first == second


def alone(rank: int, world_size: int) -> str:
    run = Run("auto", rank, warmup_steps=2)
    run.train(6)
    recipe = str(run.link.recipe)
    run.link.close()
    return recipe


def test_alone_it_sends_nothing(pools: Pools) -> None:
    assert pools(1).run(alone) == ["fp32|all_reduce"]
