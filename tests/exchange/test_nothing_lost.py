"""Nothing is lost: means and residuals add up to all that was given.

A value that is not finite reaches every rank and leaves no trace on any.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support.ranks import (
    EPS,
    RECIPES,
    SHARED_RECIPES,
    WITH_MEMORY,
    WORLD_SIZES,
    Ranks,
    exact_elements,
    gradient,
    noise,
    parts_of,
    run,
    same_bits,
)
from thinwire import parse
from thinwire.exchange.first_shot import pieces

# Sums of exponential codes are rounded once more, and so is a second shot without feedback: see below.
LOSSY = ("exponential", "sign|two_shot")
CONSERVING = [text for text in WITH_MEMORY if text.startswith("ef|") and not any(word in text for word in LOSSY)]


def narrow_sum(text: str) -> bool:
    """Whether the network adds bfloat16: what such an addition rounds away is in nobody's memory."""
    codec, exchange = parse(text).codec, parse(text).exchange
    return "bf16" in text and exchange.name in ("all_reduce", "shared_top_k") and codec.name != "low_rank"


# ------------------------------------------------------------------------------------------------ conservation


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("text", CONSERVING)
def test_means_and_residuals_are_all_that_was_given(text: str, world_size: int) -> None:
    """Float32 rounds a few operations a step. A sum in bfloat16 errs by 2**-8 in each of its n - 1 additions, relative
    to shares that are no larger than all that was given so far."""
    recorded = run(text, world_size)
    for numel in recorded.steps[0]:
        given, size, granted = (torch.zeros(numel, dtype=torch.float64) for _ in range(3))
        delivered = torch.zeros(numel, dtype=torch.float64)
        for step in recorded.steps:
            for x in step[numel].gradients:
                given += x
                size += x.abs()
            delivered += world_size * step[numel].results[0].mean.double()
            granted += 8 * EPS * float(size.max() if numel else 0)
            if narrow_sum(text):
                granted += (world_size - 1) * 2.0**-8 * size
        off = (delivered + recorded.ranks.unsent(f"n{numel}", numel) - given).abs()
        assert bool((off <= granted).all()), f"{float((off - granted).max()):.3g} of {numel} elements is lost"


def test_exponential_codes_are_remembered_but_their_sums_are_not() -> None:
    """Alone there is no sum, so nothing is lost; between two ranks every addition rounds at random."""
    text = "ef|global_qsgd:8,dither=exponential,norm=l2,block=64|all_reduce"
    for world_size, nothing_lost in ((1, True), (2, False)):
        ranks, given, delivered = Ranks(text, world_size), torch.zeros(300), torch.zeros(300)
        for step in range(5):
            gradients = [noise(rank, step, numel=300) for rank in range(world_size)]
            given += sum(gradients)
            delivered += world_size * ranks.step(gradients, step)
        off = (delivered + ranks.unsent("w", 300) - given).abs().max()
        assert (float(off) < 1e-4) == nothing_lost


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_feedback_of_the_second_shot_keeps_what_it_rounds_away(world_size: int) -> None:
    """Gradients that the first shot carries exactly leave the second alone to be blamed."""
    totals = {}
    for feedback in ("true", "false"):
        ranks = Ranks(f"bf16|two_shot:0,feedback={feedback}", world_size)
        given, delivered = torch.zeros(2100), torch.zeros(2100)
        for step in range(6):
            gradients = [noise(rank, step, numel=2100).bfloat16().float() for rank in range(world_size)]
            given += sum(gradients)
            delivered += world_size * ranks.step(gradients, step)
        totals[feedback] = float((delivered + ranks.unsent("w", 2100) - given).abs().max())
        sizes = [kept.backs["w"].numel() if kept.backs else 0 for kept in ranks.residuals]
        wanted = [piece.stop - piece.start for piece in pieces(2100, world_size)]
        assert sizes == (wanted if feedback == "true" else [0] * world_size)
    assert totals["true"] < 1e-4
    assert world_size == 1 or totals["false"] > 1e-2


@pytest.mark.parametrize("text", WITH_MEMORY)
def test_residuals_follow_the_loss_scale(text: str) -> None:
    """Gradients and residuals times 64 (a power of two, so that nothing rounds differently) deliver means times 64."""
    plain, scaled = Ranks(text, 2), Ranks(text, 2)
    for step in range(4):
        factor = 1.0 if step < 2 else 64.0
        if step == 2:
            for kept in scaled.residuals:
                kept.rescale(factor)
            torch.testing.assert_close(scaled.unsent("w", 1025), factor * plain.unsent("w", 1025), rtol=1e-12, atol=0)
        gradients = [gradient(rank, step, 1025) for rank in range(2)]
        expected = plain.step(gradients, step, parts=parts_of(1025))
        mean = scaled.step([factor * x for x in gradients], step, parts=parts_of(1025))
        if "fp16" in text:  # which has no room for much larger numbers, nor for much smaller
            torch.testing.assert_close(mean, factor * expected, rtol=2.0**-10, atol=0)
        else:
            assert torch.equal(mean, factor * expected)
    for ours, theirs in zip(scaled.residuals, plain.residuals, strict=True):
        passes = [kept.states["w"].get("passes") for kept in (ours, theirs)]
        assert passes[0] == passes[1]  # a threshold that had not followed would have been searched anew


