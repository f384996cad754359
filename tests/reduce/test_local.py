"""The stand-in for a network: means as the recipe promises them, and memories that add up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thinwire import Draw, LocalGroup, OptionError, parse

RECIPES = [
    "all_reduce",
    "bf16|all_reduce",
    "fp8|all_gather",
    "qsgd:8,block=64|all_gather",
    "rotated:4|local",
    "ef|abs_max:4|all_gather",
    "ef|sign|all_gather",
    "ef|top_k:0.1|bf16|all_gather",
    "ef|threshold_k:0.1|bf16|all_gather",
    "ef|random_k:0.25,scaled=false|all_reduce",
    "ef|global_qsgd:8,block=64|all_reduce",
    "global_qsgd:8,dither=exponential,norm=l2|all_reduce",
    "global_qsgd:8|all_gather",
    "ef|low_rank:2|all_reduce",
    "ef|low_rank:2|bf16|all_gather",
    "dgc|top_k:0.1|all_gather",
]
SHAPES = {"weight": (16, 24), "bias": (24,), "scale": ()}


def gradients(world_size: int, step: int = 0, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        for _ in range(world_size)
    ]


def true_mean(ranks: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([rank[name].float() for rank in ranks]).mean(0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("text", RECIPES)
def test_every_recipe_gives_a_mean_of_the_right_kind(text: str, world_size: int) -> None:
    group = LocalGroup(parse(text), world_size)
    for step, dtype in enumerate((torch.float32, torch.bfloat16)):
        mean = group.mean(gradients(world_size, step, dtype), step)
        assert {name: tuple(tensor.shape) for name, tensor in mean.items()} == SHAPES
        assert all(tensor.dtype == dtype and torch.isfinite(tensor).all() for tensor in mean.values())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dense_is_the_mean(world_size: int) -> None:
    ranks = gradients(world_size)
    mean = LocalGroup(parse("all_reduce"), world_size).mean(ranks, 0)
    for name in SHAPES:
        torch.testing.assert_close(mean[name], true_mean(ranks, name))


@pytest.mark.parametrize("text", [text for text in RECIPES if text.startswith("ef|")])
def test_nothing_is_lost_between_the_ranks(text: str) -> None:
    """Sum of the means times n and of all residuals is the sum of all gradients."""
    n = 3
    group = LocalGroup(parse(text), n)
    given_in = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    delivered = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(10):
        ranks = gradients(n, step)
        for name, mean in group.mean(ranks, step).items():
            given_in[name] += sum(rank[name] for rank in ranks)
            delivered[name] += n * mean
    for name in SHAPES:
        kept = sum(memory.residual(name) for memory in group.memories)
        torch.testing.assert_close(delivered[name] + kept, given_in[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dither", ["linear", "exponential"])
@pytest.mark.parametrize("norm", ["linf", pytest.param("l2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.slow), 64])
def test_global_qsgd_shares_its_scale_and_is_unbiased(dither: str, norm: str, block: int) -> None:
    group = LocalGroup(parse(f"global_qsgd:8,dither={dither},norm={norm},block={block}|all_reduce"), 3)
    ranks = [rank["weight"] for rank in gradients(3)]
    draws = torch.stack([group.mean(ranks, step) for step in range(800)])
    error = draws.mean(0) - torch.stack(ranks).mean(0)
    assert (error.abs() <= 6 * draws.std(0) / math.sqrt(len(draws)) + 1e-6).all()


def test_linear_global_qsgd_is_a_whole_number_of_steps() -> None:
    recipe = parse("global_qsgd:8|all_reduce")
    ranks = [torch.tensor([1.0, 0.3]), torch.tensor([-4.0, 0.7])]
    mean = LocalGroup(recipe, 2).mean(ranks, 0)
    steps = mean * 2 / (4.0 / 63)  # 127 levels, halved for two ranks; the largest element of all ranks is 4
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)


def test_averaged_factors_are_those_of_the_mean() -> None:
    group, alone = LocalGroup(parse("low_rank:2|all_reduce"), 4), LocalGroup(parse("low_rank:2|all_reduce"), 1)
    for step in range(3):
        ranks = [rank["weight"] for rank in gradients(4, 7)]
        ours, theirs = group.mean(ranks, step), alone.mean([torch.stack(ranks).mean(0)], step)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", RECIPES)
def test_a_run_repeats_and_ranks_draw_differently(text: str) -> None:
    first, second = (LocalGroup(parse(text), 2, seed=3) for _ in range(2))
    for step in range(3):
        ours, theirs = first.mean(gradients(2, step), step), second.mean(gradients(2, step), step)
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def test_equal_gradients_are_not_rounded_alike_on_every_rank() -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    codec = parse("qsgd:2|all_gather").codec
    mean = LocalGroup(parse("qsgd:2|all_gather"), 2).mean([x, x], 0)
    assert not torch.equal(mean, codec.decode(codec.encode(x, draw=Draw(stream="gradient"))))


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("text", RECIPES)
def test_one_rank_that_is_not_finite_is_news_to_all_and_changes_no_memory(text: str, poison: float) -> None:
    group, clean = LocalGroup(parse(text), 3), LocalGroup(parse(text), 3)
    for each in (group, clean):
        each.mean(gradients(3, 0), 0)
    bad = gradients(3, 1)
    bad[1]["weight"][3, 4] = poison
    kept = [memory.residual("weight").clone() for memory in group.memories]
    assert not torch.isfinite(group.mean(bad, 1)["weight"]).all()
    for memory, before in zip(group.memories, kept, strict=True):
        assert torch.equal(memory.residual("weight"), before)
    ours, theirs = group.mean(gradients(3, 2), 2), clean.mean(gradients(3, 2), 2)
    assert torch.equal(ours["weight"], theirs["weight"])


def test_refusals() -> None:
    with pytest.raises(OptionError, match="at least 1 rank"):
        LocalGroup(parse("all_reduce"), 0)
    group = LocalGroup(parse("all_reduce"), 2)
    with pytest.raises(OptionError, match="this group has 2 ranks, 1 gave tensors: give one each"):
        group.mean([torch.ones(2)], 0)
    with pytest.raises(OptionError, match="the same parameter on every rank"):
        group.mean([torch.ones(2), torch.ones(3)], 0)
    with pytest.raises(OptionError, match="the same parameters on every rank"):
        group.mean([{"a": torch.ones(2)}, {"b": torch.ones(2)}], 0)
