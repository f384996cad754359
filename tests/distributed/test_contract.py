"""What attach promises beside its recipe: the same as DDP where nothing is compressed, and a refusal where it cannot.

Other ways in which gradients may arrive are in `test_contract_buckets`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import math
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket, HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.forced_auto import EXACT, attach
from support.ledger import Ledger, Loss, assert_nothing_lost, assert_same_on_all, batch, copied
from support.pool import Pool
from thinwire.attach import ddp as hook_module
from thinwire.recipe.presets import PRESETS
from thinwire.reduce import Records

Pools = Callable[[int], Pool]
TOP_K = "ef|top_k:0.05|all_gather"
RECIPES = [TOP_K, EXACT]  # with error feedback, so nothing may get lost
WIDTH = 64
SMALL = 0.03  # MiB: less than two matrices of 64 x 64
STEPS = 4


def layers() -> nn.Module:
    """Matrices, biases, a norm, and a matrix too small to be worth compressing."""
    torch.manual_seed(0)
    inner = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    return nn.Sequential(*inner, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(layers(), bucket_cap_mb=SMALL, **options)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    total: Tensor = model(batch(rank, step, 8, WIDTH)).square().sum()
    return total


def loss_of(rank: int, step: int) -> Loss:
    return lambda module: loss(module, rank, step)


def grads(model: DistributedDataParallel) -> dict[str, Tensor]:
    return copied((name, p.grad) for name, p in model.module.named_parameters())


# ------------------------------------------------------------------------------------------- ways to make a step


def plainly(model: Any, rank: int, step: int) -> None:
    loss(model, rank, step).backward()


def in_three_parts(model: Any, rank: int, step: int) -> None:
    for part in range(3):
        with model.no_sync() if part < 2 else contextlib.nullcontext():
            loss(model, rank, 10 * step + part).backward()


def twice_through_one_graph(model: Any, rank: int, step: int) -> None:
    with model.no_sync():
        total = loss(model, rank, step)
        total.backward(retain_graph=True)
        (3 * total).backward()
    loss(model, rank, step + 50).backward()


WAYS: dict[str, Callable[[Any, int, int], None]] = {
    way.__name__: way for way in (plainly, in_three_parts, twice_through_one_graph)
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train(
    model: DistributedDataParallel, rank: int, way: str, *, clip: bool, to_none: bool
) -> Iterator[dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        WAYS[way](model, rank, step)
        yield grads(model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def as_ddp(rank: int, world_size: int, way: str, option: str, kinds: dict[str, bool]) -> bool:
    """Whether every gradient has the bits that DDP alone gives it."""
    plain, ours = wrapped(**OPTIONS[option]), wrapped(**OPTIONS[option])
    thinwire.attach(ours, "dense")
    runs = zip(train(plain, rank, way, **kinds), train(ours, rank, way, **kinds), strict=True)
    return all(torch.equal(a, b) for theirs, mine in runs for a, b in zip(theirs.values(), mine.values(), strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_dense_is_ddp_to_the_bit(pools: Pools, world_size: int, way: str) -> None:
    kinds = {"clip": way == "plainly", "to_none": way != "plainly"}
    assert pools(world_size).run(as_ddp, way, "default", kinds) == [True] * world_size


@pytest.mark.parametrize("option", ["bucket view", "static", "unused"])
def test_dense_is_ddp_to_the_bit_with(pools: Pools, option: str) -> None:
    """On two ranks: on three DDP itself divides a bucket that gradients point to in another way than one it fills."""
    way = "plainly" if option == "static" else "in_three_parts"
    for to_none in (False, True):
        assert pools(2).run(as_ddp, way, option, {"clip": False, "to_none": to_none}) == [True, True]


def with_memory(rank: int, world_size: int, recipe: str, way: str, option: str) -> dict[str, Any]:
    """Clipped, with gradients set to zero and not to None: the link sees neither."""
    ledger = Ledger(wrapped(**OPTIONS[option]), recipe, exempt=())
    ledger.local.no_sync = contextlib.nullcontext
    optimizer = torch.optim.SGD(ledger.ddp.parameters(), lr=1e-3)
    for step in range(STEPS):
        ledger.enter(whole_step(way, rank, step))
        optimizer.zero_grad(set_to_none=False)
        WAYS[way](ledger.ddp, rank, step)
        ledger.receive()
        nn.utils.clip_grad_norm_(ledger.ddp.parameters(), 1.0)
        optimizer.step()
    return ledger.books()


class _Ran:
    """A loss whose backward is a whole step."""

    def __init__(self, backward: Callable[[], None]) -> None:
        self.backward = backward


def whole_step(way: str, rank: int, step: int) -> Loss:
    return lambda module: _Ran(lambda: WAYS[way](module, rank, step))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("option", ["default", "bucket view", "unused"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_make_a_step_feeds_memory(pools: Pools, way: str, option: str, recipe: str) -> None:
    assert_nothing_lost(pools(2).run(with_memory, recipe, way, option))


def whole_top_k(rank: int, world_size: int) -> float:
    plain, ours = wrapped(), wrapped()
    thinwire.attach(ours, "top_k:1|all_gather", exempt=())
    worst = 0.0
    for step in range(STEPS):
        for model in (plain, ours):
            model.zero_grad()
            plainly(model, rank, step)
        for theirs, mine in zip(grads(plain).values(), grads(ours).values(), strict=True):
            worst = max(worst, float((theirs - mine).abs().max() / theirs.abs().max()))
    return worst


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_of_top_k_is_dense(pools: Pools, world_size: int) -> None:
    assert max(pools(world_size).run(whole_top_k)) < 1e-6


# --------------------------------------------------------------------------------------------------------- exempt


def exempted(rank: int, world_size: int) -> dict[str, Any]:
    """For every preset, how far the mean of every parameter is from DDP's."""
    plain = wrapped()
    plainly(plain, rank, 0)
    found: dict[str, Any] = {}
    for preset in PRESETS:
        ours = wrapped()
        link = thinwire.attach(ours, preset)
        plainly(ours, rank, 0)
        theirs, mine = grads(plain), grads(ours)
        found[preset] = {name: float((mine[name] - g).abs().max() / g.abs().max()) for name, g in theirs.items()}
        found[f"{preset} bits"] = mine
        link.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_small_parameters_are_exact_with_every_preset(pools: Pools, world_size: int) -> None:
    """To a few units in the last place: a sum over ranks has another order in another message."""
    ranks = pools(world_size).run(exempted)
    matrices = {"0.weight", "3.weight", "5.weight"}
    for preset in PRESETS:
        errors = ranks[0][preset]
        assert max(error for name, error in errors.items() if name not in matrices) <= 4e-7, preset
        assert (preset == "dense") == (min(errors[name] for name in matrices) == 0.0), preset
        assert_same_on_all([found[f"{preset} bits"] for found in ranks])


