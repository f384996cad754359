"""What the ranks get is the mean in expectation, and what they round away is not the same on every rank.

A tensor that repeats a short one holds many independent draws, so that a few steps make thousands of them.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support.ranks import Ranks, noise, true_mean

BLOCK = 64


def draws(text: str, gradients: list[Tensor], *, repeats: int, steps: int) -> Tensor:
    """Means of the same gradients, one a row, float64."""
    ranks, tiled = Ranks(text, len(gradients)), [x.repeat(repeats) for x in gradients]
    rows = [ranks.step(tiled, step).view(repeats, -1).double() for step in range(steps)]
    return torch.cat(rows)


def assert_mean_within(rows: Tensor, expected: Tensor, standard_error: Tensor | float) -> None:
    off = (rows.mean(0) - expected).abs()
    granted = 5 * standard_error + 1e-6 * expected.abs().max()
    assert bool((off <= granted).all()), f"off by {float((off / granted).max()):.2f} times what chance explains"


def quarters(rank: int) -> Tensor:
    """A quarter, half or three quarters of the way between powers of two that are near: no rounding is a rare event."""
    generator = torch.Generator().manual_seed(rank)
    choice = torch.randint(3, (3, BLOCK), generator=generator).float()
    return (1.25 + choice[0] / 4) * 2.0 ** choice[1] * torch.where(choice[2] == 0, -1.0, 1.0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("options", ["", ",block=64", ",norm=l2,block=64"])
def test_sums_of_exponential_codes_are_unbiased(options: str, world_size: int) -> None:
    """Every level of the tree rounds once more, to a power of two: any rule but the right one is off by far."""
    gradients = [quarters(rank) for rank in range(world_size)]
    rows = draws(f"global_qsgd:8,dither=exponential{options}|all_reduce", gradients, repeats=100, steps=20)
    assert rows.shape == (2000, BLOCK)
    assert_mean_within(rows, true_mean(gradients), rows.std(0) / math.sqrt(len(rows)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_of_exponential_codes_are_powers_of_two_of_the_scale(world_size: int) -> None:
    gradients = [quarters(rank) for rank in range(world_size)]
    mean = draws("global_qsgd:8,dither=exponential|all_reduce", gradients, repeats=1, steps=10)
    scale = max(float(x.abs().max()) for x in gradients)
    exponents = (mean[mean != 0].abs() * world_size / scale).log2()
    torch.testing.assert_close(exponents, exponents.round(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("options", ["", ",block=64", ",norm=l2,block=64"])
def test_linear_global_qsgd_is_unbiased(options: str, world_size: int) -> None:
    """The standard error is that of rounding half-way, the worst; the sample's own misses rare events."""
    gradients = [noise(rank, numel=BLOCK) for rank in range(world_size)]
    rows = draws(f"global_qsgd:8{options}|all_reduce", gradients, repeats=100, steps=20)
    stacked = torch.stack(gradients).double()
    scale = float(stacked.square().sum().sqrt() if "l2" in options else stacked.abs().max())
    step = scale / (127 // world_size)
    assert_mean_within(rows, true_mean(gradients), step / 2 / math.sqrt(world_size * len(rows)))
    assert (rows.std(0) <= 1.1 * step / 2 / math.sqrt(world_size)).all()


@pytest.mark.parametrize(
    "text", ["global_qsgd:5,block=64|all_reduce", "abs_max:3,block=64|all_gather", "qsgd:4,block=64|all_gather"]
)
def test_equal_gradients_are_rounded_independently(text: str) -> None:
    """Errors of n ranks average out: the variance of the mean is 1/n of one rank's, which shared draws would not give.

    For global_qsgd one rank alone would have more levels, so the step is taken into account.
    """
    n, x = 4, torch.full((BLOCK,), 0.37)
    x[0] = 1.0
    several = draws(text, [x] * n, repeats=500, steps=2)[:, 1:]
    alone = draws(text, [x], repeats=500, steps=2)[:, 1:]
    shares = []
    for rows, ranks in ((several, n), (alone, 1)):
        apart = torch.unique(rows * ranks).diff()
        step = float(apart[apart > 1e-3].min())  # closer ones are the same but for float32
        up = (rows.mean() / step) % 1.0
        shares.append(float(rows.var(0).mean()) * ranks / (step**2 * float(up * (1 - up))))
    assert shares == pytest.approx([1.0, 1.0], abs=0.06)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("text", ["random_k:0.25|all_reduce", "random_k:0.25,shared=false|all_gather"])
def test_random_k_is_unbiased(text: str, world_size: int) -> None:
    gradients = [noise(rank, numel=BLOCK) for rank in range(world_size)]
    rows = draws(text, gradients, repeats=25, steps=80)
    # An element travels as four times itself or not at all, on all ranks alike if the positions are shared.
    size = true_mean(gradients).abs()
    if "shared" in text:
        size = torch.stack(gradients).double().square().sum(0).sqrt() / world_size
    assert_mean_within(rows, true_mean(gradients), size * math.sqrt((4 - 1) / len(rows)))
    sent = (rows != 0).double().mean()
    assert float(sent) == pytest.approx(1 - 0.75 ** (world_size if "shared" in text else 1), abs=0.02)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("text", ["qsgd:4,block=64|two_shot", "abs_max:3,block=64|two_shot:5", "min_max:4|two_shot:8"])
def test_two_shots_are_unbiased(text: str, world_size: int) -> None:
    gradients = [noise(rank, numel=BLOCK) for rank in range(world_size)]
    rows = draws(text, gradients, repeats=160, steps=12)
    granted = rows.std(0).clamp(min=float(rows.std(0).mean())) / math.sqrt(len(rows))  # rare events: see above
    assert_mean_within(rows, true_mean(gradients), granted)


@pytest.mark.parametrize(("text", "world_size"), [("rotated:3|two_shot:4", 2), ("rotated:2|two_shot", 3)])
def test_two_rotated_shots_are_unbiased_where_no_element_outweighs_all_others(text: str, world_size: int) -> None:
    gradients = [noise(rank, numel=1024) for rank in range(world_size)]
    rows = draws(text, gradients, repeats=40, steps=10)
    assert_mean_within(rows, true_mean(gradients), rows.std(0) / math.sqrt(len(rows)))


def test_two_rotated_shots_of_one_large_element_stay_within_the_documented_bias() -> None:
    """Up to 1.5 % of the norm in each shot, and what chance leaves of their variances."""
    x = torch.full((1024,), 1e-3)
    x[700] = -2.0
    rows = draws("rotated:3|two_shot:4", [x, x], repeats=40, steps=10)
    bias = (rows.mean(0) - x.double()).norm() / x.norm()
    chance = (rows.var(0).sum() / len(rows)).sqrt() / x.norm()
    assert float(bias) <= 2 * 0.015 + 3 * float(chance)
