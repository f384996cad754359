"""When a rank dies, hangs, breaks or wants something else: every rank is told in time, and nothing stays behind.

A world that loses a rank is of no further use, so all recipes lose it together: each has a model with a group of its
own, and they wait in threads, all at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
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
from support.forced_auto import CANDIDATES, EXACT, MIXED, attach
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
    EXACT: (EXACT, 3, False),
    f"{EXACT}, between rounds": (EXACT, 5, False),
    f"{EXACT}, first step": (EXACT, 0, False),
    f"{MIXED}, static": (MIXED, 3, True),
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
        out: Tensor = self.layers(x)
        return out


def built(*, layers: int = 4, group: dist.ProcessGroup | None = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(layers), bucket_cap_mb=0.02, process_group=group, **options)


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, SIZE)).square().mean().backward()


def steps_of(model: nn.Module, count: int) -> None:
    for _ in range(count):
        step(model)


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
        attach(models[name], recipe, warmup_steps=WARMUP.get(name, 0))
        for _ in range(steps):
            step(models[name])
    attached = sockets()
    if rank == world_size - 1:
        victim = models["threshold-k"].module
        if how == "killed":  # some buckets are on their way, others not
            victim.layers[1].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        victim.asleep = how == "hung"
        step(models["threshold-k"])
    actions: dict[str, Callable[[], object]] = {name: functools.partial(step, model) for name, model in models.items()}
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
            assert told["seconds"] < TIMEOUT + MARGIN, name
            if recipe in CANDIDATES:  # in a round, or in a bucket
                assert re.search(rf"(^auto\(.* failed|\(layers\.\d.*\|.*) in step {steps}\b", told["text"]), (
                    name,
                    told,
                )
                continue
            whole = recipe == "dense" or name in WARMUP
            assert re.search(r"the bucket of layers\.\d" if whole else r"bucket \d \(layers\.\d", told["text"]), told
            assert f"could not be sent by {thinwire.parse(recipe)} in step {steps}" in told["text"], (name, told)
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
    names = ("write", "write_taking", "write_compensated", "write_mean", "to_sum", "codes", "left", "pack_positions")
    codecs = [one.recipe.codec for one in getattr(link.reducer.policy, "candidates", ())] or [link.recipe.codec]
    kinds = {type(found) for codec in codecs for found in (codec, getattr(codec, "values", codec))}
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
def damaged_bytes(rank: int, where: int, at: float, *, kinds: Collection[str], reports: bool = False) -> Iterator[None]:
    """On one rank, a bit of what comes from the network is wrong; `at` is where in the bytes, as a share.

    Of gradients, or of the `reports` of auto.
    """

    receive = Pending._received

    def damaging(self: Pending) -> Tensor:
        received = receive(self)
        flat = received.view(-1).view(torch.uint8)
        gradient = received.dtype not in (torch.int64, torch.float64) and flat.numel() > 64  # hashes are int64
        if self._kind in kinds and (received.dtype == torch.float64 if reports else gradient):
            flat[int(at * (flat.numel() - 1))] ^= 0x10
        return received

    with mock.patch.object(Pending, "_received", damaging) if rank == where else contextlib.nullcontext():
        yield


def trouble(rank: int, world_size: int, recipe: str) -> dict[str, Any]:
    model = built()
    before = sockets()
    link = attach(model, recipe)
    for _ in range(3):
        step(model)
    with broken_codec(rank, 1, link):
        told = outcome(lambda: steps_of(model, 3))  # a rank may be done with a step that fails elsewhere
    return told | {"lanes": lanes(), "sockets": sockets() - before, "step": link.step}


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES[1:], EXACT, MIXED])
def test_one_rank_in_trouble_ends_all(pools: Pools, recipe: str) -> None:
    seen = pools(3).run(trouble, recipe)
    for rank, told in enumerate(seen):
        assert told["kind"] == "ExchangeError", (rank, told)
        if recipe in CANDIDATES:
            assert re.search(r"(auto\(.* failed|bucket \d \(layers\.\d.*\|).* in step \d", told["text"]), told
        else:
            assert re.search(rf"bucket \d \(layers\.\d.*{re.escape(str(thinwire.parse(recipe)))}", told["text"]), told
        assert told["lanes"] == []
        assert told["sockets"] <= 0
    assert "a codec went wrong" in seen[1]["text"]
    assert seen[1]["step"] == 3 or recipe in CANDIDATES  # where a dense bucket may come first


def damage(
    rank: int, world_size: int, recipe: str, kinds: Collection[str], at: float, every: int, exact: bool = False
) -> dict[str, Any]:
    model = built()
    options: dict[str, Any] = {"exempt": lambda name, parameter: True} if exact else {}
    link = attach(model, recipe, check_every=every, **options)
    for _ in range(3):
        step(model)
    steps = 6 if link.chooses else 3  # until that collective has run
    with damaged_bytes(rank, 1, at, kinds=kinds):
        told = outcome(lambda: steps_of(model, steps))
    left = lanes()
    link.close()
    return told | {"lanes": left, "step": link.step}


# Recipe, the collective whose result is damaged, and where in it: messages, exact elements at the end, positions, sums.
DAMAGED = [
    *(
        (recipe, ("all_gather",), at, False)
        for recipe in ("qsgd-4", "two-shot-4", "two-shot-2-ef")
        for at in (0.1, 0.4)
    ),
    *((recipe, ("all_gather",), 0.95, False) for recipe in ("threshold-k", "top-k")),
    *((recipe, ("all_reduce",), 0.5, False) for recipe in ("dense", "bf16", "global-qsgd-8", "powersgd-4", "ar-top-k")),
    ("two-shot-4", ("all_gather",), 0.1, True),  # exact elements behind messages
    ("threshold-k", ("all_reduce",), 0.5, False),  # exact elements beside messages
    ("ar-top-k", ("broadcast",), 0.3, False),  # positions
    *((recipe, ("all_gather",), 0.95, False) for recipe in (EXACT, MIXED)),
    *((recipe, ("all_reduce",), 0.5, False) for recipe in (EXACT, MIXED)),
]
# One rank reads what is damaged there, and all ranks get the sum.
FIRST_SHOTS = ["two-shot-4", "two-shot-1-2", "two-shot-top-k", "global-qsgd-exp", MIXED]


@pytest.mark.parametrize(("recipe", "kinds", "at", "exact"), DAMAGED)
def test_no_damaged_bit_goes_unnoticed(
    pools: Pools, recipe: str, kinds: tuple[str, ...], at: float, exact: bool
) -> None:
    """Whatever travels without a checksum: replicas that part end the run, on all ranks, in that step."""
    seen = pools(3).run(damage, recipe, kinds, at, 1, exact)
    for rank, told in enumerate(seen):
        assert told["kind"] == "ExchangeError", (rank, told)
        assert told["lanes"] == []
    texts = [told["text"] for told in seen]
    if "message" in texts[1] and "positions" in texts[1]:  # they led outside the tensor, which that rank saw itself
        return
    step = r"\d" if recipe in CANDIDATES else "3"  # that collective may first run in a later step
    for text in texts:
        assert re.search(rf"different means of .*layers\.\d.* in step {step}: rank 1 differs from the other 2", text), (
            text
        )


@pytest.mark.parametrize("recipe", FIRST_SHOTS)
def test_damage_that_all_replicas_would_take_is_noticed(pools: Pools, recipe: str) -> None:
    """The means stay equal, so that hashes of means say nothing."""
    for told in pools(3).run(damage, recipe, ("all_to_all",), 0.1, 1):
        assert told["kind"] == "ExchangeError", told
        assert re.search(r"rank 1 received other bytes than rank \d sent, in step \d", told["text"]), told
        assert told["lanes"] == []


def damaged_report(rank: int, world_size: int, kind: str, at: float) -> dict[str, Any]:
    model, before = built(), set(threading.enumerate())  # others may still run here
    link = attach(model, EXACT)
    with damaged_bytes(rank, 1, at, kinds=(kind,), reports=True):
        told = outcome(lambda: steps_of(model, 6))
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    link.close()
    return told | {"lanes": left}


@pytest.mark.parametrize("at", [0.0, 0.1, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("kind", ["all_gather", "broadcast"])
def test_no_damaged_decision_is_run(pools: Pools, kind: str, at: float) -> None:
    """A rank that ran another recipe than the others would wait for them, or take their bytes for its own."""
    seen = pools(2).run(damaged_report, kind, at)
    for told in seen:
        assert told["kind"] == "ExchangeError", told
        assert told["lanes"] == []
        assert told["seconds"] < 20
    assert "was damaged on its way" in seen[1]["text"]


def damaged_once(rank: int, world_size: int, recipe: str, at_step: int, kinds: Collection[str]) -> dict[str, Any]:
    """One message of one step is damaged on one rank, and the model trains on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    link = thinwire.attach(model, recipe, check_every=5)

    def train(*_: object) -> int:
        numbers = torch.Generator().manual_seed(link.step)
        optimizer.zero_grad()
        model(torch.randn(4, SIZE, generator=numbers)).square().mean().backward()
        optimizer.step()
        return link.step

    while link.step < at_step:
        train()
    with damaged_bytes(rank, 1, 0.5, kinds=kinds):
        first = outcome(train)
    told = outcome(lambda: [train() for _ in range(6)]) if not first["kind"] else first
    link.close()
    return told