def exempt_by(rank: int, world_size: int, exempt: Any) -> dict[str, float]:
    plain, ours = wrapped(), wrapped()
    link = thinwire.attach(ours, "ef|top_k:0.05|bf16|all_gather", exempt=exempt)
    for model in (plain, ours):
        plainly(model, rank, 0)
    theirs, mine = grads(plain), grads(ours)
    for name, owed in ((name, link.residual(name)) for name in mine):
        assert owed.shape == mine[name].shape
    return {name: float((mine[name] - g).abs().max()) for name, g in theirs.items()}


@pytest.mark.parametrize("exempt", [(), ("3.weight",), "3.weight", ["0.bias", "6.weight"]])
def test_exempt_by_name(pools: Pools, exempt: Any) -> None:
    """What is not compressed owes nothing, and can be asked."""
    for errors in pools(2).run(exempt_by, exempt):
        exact = {exempt} if isinstance(exempt, str) else set(exempt)
        assert {name for name, error in errors.items() if error <= 1e-5} == exact


# ----------------------------------------------------------------------------------------- warm-up and set_recipe


def warmed_up(rank: int, world_size: int, recipe: str, steps: int) -> list[bool]:
    plain, ours = wrapped(), wrapped()
    attach(ours, recipe, warmup_steps=steps, exempt=())
    same = []
    for step in range(steps + 2):
        for model in (plain, ours):
            model.zero_grad()
            plainly(model, rank, step)
        same.append(all(map(torch.equal, grads(plain).values(), grads(ours).values())))
    return same


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("steps", [1, 3])
def test_warm_up_is_ddp_to_the_bit(pools: Pools, steps: int, recipe: str) -> None:
    assert pools(3).run(warmed_up, recipe, steps) == [[True] * steps + [False] * 2] * 3


