"""Global-QSGD over simulated ranks: sums never wrap, the mean is unbiased, variance stays within the stated theta."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from support.inputs import (
    INF,
    NAN,
    assert_error_within,
    assert_sizes,
    assert_unbiased,
    dither,
    gaussian,
    hard_inputs,
    repeated,
    through,
)
from thinwire import theory
from thinwire.codecs import global_qsgd
from thinwire.codecs.global_qsgd import GlobalQsgd
from thinwire.errors import OptionError
from thinwire.rng import Draw

Norm = Literal["linf", "l2"]
Dither = Literal["linear", "exponential"]
WORLDS = (1, 2, 3, 4, 8, 16)
NORMS: tuple[Norm, ...] = ("linf", "l2")
DITHERS: tuple[Dither, ...] = ("linear", "exponential")
MESSAGES = [
    global_qsgd(bits, dither=dither, norm=norm, block=64)
    for bits in (2, 3, 4, 8)
    for dither in DITHERS
    for norm in NORMS
]


def shared_scale(codec: GlobalQsgd, ranks: Sequence[Tensor]) -> Tensor:
    norms = torch.stack([codec.local_norm(x) for x in ranks])
    return codec.scale_from(norms.amax(0) if codec.combination == "max" else norms.sum(0))


def tree_sum(codec: GlobalQsgd, codes: list[Tensor], seed: int) -> Tensor:
    """Add neighbours, then neighbours of neighbours: the balanced tree whose depth the headroom covers."""
    level = 0
    while len(codes) > 1:
        pairs = range(0, len(codes) - 1, 2)
        added = [codec.add_codes(codes[i], codes[i + 1], Draw(seed=seed, step=level, rank=i)) for i in pairs]
        codes, level = added + codes[2 * len(added) :], level + 1
    return codes[0]


def mean_of(codec: GlobalQsgd, ranks: Sequence[Tensor], seed: int = 0) -> Tensor:
    """The whole exchange in one process."""
    n, scale = len(ranks), shared_scale(codec, ranks)
    codes = [codec.codes(x, scale=scale, world_size=n, draw=Draw(seed=seed, rank=i)) for i, x in enumerate(ranks)]
    if codec.addition == "sum":
        total = codes[0].clone()
        for code in codes[1:]:
            total += code  # int8, as the network adds it
        assert torch.equal(total.to(torch.int64), torch.stack(codes).to(torch.int64).sum(0)), "int8 wrapped"
    else:
        total = tree_sum(codec, codes, seed)
    return codec.values(total, scale=scale, world_size=n) / n


# --------------------------------------------------------------------------------------------------------- linear sums


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("bits", [6, 7, 8])
@pytest.mark.parametrize("norm", NORMS)
def test_int8_sums_never_wrap(bits: int, norm: Norm, world_size: int) -> None:
    codec = global_qsgd(bits, norm=norm)
    for sign in (1.0, -1.0):
        ranks = [torch.full((65,), sign * 0.37)] * world_size
        mean = mean_of(codec, ranks)
        if norm == "linf":
            assert torch.allclose(mean, ranks[0], rtol=1e-6)  # every element is the maximum: exact
    assert codec.levels(world_size) * world_size <= 2 ** (bits - 1) - 1
    codes = codec.codes(ranks[0], scale=shared_scale(codec, ranks), world_size=world_size)
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) <= codec.levels(world_size)


@pytest.mark.parametrize("norm", NORMS)
def test_codes_match_a_scalar_oracle(norm: Norm) -> None:
    codec, x, draw = global_qsgd(8, norm=norm, block=64), gaussian(150), Draw(seed=4, rank=2)
    scale = shared_scale(codec, [x, 2 * x])
    codes = codec.codes(x, scale=scale, world_size=2, draw=draw).tolist()
    for i, v in enumerate(x.tolist()):
        part = x[i // 64 * 64 : i // 64 * 64 + 64].double()
        size = 2 * float(part.abs().max()) if norm == "linf" else math.sqrt(5) * float(part.norm())
        sought = v / size * 63 + dither(i, draw.key())
        if abs(sought - round(sought)) > 1e-4:
            assert codes[i] == math.floor(sought)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("norm", NORMS)
def test_linear_mean_is_unbiased_and_within_theta(norm: Norm, world_size: int) -> None:
    codec = global_qsgd(8, norm=norm, block=64)
    levels, bound = codec.levels(world_size), theory.uniform_l2 if norm == "l2" else theory.uniform_linf
    theta = theory.global_theta(bound(64 * world_size, levels), world_size)
    for shapes in (["gaussian"], ["one_hot", "constant"], ["heavy_tail", "one_and_dust", "gaussian"]):
        ranks = [hard_inputs(64)[shapes[i % len(shapes)]] * (1 + i) for i in range(world_size)]
        samples = mean_of(codec, [x.repeat(1500) for x in ranks]).view(1500, 64)
        mean = torch.stack(ranks).mean(0)
        assert_unbiased(samples, mean)
        error = (samples.double() - mean.double()).square().sum(1)
        stated = theta / world_size * sum(float(x.double().square().sum()) for x in ranks)
        assert float(error.mean()) <= stated + 4 * float(error.std()) / math.sqrt(1500)


def test_totals_may_be_widened() -> None:
    codec, x = global_qsgd(8), gaussian(50)
    scale = shared_scale(codec, [x])
    codes = codec.codes(x, scale=scale, world_size=2)
    wide, narrow = (codec.values(c, scale=scale, world_size=2) for c in (codes.to(torch.int32), codes))
    assert torch.equal(wide, narrow)


def test_one_rank_sends_what_a_plain_message_says() -> None:
    for codec in (global_qsgd(8), global_qsgd(4, norm="l2", block=64), global_qsgd(8, dither="exponential")):
        x, draw = gaussian(200), Draw(seed=6)
        scale = codec.scale_from(codec.local_norm(x))
        total = codec.codes(x.view(10, 20), scale=scale, world_size=1, draw=draw)
        assert torch.equal(codec.values(total, scale=scale, world_size=1), codec.decode(codec.encode(x, draw=draw)))


# --------------------------------------------------------------------------------------------------- exponential codes


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_headroom_holds_when_every_element_is_the_maximum(bits: int, world_size: int) -> None:
    codec = global_qsgd(bits, dither="exponential")
    for sign in (1.0, -1.0):
        ranks = [torch.full((500,), sign * 0.37)] * world_size
        power = 2 ** math.ceil(math.log2(world_size))
        mean = mean_of(codec, ranks)
        assert float(mean.abs().max()) <= 0.37 * power / world_size * 1.00001
        assert float(mean.mean()) == pytest.approx(sign * 0.37, rel=0.1)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_exponential_mean_is_unbiased(bits: int, norm: Norm, world_size: int) -> None:
    codec = global_qsgd(bits, dither="exponential", norm=norm, block=64)
    for shapes in (["gaussian"], ["one_hot", "constant"], ["constant", "two_ends"]):
        ranks = [hard_inputs(64)[shapes[i % len(shapes)]] * (1 + i / 8) for i in range(world_size)]
        samples = mean_of(codec, [x.repeat(1500) for x in ranks]).view(1500, 64)
        assert_unbiased(samples, torch.stack(ranks).mean(0))


@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_tree_keeps_the_second_moment_within_its_penalty(world_size: int) -> None:
    codec = global_qsgd(8, dither="exponential", block=64)
    ranks = [gaussian(64, seed) for seed in range(world_size)]
    means = mean_of(codec, [x.repeat(1000) for x in ranks]).view(1000, 64).double()
    variance_of_leaves = sum(float(x.double().square().sum()) for x in ranks) * theory.natural() / world_size**2
    squared_mean = float(torch.stack(ranks).double().mean(0).square().sum())
    stated = theory.exponential_tree_penalty(world_size) * (squared_mean + variance_of_leaves)
    assert float(means.square().sum(1).mean()) <= stated * 1.01


def test_narrow_codes_carry_sign_and_exponent() -> None:
    for bits in range(2, 9):
        codec = global_qsgd(bits, dither="exponential")
        powers = torch.tensor([2.0**-e for e in range(min(codec.top, 20))])
        x = torch.cat((powers, -powers, torch.zeros(3)))
        assert torch.equal(through(codec, x), x)  # powers of two of the scale are levels


# ------------------------------------------------------------------------------------------------------ plain messages


@pytest.mark.parametrize("codec", MESSAGES, ids=repr)
def test_stated_size_is_real(codec: GlobalQsgd) -> None:
    assert_sizes(codec)


@pytest.mark.parametrize("codec", MESSAGES, ids=repr)
def test_plain_messages_are_unbiased_and_within_omega(codec: GlobalQsgd) -> None:
    for name, x in hard_inputs(64).items():
        if codec.norm == "l2" and name == "tiny":
            continue  # squares of 1e-20 leave float32, as the docstring says
        samples = repeated(codec, x, 2000)
        assert_unbiased(samples, x)
        assert_error_within(samples, x, codec.omega(64))


# ------------------------------------------------------------------------------------------------------ special values


@pytest.mark.parametrize("codec", MESSAGES, ids=repr)
def test_zero_tiny_and_single(codec: GlobalQsgd) -> None:
    assert torch.equal(through(codec, torch.zeros(130)), torch.zeros(130))
    assert torch.equal(through(codec, torch.full((130,), 1e-42)), torch.zeros(130))
    assert torch.equal(through(codec, torch.full((130,), 1e-32)), torch.zeros(130))
    assert float(through(codec, torch.tensor([-0.3]))) == pytest.approx(-0.3, rel=1e-6)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("codec", MESSAGES, ids=repr)
def test_non_finite_on_one_rank_reaches_all_in_that_block_only(codec: GlobalQsgd, bad: float) -> None:
    spoiled = gaussian(200)
    spoiled[70] = bad
    lost = (torch.arange(200) >= 64) & (torch.arange(200) < 128)
    assert torch.equal(through(codec, spoiled).isnan(), lost)
    assert not bool(codec.local_norm(spoiled).isnan().any())  # a network's MAX may drop a NaN, never an inf
    if codec.bits == 8:
        for ranks in ([gaussian(200, 1), spoiled], [spoiled, gaussian(200, 1)]):
            mean = mean_of(codec, ranks)
            assert torch.equal(mean.isnan(), lost)
            assert bool(mean[~lost].isfinite().all())


def test_a_rank_of_zeros_changes_nothing_but_the_divisor() -> None:
    x = torch.full((64,), 0.5)
    for codec in (global_qsgd(), global_qsgd(dither="exponential")):
        assert torch.allclose(mean_of(codec, [x, torch.zeros(64)]), x / 2)


# ------------------------------------------------------------------------------------------------------------- options


def test_facts_and_words() -> None:
    assert global_qsgd().text() == "global_qsgd"
    assert repr(global_qsgd(4, dither="exponential", norm="l2", block=64)) == (
        "global_qsgd(4, dither='exponential', norm='l2', block=64)"
    )
    assert global_qsgd(4, dither="exponential").text() == "global_qsgd:4,dither=exponential"
    assert (global_qsgd().addition, global_qsgd(dither="exponential").addition) == ("sum", "codes")
    assert (global_qsgd().combination, global_qsgd(norm="l2").combination) == ("max", "sum")
    assert global_qsgd().sum_dtype == torch.int8
    assert global_qsgd().unbiased
    assert [global_qsgd().levels(n) for n in (1, 2, 3, 4, 16, 127)] == [127, 63, 42, 31, 7, 1]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: global_qsgd(1), "bits must be 2 to 8, got 1"),
        (lambda: global_qsgd(dither="cubic"), "dither must be 'linear' or 'exponential', got 'cubic'"),  # type: ignore[arg-type]
        (lambda: global_qsgd(norm="l1"), "norm must be 'linf' or 'l2', got 'l1'"),  # type: ignore[arg-type]
        (lambda: global_qsgd(block=63), "multiple of 64, got 63"),
        (lambda: global_qsgd(4).levels(8), "use 5 bits, or dither='exponential'"),
        (lambda: global_qsgd(8).levels(128), "128 ranks: use dither='exponential'"),
        (lambda: global_qsgd(2, dither="exponential").headroom(2), "use 3 bits"),
        (lambda: global_qsgd(3, dither="exponential").headroom(16), "use 4 bits"),
    ],
)
def test_bad_options_name_the_fix(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        build()


def test_the_fix_named_is_enough_and_no_more() -> None:
    for world_size in range(2, 128):
        enough = next(b for b in range(2, 9) if 2 ** (b - 1) - 1 >= world_size)
        assert global_qsgd(enough).levels(world_size) >= 1
        if enough > 2:
            with pytest.raises(OptionError, match=f"use {enough} bits"):
                global_qsgd(enough - 1).levels(world_size)
