"""A gradient that is not finite on one rank: every rank sees it in that step, and no rank afterwards.

All runs are of the same model: five parameters that travel compressed and five exact ones, in several buckets.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.forced_auto import EXACT, MIXED, attach
from support.ledger import grad_of, owed
from support.pool import Pool
from support.runs import MANY, ONE_OF_A_KIND, Tree, assert_same
from thinwire import Link

Pools = Callable[[int], Pool]
Poison = tuple[int, int, str, float]  # step, rank, parameter, what one element of its gradient becomes

PRESETS = {
    "dense": 2,
    "bf16": 3,
    "global-qsgd-8": 3,
    "global-qsgd-exp": 3,
    "qsgd-4": 2,
    "two-shot-8": 3,
    "two-shot-4": 2,
    "two-shot-2-ef": 3,
    "two-shot-1": 3,
    "two-shot-top-k": 3,
    "gaussian-k": 2,
    "threshold-k": 3,
    "top-k": 2,
    "ar-top-k": 3,
    "ar-top-k-var": 3,
    "dgc": 3,
    "powersgd-4": 3,
    "ef|random_k:0.05,scaled=false,shared=true|all_reduce": 3,
    "ef|global_qsgd:8,block=256|all_reduce": 2,
    "ef|global_qsgd:8,dither=exponential|all_reduce": 3,
    "ef:0.9|abs_max:4,block=64|two_shot": 2,
    EXACT: 3,
    MIXED: 2,
}
FORCED = (EXACT, MIXED)
MARKED = {name: [] if name in ONE_OF_A_KIND or name in FORCED else [pytest.mark.slow] for name in PRESETS}
REMEMBERING = [name for name in PRESETS if name in FORCED or thinwire.parse(name).memory is not None]
BAD = 4  # the step that overflows
STEPS = 8


class Net(nn.Module):
    """Used in another order than made, so that DDP's buckets are not the ones that were planned."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 40)
        self.middle = nn.Linear(96, 64)
        self.first = nn.Linear(48, 96)
        self.norm = nn.LayerNorm(96)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        out: Tensor = self.last(torch.tanh(self.middle(x)))
        return out


class Run:
    """A model in training, whose gradients can be spoilt."""

    def __init__(
        self, recipe: str, rank: int, poisons: Sequence[Poison] = (), scaler: Any = None, follows: bool = True
    ):
        torch.manual_seed(0)
        self.net, self.rank, self.scaler, self.now = Net(), rank, scaler, 0
        for at, where, name, value in poisons:
            if where == rank:
                self.net.get_parameter(name).register_hook(self._spoiler(at, value))
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=MANY)
        self.link = attach(self.model, recipe, scaler=scaler if follows else None)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def _spoiler(self, at: int, value: float) -> Callable[[Tensor], Tensor | None]:
        held = weakref.ref(self)  # a hook of a parameter that holds its model is never collected, nor are its sockets

        def spoil(gradient: Tensor) -> Tensor | None:
            run = held()
            if run is None or run.now != at:
                return None
            gradient = gradient.clone()
            gradient.view(-1)[7] = value
            return gradient

        return spoil

    def step(self) -> bool:
        """Whether the gradients were finite, which is when the optimizer takes its step."""
        numbers = torch.Generator().manual_seed(1000 * self.now + self.rank)
        loss = self.model(torch.randn(8, 48, generator=numbers)).square().mean()
        self.optimizer.zero_grad()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.now += 1
        finite = all(bool(grad_of(p).isfinite().all()) for p in self.net.parameters())
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()
        return finite

    def skip(self) -> None:
        """As if this step had never been, except for its number: random draws, leaders and decisions follow that."""
        self.now += 1
        if self.link.chooses:
            self.link.reducer.commit(finite=False)  # a step without gradients
        else:
            self.link.reducer.step += 1

    def memory(self) -> Tree:
        return remembered(self.link)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}


def remembered(link: Link) -> Tree:
    """All that a link carries from one step to the next, copied."""
    residuals = link.reducer.residuals
    memory = residuals.memory
    kept = {} if memory is None else {name: dict(memory.tensors(name)) for name in memory.names()}
    owed = {parameter.name: link.residual(parameter.name) for parameter in link.layout.parameters}
    return copied({"kept": kept, "residuals": owed, "states": residuals.states, "backs": residuals.backs})


