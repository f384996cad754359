"""The public Reducer between real processes: any tensor, several in flight, whole steps or no trace, resumed runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from support.pool import Pool
from thinwire.exchange import shards

Pools = Callable[[int], Pool]
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (40, 30),
    "long": (5000,),
    "scalar": (),
    "empty": (0, 3),
    "cube": (4, 5, 6),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def given(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=numbers).to(dtype) for name, shape in SHAPES.items()}


def in_flight(rank: int, world_size: int, recipe: str, dtype: torch.dtype) -> list[Any]:
    reducer, seen = tw.Reducer(recipe, check_every=1), []
    for step in range(3):
        tensors = given(rank, step, dtype)
        works = {name: reducer.start(name, tensor) for name, tensor in tensors.items()}
        means = {name: work.wait() for name, work in reversed(works.items())}  # in any order
        assert reducer.commit() is True
        for name, tensor in tensors.items():
            assert means[name].shape == tensor.shape
            assert means[name].dtype == tensor.dtype
            assert torch.equal(tensor, given(rank, step, dtype)[name])  # what was given is untouched
        seen.append({name: mean.tolist() for name, mean in means.items()})
    reducer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    return seen


@pytest.mark.parametrize("recipe", ["dense", "bf16", "two-shot-4", "threshold-k", "ar-top-k", "global-qsgd-8"])
def test_several_tensors_in_flight(pools: Pools, recipe: str) -> None:
    for seen in (results := pools(3).run(in_flight, recipe, torch.float32)):
        assert seen == results[0]  # the same bits on all ranks
    mean = [torch.stack([given(rank, step)["matrix"] for rank in range(3)]).mean(0) for step in range(3)]
    if recipe in ("dense", "bf16"):
        for step in range(3):
            torch.testing.assert_close(torch.tensor(results[0][step]["matrix"]), mean[step], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ["dense", "two-shot-8", "top-k"])
def test_any_float_dtype(pools: Pools, recipe: str, dtype: torch.dtype) -> None:
    results = pools(2).run(in_flight, recipe, dtype)
    assert results[0] == results[1]


def together(rank: int, world_size: int) -> Any:
    """Several tensors as one message, some exact, written over what was given."""
    reducer = tw.Reducer("ef|top_k:0.1|bf16|all_gather")
    tensors = given(rank, 0)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    means = reducer.start("all", tensors, exact=["scalar", "cube"], out=tensors).wait()
    reducer.commit()
    assert all(means[name] is tensors[name] for name in tensors)
    assert reducer.network.traffic.calls <= 4 + 3  # agreement, and nothing else by the group itself
    reducer.close()
    return {name: mean.tolist() for name, mean in means.items()}, {n: t.tolist() for n, t in expected.items()}


def test_tensors_that_travel_together(pools: Pools) -> None:
    results = pools(2).run(together)
    assert results[0][0] == results[1][0]
    for name in ("scalar", "cube"):
        mean = (torch.tensor(results[0][1][name]) + torch.tensor(results[1][1][name])) / 2
        torch.testing.assert_close(torch.tensor(results[0][0][name]), mean)
    assert torch.tensor(results[0][0]["long"]).count_nonzero() <= 2 * 623


def void(rank: int, world_size: int, recipe: str) -> bool:
    """A step that one rank says to skip, or that is not finite somewhere, leaves no trace."""
    reducer = tw.Reducer(recipe)
    for step in range(2):
        for name, tensor in given(rank, step).items():
            reducer.reduce(name, tensor)
        reducer.commit()
    before = [reducer.residual(name) for name in SHAPES]
    for name, tensor in given(rank, 2).items():
        reducer.reduce(name, tensor)
    assert reducer.commit(finite=False) is False
    for name, tensor in given(rank, 3).items():
        reducer.reduce(name, tensor if rank or name != "cube" else tensor * float("nan"))
    assert reducer.commit() is False
    after = [reducer.residual(name) for name in SHAPES]
    reducer.close()
    return all(torch.equal(*pair) for pair in zip(before, after, strict=True)) and any(bool(r.any()) for r in before)


@pytest.mark.parametrize("recipe", ["threshold-k", "dgc", "ar-top-k", "ef|abs_max:4|two_shot:8,feedback=true"])
def test_a_void_step_leaves_no_trace(pools: Pools, recipe: str) -> None:
    assert pools(2).run(void, recipe) == [True, True]


def saved_and_resumed(rank: int, world_size: int, recipe: str) -> bool:
    def run(reducer: tw.Reducer, steps: range) -> list[Any]:
        found = []
        for step in steps:
            found.append([reducer.reduce(name, tensor).tolist() for name, tensor in given(rank, step).items()])
            reducer.commit()
        return found

    first = tw.Reducer(recipe, seed=3)
    run(first, range(3))
    state = first.state_dict()
    expected = run(first, range(3, 6))
    first.close()
    second = tw.Reducer(recipe, seed=3)
    assert second.load_state_dict(state) == {}
    resumed = run(second, range(3, 6))
    second.close()
    return resumed == expected


@pytest.mark.parametrize("recipe", ["threshold-k", "powersgd-4", "two-shot-2-ef", "qsgd-4", "dgc"])
def test_resumes_bit_for_bit(pools: Pools, recipe: str) -> None:
    assert pools(2).run(saved_and_resumed, recipe) == [True, True]


def damaged_on_one_rank(rank: int, world_size: int) -> tuple[str, bool]:
    reducer = tw.Reducer("threshold-k")
    reducer.reduce("w", given(rank, 0)["matrix"])
    reducer.commit()
    state, before = reducer.state_dict(), reducer.residual("w")
    if rank == 1:
        state[f"1of{world_size}"]["info"] = "no JSON"
    told = ""
    try:
        reducer.load_state_dict(state)
    except tw.StateError as refusal:
        told = str(refusal)
    untouched = torch.equal(reducer.residual("w"), before) and reducer.step == 1
    reducer.reduce("w", given(rank, 1)["matrix"])  # nobody waits for anybody
    reducer.commit()
    reducer.close()
    return told, untouched


def test_a_state_that_one_rank_cannot_load_is_loaded_by_none(pools: Pools) -> None:
    results = pools(3).run(damaged_on_one_rank)
    assert all(untouched for _, untouched in results)
    assert "damaged" in results[1][0]
    for rank in (0, 2):
        assert results[rank][0] == "rank 1 cannot load its state, so no rank does: its error says why"


def changing(rank: int, world_size: int) -> Any:
    reducer, total = tw.Reducer("ef|top_k:0.02|all_gather"), torch.zeros(40, 30)
    sent = torch.zeros(40, 30)
    for step, recipe in enumerate(["ef|threshold_k:0.1|all_gather", "ef|top_k:0.1|shared_top_k", "dense", "dense"]):
        tensor = given(rank, step)["matrix"]
        sent += reducer.reduce("matrix", tensor)
        reducer.commit()
        total += tensor
        reducer.set_recipe(recipe)
    sent += reducer.reduce("matrix", torch.zeros(40, 30))
    reducer.commit()
    reducer.close()
    return sent, total


def test_residuals_survive_a_switch(pools: Pools) -> None:
    results = pools(2).run(changing)
    torch.testing.assert_close(results[0][0], (results[0][1] + results[1][1]) / 2, rtol=1e-4, atol=1e-4)


def scattered(rank: int, world_size: int, recipe: str) -> Any:
    reducer = tw.Reducer(recipe)
    tensor = given(rank, 0)["matrix"]
    mine = reducer.reduce_scatter("matrix", tensor)
    reducer.commit()
    whole = reducer.network.all_gather(tensor).mean(0).view(-1)
    reducer.close()
    error = (mine - whole[shards(tensor.numel(), world_size)[rank]]).norm() / whole.norm()
    return float(error), mine.numel()


@pytest.mark.parametrize(
    ("recipe", "bound"), [("dense", 1e-6), ("bf16", 0.01), ("two-shot-8", 0.02), ("global-qsgd-8", 0.1)]
)
def test_reduce_scatter(pools: Pools, recipe: str, bound: float) -> None:
    results = pools(3).run(scattered, recipe)
    assert sum(count for _, count in results) == 1200
    assert all(error < bound for error, _ in results)


def misused(rank: int, world_size: int) -> list[str]:
    told = []

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except tw.ThinwireError as refusal:
            told.append(f"{type(refusal).__name__}: {refusal}")

    reducer = tw.Reducer("ef|top_k:0.1|all_gather")
    attempt(lambda: tw.Reducer("two-shot-5"))
    attempt(lambda: tw.Reducer("top_k:0.1|local"))
    attempt(lambda: tw.Reducer("dense", check_every=-1))
    attempt(lambda: reducer.start("codes", torch.arange(3)))
    reducer.reduce("w", torch.ones(4))
    attempt(lambda: reducer.reduce("w", torch.ones(4)))
    attempt(lambda: reducer.set_recipe("dense"))
    reducer.commit()
    attempt(lambda: reducer.reduce("w", torch.ones(5)))
    attempt(lambda: reducer.residual("v"))
    reducer.close()
    attempt(lambda: reducer.reduce("w", torch.ones(4)))
    return told


def test_misuse_is_answered_in_one_sentence(pools: Pools) -> None:
    for told in pools(2).run(misused):
        assert [one.split(":")[0] for one in told] == [
            "RecipeError",
            "AttachError",
            "OptionError",
            "OptionError",
            "OptionError",
            "AttachError",
            "OptionError",
            "StateError",
            "AttachError",
        ]
        assert "commit() before the next" in told[4]
        assert "other shapes" in told[6]


def disagreeing(rank: int, world_size: int) -> str:
    try:
        tw.Reducer("bf16|all_reduce" if rank else "dense")
    except tw.AttachError as refusal:
        return str(refusal)
    return ""


def test_ranks_must_agree(pools: Pools) -> None:
    for told in pools(2).run(disagreeing):
        assert "the ranks disagree on the recipe: rank 0 has fp32|all_reduce, rank 1 has bf16|all_reduce" in told


def own_codec(rank: int, world_size: int) -> list[Any]:
    """A codec that only this program knows, in every exchange that its declaration allows."""

    @tw.codecs.register
    class Nibbles(tw.codecs.Codec):
        """The top 16 bits of every number."""

        name = "nibbles"
        sum_dtype = torch.bfloat16

        def body_bytes(self, numel: int, *, shape: tuple[int, ...] | None = None) -> int:
            return 2 * numel

        def delta(self, numel: int, *, shape: tuple[int, ...] | None = None) -> float:
            return 0.98

        def write(self, x: Tensor, body: Tensor, key: Any, state: Any) -> None:
            body.view(torch.bfloat16).copy_(x.reshape(-1))

        def add_body(self, body: Tensor, out: Tensor, key: Any, shape: tuple[int, ...]) -> None:
            out += body.view(torch.bfloat16)

        def to_sum(self, x: Tensor) -> Tensor:
            return x.reshape(-1).to(torch.bfloat16)

    try:
        seen = []
        for recipe in (
            "nibbles|all_gather",
            "nibbles|two_shot",
            "ef|nibbles|all_reduce",
            "ef|top_k:0.5|nibbles|shared_top_k",
        ):
            reducer = tw.Reducer(recipe, check_every=1)
            seen.append(reducer.reduce("w", given(rank, 0)["matrix"]).tolist())
            reducer.commit()
            reducer.close()
        return seen
    finally:
        tw.codecs.unregister("nibbles")


def test_a_codec_of_ones_own(pools: Pools) -> None:
    results = pools(2).run(own_codec)
    assert results[0] == results[1]
    mean = (given(0, 0)["matrix"] + given(1, 0)["matrix"]) / 2
    for delivered in results[0][:3]:
        torch.testing.assert_close(torch.tensor(delivered), mean, rtol=0.02, atol=0.02)


def by_auto(rank: int, world_size: int) -> Any:
    """`auto` in a loop of one's own: no DDP tells when forward begins."""
    reducer = tw.Reducer("dense", policy=tw.auto(allow=["bf16", "two-shot-4", "threshold-k"]), check_every=5)
    for step in range(12):
        tensors = given(rank, step)
        works = [reducer.start(name, tensor) for name, tensor in tensors.items()]
        means = [work.wait() for work in works]
        reducer.commit()
    stats = reducer.stats()
    state = reducer.state_dict()
    reducer.close()
    return [mean.tolist() for mean in means], "auto/changes" in stats, bool(state)


def test_auto_as_policy(pools: Pools) -> None:
    results = pools(2).run(by_auto)
    assert results[0] == results[1]
    assert results[0][1:] == (True, True)