def changed(rank: int, world_size: int, recipes: list[str], every: int) -> Any:
    """Another recipe every few steps; what is owed after each."""
    ledger = Ledger(wrapped(), recipes[0], exempt=())
    owed = []
    for place, recipe in enumerate(recipes):
        if place:
            ledger.link.set_recipe(recipe)
        for step in range(every):
            ledger.step(loss_of(rank, every * place + step))
        owed.append(sum(float(residual.abs().sum()) for residual in ledger.residuals().values()))
    return ledger.books(), owed


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "recipes",
    [
        [TOP_K, "powersgd-4", "ef|abs_max:4|all_gather", "ar-top-k"],
        [TOP_K, "dense", TOP_K, "dense", "powersgd-4"],
        ["dense", "powersgd-4", "dense", "dense"],
        ["powersgd-4", "top_k:1|all_gather"],
        ["two-shot-2-ef", "dense"],
        ["two-shot-2-ef", TOP_K],
        [EXACT, "dense"],
        [EXACT, TOP_K],
    ],
)
def test_another_recipe_owes_what_the_last_one_did(pools: Pools, recipes: list[str], every: int) -> None:
    """A recipe without memory sends it with its first step. `every` counts steps, before or after other buckets."""
    books, owed = zip(*pools(2).run(changed, recipes, every), strict=True)
    assert_nothing_lost(books)
    for recipe, left in zip(recipes, owed[0], strict=True):
        assert (left > 0) == (recipe == EXACT or thinwire.parse(recipe).memory is not None)


def with_feedback_only(rank: int, world_size: int, recipe: str, steps: int) -> tuple[float, float]:
    """What second shots kept back, and how much of it is missing when gradients of zero have brought it."""
    model = wrapped()
    link = thinwire.attach(model, "rotated:2|two_shot:3,feedback=true", exempt=())
    for step in range(steps):
        model.zero_grad()
        plainly(model, rank, step)
    kept = sum(float(back.sum(dtype=torch.float64)) for back in link.reducer.residuals.backs.values())
    total = torch.tensor(kept, dtype=torch.float64)
    dist.all_reduce(total)
    link.set_recipe(recipe)
    model.zero_grad()
    (0 * loss(model, rank, steps)).backward()
    brought = sum(float(grad.sum(dtype=torch.float64)) for grad in grads(model).values())
    return float(total), brought


@pytest.mark.parametrize("recipe", ["dense", "ef|top_k:1|all_gather"])
@pytest.mark.parametrize("steps", [1, 3])
def test_another_recipe_owes_what_second_shots_kept_back(pools: Pools, recipe: str, steps: int) -> None:
    """Also where there was no memory beside them."""
    for kept, brought in pools(2).run(with_feedback_only, recipe, steps):
        assert abs(kept) > 1e-3
        assert brought == pytest.approx(kept, rel=1e-3)


