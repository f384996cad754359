"""Every hot loop in plain torch: the definition that the numba and Triton bodies must match bit for bit.

Any device, any float dtype in (computed in float32). Tensors are flat. A *block* is a run of consecutive elements with
a scale of its own; `block=0` means one block for the whole tensor, otherwise a multiple of `CHUNK`.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from ..rng import Key
from . import fused
from .fused import Keys
from .layout import (
    CHUNK,
    CUT_SHIFT,
    FRACTION_BITS,
    MIX_1,
    MIX_2,
    ROTATION,
    WEYL,
    Moments,
    Selection,
    blocks_of,
    magnitude_bits,
    planes,
    rotated_numel,
)

_MASK32 = 0xFFFFFFFF


def _spread(per_block: Tensor, numel: int, block: int) -> Tensor:
    """One entry per block -> one per element (or a scalar that broadcasts)."""
    return per_block if block == 0 else per_block.repeat_interleave(block)[:numel]


def _flat32(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).to(torch.float32)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    """A buffer may be given as `out`: codes are written where they are sent from, and fresh memory is slow."""
    return result if out is None else out.copy_(result)


def random_bits(numel: int, key: Key, *, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits per element, in an int64 tensor: a keyed two-round integer hash of the position.

    Only the upper bits are meant to be used (the last multiplication leaves the lowest ones weak).
    """
    h = (torch.arange(numel, dtype=torch.int64, device=device) + key.k0) & _MASK32
    h = ((h ^ (h >> 16)) * MIX_1) & _MASK32
    return ((h ^ (h >> 15) ^ key.k1) * MIX_2) & _MASK32


# --------------------------------------------------------------------------------------------- packing and quantising


