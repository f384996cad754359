"""Every exchange: the same bits on all ranks, the means that were promised, and no byte more than was announced."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from support.ranks import (
    EPS,
    RECIPES,
    SHARED_RECIPES,
    WORLD_SIZES,
    Ranks,
    assert_all_ranks_got,
    gradient,
    lost,
    parts_of,
    run,
    same_bits,
    summation_error,
    true_mean,
)
from thinwire import Draw, OptionError, parse
from thinwire.exchange import TwoShot
from thinwire.exchange.first_shot import pieces
from thinwire.exchange.script import Send, Wait
from thinwire.exchange.two_shot import _waves


def given(world_size: int, numel: int, step: int = 0) -> list[Tensor]:
    return [gradient(rank, step, numel) for rank in range(world_size)]


def assert_within(x: Tensor, y: Tensor, granted: Tensor | float) -> None:
    off = (x.double() - y.double()).abs()
    assert bool((off <= granted).all()), f"off by up to {float((off - granted).max()):.3g} too much"


# ------------------------------------------------------------------------------------------------- every recipe


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("text", RECIPES)
def test_all_ranks_get_the_same_bits(text: str, world_size: int) -> None:
    for step in run(text, world_size).steps:
        for numel, one in step.items():
            result = assert_all_ranks_got(one.results)
            assert result.mean.shape == (numel,)
            assert result.mean.dtype == result.exact.dtype == torch.float32
            assert result.finite
            assert result.mean.isfinite().all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("text", RECIPES)
def test_exact_elements_are_the_mean_also_when_they_are_alone(text: str, world_size: int) -> None:
    for step in run(text, world_size).steps:
        for one in step.values():
            assert_within(one.results[0].exact, true_mean(one.exact), summation_error(one.exact))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("text", RECIPES)
def test_announced_bytes_are_those_counted(text: str, world_size: int) -> None:
    recipe = parse(text)
    may_send_less = text in SHARED_RECIPES and recipe.codec.name != "top_k"  # its selector may find too few
    for step in run(text, world_size).steps:
        for numel, one in step.items():
            shapes = [part.shape for part in parts_of(numel)]
            announced = recipe.exchange.sent_bytes(
                recipe.codec, numel, world_size=world_size, exact=one.exact[0].numel(), shapes=shapes
            )
            if may_send_less:
                assert len(set(one.sent_bytes)) == 1
                assert one.sent_bytes[0] <= announced
            else:
                assert one.sent_bytes == [announced] * world_size
            assert (announced == 0) == (world_size == 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize("text", RECIPES)
def test_scripts_name_the_collectives_that_run(text: str, world_size: int) -> None:
    recipe = parse(text)
    for step in run(text, world_size).steps:
        for numel, one in step.items():
            shapes = [part.shape for part in parts_of(numel)]
            script = recipe.exchange.script(
                recipe.codec, numel, world_size=world_size, exact=one.exact[0].numel(), shapes=shapes
            )
            sends = [op for op in script if isinstance(op, Send)]
            kinds = Counter("all_reduce" if op.collective == "small_sum" else op.collective for op in sends)
            assert [dict(kinds)] * world_size == one.calls, numel
            waits = [op.tag for op in script if isinstance(op, Wait)]
            assert sorted(waits) == sorted(op.tag for op in sends)  # all that is sent is waited for, once
            for op in sends:
                assert script.index(op) < script.index(Wait(op.tag))


@pytest.mark.parametrize("text", RECIPES)
def test_nothing_at_all_has_a_mean(text: str) -> None:
    ranks, nothing = Ranks(text, 3), [torch.empty(0)] * 3
    result = ranks.exchange("w", nothing, 0, exact=nothing, parts=[])
    assert result.finite
    assert result.mean.shape == result.exact.shape == (0,)
    assert [network.traffic.bytes for network in ranks.networks] == [0, 0, 0]
    recipe = ranks.recipe
    assert recipe.exchange.sent_bytes(recipe.codec, 0, world_size=3) == 0


@pytest.mark.parametrize("text", RECIPES)
def test_places_and_measures_change_nothing(text: str) -> None:
    """A buffer for the mean, or one more look at what was left: the mean is the same."""
    told, plain, parts = Ranks(text, 2), Ranks(text, 2), parts_of(1025)
    out = [torch.full((1025,), math.nan) for _ in range(2)]
    for step in range(2):
        expected = plain.step(given(2, 1025, step), step, parts=parts)
        assert torch.equal(told.step(given(2, 1025, step), step, parts=parts, out=out, measure=True), expected)
    assert same_bits(told.snapshot(), plain.snapshot())


# ----------------------------------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "text",
    [
        "all_reduce",
        "local",
        "fp32|all_gather",
        "fp32|two_shot",
        "random_k:1|all_reduce",
        "top_k:1|all_gather",
        "ef|trimmed_k:1|all_gather",
        "top_k:1|shared_top_k",
        "threshold_k:1|shared_top_k:norm",
        "low_rank:64|all_reduce",
    ],
)
def test_what_leaves_nothing_out_is_the_mean(text: str, world_size: int) -> None:
    ranks = Ranks(text, world_size)
    for numel in (1, 64, 1025):
        gradients = given(world_size, numel)
        mean = ranks.exchange(f"n{numel}", gradients, 0).mean
        assert_within(mean, true_mean(gradients), summation_error(gradients))


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize(("text", "unit"), [("bf16|all_reduce", 2.0**-8), ("fp16|all_reduce", 2.0**-11)])
def test_narrow_floats_round_every_share_and_every_addition(text: str, unit: float, world_size: int) -> None:
    gradients = given(world_size, 1000)
    mean = Ranks(text, world_size).step(gradients, 0)
    size = torch.stack(gradients).double().abs().mean(0)
    assert_within(mean, true_mean(gradients), world_size * unit * 1.01 * size + 2.0**-24)
    assert not torch.equal(mean, Ranks("all_reduce", world_size).step(gradients, 0))


@pytest.mark.parametrize("text", ["qsgd:4,block=64", "sign", "rotated:3", "top_k:0.1|bf16", "global_qsgd:6", "fp8"])
def test_all_gather_averages_what_every_message_says(text: str) -> None:
    codec, gradients = parse(f"{text}|all_gather").codec, given(3, 1025)
    messages = [codec.encode(x, draw=Draw(seed=4, step=2, stream="w", rank=i)) for i, x in enumerate(gradients)]
    decoded = [codec.decode(message) for message in messages]
    mean = Ranks(f"{text}|all_gather", 3, seed=4).step(gradients, 2)
    assert_within(mean, true_mean(decoded), summation_error(decoded))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("leader", ["turn", "norm"])
@pytest.mark.parametrize("values", ["", "bf16|", "fp16|"])
def test_shared_top_k_is_the_mean_at_the_positions_of_its_leader(values: str, leader: str, world_size: int) -> None:
    ranks, numel, k = Ranks(f"top_k:0.05|{values}shared_top_k:{leader}", world_size), 1000, 50
    for step in range(world_size + 2):
        gradients = given(world_size, numel, step)
        loudest = (2 * step + 1) % world_size
        gradients[loudest] *= 3
        lead = step % world_size if leader == "turn" else loudest
        chosen = gradients[lead].abs().topk(k).indices
        expected = torch.zeros(numel, dtype=torch.float64)
        expected[chosen] = true_mean(gradients)[chosen]
        unit = {"": EPS, "bf16|": 2.0**-8, "fp16|": 2.0**-11}[values]
        size = torch.stack(gradients).double().abs().mean(0)
        mean = ranks.step(gradients, step)
        assert_within(mean, expected, (world_size + 1) * 1.01 * unit * size)
        assert set(mean.nonzero().view(-1).tolist()) <= set(chosen.tolist())


def test_a_leader_that_finds_nothing_sends_nothing() -> None:
    ranks = Ranks("ef|gaussian_k:0.1|bf16|shared_top_k", 2)
    mean = ranks.step([torch.zeros(100), torch.ones(100)], 0)
    assert not mean.any()
    torch.testing.assert_close(ranks.unsent("w", 100), torch.ones(100, dtype=torch.float64))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize(("norm", "block"), [("linf", 0), ("linf", 64), ("l2", 0), ("l2", 64)])
def test_linear_global_qsgd_is_a_whole_number_of_steps_of_the_common_scale(
    norm: str, block: int, world_size: int
) -> None:
    numel, gradients = 1000, given(world_size, 1000)
    mean = Ranks(f"global_qsgd:8,norm={norm},block={block}|all_reduce", world_size).step(gradients, 0)
    everything, width = torch.stack(gradients).double(), block or numel
    for start in range(0, numel, width):
        part = everything[:, start : start + width]
        scale = float(part.abs().max() if norm == "linf" else part.square().sum().sqrt())
        codes = mean[start : start + width].double() * world_size * (127 // world_size) / scale
        assert_within(codes, codes.round(), 1e-4)
        assert codes.round().abs().max() <= 127
        assert_within(codes, part.sum(0) * (127 // world_size) / scale, world_size)  # each rank errs by less than one


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("bits", "world_size"), [(8, n) for n in (2, 3, 4, 5, 6, 7, 8, 127)] + [(4, 7), (2, 1)])
def test_integers_never_wrap(bits: int, world_size: int, norm: str) -> None:
    """All ranks have the same largest gradient: every code is the largest, in both directions."""
    x = torch.tensor([5.0, -5.0, 0.0]) if norm == "linf" else torch.tensor([-5.0])
    mean = Ranks(f"global_qsgd:{bits},norm={norm}|all_reduce", world_size).step([x] * world_size, 0)
    if norm == "linf":
        torch.testing.assert_close(mean, x, rtol=1e-6, atol=0)
    else:  # each rank has 1 / sqrt(n) of the norm of all, rounded up or down
        assert_within(mean, x, 5 * math.sqrt(world_size) / ((1 << (bits - 1)) // world_size or 1))
        assert (mean <= 0).all()


def test_too_many_ranks_for_the_bits_are_refused() -> None:
    with pytest.raises(OptionError, match="leave no level for each of 8 ranks: use 5 bits"):
        Ranks("global_qsgd:4|all_reduce", 8).step([torch.ones(3)] * 8, 0)


# ------------------------------------------------------------------------------------------------- error bounds


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize(
    "text",
    [
        "qsgd:8,block=64|two_shot",
        "abs_max:8|two_shot",
        "qsgd:4,block=64|two_shot:8",
        "rotated:3|two_shot:4",
        "rotated:4|two_shot:2",
        "min_max:4|two_shot:8",
        "natural|two_shot",
    ],
)
def test_two_shots_err_as_much_as_both_may(text: str, world_size: int) -> None:
    """Unbiased: V1 = omega_1 sum |x_i|^2 / n^2, and of that mean the second shot loses omega_2 (|mean|^2 + V1).

    x_i is what rank i sends to others: its own piece it adds as it is.
    """
    ranks, numel, draws = Ranks(text, world_size), 3000, 10
    codec, back = ranks.recipe.codec, ranks.recipe.exchange
    assert isinstance(back, TwoShot)
    places = list(pieces(numel, world_size))
    longest = max(piece.stop - piece.start for piece in places)
    gradients = given(world_size, numel)
    mean = true_mean(gradients)
    energies = [x.double().square() for x in gradients]
    travelling = sum(float(x.sum() - x[own].sum()) for x, own in zip(energies, places, strict=True))
    first = lost(codec, longest) * travelling / world_size**2
    second = lost(back.codec_back(codec), longest) * (float(mean.square().sum()) + first)
    errors = torch.stack([(ranks.step(gradients, step).double() - mean).square().sum() for step in range(draws)])
    assert float(errors.mean()) <= first + second + 4 * float(errors.std()) / math.sqrt(draws)
    assert float(errors.mean()) >= 0.02 * (first + second)  # and they do err: both shots are compressed


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("text", ["fp32|two_shot", "abs_max:8|two_shot", "ef|rotated:2|two_shot:3,feedback=true"])
def test_large_tensors_travel_in_waves(text: str, world_size: int) -> None:
    """Of which every element belongs to one, and which deliver what one would."""
    numel = 400_000 * world_size + 77
    ranks, gradients = Ranks(text, world_size), given(world_size, numel)
    mean = true_mean(gradients)
    error = float((ranks.step(gradients, 0).double() - mean).norm() / mean.norm())
    assert error <= {"fp32": 1e-6, "abs_": 0.02, "ef|r": 1.0}[text[:4]]
    waves = _waves(numel, world_size, 10)
    assert len(waves) == 3
    seen = torch.zeros(numel, dtype=torch.int32)
    for rank, piece in enumerate(pieces(numel, world_size)):
        for wave in waves:
            seen[wave.places[rank]] += 1
            assert piece.start <= wave.places[rank].start <= wave.places[rank].stop <= piece.stop
    assert (seen == 1).all()
    assert [wave.share for wave in waves] == [-(-10 // world_size), 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("text", ["fp8|two_shot", "bf16|two_shot", "fp16|two_shot", "ef|sign|two_shot"])
def test_two_biased_shots_err_as_much_as_both_may(text: str, world_size: int) -> None:
    """|C(x) - x| <= sqrt(1 - delta) |x| for every rank, and once more for the mean of what arrived."""
    ranks, gradients = Ranks(text, world_size), given(world_size, 1025)
    share = math.sqrt(lost(ranks.recipe.codec, 1025))
    mean = true_mean(gradients)
    first = share * sum(float(x.double().norm()) for x in gradients) / world_size
    error = float((ranks.step(gradients, 0).double() - mean).norm())
    assert 0 < error <= first + share * (float(mean.norm()) + first)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("bits", "block"), [(8, 0), (8, 64), (5, 64)])
def test_linear_global_qsgd_errs_by_a_quarter_of_a_squared_step_at_most(bits: int, block: int, world_size: int) -> None:
    ranks, gradients, draws = (
        Ranks(f"global_qsgd:{bits},block={block}|all_reduce", world_size),
        given(world_size, 1000),
        24,
    )
    levels, stacked, mean = ((1 << (bits - 1)) - 1) // world_size, torch.stack(gradients).double(), true_mean(gradients)
    steps = torch.stack([part.abs().max() / levels for part in torch.split(stacked, block or 1000, dim=1)])
    widths = torch.tensor([part.shape[0] for part in torch.split(mean, block or 1000)])
    bound = float((steps.square() / 4 * widths).sum()) / world_size
    errors = torch.stack([(ranks.step(gradients, step).double() - mean).square().sum() for step in range(draws)])
    assert 0.3 * bound < float(errors.mean()) <= bound
