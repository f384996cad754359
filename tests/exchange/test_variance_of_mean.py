"""What quantised messages add to the mean over n ranks: for the same input on all ranks and for different ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.ranks import Ranks, true_mean
from thinwire import parse, theory
from thinwire.predict.variance import variance_of_mean

NUMEL = 1 << 15  # whole blocks for every number of ranks below; of 3 and 5, the last piece is shorter
EACH = pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16])
ALIKE = pytest.mark.parametrize("alike", [True, False], ids=["alike", "different"])


def inputs(world_size: int, *, alike: bool) -> list[Tensor]:
    """Gaussian, of one energy."""
    generator = torch.Generator().manual_seed(world_size)
    first = torch.randn(NUMEL, generator=generator)
    return [first if alike else torch.randn(NUMEL, generator=generator) for _ in range(world_size)]


def errors(text: str, gradients: list[Tensor], *, steps: int) -> tuple[float, float]:
    """Of one step's mean and of the mean over all steps, both over one rank's |x|^2."""
    ranks, expected = Ranks(text, len(gradients)), true_mean(gradients)
    off = torch.stack([ranks.step(gradients, step).double() - expected for step in range(steps)])
    energy = float(torch.stack(gradients).double().square().sum(1).mean())
    return float(off.square().sum(1).mean()) / energy, float(off.mean(0).square().sum()) / energy


def ideal(bits: int) -> float:
    """D / (1 - D), what a Gaussian block of any length has but for chance."""
    error = theory.LLOYD_MAX_ERROR[bits]
    return error / (1 - error)


@EACH
@ALIKE
@pytest.mark.parametrize("bits", [1, 2])
def test_errors_of_ranks_are_independent(bits: int, world_size: int, alike: bool) -> None:
    gradients = inputs(world_size, alike=alike)
    one, over_time = errors(f"rotated:{bits}|all_gather", gradients, steps=4)
    assert one == pytest.approx(ideal(bits) / world_size, rel=0.03)
    assert over_time == pytest.approx(one / 4, rel=0.05)  # no part of it stays: unbiased
    stated = parse(f"rotated:{bits}|all_gather").codec.omega_of_mean(NUMEL, world_size)
    assert stated is not None
    assert one <= stated


@EACH
@ALIKE
@pytest.mark.parametrize(("bits", "back"), [(1, 1), (1, 2), (2, 3)])
def test_two_shots_add_what_theory_says(bits: int, back: int, world_size: int, alike: bool) -> None:
    """A rank does not compress its own share of its piece; the way back rounds the mean and the first shot's error."""
    text, gradients = f"rotated:{bits}|two_shot:{back}", inputs(world_size, alike=alike)
    one, over_time = errors(text, gradients, steps=4)
    there = ideal(bits) * (world_size - 1) / world_size**2
    mean = 1.0 if alike else 1 / world_size
    assert one == pytest.approx(there + ideal(back) * (mean + there), rel=0.04)
    assert over_time == pytest.approx(one / 4, rel=0.06)
    stated = variance_of_mean(parse(text), NUMEL, world_size)
    assert stated is not None
    assert one <= stated


@pytest.mark.parametrize(
    ("word", "residual", "sent"),
    [
        ("rotated:1,scale=mmse", 0.3634 / (1 - 0.3634), 1.0),
        ("rotated:1", 0.3634 / (1 - 2 * 0.3634), 1 / (1 - 2 * 0.3634)),
    ],
)
def test_energy_under_error_feedback(word: str, residual: float, sent: float) -> None:
    """With the smaller scale, one bit keeps less back, and sends as much energy as there is in gradients."""
    ranks, generator = Ranks(f"ef|{word}|all_gather", 1), torch.Generator().manual_seed(0)
    kept, found = [], []
    for step in range(24):
        mean = ranks.step([torch.randn(NUMEL, generator=generator)], step)
        kept.append(float(ranks.sides[0].residual("w").square().mean()))
        found.append(float(mean.square().mean()))
    assert sum(kept[12:]) / 12 == pytest.approx(residual, rel=0.03)
    assert sum(found[12:]) / 12 == pytest.approx(sent, rel=0.03)