def copied(tree: Tree) -> Tree:
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else tree


def assert_finite(tree: Tree, where: str = "") -> None:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            assert_finite(value, f"{where}/{key}")
    elif isinstance(tree, (Tensor, float)):
        assert bool(torch.as_tensor(tree).isfinite().all()), where


# ------------------------------------------------------------------------------------------------ no trace is left


def overflowing_runs(rank: int, world_size: int, recipe: str) -> list[Tensor]:
    """The same run with four kinds of a spoilt step, and one that never had that step: all must end the same."""
    last = world_size - 1
    spoilt = {
        "inf": [(BAD, 0, "middle.weight", math.inf)],
        "-inf on the last rank": [(BAD, last, "first.weight", -math.inf)],
        "nan in another bucket": [(BAD, last, "last.weight", math.nan)],
        "only an exact parameter": [(BAD, 0, "norm.bias", math.inf)],
        "everywhere": [(BAD, r, name, math.nan) for r in range(world_size) for name in ("last.weight", "first.bias")],
    }
    ends, after = {}, None
    for kind, poisons in {"skipped": [], **spoilt}.items():
        run = Run(recipe, rank, poisons)
        for _ in range(BAD):
            assert run.step()
        assert run.link.layout_is_final
        assert len(run.link.layout.buckets) > 1
        before = run.memory()
        if kind == "skipped":
            run.skip()
        else:
            assert not run.step(), f"rank {rank} did not see {kind}"
        if recipe in FORCED:  # another recipe may begin with that step, and takes over what was owed
            after = after or run.memory()
        assert_same(run.memory(), after or before, f"{recipe}, {kind}: memory")
        for _ in range(BAD + 1, STEPS):
            assert run.step(), f"{recipe}, {kind}: step {run.now - 1} is not clean"
        assert_finite(run.memory(), f"{recipe}, {kind}")
        ends[kind] = run.memory() | {"parameters": run.parameters()}
        run.link.close()
    for kind in spoilt:
        assert_same(ends[kind], ends["skipped"], f"{recipe}, {kind}")
    return list(ends["skipped"]["parameters"].values())


@pytest.mark.parametrize(
    ("recipe", "world_size"), [pytest.param(name, n, marks=MARKED[name]) for name, n in PRESETS.items()]
)
def test_an_overflow_leaves_no_trace(pools: Pools, recipe: str, world_size: int) -> None:
    replicas = pools(world_size).run(overflowing_runs, recipe)
    for replica in replicas[1:]:
        assert all(map(torch.equal, replica, replicas[0]))


def overflow_at_start(rank: int, world_size: int, recipe: str, at: int) -> list[Tensor]:
    """In the first steps DDP changes its buckets, and memories move to other buckets."""
    ends = []
    for name, value in (("middle.weight", math.inf), ("first.bias", math.nan)):
        run = Run(recipe, rank, [(at, world_size - 1, name, value)])
        for step in range(BAD):
            before, sums = run.memory()["residuals"], owed(run.link)
            assert run.step() == (step != at)
            if step == at and recipe in FORCED:  # other buckets take over what second shots kept back
                torch.testing.assert_close(owed(run.link), sums, rtol=1e-6, atol=1e-9)
            elif step == at:
                assert_same(run.memory()["residuals"], before)
        ends.append(run.memory() | {"parameters": run.parameters()})
        run.link.close()
    assert_finite(ends)
    assert_same(*ends)
    return list(ends[0]["parameters"].values())


@pytest.mark.parametrize("recipe", ["threshold-k", "dgc", "powersgd-4", "ar-top-k", "two-shot-8", EXACT])
def test_an_overflow_in_the_first_steps(pools: Pools, recipe: str) -> None:
    for at in range(3):
        replicas = pools(3).run(overflow_at_start, recipe, at)
        assert all(map(torch.equal, replicas[0], replicas[-1]))