def changed_in_backward(rank: int, world_size: int, recipe: str) -> Any:
    ledger = Ledger(wrapped(), recipe, exempt=())
    told: list[str] = []

    def change(grad: Tensor) -> None:
        try:
            ledger.link.set_recipe("dense")
        except thinwire.AttachError as refusal:
            told.append(str(refusal))

    first = ledger.module[0].weight
    for step in range(STEPS):
        hook = first.register_hook(change) if step == 2 else None  # buckets of later layers are under way by then
        ledger.step(loss_of(rank, step))
        if hook is not None:
            hook.remove()
    return ledger.books(), told, ledger.link.chooses or str(ledger.link.recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_other_recipe_during_backward(pools: Pools, recipe: str) -> None:
    books, told, recipes = zip(*pools(2).run(changed_in_backward, recipe), strict=True)
    assert told == (["set_recipe was called during backward: call it between steps"],) * 2
    assert recipes == (recipe == EXACT or str(thinwire.parse(TOP_K)),) * 2
    assert_nothing_lost(books)


# ------------------------------------------------------------------------------------------- refusals and copies


def refused(rank: int, world_size: int) -> dict[str, Any]:
    """Every refusal comes before any rank waits for another: they are only tried on rank 0."""
    if rank:
        return {}
    alone = dist.new_group([0], use_local_synchronization=True)
    told: dict[str, Any] = {}
    others = lanes()

    def fresh(**options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(layers(), process_group=alone, **options)

    def attempt(what: str, model: Any, recipe: Any = TOP_K, **options: Any) -> None:
        try:
            thinwire.attach(model, recipe, **options)
        except Exception as refusal:
            told[what] = f"{type(refusal).__name__}: {refusal}"

    attempt("plain module", layers())
    attempt("compiled module", torch.compile(layers(), backend="eager"))
    attempt("local", fresh(), "ef|top_k:0.05|local")
    attempt("no recipe", fresh(), 7)
    attempt("unknown preset", fresh(), "two-shot-5")
    attempt("exempt", fresh(), exempt=["0.weight", "9.weight"])
    attempt("frozen exempt", fresh(), exempt=["module.0.weight"])
    attempt("warm-up", fresh(), warmup_steps=-1)
    twice = fresh()
    thinwire.attach(twice, TOP_K)
    attempt("twice", twice)
    other = fresh()
    other.register_comm_hook(None, default_hooks.allreduce_hook)
    attempt("another hook", other)
    builtin = fresh()
    builtin._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    attempt("a hook in C++", builtin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.nn.parallel.distributed import _MixedPrecision

        attempt("mixed precision", fresh(mixed_precision=_MixedPrecision(param_dtype=torch.float32)))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        attempt("python reducer", fresh())
    del twice
    gc.collect()
    told["lanes"] = len(lanes() - others)
    return told


REFUSALS = {
    "plain module": "AttachError: attach needs a DistributedDataParallel model, not Sequential: wrap it first",
    "compiled module": "AttachError: attach needs a DistributedDataParallel model, not OptimizedModule: wrap it first",
    "local": "AttachError: local stays in one process",
    "no recipe": "AttachError: attach takes a recipe, its text or the name of a preset, not 7",
    "unknown preset": "RecipeError: there is no preset two-shot-5: did you mean",
    "exempt": "OptionError: exempt names 9.weight, which the model does not train: it has 0.weight",
    "frozen exempt": "OptionError: exempt names module.0.weight, which the model does not train",
    "warm-up": "OptionError: warmup_steps is a number of steps, 0 or more, not -1",
    "twice": "AttachError: a DDP model takes one communication hook only, and thinwire is attached: use link.set",
    "another hook": "AttachError: a DDP model takes one communication hook only, and it has one: build the model anew",
    "a hook in C++": "AttachError: a DDP model takes one communication hook only, and it has one: build the model anew",
    "mixed precision": "AttachError: DistributedDataParallel(mixed_precision=...) uses the only communication hook",
    "python reducer": 'AttachError: torch._dynamo.config.optimize_ddp = "python_reducer" calls hooks for single',
}


def test_refusals(pools: Pools) -> None:
    told = pools(2).run(refused)[0]
    assert set(REFUSALS) | {"lanes"} == set(told)
    for what, sentence in REFUSALS.items():
        assert told[what].startswith(sentence), what
    assert told["lanes"] == 0


def copies(rank: int, world_size: int, recipe: str) -> Any:
    """A copy of a DDP model has no hook in C++, whatever its Python list says."""
    ddp = wrapped()
    attach(ddp, recipe)
    plainly(ddp, rank, 0)
    told, counts = [], []
    for make in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = make(ddp)
        told.append([str(warning.message) for warning in caught if "thinwire" in str(warning.message)])
        link = attach(again, recipe)
        for model in (again, ddp):
            model.zero_grad()
            plainly(model, rank, 1)
            counts.append(int(model.module[3].weight.grad.count_nonzero()))
        assert link.step == 1
    return told, counts


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_warns_and_can_be_attached_to(pools: Pools, recipe: str) -> None:
    for told, counts in pools(2).run(copies, recipe):
        for messages in told:
            assert len(messages) == 1
            assert "call thinwire.attach on the copy" in messages[0]
        assert all(0 < count < (WIDTH * WIDTH // 2 if recipe == TOP_K else math.inf) for count in counts)


def test_ddp_accepts_the_hook() -> None:
    """DDP compares annotations with objects, which `from __future__ import annotations` would turn into text."""
    signature = inspect.signature(hook_module.thinwire_hook)
    assert list(signature.parameters)[1] == "bucket"
    assert signature.parameters["bucket"].annotation is GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert not hasattr(hook_module, "annotations")


# ------------------------------------------------------------------------------------------ sinks, and the end


def observed_by_one(rank: int, world_size: int, recipe: str) -> Any:
    """As with a progress bar or TensorBoard: only rank 0 looks."""
    records = Records()
    ledger = Ledger(wrapped(), recipe, sinks=[records] if rank == 0 else [], exempt=())
    for step in range(STEPS):
        ledger.step(loss_of(rank, step))
    return ledger.books(), len(records.entries)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sink_on_one_rank_only(pools: Pools, recipe: str) -> None:
    books, entries = zip(*pools(2).run(observed_by_one, recipe, deadline=40.0), strict=True)
    assert_nothing_lost(books)
    assert entries == (STEPS, 0)


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("thinwire-lane-")}


def sockets() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("socket:") for link in links)


def ended(rank: int, world_size: int, recipe: str, way: str) -> Any:
    plain = wrapped()
    plainly(plain, rank, 0)  # whatever the group opens late is open now
    gc.collect()
    before, others = sockets(), lanes()
    busy = []
    for _ in range(3):
        model = wrapped()
        link = attach(model, recipe)
        for step in range(3):
            plainly(model, rank, step)
        busy.append((lanes() > others, sockets() > before))
        if way == "close":
            link.close()
            try:
                plainly(model, rank, 3)
            except thinwire.AttachError as closed:
                assert "the link was closed" in str(closed)  # noqa: PT017
        del model, link
        gc.collect()
        dist.barrier()
    return busy, len(lanes() - others), sockets() - before


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["close", "del"])
def test_nothing_stays_behind(pools: Pools, way: str, recipe: str) -> None:
    for busy, left_lanes, left_sockets in pools(2).run(ended, recipe, way):
        assert busy == [(True, True)] * 3
        assert left_lanes == 0
        assert left_sockets <= 0


def outlived(rank: int, world_size: int, recipe: str) -> int:
    """A program that begins anew, as elastic ones do, with a link of the old group still around."""
    others = lanes()
    model = wrapped()
    link = attach(model, recipe)
    plainly(model, rank, 0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    link.close()
    again = wrapped()
    attach(again, recipe)
    plainly(again, rank, 0)
    del model, link
    gc.collect()
    return len(lanes() - others)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_link_that_outlives_its_group(pools: Pools, recipe: str) -> None:
    assert pools(1).run(outlived, recipe) == [2]  # those of the new one
