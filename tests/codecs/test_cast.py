"""Casts against bit-level oracles: what is rounded, what saturates, what passes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from support.inputs import INF, NAN, assert_error_within, assert_sizes, gaussian, hard_inputs, through
from support.ranks import lost
from thinwire.codecs import Codec, bf16, fp8, fp16, fp32
from thinwire.codecs.cast import Bf16, Fp8, Fp16, Fp32
from thinwire.errors import OptionError

CASTS = (fp32(), fp16(), bf16())
ALL = (*CASTS, fp8(), fp8(64), fp8(0))
AWKWARD = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 6e-8, 1e-7, 65504.0, 65519.0, 65520.0, -1e9, 3.4e38, 1.0])


def bits_of(value: float) -> int:
    word: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return word


def bf16_oracle(value: float) -> float:
    """Nearest even on the bit pattern; a carry into the exponent of inf is taken back."""
    word = bits_of(value)
    if word & 0x7F800000 == 0x7F800000:
        return value
    word = (word + 0x7FFF + ((word >> 16) & 1)) >> 16 << 16
    if word & 0x7F800000 == 0x7F800000:
        word -= 1 << 16
    back: float = struct.unpack("<f", struct.pack("<I", word))[0]
    return back


def float8_values() -> list[float]:
    """Every finite non-negative e4m3fn value, in the order of its code."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return (subnormal + normal)[:-1]  # the last code is NaN


def fp8_oracle(block: list[float]) -> list[float]:
    largest = max(abs(v) for v in block)
    if largest / 448 < 2.0**-100:
        return [0.0] * len(block)
    values, out = float8_values(), []
    for v in block:
        y = abs(v) / largest * 448
        code = min(range(len(values)), key=lambda c: (abs(values[c] - y), c % 2))  # ties to the even code
        out.append(np.copysign(values[code] * largest / 448, v))
    return out


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_stated_size_is_real(codec: Codec) -> None:
    assert_sizes(codec)


def test_names_print_as_written() -> None:
    assert [repr(c) for c in ALL] == ["fp32()", "fp16()", "bf16()", "fp8()", "fp8(64)", "fp8(0)"]
    assert fp8(64).text() == "fp8:64"
    assert (fp32, fp16, bf16, fp8) == (Fp32, Fp16, Bf16, Fp8)


def test_fp32_changes_nothing() -> None:
    x = torch.cat((AWKWARD, torch.tensor([INF, -INF, NAN]), gaussian(100)))
    decoded = through(fp32(), x)
    assert torch.equal(decoded.isnan(), x.isnan())
    assert torch.equal(decoded[~x.isnan()], x[~x.isnan()])
    assert fp32().omega(10) == 0.0


def test_fp16_rounds_like_numpy_and_saturates() -> None:
    x = torch.cat((AWKWARD, gaussian(1000) * 100))
    expected = np.clip(x.numpy(), -65504, 65504).astype(np.float16).astype(np.float32)
    assert np.array_equal(through(fp16(), x).numpy(), expected)


def test_bf16_rounds_to_nearest_even_and_saturates() -> None:
    ties = torch.tensor([bits_of(1.0) + 0x8000, bits_of(1.0) + 0x18000, 0x7F7FFFFF, 0x7F7F8000], dtype=torch.int32)
    x = torch.cat((AWKWARD, gaussian(1000), ties.view(torch.float32), -ties.view(torch.float32)))
    expected = torch.tensor([bf16_oracle(float(v)) for v in x])
    assert torch.equal(through(bf16(), x), expected)
    assert bool(through(bf16(), x).isfinite().all())


@pytest.mark.parametrize("codec", CASTS, ids=repr)
def test_inf_and_nan_pass_through_casts(codec: Codec) -> None:
    decoded = through(codec, torch.tensor([1.0, INF, -INF, NAN, 1e30, -2.0]))
    assert decoded[0] == 1.0
    assert decoded[1] == INF
    assert decoded[2] == -INF
    assert bool(decoded[3].isnan())
    assert bool(decoded[4].isfinite())
    assert decoded[5] == -2.0


@pytest.mark.parametrize("codec", CASTS, ids=repr)
def test_sums_of_casts(codec: Fp32 | Fp16 | Bf16) -> None:
    a, b = gaussian(50).view(5, 10), gaussian(50, 1).view(5, 10)
    total = codec.to_sum(a) + codec.to_sum(b)
    assert total.dtype == codec.dtype
    assert total.shape == (50,)
    summed = codec.from_sum(total)
    assert summed.dtype == torch.float32
    assert torch.allclose(summed, (a + b).reshape(-1), rtol=2e-2, atol=2e-2)
    assert torch.equal(codec.from_sum(codec.to_sum(a)), through(codec, a))
    assert codec.sum_dtype == codec.dtype


@pytest.mark.parametrize("block", [0, 64, 128])
def test_fp8_matches_the_nearest_value_by_search(block: int) -> None:
    x = torch.cat((gaussian(200), torch.tensor([0.0, 1e-6, -1e-3, 0.5])))
    width = block or x.numel()
    expected = [v for start in range(0, x.numel(), width) for v in fp8_oracle(x[start : start + width].tolist())]
    assert torch.allclose(through(fp8(block), x), torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0)


def test_fp8_zero_tiny_and_single() -> None:
    assert torch.equal(through(fp8(), torch.zeros(200)), torch.zeros(200))
    assert torch.equal(through(fp8(), torch.full((200,), 1e-30)), torch.zeros(200))  # 448 * 2**-100 is 3.5e-28
    assert torch.equal(through(fp8(), torch.full((3,), 1e-42)), torch.zeros(3))
    assert torch.allclose(through(fp8(), torch.tensor([-0.3])), torch.tensor([-0.3]), rtol=1e-6)
    assert torch.allclose(through(fp8(), torch.tensor([3.4e38, 1.0])), torch.tensor([3.4e38, 0.0]), rtol=1e-6)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_fp8_non_finite_spoils_its_block_only(bad: float) -> None:
    x = gaussian(300)
    x[70] = bad
    decoded = through(fp8(64), x)
    assert bool(decoded[64:128].isnan().all())
    assert bool(decoded[:64].isfinite().all())
    assert bool(decoded[128:].isfinite().all())


@pytest.mark.parametrize("codec", [fp16(), bf16(), fp8(), fp8(0)], ids=repr)
def test_error_is_within_delta(codec: Codec) -> None:
    for name, x in hard_inputs(128).items():
        if codec.name == "fp16" and name in ("tiny", "large"):
            continue  # outside float16's range, as its docstring says
        assert_error_within(through(codec, x)[None].repeat(2, 1), x, lost(codec, 128))
    assert not codec.unbiased
    assert codec.omega(128) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_any_float_dtype_and_layout_in(codec: Codec, dtype: torch.dtype) -> None:
    x = gaussian(70).view(7, 10).t().to(dtype)
    assert torch.equal(through(codec, x), through(codec, x.to(torch.float32).contiguous()))


@pytest.mark.parametrize("block", [100, -64, 64.0])
def test_a_bad_block_names_the_fix(block: int) -> None:
    with pytest.raises(OptionError, match="multiple of 64"):
        fp8(block)
