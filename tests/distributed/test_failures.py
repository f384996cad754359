"""When a rank dies, hangs, breaks or wants something else: every rank is told in time, and nothing stays behind.

A world that loses a rank is of no further use, so all recipes lose it together: each has a model with a group of its
own, and they wait in threads, all at the same time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.pool import Pool, run_fresh
from thinwire.comm.network import Pending
from thinwire.errors import ThinwireError

Pools = Callable[[int], Pool]
TIMEOUT = 10.0  # of every group
MARGIN = 25.0  # machines are busy with other things; a hang would take until the deadline
DEADLINE = 150.0
SIZE = 64
RECIPES = ["dense", "threshold-k", "two-shot-4", "global-qsgd-8", "ar-top-k", "powersgd-4"]
# Name: recipe, steps before the rank is lost, static_graph.
SCENES = {
    **{recipe: (recipe, 3, False) for recipe in RECIPES},
    **{f"{recipe}, first step": (recipe, 0, False) for recipe in ("dense", "threshold-k", "two-shot-4")},
    **{f"{recipe}, static": (recipe, 3, True) for recipe in ("dense", "powersgd-4")},
    **{f"{recipe}, static, first step": (recipe, 0, True) for recipe in ("dense", "ar-top-k")},
    "two-shot-2-ef, warming up": ("two-shot-2-ef", 2, False),  # in step 1, DDP itself needs all ranks in forward
}
WARMUP = {"two-shot-2-ef, warming up": 5}


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(layers)))
        self.asleep = False

    def forward(self, x: Tensor) -> Tensor:
        if self.asleep:
            time.sleep(10 * DEADLINE)
        return self.layers(x)


def built(*, layers: int = 4, group: dist.ProcessGroup | None = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(layers), bucket_cap_mb=0.02, process_group=group, **options)


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, SIZE)).square().mean().backward()


def outcome(action: Callable[[], object]) -> dict[str, Any]:
    """What it raised, as text: an exception would keep everything in its frames alive."""
    begin = time.monotonic()
    try:
        action()
    except Exception as error:
        kind = type(error).__name__
        ours = isinstance(error, ThinwireError)
        return {"kind": kind, "ours": ours, "text": str(error), "seconds": time.monotonic() - begin}
    return {"kind": "", "ours": False, "text": "nothing was raised", "seconds": time.monotonic() - begin}


def sockets() -> int:
    found = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found += os.readlink(f"/proc/self/fd/{file}").startswith("socket:")
    return found


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]


# --------------------------------------------------------------------------------------------------- a rank is lost


def lose_a_rank(rank: int, world_size: int, how: str) -> dict[str, Any]:
    limit = timedelta(seconds=TIMEOUT)
    models = {
        name: built(group=dist.new_group(timeout=limit), static_graph=static) for name, (_, _, static) in SCENES.items()
    }
    late = built(group=dist.new_group(timeout=limit))
    before = sockets()
    for name, (recipe, steps, _) in SCENES.items():
        thinwire.attach(models[name], recipe, warmup_steps=WARMUP.get(name, 0))
        for _ in range(steps):
            step(models[name])
    attached = sockets()
    if rank == world_size - 1:
        victim = models["threshold-k"].module
        if how == "killed":  # some buckets are on their way, others not
            victim.layers[1].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        victim.asleep = how == "hung"
        step(models["threshold-k"])
    actions = {name: (lambda model=model: step(model)) for name, model in models.items()}
    actions["attach"] = lambda: thinwire.attach(late, "threshold-k")
    with ThreadPoolExecutor(len(actions)) as threads:
        told = dict(zip(actions, threads.map(outcome, actions.values()), strict=True))
        again = dict(zip(models, threads.map(outcome, list(actions.values())[: len(models)]), strict=True))
    return {"told": told, "again": again, "sockets": [before, attached, sockets()], "lanes": lanes()}


@pytest.fixture(scope="module", params=["killed", "hung"])
def survivors(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the other ranks have seen."""
    world_size = 4 if request.param == "killed" else 3
    *others, lost = run_fresh(
        world_size, lose_a_rank, request.param, timeout=TIMEOUT, deadline=DEADLINE, expect_death=[world_size - 1]
    )
    assert lost == ("died", -signal.SIGKILL)
    assert [other[0] for other in others] == ["returned"] * len(others), others
    return [other[1] for other in others]