def pack(codes: Tensor, *, bits: int) -> Tensor:
    """uint8 codes below 2**bits -> packed bytes. In a plane of width w, byte j of a chunk holds the elements
    j, j + 8w, j + 16w, ...: neighbouring bytes come from neighbouring elements, which is what vector units like."""
    chunks = -(-codes.numel() // CHUNK)
    padded = torch.zeros(chunks * CHUNK, dtype=torch.uint8, device=codes.device)
    padded[: codes.numel()] = codes
    rows = padded.view(chunks, CHUNK)
    out = []
    for width, shift in planes(bits):
        plane = (rows >> shift) & ((1 << width) - 1)
        parts = plane.view(chunks, 8 // width, 8 * width)
        merged = parts[:, 0].clone()
        for part in range(1, 8 // width):
            merged |= parts[:, part] << (part * width)
        out.append(merged)
    return torch.cat(out, dim=1).reshape(-1)


def unpack(packed: Tensor, numel: int, *, bits: int) -> Tensor:
    """The inverse of `pack`: packed bytes -> `numel` uint8 codes."""
    chunks = -(-numel // CHUNK)
    rows = packed[: chunks * 8 * bits].view(chunks, 8 * bits)
    codes = torch.zeros(chunks, CHUNK, dtype=torch.uint8, device=packed.device)
    start = 0
    for width, shift in planes(bits):
        plane = rows[:, start : start + 8 * width]
        start += 8 * width
        parts = [(plane >> (part * width)) & ((1 << width) - 1) for part in range(8 // width)]
        codes |= torch.cat(parts, dim=1) << shift
    return codes.reshape(-1)[:numel]


def quantize(
    x: Tensor,
    low: Tensor,
    inverse_step: Tensor,
    *,
    bits: int,
    top: int,
    offset: int,
    block: int,
    key: Key,
    out: Tensor | None = None,
) -> Tensor:
    """Unbiased rounding to a uniform grid, packed: code c in 0..top stands for low + (c - offset) * step.

    `low` and `inverse_step` hold one float32 per block. The rounding is done in fixed point with 23 fractional bits, in
    integers, so that every body gives the same bits; values outside the grid are clamped to its ends (NaN: to the top).
    """
    x = _flat32(x)
    scale = inverse_step * float(1 << FRACTION_BITS)
    y = (x - _spread(low, x.numel(), block)) * _spread(scale, x.numel(), block)
    ceiling = y.new_tensor(float((top - offset) << FRACTION_BITS))
    floor = y.new_tensor(float(-offset << FRACTION_BITS))
    y = torch.where(y < ceiling, y, ceiling)
    y = torch.where(y > floor, y, floor)
    dither = random_bits(x.numel(), key, device=x.device) >> (32 - FRACTION_BITS)
    codes = (y.to(torch.int32).to(torch.int64) + dither + (offset << FRACTION_BITS)) >> FRACTION_BITS
    return _into(out, pack(codes.to(torch.uint8), bits=bits))


def dequantize_add(
    out: Tensor, packed: Tensor, low: Tensor, step: Tensor, *, bits: int, offset: int, block: int
) -> None:
    """out += low + (code - offset) * step, in place; `out` is flat float32."""
    codes = unpack(packed, out.numel(), bits=bits).to(torch.int32) - offset
    grid = codes.to(torch.float32) * _spread(step, out.numel(), block)
    out += grid + _spread(low, out.numel(), block)


# --------------------------------------------------------------------------------------------- exponential dithering


def exponential_encode(x: Tensor, inverse_scale: Tensor, *, top: int, block: int, key: Key) -> Tensor:
    """Unbiased rounding of x / scale to a signed power of two; one byte per element, sign bit 0x80.

    Code c in 1..top stands for 2**(c - top), 0 for zero; |x| / scale above 1 is clamped. Adding a random mantissa and
    dropping the mantissa rounds up with exactly the right probability (Horvath et al., natural compression).
    """
    x = _flat32(x)
    y = x.abs() * _spread(inverse_scale, x.numel(), block)
    one = y.new_tensor(1.0)
    y = torch.where(y < one, y, one)
    dither = random_bits(x.numel(), key, device=x.device) >> (32 - FRACTION_BITS)
    bits = y.view(torch.int32).to(torch.int64)
    code = ((bits + dither) >> FRACTION_BITS) - 127 + top
    # Below the smallest level the choice is between it and zero.
    lowest = (y * 2.0 ** (top - 1)) * float(1 << FRACTION_BITS)
    lowest = torch.where(lowest < float(1 << FRACTION_BITS), lowest, float(1 << FRACTION_BITS)).to(torch.int64)
    below = (bits >> FRACTION_BITS) - 127 + top < 1
    code = torch.where(below, (dither < lowest).to(torch.int64), code)
    sign = (x.view(torch.int32) < 0) & (code > 0)
    return (code + sign.to(torch.int64) * 128).to(torch.uint8)


def exponential_decode_add(out: Tensor, codes: Tensor, scale: Tensor, *, top: int, block: int) -> None:
    """out += sign * 2**(code - top) * scale, in place."""
    exponent = (codes & 0x7F).to(torch.int32)
    # code - top + 127 is the IEEE exponent field; code 0 is zero whatever `top` is.
    field = torch.where(exponent > 0, exponent - top + 127, 0) << 23
    magnitude = field.view(torch.float32) * _spread(scale, out.numel(), block)
    out += torch.where(codes >= 128, -magnitude, magnitude)


def exponential_add(a: Tensor, b: Tensor, *, top: int, key: Key) -> Tensor:
    """The sum of two exponential codes, as a code: E[value(result)] = value(a) + value(b), integers only.

    Equal signs: the larger exponent, plus one with probability 2**-gap. Opposite signs: the larger exponent, minus one
    with probability 2**-(gap - 1), or zero if they cancel. The result saturates at `top`.
    """
    a64, b64 = a.to(torch.int64), b.to(torch.int64)
    ea, eb = a64 & 0x7F, b64 & 0x7F
    swap = eb > ea
    large, small = torch.where(swap, b64, a64), torch.where(swap, a64, b64)
    el, es = large & 0x7F, small & 0x7F
    gap = el - es
    random = random_bits(a.numel(), key, device=a.device)
    same = (a64 & 0x80) == (b64 & 0x80)
    shift = torch.where(same, gap, (gap - 1).clamp(min=0)).clamp(max=32)
    rounds = random < ((1 << 32) >> shift)
    moved = torch.where(same, el + rounds.to(torch.int64), el - rounds.to(torch.int64))
    moved = torch.where(~same & (gap == 0), 0, moved).clamp(max=top)
    result = torch.where(moved > 0, moved | (large & 0x80), 0)
    return torch.where(es == 0, large, result).to(torch.uint8)


# ------------------------------------------------------------------------------------------------------ block scales


def _padded_rows(x: Tensor, block: int, fill: int) -> Tensor:
    """int32 view of float32 data as (blocks, block), padded with `fill`."""
    bits = _flat32(x).view(torch.int32)
    width = block or max(bits.numel(), 1)
    rows = blocks_of(bits.numel(), block)
    padded = torch.full((rows * width,), fill, dtype=torch.int32, device=x.device)
    padded[: bits.numel()] = bits
    return padded.view(rows, width)


def block_abs_max(x: Tensor, *, block: int) -> Tensor:
    """max |x| of each block, float32. Compared as integers, so inf and NaN come out as inf and NaN."""
    rows = _padded_rows(x, block, 0) & 0x7FFFFFFF
    if rows.numel() == 0:
        return torch.zeros(0, dtype=torch.float32, device=x.device)
    return rows.amax(dim=1).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Float bits -> integers of the same order (and back): flips the magnitude bits of negative numbers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def block_min_max(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """min and max of each block, float32. A NaN in the block shows as NaN in one of the two."""
    bits = _ordered(_flat32(x).view(torch.int32))
    if bits.numel() == 0:
        empty = torch.zeros(0, dtype=torch.float32, device=x.device)
        return empty, empty.clone()
    rows, width = blocks_of(bits.numel(), block), block or bits.numel()
    padded = bits[-1:].repeat(rows * width)  # padding with an element of the last block changes neither end
    padded[: bits.numel()] = bits
    padded = padded.view(rows, width)
    return _ordered(padded.amin(dim=1)).view(torch.float32), _ordered(padded.amax(dim=1)).view(torch.float32)


def block_square_sum(x: Tensor, *, block: int) -> Tensor:
    """sum of x**2 of each block, accumulated in float64, float64 out."""
    rows = _padded_rows(x, block, 0).view(torch.float32).to(torch.float64)
    return (rows * rows).sum(dim=1)


# ---------------------------------------------------------------------------------------------------------- rotation


def _hadamard(rows: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of each row; strides 1, 2, 4, ... in this order (the bits depend on it)."""
    count, width = rows.shape
    stride = 1
    while stride < width:
        pairs = rows.view(count, width // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((a + b, a - b), dim=2).reshape(count, width)
        stride *= 2
    return rows * torch.tensor(1.0 / math.sqrt(width), dtype=torch.float32, device=rows.device)


def _signs(numel: int, key: Key, device: torch.device) -> Tensor:
    """+1 or -1 per element from the top random bit."""
    return 1.0 - 2.0 * (random_bits(numel, key, device=device) >> 31).to(torch.float32)


def _transform(x: Tensor) -> Tensor:
    full = x.numel() // ROTATION * ROTATION
    parts = [_hadamard(x[:full].view(-1, ROTATION)).reshape(-1)] if full else []
    if x.numel() > full:
        parts.append(_hadamard(x[full:].view(1, -1)).reshape(-1))
    return torch.cat(parts) if parts else x.clone()


def rotate(x: Tensor, *, key: Key, out: Tensor | None = None) -> Tensor:
    """Random signs, then a Hadamard transform in blocks of 1024; output of length `rotated_numel` (`out` may be x)."""
    x = _flat32(x)
    padded = torch.zeros(rotated_numel(x.numel()), dtype=torch.float32, device=x.device)
    padded[: x.numel()] = x
    return _into(out, _transform(padded * _signs(padded.numel(), key, x.device)))


def unrotate(z: Tensor, numel: int, *, key: Key, out: Tensor | None = None) -> Tensor:
    """The inverse of `rotate`: Hadamard transform, then the same signs; `numel` elements (`out` may be z)."""
    z = _flat32(z)
    return _into(out, (_transform(z) * _signs(z.numel(), key, z.device))[:numel])


def codebook_encode(
    z: Tensor, inverse_scale: Tensor, boundaries: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    """Nearest codeword of a sorted codebook, packed: the code is the number of boundaries below z / scale."""
    y = _flat32(z) * _spread(inverse_scale, z.numel(), block)
    codes = torch.zeros(y.numel(), dtype=torch.uint8, device=y.device)
    for boundary in boundaries:
        codes += (y > boundary).to(torch.uint8)
    return _into(out, pack(codes, bits=bits))


def codebook_decode(
    packed: Tensor, numel: int, scale: Tensor, codebook: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    """codebook[code] * scale, float32."""
    words = codebook[unpack(packed, numel, bits=bits).to(torch.int64)]
    return _into(out, words * _spread(scale, numel, block))


def abs_max_encode(x: Tensor, step: Tensor, out: Tensor, *, levels: int, bits: int, block: int, key: Key) -> None:
    """Rounded at random to `levels` either side of zero: codes into `out`, a step for each block into `step`.

    A step is 0 for a block of zeros and NaN for one that is not finite.
    """
    options = {"levels": levels, "bits": bits, "block": block}
    fused.abs_max_encode(sys.modules[__name__], x, step, out, **options, key=key)


def rotated_encode(
    x: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, boundaries: Tensor, bits: int
) -> None:
    """Two rotations, then the nearest codewords into `out` and, for each block, |z|^2 / <c, z> into `scale`.

    A scale is 0 for a block of zeros and NaN for one that is not finite.
    """
    loops = sys.modules[__name__]
    fused.rotated_encode(loops, x, scale, out, keys=keys, codebook=codebook, boundaries=boundaries, bits=bits)


def rotated_add(
    packed: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, bits: int, fresh: bool = False
) -> None:
    """Add to `out` what `rotated_encode` stands for; `fresh`: as if it held zeros, without reading it."""
    loops = sys.modules[__name__]
    fused.rotated_add(loops, packed, scale, out, keys=keys, codebook=codebook, bits=bits, fresh=fresh)


# --------------------------------------------------------------------------------------------------------- selection


def threshold_count(x: Tensor, threshold: float) -> int:
    """How many |x| exceed the threshold (inf and NaN exceed every finite one)."""
    magnitude = _flat32(x).view(torch.int32) & 0x7FFFFFFF
    return int((magnitude > magnitude_bits(threshold)).sum())


def select(x: Tensor, threshold: float, *, capacity: int) -> Selection:
    """The first `capacity` elements with |x| > threshold, in order of position."""
    x = _flat32(x)
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    indices = (magnitude > magnitude_bits(threshold)).nonzero().reshape(-1)[:capacity]
    return Selection(x[indices], indices.to(torch.int32), threshold_count(x, threshold))


def select_ef(memory: Tensor, gradient: Tensor, threshold: float, *, capacity: int) -> Selection:
    """memory += gradient; take out the first `capacity` elements above the threshold; the rest stays in memory."""
    memory += _flat32(gradient)
    chosen = select(memory, threshold, capacity=capacity)
    memory[chosen.indices.to(torch.int64)] = 0.0
    return chosen


def keep_largest(
    values: Tensor, indices: Tensor, *, k: int, threshold: float, memory: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """The k largest of the candidates above `threshold`, in order of position, and the magnitude of the cut.

    Magnitudes within 2**-18 of each other count as equal, of equal ones the lower position is kept. Those left out go
    back to `memory`.
    """
    if values.numel() <= k:
        return values, indices, threshold
    low = magnitude_bits(threshold)
    rank = (((values.view(torch.int32) & 0x7FFFFFFF) - low) >> CUT_SHIFT).clamp(min=0)
    cut = int(rank.topk(k, sorted=False).values.min())
    tied = rank == cut
    room = k - int((rank > cut).sum())
    keep = (rank > cut) | (tied & (tied.to(torch.int64).cumsum(0) <= room))
    if memory is not None:
        memory[indices[~keep].to(torch.int64)] = values[~keep]
    edge = torch.tensor(low + (cut << CUT_SHIFT), dtype=torch.int32).view(torch.float32)
    return values[keep], indices[keep], float(edge)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] += values, in place; indices (int32, unique, in range) come from a checked decoder."""
    out.index_add_(0, indices.to(torch.int64), values)


# -------------------------------------------------------------------------------------------------- sums and checks


def moments(x: Tensor) -> Moments:
    """Sum, sum of squares (both in float64) and max |x| (inf or NaN if there is one)."""
    if x.numel() == 0:
        return Moments(0.0, 0.0, 0.0)
    wide = _flat32(x).to(torch.float64)
    return Moments(float(wide.sum()), float((wide * wide).sum()), float(block_abs_max(x, block=0)[0]))


def all_finite(x: Tensor) -> bool:
    """True if there is neither inf nor NaN."""
    return x.numel() == 0 or float(block_abs_max(x, block=0)[0]) < math.inf


def checksum(data: Tensor) -> int:
    """32-bit sum of the little-endian words of a byte tensor (length a multiple of 4), each mixed with its position.

    Any change of a single word changes the sum; other damage passes with a chance of 2**-32.
    """
    words = data.view(torch.int32).to(torch.int64)
    positions = torch.arange(words.numel(), device=data.device, dtype=torch.int64)
    h = (words + (2 * positions + 1) * WEYL) & _MASK32
    h = ((h ^ (h >> 16)) * MIX_1) & _MASK32
    return int((h ^ (h >> 15)).sum()) & _MASK32