# -------------------------------------------------------------------------------------------------- not finite


def unseen_position(ranks: Ranks, gradients: list[Tensor], leader: int) -> int:
    """Where the leader has least to send: no sparsifier of its data chooses it."""
    u, memory = gradients[leader].abs(), ranks.residuals[leader].memory
    if memory is not None:
        u = (gradients[leader] + memory.residual("w").view(-1)).abs()
    return int(u.argmin())


@pytest.mark.parametrize("poison", [-math.inf, math.nan])
@pytest.mark.parametrize("place", ["compressed", "exact"])
@pytest.mark.parametrize("text", RECIPES)
def test_poison_on_one_rank_reaches_all_and_leaves_no_trace(text: str, place: str, poison: float) -> None:
    n, numel, parts = 3, 1025, parts_of(1025)
    group, clean = Ranks(text, n), Ranks(text, n)
    for step in (0, 1, 2):
        gradients = [gradient(rank, step, numel) for rank in range(n)]
        exact = [exact_elements(rank, step, numel) for rank in range(n)]
        if step == 1:  # rank 1 leads, rank 2 is ill
            before = group.snapshot()
            if place == "exact":
                exact[2][1] = poison
            else:
                gradients[2][unseen_position(group, gradients, leader=1)] = poison
            poisoned = group.exchange("w", gradients, step, exact=exact, parts=parts)
            group.settle(finite=poisoned.finite)
            assert not poisoned.finite
            assert not bool((poisoned.exact if place == "exact" else poisoned.mean).isfinite().all())
            assert bool((poisoned.mean if place == "exact" else poisoned.exact).isfinite().all())
            assert same_bits(group.snapshot(), before)
            continue
        ours, theirs = (each.exchange("w", gradients, step, exact=exact, parts=parts) for each in (group, clean))
        assert ours.finite
        assert same_bits([ours.mean, ours.exact], [theirs.mean, theirs.exact])
        for each in (group, clean):
            each.settle()
    assert same_bits(group.snapshot(), clean.snapshot())


@pytest.mark.parametrize("text", SHARED_RECIPES)
@pytest.mark.parametrize("ill", [0, 1, 2])
def test_poison_is_seen_whoever_leads(text: str, ill: int) -> None:
    gradients = [noise(rank, numel=200) for rank in range(3)]
    gradients[ill][7] = math.nan
    assert Ranks(text, 3).exchange("w", gradients, 0).mean.isnan().all()


@pytest.mark.parametrize("size", [1e30, 3e38])
@pytest.mark.parametrize("text", [*RECIPES, "ef|global_qsgd:8,dither=exponential,block=64|all_reduce"])
def test_finite_is_said_of_finite_means_only(text: str, size: float) -> None:
    """Near the end of float32: sums and squares may overflow although no gradient is infinite. Then it has to be said,
    or the memories would go on as if the step had happened."""
    ranks, parts = Ranks(text, 3), parts_of(1025)
    before = ranks.snapshot()
    result = ranks.exchange("w", [torch.full((1025,), size)] * 3, 0, parts=parts, exact=[torch.full((2,), size)] * 3)
    assert bool(result.mean.isfinite().all() and result.exact.isfinite().all()) == result.finite
    assert result.exact.isfinite().all()
    ranks.settle(finite=result.finite)
    for old, new in zip(before, ranks.snapshot(), strict=True):
        kept = [tensor for tensors in new["memory"].get("kept", {}).values() for tensor in tensors.values()]
        assert all(tensor.isfinite().all() for tensor in kept)
        if not result.finite:
            assert same_bits([old["states"], old["backs"]], [new["states"], new["backs"]])
            assert not any(tensor.any() for tensor in kept)


def test_a_residual_that_overflows_with_the_gradient_is_seen_by_all_and_stays_as_it_was() -> None:
    ranks = Ranks("ef|top_k:0.1|all_gather", 2)
    huge, calm = torch.full((100,), 3e38), torch.ones(100)
    assert ranks.step([huge, calm], 0).isfinite().all()
    before = ranks.snapshot()
    assert not ranks.step([huge, calm], 1).isfinite().all()
    assert same_bits(ranks.snapshot(), before)
    assert ranks.step([calm, calm], 2).isfinite().all()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("ef|top_k:0.1|all_gather", 1e34),
        ("dgc|top_k:0.1|all_gather", 1e34),
        ("abs_max:4|two_shot:4,feedback=true", 1e37),
    ],
)
def test_a_residual_that_overflows_with_the_loss_scale_is_forgotten(text: str, size: float) -> None:
    """A scale that grows 2**20 times at once makes residuals infinite; they must not poison every step from then on."""
    ranks = Ranks(text, 2)
    ranks.step([size * (2 + noise(rank, numel=100).sign()) for rank in range(2)], 0)
    for kept in ranks.residuals:
        kept.rescale(2.0**20)
    assert ranks.step([noise(rank, numel=100) for rank in range(2)], 1).isfinite().all()