def huge_but_finite(rank: int, world_size: int, recipe: str, value: float, ranks: int) -> list[bool]:
    """Where a codec or a sum leaves float32, this is an overflow as well; else the step is as good as any other."""
    where = [(r, name) for r in range(ranks) for name in ("middle.weight", "first.weight")]
    run = Run(recipe, rank, [(at, r, name, value) for at in (BAD, BAD + 1) for r, name in where])
    run.optimizer.param_groups[0]["lr"] = 0.0
    seen = []
    for _ in range(BAD + 2):
        before, sums = run.memory(), owed(run.link)
        seen.append(run.step())
        if seen[-1]:
            assert_finite(run.memory(), recipe)
        elif recipe in FORCED:  # another recipe may begin with that step, and takes over what was owed
            torch.testing.assert_close(owed(run.link), sums, rtol=1e-6, atol=1e-9)
        else:
            assert_same(run.memory(), before, recipe)
    run.link.close()
    return seen


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=MARKED[name]) for name in PRESETS])
def test_numbers_near_the_end_of_float32(pools: Pools, recipe: str) -> None:
    for value, ranks in ((3.0e38, 1), (3.0e38, 3), (-1.0e36, 1)):
        seen = pools(3).run(huge_but_finite, recipe, value, ranks)
        assert seen[0] == seen[1] == seen[2]
        assert all(seen[0][:BAD])


# ------------------------------------------------------------------------------------------------------ GradScaler


def with_grad_scaler(rank: int, world_size: int, recipe: str, follows: bool) -> dict[str, Any]:
    """Against a run without a scaler that leaves out what the scaler leaves out: powers of two change no bit."""
    bad = [(3, 0, "middle.weight", math.inf), (7, world_size - 1, "norm.weight", math.nan)]
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    try:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, backoff_factor=0.25)
        run = Run(recipe, rank, bad, scaler, follows)
        plain = Run(recipe, rank)
        scales, same = [], []
        for step in range(12):
            scales.append(scaler.get_scale())
            assert run.step() == (step not in (3, 7))
            if step in (3, 7):
                plain.skip()
            else:
                plain.step()
            owed, expected = (r.memory()["residuals"] for r in (run, plain))
            scale = run.link.scale if follows else 1.0
            parameters = zip(run.parameters().values(), plain.parameters().values(), strict=True)
            same.append(
                all(torch.equal(a, b) for a, b in parameters)
                and all(torch.equal(owed[name] / scale, expected[name]) for name in expected)
            )
        run.link.close()
        plain.link.close()
    finally:
        logger.removeHandler(handler)
    return {"scales": scales, "same": same, "warnings": warnings}


EXPECTED_SCALES = [2.0**exponent for exponent in (10, 10, 11, 11, 9, 9, 10, 10, 8, 8, 9, 9)]


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=MARKED[name]) for name in REMEMBERING])
def test_memories_follow_the_scale(pools: Pools, recipe: str) -> None:
    world_size = PRESETS[recipe]
    for seen in pools(world_size).run(with_grad_scaler, recipe, True):
        assert seen["scales"] == EXPECTED_SCALES  # every rank skipped the same steps
        assert seen["same"] == [True] * 12
        assert seen["warnings"] == []


def test_without_the_scaler_one_warning(pools: Pools) -> None:
    for seen in pools(3).run(with_grad_scaler, "top-k", False):
        assert seen["scales"] == EXPECTED_SCALES
        assert seen["same"][-1] is False  # which is why there is a warning
        [warning] = seen["warnings"]
        assert "not finite in step 3" in warning
        assert "attach(..., scaler=scaler)" in warning


def test_without_a_memory_nothing_to_warn_of(pools: Pools) -> None:
    for recipe in ("two-shot-8", "dense"):
        for seen in pools(3).run(with_grad_scaler, recipe, False):
            assert seen["scales"] == EXPECTED_SCALES
            assert seen["same"] == [True] * 12
            assert seen["warnings"] == []


def followed_later(rank: int, world_size: int) -> tuple[float, float]:
    """`link.follow`: from then on, and from the scale of that moment."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    run = Run("ar-top-k", rank, scaler=scaler, follows=False)
    for _ in range(3):
        run.step()
    run.link.follow(scaler)
    before = run.link.residual("middle.weight")
    scaler.update(2.0**6)
    run.optimizer.zero_grad()
    (run.model(torch.zeros(8, 48)).sum() * 0.0).backward()  # nothing is added, something is sent
    after = run.link.residual("middle.weight")
    unsent = after != 0
    run.link.close()
    return float((before[unsent] / after[unsent]).min()), float((before[unsent] / after[unsent]).max())


def test_follow_starts_at_the_scale_of_the_moment(pools: Pools) -> None:
    for ratios in pools(2).run(followed_later):
        assert ratios == (16.0, 16.0)
