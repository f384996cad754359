"""The rotated codec against a dense matrix, its codebook against its definition, its bound on inputs made to hurt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from support.inputs import (
    INF,
    NAN,
    assert_sizes,
    assert_unbiased,
    error_over_norm,
    gaussian,
    random_word,
    repeated,
    through,
)
from thinwire import theory
from thinwire.codecs import rotated
from thinwire.codecs.rotated import _CODEWORDS
from thinwire.errors import OptionError
from thinwire.rng import Draw, Key

BITS = (1, 2, 3, 4)
WORST = {"one_and_a_little": 0.015, "twelve_and_many": 0.024}  # bias over norm, see the docstring of the codec
Array = npt.NDArray[np.float64]


def hot(values: Sequence[float], numel: int = 1024) -> Tensor:
    x = torch.zeros(numel)
    x[torch.arange(len(values)) * 37 + 5] = torch.tensor(values)
    return x


def breakers() -> dict[str, Tensor]:
    """Blocks of 1024 that one Hadamard transform turns into few distinct values, and ordinary ones."""
    noise = gaussian(1024, 9) / 32
    return {
        "one": hot([1.0]),
        "two_equal": hot([1.0, 1.0]),
        "two_unequal": hot([1.0, 0.3]),
        "one_and_a_little": hot([1.0, 0.003]),
        "one_and_some": hot([1.0, 0.1]),
        "three": hot([1.0, 0.818, 1.0]),
        "four": hot([0.929, 1.0, 1.0, 1.0]),
        "four_unequal": hot([0.79, 0.79, 1.0, 0.211]),
        "sixteen": hot([1.0] * 16),
        "quarter": torch.cat((torch.ones(257), torch.zeros(767))),
        "twelve_and_many": torch.cat((torch.full((12,), 3.9), torch.ones(308), torch.zeros(704))),
        "half": torch.cat((torch.ones(512), torch.zeros(512))),
        "constant": torch.ones(1024),
        "spike_in_noise": hot([1.0]) + 0.1 * noise,
        "spike_in_more_noise": hot([1.0]) + noise,
        "gaussian": gaussian(1024),
        "laplace": gaussian(1024).sign() * gaussian(1024, 1).abs().square(),
        "sparse": gaussian(1024) * (gaussian(1024, 2) > 2.3),
        "cauchy": gaussian(1024) / gaussian(1024, 3),
    }


# ------------------------------------------------------------------------------------------------------------- oracles


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def probability(a: float, b: float) -> float:
    return (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2


@pytest.mark.parametrize("bits", BITS)
def test_codebook_is_the_lloyd_max_one(bits: int) -> None:
    """Each codeword is the mean of the Gaussian between the midpoints to its neighbours."""
    words = _CODEWORDS[bits]
    assert len(words) == 2 ** (bits - 1)
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(words)), INF]
    kept = 0.0
    for word, (low, high) in zip(words, itertools.pairwise(edges), strict=True):
        mass = probability(low, high)
        assert word == pytest.approx((density(low) - density(high)) / mass, abs=2e-8)
        kept += 2 * word * word * mass
    assert 1 - kept == pytest.approx(theory.LLOYD_MAX_ERROR[bits], rel=1e-3)


def hadamard_oracle(block: Array, key: Key, start: int) -> Array:
    """One random-sign Hadamard transform as a dense matrix in float64."""
    size = len(block)
    matrix = np.array([[1.0]])
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    words = [random_word(start // 32 + i, key) for i in range(size // 32)]
    bits = np.array([((word ^ word >> 16) >> place) & 1 for word in words for place in range(32)])
    signs = 1.0 - 2.0 * bits
    turned: Array = matrix * signs / math.sqrt(size)
    return turned


def rotated_oracle(bits: int, x: Array, key: Key) -> Array:
    words = np.array(_CODEWORDS[bits])
    words = np.concatenate((-words[::-1], words))
    out = []
    for start in range(0, len(x), 1024):
        part = x[start : start + 1024]
        size = 1024 if len(part) == 1024 else max(64, 2 ** math.ceil(math.log2(len(part))))
        part = np.pad(part, (0, size - len(part)))
        both = hadamard_oracle(part, key.fold(0), start)
        many = np.sum(np.abs(part) > np.sqrt(np.mean(part * part)) / 2)
        if 32 * np.max(np.abs(part)) ** 2 > np.sum(part * part) or 4 * many < size:  # few outweigh the others
            both = hadamard_oracle(part, key.fold(1), start) @ both
        z = both @ part
        unit = z / math.sqrt(np.mean(z * z))
        nearest = words[np.abs(unit[:, None] - words).argmin(axis=1)]
        decoded = both.T @ (nearest * (z @ z) / (nearest @ z))
        out.append(decoded[: len(x) - start])
    return np.concatenate(out)


@pytest.mark.parametrize("numel", [1, 2, 63, 65, 100, 1024, 1100])
@pytest.mark.parametrize("bits", BITS)
def test_matches_a_dense_oracle(bits: int, numel: int) -> None:
    x = gaussian(numel, numel)
    expected = rotated_oracle(bits, x.numpy().astype(np.float64), Draw(seed=0).key())
    decoded = through(rotated(bits), x).numpy()
    # An element at a boundary may go to the other codeword in float32; that moves all elements a little.
    assert np.linalg.norm(decoded - expected) <= 2e-2 * np.linalg.norm(x.numpy())
    assert np.median(np.abs(decoded - expected)) <= 1e-3


# --------------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize("bits", BITS)
def test_stated_size_is_real(bits: int) -> None:
    assert_sizes(rotated(bits))
    assert rotated(bits).wire_bytes(10 * 1024) == 32 + 40 + 10 * 128 * bits


@pytest.mark.parametrize("bits", BITS)
def test_unbiased_and_within_omega_even_where_one_transform_fails(bits: int) -> None:
    codec = rotated(bits)
    for name, x in breakers().items():
        samples = repeated(codec, x, 400)
        mean, standard_error = error_over_norm(samples, x)
        assert mean <= theory.rotated(bits) + 4 * standard_error, name
        # Without bias the error of the mean falls as 1 / samples.
        left = float((samples.double().mean(0) - x.double()).square().sum() / x.double().square().sum())
        if name in WORST:
            assert left <= 1.5 * mean / 400 + WORST[name] ** 2, name
        else:
            assert left <= 1.5 * mean / 400 + 1e-12, name
            assert_unbiased(samples, x)


@pytest.mark.parametrize("numel", [1, 2, 3, 10, 64, 100])
@pytest.mark.parametrize("bits", BITS)
def test_small_tensors_are_within_omega(bits: int, numel: int) -> None:
    codec = rotated(bits)
    spike = 0.02 * gaussian(numel)
    spike[0] = 1.0
    for x in (torch.ones(numel), gaussian(numel, 5), spike):
        samples = torch.stack([through(codec, x, seed) for seed in range(60)])
        mean, standard_error = error_over_norm(samples, x)
        assert mean <= theory.rotated(bits) + 4 * standard_error


@pytest.mark.parametrize("bits", BITS)
def test_the_part_along_the_input_is_exact(bits: int) -> None:
    """What EDEN's scale does: <decoded, x> = |x|^2 for every draw."""
    for x in breakers().values():
        decoded = through(rotated(bits), x).double()
        assert float(decoded @ x.double()) == pytest.approx(float(x.double() @ x.double()), rel=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_the_smaller_scale_contracts_any_block(bits: int) -> None:
    """Its codes are those of the unbiased codec; the part along the input is 1 - D for every draw."""
    unbiased, closer, shrink = rotated(bits), rotated(bits, scale="mmse"), 1 - theory.LLOYD_MAX_ERROR[bits]
    for name, x in breakers().items():
        torch.testing.assert_close(
            through(closer, x), through(unbiased, x) * shrink, rtol=1e-5, atol=1e-6 * float(x.norm())
        )
        error, standard_error = error_over_norm(repeated(closer, x, 200), x)
        delta = closer.delta(1024)
        assert delta is not None
        assert error <= 1 - delta + 4 * standard_error, name
        along = through(closer, x).double() @ x.double() / (x.double() @ x.double())
        assert float(along) == pytest.approx(shrink, rel=1e-5)


def test_a_draw_repeats_and_ranks_differ() -> None:
    x, codec = gaussian(2000), rotated(3)
    first, again, other = (codec.encode(x, draw=Draw(rank=rank)) for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(codec.decode(first), codec.decode(other))


def test_adding_messages_equals_adding_tensors() -> None:
    codec, x, y = rotated(3), gaussian(1500), gaussian(1500, 1)
    out = through(codec, x)
    codec.add(codec.encode(y, draw=Draw(seed=3)), out)
    assert torch.allclose(out, through(codec, x) + through(codec, y, 3), atol=1e-6)


# ------------------------------------------------------------------------------------------------------ special values


@pytest.mark.parametrize("bits", BITS)
def test_zero_and_tiny_blocks_are_zero(bits: int) -> None:
    for x in (torch.zeros(1500), torch.full((1500,), 1e-42), torch.full((100,), 1e-31)):
        assert torch.equal(through(rotated(bits), x), torch.zeros(x.numel()))
    half = torch.cat((torch.zeros(1024), gaussian(500)))
    assert torch.equal(through(rotated(bits), half)[:1024], torch.zeros(1024))


@pytest.mark.parametrize("factor", [1e-25, 1e-10, 1e10, 1e30])
def test_error_does_not_depend_on_the_scale(factor: float) -> None:
    x = gaussian(3000)
    unit, scaled = through(rotated(3), x), through(rotated(3), x * factor) / factor
    assert float((unit - scaled).norm() / x.norm()) < 1e-2  # a few elements may fall on the other side of a boundary


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("bits", BITS)
def test_non_finite_stays_in_its_block(bits: int, bad: float) -> None:
    x = gaussian(3000)
    x[1500] = bad
    decoded = through(rotated(bits), x)
    lost = (torch.arange(3000) >= 1024) & (torch.arange(3000) < 2048)
    assert torch.equal(decoded.isnan(), lost)
    assert bool(decoded[~lost].isfinite().all())


def test_numbers_the_rotation_overflows_are_not_finite() -> None:
    assert bool(through(rotated(2), torch.full((1024,), 3e38)).isnan().all())
    assert bool(through(rotated(2), torch.full((1024,), 1e35)).isfinite().all())


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("bits", [0, 5, 8])
def test_bad_bits_name_the_fix(bits: int) -> None:
    with pytest.raises(OptionError, match=f"rotated: bits must be 1, 2, 3 or 4, got {bits}"):
        rotated(bits)


def test_bad_scales_name_the_fix() -> None:
    with pytest.raises(OptionError, match="rotated: scale must be 'unbiased' or 'mmse', got 'least'"):
        rotated(1, scale="least")  # type: ignore[arg-type]


def test_prints_as_written() -> None:
    assert rotated(1, scale="mmse").text() == "rotated:1,scale=mmse"
    assert repr(rotated(3)) == "rotated(3)"
    assert rotated(3).text() == "rotated:3"
    assert rotated(3).unbiased
    assert rotated(3).sum_dtype is None