def test_every_rank_is_told_in_time(survivors: list[dict[str, Any]]) -> None:
    for seen in survivors:
        for name, (recipe, steps, _) in SCENES.items():
            told = seen["told"][name]
            assert told["kind"] == "ExchangeError", (name, told)
            whole = recipe == "dense" or name in WARMUP
            assert re.search(r"the bucket of layers\.\d" if whole else r"bucket \d \(layers\.\d", told["text"]), told
            assert f"could not be sent by {thinwire.parse(recipe)} in step {steps}" in told["text"], (name, told)
            assert told["seconds"] < TIMEOUT + MARGIN, name
        assert seen["told"]["attach"]["kind"] == "ExchangeError", seen["told"]["attach"]
        assert seen["told"]["attach"]["seconds"] < TIMEOUT + MARGIN


def test_nothing_stays_behind(survivors: list[dict[str, Any]]) -> None:
    for seen in survivors:
        before, attached, after = seen["sockets"]
        assert attached > before
        assert after <= before
        assert seen["lanes"] == []


def test_the_next_step_is_refused_as_well(survivors: list[dict[str, Any]]) -> None:
    """With the same error, not with one from inside DDP that sends people the wrong way."""
    for seen in survivors:
        for name, again in seen["again"].items():
            assert again["seconds"] < MARGIN, name
            assert again["ours"], (name, again)
            assert again["text"] == seen["told"][name]["text"]


# ------------------------------------------------------------------------------------------------ a rank breaks


@contextlib.contextmanager
def broken_codec(rank: int, where: int, link: thinwire.Link) -> Iterator[None]:
    """On one rank, the second bucket of a step cannot be encoded."""
    names = ("encode", "encode_taking", "to_sum", "left", "pack_positions")
    kinds = {type(link.recipe.codec), type(getattr(link.recipe.codec, "values", link.recipe.codec))}
    with contextlib.ExitStack() as stack:
        calls: list[str] = []
        for kind in kinds if rank == where else ():
            for name in names:
                if hasattr(kind, name):
                    stack.enter_context(mock.patch.object(kind, name, _breaking(getattr(kind, name), calls)))
        yield


