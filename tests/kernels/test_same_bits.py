"""The numba and the Triton body give the bits of the definition; Triton runs in its interpreter."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.bodies import (
    BIG,
    BLOCKS,
    BODIES,
    INTERPRETED,
    LARGE,
    SIZES,
    TINY,
    assert_same,
    blocks,
    check,
    cpu,
    dtypes,
    few,
    gpu,
    keys,
    mixed,
    random_codes,
    scales,
    seeds,
    sizes,
    specials,
)
from thinwire.errors import MessageError, OptionError
from thinwire.kernels import blocks_of, layout, reference
from thinwire.rng import Key

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter reports inf - inf and such


def test_the_interpreter_is_on() -> None:
    kernel = gpu.gpu_quantize.pack_kernel
    interpreted = type(kernel).__name__ == "InterpretedFunction"
    assert interpreted == INTERPRETED, "triton was imported before conftest.py chose the interpreter"


def test_signatures_are_those_of_the_definition() -> None:
    for name, function in inspect.getmembers(reference, inspect.isfunction):
        if not name.startswith("_") and function.__module__ == reference.__name__:
            for body, _ in BODIES:
                assert inspect.signature(getattr(body, name)) == inspect.signature(function), name


@few
@given(sizes, keys)
def test_random_bits(numel: int, key: Key) -> None:
    for body, device in BODIES:
        assert_same(reference.random_bits(numel, key), body.random_bits(numel, key, device=device))


@pytest.mark.parametrize("bits", range(1, 9))
@settings(max_examples=4, deadline=None)
@given(sizes, seeds)
def test_pack_and_unpack(bits: int, numel: int, seed: int) -> None:
    codes = random_codes(numel, bits, seed)
    packed = check("pack", codes, bits=bits)
    assert_same(codes, check("unpack", packed, numel, bits=bits))


@pytest.mark.parametrize("bits", range(1, 9))
@settings(max_examples=8, deadline=None)
@given(sizes, seeds, blocks, dtypes, keys, specials, st.data())
def test_quantize(
    bits: int, numel: int, seed: int, block: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], data: Any
) -> None:
    top = data.draw(st.integers(1, (1 << bits) - 1))
    offset = data.draw(st.integers(0, top))
    low, step = mixed(blocks_of(numel, block), seed), scales(numel, block, seed, special)
    x = mixed(numel, seed, special, dtype)
    packed = check("quantize", x, low, step, bits=bits, top=top, offset=offset, block=block, key=key)
    check("dequantize_add", mixed(numel, seed, TINY), packed, low, step, bits=bits, offset=offset, block=block)


@few
@given(sizes, seeds, blocks, dtypes, keys, specials, st.integers(1, 127))
def test_exponential(
    numel: int, seed: int, block: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], top: int
) -> None:
    scale = scales(numel, block, seed, special)
    x = mixed(numel, seed, special, dtype)
    codes = check("exponential_encode", x, scale, top=top, block=block, key=key)
    check("exponential_decode_add", mixed(numel, seed, TINY), codes, scale, top=top, block=block)
    check("exponential_add", codes, random_codes(numel, 8, seed), top=top, key=key)


def test_exponential_add_of_every_pair() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for left in every.chunk(4):  # 16,384 pairs each, which the interpreter still takes
        check("exponential_add", left.repeat(256), every.repeat_interleave(64), top=100, key=Key(7, 2**32 - 1))


@pytest.mark.parametrize("random", [0, 1, 2])
def test_exponential_add_at_the_smallest_random_numbers(random: int) -> None:
    """A gap of 32 rounds only if the random number is 0: solve the hash for the key that draws it at position 0."""
    wanted = random * pow(layout.MIX_2, -1, 1 << 32)
    key = Key(0, wanted & 0xFFFFFFFF)  # the position 0 and k0 = 0 hash to 0 before k1 comes in
    assert int(reference.random_bits(1, key)) == random
    for gap in (31, 32, 33, 34, 90):
        for sign in (0, 128):
            small = torch.tensor([1 + sign], dtype=torch.uint8)
            check("exponential_add", torch.tensor([1 + gap], dtype=torch.uint8), small, top=120, key=key)


@few
@given(sizes, seeds, st.sampled_from((0, 64, 192, 1024, 3008)), dtypes, specials)
def test_block_scales(numel: int, seed: int, block: int, dtype: torch.dtype, special: tuple[float, ...]) -> None:
    x = mixed(numel, seed, special, dtype)
    check("block_abs_max", x, block=block)
    check("block_min_max", x, block=block)
    expected = reference.block_square_sum(x, block=block)
    for body, device in BODIES:
        found = body.block_square_sum(x.to(device), block=block).cpu()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.allclose(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)


@few
@given(st.sampled_from((*SIZES, 100, 200, 500)), seeds, dtypes, keys, specials)
def test_rotation(numel: int, seed: int, dtype: torch.dtype, key: Key, special: tuple[float, ...]) -> None:
    x = mixed(numel, seed, special, dtype)
    rotated = check("rotate", x, key=key)
    check("unrotate", rotated, numel, key=key)
    for body, device in ((reference, "cpu"), *BODIES):  # in place
        z = rotated.to(device, copy=True)
        assert body.rotate(z, key=key, out=z) is z
        assert_same(reference.rotate(rotated, key=key), z)
        assert_same(
            rotated if numel == 0 else reference.unrotate(z.cpu(), z.numel(), key=key),
            body.unrotate(z, z.numel(), key=key, out=z),
        )


@few
@given(sizes, seeds, blocks, dtypes, specials, st.integers(1, 8))
def test_codebook(numel: int, seed: int, block: int, dtype: torch.dtype, special: tuple[float, ...], bits: int) -> None:
    scale = scales(numel, block, seed, special)
    boundaries = mixed((1 << bits) - 1, seed, BIG).sort().values
    packed = check("codebook_encode", mixed(numel, seed, special, dtype), scale, boundaries, bits=bits, block=block)
    check("codebook_decode", packed, numel, scale, mixed(1 << bits, seed), bits=bits, block=block)


@pytest.mark.parametrize("numel", LARGE)
def test_larger_tensors(numel: int) -> None:
    x, key = mixed(numel, numel), Key(2**32 - 5, 2**31)
    for block in BLOCKS:
        low, step = mixed(blocks_of(numel, block), 1), scales(numel, block, 2, TINY)
        packed = check("quantize", x, low, step, bits=7, top=126, offset=63, block=block, key=key)
        check("dequantize_add", x, packed, low, step, bits=7, offset=63, block=block)
        check("block_min_max", x, block=block)
        codes = check("exponential_encode", x, step, top=30, block=block, key=key)
        check("exponential_decode_add", x, codes, step, top=30, block=block)
    check("unrotate", check("rotate", x, key=key), numel, key=key)
    for capacity in (0, numel // 4, numel):
        chosen = check("select_ef", x, x, 0.01, capacity=capacity)
        check("scatter_add", x, chosen.indices, chosen.values)
    assert cpu.moments(x).squares == pytest.approx(reference.moments(x).squares, rel=1e-6)
    check("checksum", random_codes(4 * numel, 8, 3))


def test_tensors_with_gaps_or_another_dtype() -> None:
    """Inputs are reshaped and converted as in the definition, and so is what is changed in place."""
    key, step, low = Key(1, 2), torch.full((1,), 0.25), torch.zeros(1)
    x = mixed(300, 1, dtype=torch.bfloat16).view(20, 15).t()
    packed = check("quantize", x, low, step, bits=4, top=15, offset=7, block=0, key=key)
    chosen = check("select", x, 0.1, capacity=20)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        results = []
        for body, device in ((reference, "cpu"), *BODIES):
            out = torch.ones(600, dtype=dtype)[::2].to(device)
            body.dequantize_add(out, packed.to(device), low.to(device), step.to(device), bits=4, offset=7, block=0)
            body.scatter_add(out, chosen.indices.to(device), chosen.values.to(device, dtype))
            body.select_ef(out, x.to(device), 1.0, capacity=30)
            results.append(out.cpu())
        assert_same(results[0], results[1])
        assert_same(results[0], results[2])


@pytest.mark.parametrize(("body", "device"), BODIES)
def test_buffers_too_short_for_a_kernel_are_refused(body: Any, device: str) -> None:
    x, one = torch.zeros(65, device=device), torch.ones(1, device=device)
    with pytest.raises(MessageError):
        body.unpack(torch.zeros(15, dtype=torch.uint8, device=device), 65, bits=1)
    with pytest.raises(OptionError):
        body.quantize(x, one, one, bits=1, top=1, offset=0, block=64, key=Key(0, 0))
    with pytest.raises(OptionError):
        body.exponential_encode(x, one, top=7, block=96, key=Key(0, 0))
    with pytest.raises(OptionError):
        body.pack(torch.zeros(8, dtype=torch.uint8, device=device), bits=9)
    with pytest.raises(OptionError):
        body.select_ef(x, one, 0.5, capacity=1)
    with pytest.raises(OptionError):
        body.unrotate(x, 65, key=Key(0, 0))


def test_quantize_writes_where_it_is_told() -> None:
    x, one, zero = mixed(1000, 1), torch.ones(1), torch.zeros(1)
    options: dict[str, Any] = {"bits": 4, "top": 14, "offset": 7, "block": 0, "key": Key(1, 2)}
    expected = reference.quantize(x, zero, one, **options)
    for body, device in ((reference, "cpu"), *BODIES):
        out = torch.zeros_like(expected, device=device)
        given_back = body.quantize(x.to(device), zero.to(device), one.to(device), **options, out=out)
        assert given_back.data_ptr() == out.data_ptr()
        assert_same(expected, out)
    with pytest.raises(OptionError):
        cpu.quantize(x, zero, one, **options, out=torch.zeros(3, dtype=torch.uint8))
