"""Triton kernels that encode or decode a whole message in one launch: abs-max quantising and the `rotated` codec.

Only device code; `gpu_whole.py` has the functions to call. A block stays in the registers of one program, so that the
data is read from memory once. What does not fit is put together from smaller kernels (`fused.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import layout
from .gpu_quantize import hadamard, load_codes, random_signs, rounded_codes, store_codes

_DOMINATES, _FEW = tl.constexpr(layout.DOMINATES), tl.constexpr(layout.FEW)
_SMALLEST = tl.constexpr(layout.SMALLEST_STEP)
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_ONE = tl.constexpr(float(1 << layout.FRACTION_BITS))


@triton.jit
def _usable(step):
    """`layout.usable_steps`: NaN if not finite, 0 if too small; and the inverse to encode with."""
    finite = (step.to(tl.int32, bitcast=True) & _MAGNITUDE) < _INFINITY
    step = tl.where(finite, step, float("nan"))
    step = tl.where(step < _SMALLEST, 0.0, step)
    return step, tl.where(step > 0, tl.div_rn(1.0, step), 0.0)


@triton.jit(do_not_specialize=["k0", "k1"])
def abs_max_encode_kernel(
    packed, step, x, numel, block, k0, k1,
    LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scales and codes of BLOCKS blocks; `block` elements of WIDTH, a power of two, are used."""
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = tl.arange(0, WIDTH)
    element = row[:, None] * block + inside[None, :]
    mask = (inside < block)[None, :] & (element < numel)
    values = tl.load(x + element, mask=mask, other=0.0)
    largest = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1).to(tl.float32, bitcast=True)
    found, inverse = _usable(tl.div_rn(largest, LEVELS * 1.0))
    tl.store(step + row, found, mask=row * block < numel)
    codes = rounded_codes(values * (inverse * _ONE)[:, None], element, k0, k1, 2 * LEVELS, LEVELS)
    CHUNKS: tl.constexpr = WIDTH // 64
    part = tl.arange(0, BLOCKS * CHUNKS)
    chunk = (tl.program_id(0).to(tl.int64) * BLOCKS + part // CHUNKS) * (block // 64) + part % CHUNKS
    used = (part % CHUNKS * 64 < block) & (chunk * 64 < numel)
    codes = tl.reshape(tl.where(mask, codes, 0), (BLOCKS * CHUNKS, 64))
    store_codes(packed, chunk, codes, used, BITS, BLOCKS * CHUNKS)


@triton.jit
def _square_sum(values):
    wide = values.to(tl.float64)
    return tl.sum(wide * wide, axis=0)


@triton.jit
def _uneven(values, squares, WIDTH: tl.constexpr):
    """`fused.uneven` of one block."""
    magnitude = tl.abs(values)
    half = 0.5 * tl.sqrt(squares / WIDTH).to(tl.float32)
    largest = tl.max(magnitude, axis=0).to(tl.float64)
    many = tl.sum((magnitude > half).to(tl.int32), axis=0)
    return (squares < float("inf")) & ((largest * largest * _DOMINATES > squares) | (many * _FEW < WIDTH))


@triton.jit
def _encode_block(
    packed, scale, x, boundaries, codebook, block, count, numel, factor, a0, a1, b0, b1,
    LOG_WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Codes and scale of one block of 2**LOG_WIDTH elements; `factor` makes the transform orthonormal."""
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    position = block * 1024 + tl.arange(0, WIDTH)
    values = tl.load(x + position, mask=position < numel, other=0.0)
    z = hadamard(values * random_signs(position, a0, a1), factor, LOG_WIDTH)
    squares = _square_sum(z)
    twice = _uneven(values, squares, WIDTH)
    if twice:
        z = hadamard(z * random_signs(position, b0, b1), factor, LOG_WIDTH)
        squares = _square_sum(z)
    rms, inverse = _usable(tl.sqrt(squares / WIDTH).to(tl.float32))
    y = z * inverse
    codes = tl.zeros((WIDTH,), tl.int32)
    for i in range(count):
        codes += (y > tl.load(boundaries + i)).to(tl.int32)
    chunk = block * 16 + tl.arange(0, WIDTH // 64)
    store_codes(packed, chunk, tl.reshape(codes, (WIDTH // 64, 64)), chunk >= 0, BITS, WIDTH // 64)
    unbiased = squares / tl.sum((tl.load(codebook + codes) * z).to(tl.float64), axis=0)
    unbiased = tl.where(twice, -unbiased, unbiased).to(tl.float32)
    tl.store(scale + block, tl.where(rms > 0, unbiased, rms))


@triton.jit(do_not_specialize=["a0", "a1", "b0", "b1"])
def rotated_encode_kernel(
    packed, scale, x, boundaries, codebook, count, numel, full, tail_factor, a0, a1, b0, b1,
    LOG_TAIL: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program for each of the `full` blocks of 1024, and one for a shorter last block (LOG_TAIL is not 0)."""
    block = tl.program_id(0).to(tl.int64)
    if LOG_TAIL == 0 or block < full:
        _encode_block(packed, scale, x, boundaries, codebook, block, count, numel, 0.03125, a0, a1, b0, b1, 10, BITS)
    else:
        _encode_block(
            packed, scale, x, boundaries, codebook, block, count, numel, tail_factor, a0, a1, b0, b1, LOG_TAIL, BITS
        )


@triton.jit
def _add_block(
    out, packed, scale, codebook, block, levels, numel, factor, a0, a1, b0, b1,
    LOG_WIDTH: tl.constexpr, BITS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Decode one block, undo its rotations, add; FRESH: to zero, so that a zero is never negative."""
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    position = block * 1024 + tl.arange(0, WIDTH)
    codes = load_codes(packed, position, position >= 0, BITS)
    step = tl.load(scale + block)
    z = tl.load(codebook + codes, mask=codes < levels, other=0.0) * tl.abs(step)
    if step < 0:
        z = hadamard(z, factor, LOG_WIDTH) * random_signs(position, b0, b1)
    z = hadamard(z, factor, LOG_WIDTH) * random_signs(position, a0, a1)
    mask = position < numel
    if FRESH:
        old = tl.zeros((WIDTH,), tl.float32)
    else:
        old = tl.load(out + position, mask=mask, other=0.0)
    tl.store(out + position, z + old, mask=mask)


@triton.jit(do_not_specialize=["a0", "a1", "b0", "b1"])
def rotated_add_kernel(
    out, packed, scale, codebook, levels, numel, full, tail_factor, a0, a1, b0, b1,
    LOG_TAIL: tl.constexpr, BITS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """One program for each of the `full` blocks of 1024, and one for a shorter last block (LOG_TAIL is not 0)."""
    block = tl.program_id(0).to(tl.int64)
    if LOG_TAIL == 0 or block < full:
        _add_block(out, packed, scale, codebook, block, levels, numel, 0.03125, a0, a1, b0, b1, 10, BITS, FRESH)
    else:
        _add_block(
            out, packed, scale, codebook, block, levels, numel, tail_factor, a0, a1, b0, b1, LOG_TAIL, BITS, FRESH
        )
