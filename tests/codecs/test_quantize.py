"""Quantisers against scalar oracles, their stated facts against measurement, and every special value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
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
    random_word,
    repeated,
    through,
)
from support.ranks import lost
from thinwire.codecs import Codec, abs_max, min_max, natural, qsgd, sign, terngrad
from thinwire.codecs.quantize import Qsgd
from thinwire.codecs.scales import block_means, times_scale
from thinwire.errors import OptionError
from thinwire.rng import Draw

KEY = Draw(seed=0).key()
QSGD = [qsgd(bits, block=64) for bits in range(1, 9)]
ABS_MAX = [abs_max(bits) for bits in range(2, 9)]
MIN_MAX = [min_max(bits, block=64) for bits in range(2, 9)]
SCALED = [*QSGD, *ABS_MAX, *MIN_MAX, terngrad(64)]
UNBIASED = [*SCALED, natural()]
WHOLE_TENSOR = [qsgd(1), qsgd(2), qsgd(4), terngrad(), abs_max(3, block=0), min_max(4, block=0), sign()]
EVERY = [*UNBIASED, *WHOLE_TENSOR, min_max(4), sign(64)]


# ------------------------------------------------------------------------------------------------------------ oracles


def grid_of(codec: Any, block: list[float]) -> tuple[float, float, int, int]:
    """(low, step, top, offset) of one block, in float64 from the definition of each codec."""
    norm, largest = math.sqrt(sum(v * v for v in block)), max(abs(v) for v in block)
    if codec.name == "min_max":
        top = 2**codec.bits - 1
        return min(block), (max(block) - min(block)) / top, top, 0
    if codec.name == "qsgd" and codec.bits == 1:
        return -norm, 2 * norm, 1, 0
    levels = 1 if codec.name == "terngrad" else 2 ** (codec.bits - 1) - 1
    return 0.0, (norm if codec.name == "qsgd" else largest) / levels, 2 * levels, levels


def check_against_oracle(codec: Any, x: Tensor) -> None:
    decoded = through(codec, x).tolist()
    values, width = x.tolist(), codec.block or x.numel()
    for start in range(0, len(values), width):
        block = values[start : start + width]
        low, step, top, offset = grid_of(codec, block)
        for i, v in enumerate(block, start):
            place = ((v - low) / step if step else 0.0) + offset
            sought = place + dither(i, KEY)
            code = min(max(math.floor(sought), 0), top)
            if abs(sought - round(sought)) > 1e-4:  # else float32 may round to the other neighbour
                rounding = 1e-6 * max(abs(v) for v in block)
                assert decoded[i] == pytest.approx(low + (code - offset) * step, rel=1e-5, abs=rounding)
            else:
                assert abs(decoded[i] - v) <= step * 1.001


@pytest.mark.parametrize("codec", [c for c in EVERY if c.name not in ("natural", "sign")], ids=repr)
def test_uniform_codecs_match_a_scalar_oracle(codec: Codec) -> None:
    check_against_oracle(codec, torch.cat((gaussian(150), torch.tensor([0.0, 5.0, -5.0, 1e-4]))))


def test_natural_matches_a_scalar_oracle() -> None:
    x = torch.cat((gaussian(200), torch.tensor([0.0, -0.0, 1.0, -2.0, 1e-42, 3e38, 1e-38])))
    for i, (v, decoded) in enumerate(zip(x.tolist(), through(natural(), x).tolist(), strict=True)):
        word = int(np.float32(abs(v)).view(np.uint32))
        exponent = min((word + (random_word(i, KEY) >> 9)) >> 23, 254)
        assert decoded == math.copysign(2.0 ** (exponent - 127) if exponent else 0.0, v)


@pytest.mark.parametrize("block", [0, 64, 128])
def test_sign_matches_its_definition(block: int) -> None:
    x = torch.cat((gaussian(150), torch.tensor([0.0, -0.0])))
    decoded, width = through(sign(block), x), block or x.numel()
    for start in range(0, x.numel(), width):
        part = x[start : start + width]
        magnitude = part.abs().double().mean()
        expected = torch.where(part >= 0, magnitude, -magnitude)
        assert torch.allclose(decoded[start : start + width].double(), expected, rtol=1e-6)


@pytest.mark.parametrize("block", [0, 64, 192])
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 500])
def test_block_helpers_match_loops(numel: int, block: int) -> None:
    x, width = gaussian(numel).abs(), block or numel
    parts = [x[start : start + width] for start in range(0, numel, width)]
    means = torch.stack([part.double().mean() for part in parts])
    assert torch.allclose(block_means(x, block), means, rtol=1e-6)
    scales = torch.arange(1, len(parts) + 1, dtype=torch.float32)
    scaled = torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)])
    assert torch.equal(times_scale(x, scales, block), scaled)


# -------------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_stated_size_is_real(codec: Codec) -> None:
    assert_sizes(codec)


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_unbiased_and_within_omega(codec: Codec) -> None:
    assert codec.unbiased
    for x in hard_inputs(64).values():
        samples = repeated(codec, x, 3000)
        assert_unbiased(samples, x)
        assert_error_within(samples, x, codec.omega(64))


@pytest.mark.parametrize("codec", [qsgd(2), qsgd(4), terngrad(), abs_max(3, block=0), min_max(4, block=0)], ids=repr)
def test_whole_tensor_scales_are_within_omega_too(codec: Codec) -> None:
    for x in hard_inputs(1000).values():
        samples = torch.stack([through(codec, x, seed) for seed in range(30)])
        assert_error_within(samples, x, codec.omega(1000))


def test_ternary_bound_is_reached() -> None:
    x = hard_inputs(64)["worst_ternary"]
    samples = repeated(terngrad(64), x, 3000)
    error = float((samples - x).square().sum(dim=1).mean() / x.square().sum())
    assert error == pytest.approx(terngrad().omega(64), rel=0.05)


@pytest.mark.parametrize("block", [0, 64])
def test_sign_keeps_its_delta(block: int) -> None:
    assert not sign(block).unbiased
    assert sign(block).omega(640) is None
    for x in hard_inputs(640).values():
        assert_error_within(through(sign(block), x)[None].repeat(2, 1), x, 1 - sign(block).delta(640))


def test_more_elements_per_scale_are_never_stated_better() -> None:
    for codec in EVERY:
        facts = [lost(codec, n) for n in (0, 1, 2, 10, 64, 1000, 10**6)]
        assert facts == sorted(facts), codec
        assert facts[0] >= 0


def test_a_draw_repeats_and_another_one_differs() -> None:
    x = gaussian(500)
    for codec in UNBIASED:
        first, again, other = (codec.encode(x, draw=Draw(step=step)) for step in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(codec.decode(first), codec.decode(other)), codec


def test_adding_messages_equals_adding_tensors() -> None:
    x, y = gaussian(130), gaussian(130, 1)
    for codec in EVERY:
        out = through(codec, x)
        codec.add(codec.encode(y, draw=Draw(seed=3)), out)
        assert torch.allclose(out, through(codec, x) + through(codec, y, 3), rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_zeros_stay_zero(codec: Codec) -> None:
    assert torch.equal(through(codec, torch.zeros(130)), torch.zeros(130))
    assert torch.equal(through(codec, -torch.zeros(1)), torch.zeros(1))


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_a_single_element(codec: Codec) -> None:
    decoded = float(through(codec, torch.tensor([-0.3])))
    if codec.name == "natural":
        assert decoded in (-0.25, -0.5)
    else:
        assert decoded == pytest.approx(-0.3, rel=1e-6)


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_constants(codec: Codec) -> None:
    x = torch.full((130,), 0.3)
    decoded = through(codec, x)
    if codec.name == "min_max":
        assert torch.equal(decoded, x)
    elif codec.name in ("abs_max", "terngrad", "sign"):
        assert torch.allclose(decoded, x, rtol=1e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_min_max_keeps_both_ends(bits: int) -> None:
    x = gaussian(64)
    decoded = through(min_max(bits), x)
    assert decoded[x.argmin()] == x.min()
    assert float(decoded[x.argmax()]) == pytest.approx(float(x.max()), rel=1e-5)


def test_min_max_of_nearly_equal_numbers() -> None:
    x = 1e6 + gaussian(64)
    assert float((through(min_max(8), x) - x).abs().max()) < 0.1


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_subnormal_numbers(codec: Codec) -> None:
    x = torch.tensor([1e-42, -3e-42, 2e-40, 5e-45] * 16)
    decoded = through(codec, x)
    if codec.name == "natural":
        assert set(decoded.abs().tolist()) <= {0.0, 2.0**-126}
    elif codec.name == "min_max":
        assert torch.equal(decoded, torch.full((64,), -3e-42))  # a range this small counts as none
    else:
        assert torch.equal(decoded, torch.zeros(64))


def test_natural_is_unbiased_for_subnormal_numbers() -> None:
    x = torch.tensor([2.0**-127, 2.0**-128, -(2.0**-127), 0.0])
    samples = through(natural(), x.repeat(4000)).view(4000, 4).double() * 2.0**127
    assert_unbiased(samples, x.double() * 2.0**127)


def test_natural_saturates_at_its_largest_power() -> None:
    largest = torch.tensor([3.4e38, -3.0e38])
    assert torch.equal(through(natural(), largest), torch.tensor([2.0**127, -(2.0**127)]))


@pytest.mark.parametrize("bad", [INF, -INF, NAN, -NAN])
@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_non_finite_stays_in_its_block(codec: Any, bad: float) -> None:
    x = gaussian(200)
    x[70] = bad
    spoiled = torch.zeros(200, dtype=torch.bool)
    if codec.name == "natural":
        spoiled[70] = True
    elif codec.block == 0 or codec.block > 200:
        spoiled[:] = True
    else:
        spoiled[64:128] = True
    decoded = through(codec, x)
    assert torch.equal(decoded.isnan(), spoiled)
    assert bool(decoded[~spoiled].isfinite().all())


HUGE = torch.tensor([3.0e38, -3.0e38, 1e38, 0.0] * 16)


@pytest.mark.parametrize("codec", [*ABS_MAX, terngrad()], ids=repr)
def test_the_largest_numbers_fit_a_scale_of_their_size(codec: Codec) -> None:
    levels = 2 ** (getattr(codec, "bits", 2) - 1) - 1
    decoded = through(codec, HUGE)
    assert float((decoded.double() - HUGE.double()).abs().max()) <= 3.0e38 / levels * 1.001


@pytest.mark.parametrize("codec", [*QSGD[:3], min_max(3), sign(64)], ids=repr)
def test_a_scale_beyond_float32_is_not_finite(codec: Codec) -> None:
    assert bool(through(codec, HUGE).isnan().all())


@pytest.mark.parametrize("codec", QSGD[3:], ids=repr)
def test_rounding_beyond_float32_gives_inf_never_a_wrong_number(codec: Qsgd) -> None:
    decoded = through(codec, HUGE)
    step = float(HUGE.double().norm()) / codec.levels
    near = (decoded.double() - HUGE.double()).abs() <= step * 1.001
    assert bool((near | decoded.isinf()).all())


# ------------------------------------------------------------------------------------------------------------ options


def test_stages_print_as_written() -> None:
    assert repr(qsgd(4, block=512)) == "qsgd(4, block=512)"
    assert qsgd(4, block=512).text() == "qsgd:4,block=512"
    assert repr(terngrad()) == "terngrad()"
    assert abs_max(4).text() == "abs_max:4"
    assert min_max(4, block=64).text() == "min_max:4,block=64"
    assert sign(64).text() == "sign:64"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: qsgd(9), "qsgd: bits must be 1 to 8, got 9"),
        (lambda: qsgd(0), "qsgd: bits must be 1 to 8, got 0"),
        (lambda: qsgd(2.5), "qsgd: bits must be 1 to 8, got 2.5"),  # type: ignore[arg-type]
        (lambda: abs_max(1), "abs_max: bits must be 2 to 8, got 1"),
        (lambda: min_max(1), "min_max: bits must be 2 to 8, got 1"),
        (lambda: qsgd(4, block=100), "qsgd: block must be 0 .* or a multiple of 64, got 100"),
        (lambda: terngrad(-64), "terngrad: block must be 0 .* or a multiple of 64, got -64"),
        (lambda: sign(1), "sign: block must be 0 .* or a multiple of 64, got 1"),
    ],
)
def test_bad_options_name_the_fix(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        build()


def test_options_after_the_first_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        qsgd(4, 512)