def _breaking(method: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def instead(*args: Any, **kwargs: Any) -> Any:
        calls.append("")
        if len(calls) > 1:
            raise ZeroDivisionError("a codec went wrong")
        return method(*args, **kwargs)

    return instead


@contextlib.contextmanager
def damaged_bytes(rank: int, where: int, link: thinwire.Link) -> Iterator[None]:
    """On one rank, a byte of what comes from the network is wrong."""

    wait = Pending.wait

    def damaging(self: Pending) -> Tensor:
        received = wait(self)
        if self._kind in ("all_gather", "all_to_all"):
            received.view(torch.uint8).view(-1)[40] ^= 4
        return received

    with mock.patch.object(Pending, "wait", damaging) if rank == where else contextlib.nullcontext():
        yield


TROUBLES = {"a codec breaks": broken_codec, "bytes are damaged": damaged_bytes}


def trouble(rank: int, world_size: int, recipe: str, what: str) -> dict[str, Any]:
    model = built()
    before = sockets()
    link = thinwire.attach(model, recipe)
    for _ in range(3):
        step(model)
    with TROUBLES[what](rank, 1, link):
        told = outcome(lambda: [step(model) for _ in range(3)])  # a rank may be done with a step that fails elsewhere
    return told | {"lanes": lanes(), "sockets": sockets() - before, "step": link.step}


@pytest.mark.parametrize(
    ("recipe", "what"),
    [(recipe, "a codec breaks") for recipe in ("bf16", *RECIPES[1:])]
    + [(recipe, "bytes are damaged") for recipe in ("threshold-k", "top-k", "qsgd-4", "two-shot-4", "two-shot-2-ef")],
)
def test_one_rank_in_trouble_ends_all(pools: Pools, recipe: str, what: str) -> None:
    seen = pools(3).run(trouble, recipe, what)
    for rank, told in enumerate(seen):
        assert told["kind"] == "ExchangeError", (rank, told)
        assert re.search(rf"bucket \d \(layers\.\d.*{re.escape(str(thinwire.parse(recipe)))}", told["text"]), told
        assert told["lanes"] == []
        assert told["sockets"] <= 0
    assert ("a codec went wrong" if what == "a codec breaks" else "message") in seen[1]["text"]
    assert seen[1]["step"] == 3


# ---------------------------------------------------------------------------------------------- ranks that disagree

AGREED = {"recipe": "top-k", "seed": 0, "warmup_steps": 0}
WISHES = {
    "recipe": ({"recipe": "threshold-k"}, "the recipe", "error_feedback|threshold_k:0.01|bf16|all_gather"),
    "dense": ({"recipe": "dense"}, "the recipe", "fp32|all_reduce"),
    "an option": ({"recipe": "ef|top_k:0.02|bf16|all_gather"}, "the recipe", "top_k:0.02"),
    "seed": ({"seed": 7}, "the seed", "7"),
    "warm-up": ({"warmup_steps": 3}, "the warm-up", "3"),
    "exempt": ({"exempt": ["layers.0.weight"]}, "the parameters", "layers.0.weight"),
    "exempt, far down": ({"exempt": ["layers.9.weight"]}, "the parameters", "layers.9.weight"),
}


def disagree(rank: int, world_size: int, options: dict[str, Any]) -> tuple[dict[str, Any], list[str], float]:
    model = built(layers=10)
    usual = {"exempt": ()} if "exempt" in options else {}
    mine = AGREED | usual | (options if rank == world_size - 1 else {})
    told = outcome(lambda: thinwire.attach(model, **mine))
    left = lanes()
    link = thinwire.attach(model, **AGREED)  # nothing is lost: the next attempt may succeed
    step(model)
    link.close()
    return told, left, float(model.module.layers[0].weight.grad.sum())


@pytest.mark.parametrize("wish", WISHES)
def test_ranks_that_disagree_are_told_who_has_what(pools: Pools, wish: str) -> None:
    options, fact, there = WISHES[wish]
    seen = pools(3).run(disagree, options)
    for told, left, total in seen:
        assert told["kind"] == "AttachError", told
        assert f"the ranks disagree on {fact}: rank 0 has " in told["text"]
        assert there in told["text"].partition(", rank 2 has ")[2]
        assert left == []
        assert total == seen[0][2] != 0.0


def disagree_later(rank: int, world_size: int) -> tuple[dict[str, Any], str, list[Tensor]]:
    model = built()
    link = thinwire.attach(model, "top-k")
    step(model)
    told = outcome(lambda: link.set_recipe("two-shot-8" if rank == 0 else "dense"))
    for _ in range(3):
        step(model)
    recipe = str(link.recipe)
    link.close()
    return told, recipe, [p.grad for p in model.module.parameters()]


def test_a_recipe_that_not_all_want_is_refused(pools: Pools) -> None:
    seen = pools(3).run(disagree_later)
    for told, recipe, gradients in seen:
        assert told["kind"] == "AttachError", told
        assert "disagree on the new recipe: rank 0 has abs_max:8,block=128|two_shot, rank 1 has fp32" in told["text"]
        assert recipe == str(thinwire.parse("top-k"))  # and it goes on with that
        assert all(map(torch.equal, gradients, seen[0][2]))