@pytest.mark.parametrize("recipe", ["bf16", "qsgd-4", "dense"])
@pytest.mark.parametrize("at_step", [5, 6, 8])
def test_a_single_damaged_message_is_noticed_within_n_steps(pools: Pools, recipe: str, at_step: int) -> None:
    """Between two checks the means agree again; the weights do not."""
    for told in pools(3).run(damaged_once, recipe, at_step, ("all_reduce", "all_gather")):
        assert told["kind"] == "ExchangeError", told
        assert re.search(
            r"different (means|weights) of .* in step (5|10): rank 1 differs from the other 2", told["text"]
        )


@pytest.mark.parametrize("at_step", [5, 6])
def test_a_damaged_first_shot_is_noticed_within_n_steps(pools: Pools, at_step: int) -> None:
    for told in pools(3).run(damaged_once, "two-shot-4", at_step, ("all_to_all",)):
        assert told["kind"] == "ExchangeError", told
        assert re.search(r"rank 1 received other bytes than rank \d sent, in step (5|10) or", told["text"]), told


def test_hashes_are_compared_every_n_steps(pools: Pools) -> None:
    """A line that damages everything from step 3 on is noticed in step 4, and never if nobody asks."""
    for told in pools(3).run(damage, "bf16", ("all_reduce",), 0.5, 4):
        assert told["kind"] == "ExchangeError"
        assert "in step 4: rank 1 differs" in told["text"]
    for told in pools(3).run(damage, "bf16", ("all_reduce",), 0.5, 0):
        assert told["kind"] == ""


# ---------------------------------------------------------------------------------------------- ranks that disagree

AGREED: dict[str, Any] = {"recipe": "top-k", "seed": 0, "warmup_steps": 0}
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
