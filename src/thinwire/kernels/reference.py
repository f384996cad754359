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
from . import checks, fused
from .fused import Keys
from .layout import (
    CHUNK,
    CUT_SHIFT,
    FRACTION_BITS,
    MIX_1,
    WEYL,
    Moments,
    Selection,
    blocks_of,
    magnitude_bits,
    planes,
    rotated_numel,
)
from .reference_parts import (
    MASK32,
    finish_hash,
    flat32,
    into,
    ordered,
    padded_rows,
    random_words,
    signs,
    spread,
    transform,
    weighted_sum,
)
from .rows import abs_max_encode_rows as abs_max_encode_rows
from .rows import rotated_add_rows as rotated_add_rows
from .rows import rotated_encode_rows as rotated_encode_rows
from .rows import rotated_mean_rows as rotated_mean_rows


def random_bits(numel: int, key: Key, *, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits per element, in an int64 tensor: a keyed two-round integer hash of the position.

    Only the upper bits are meant to be used (the last multiplication leaves the lowest ones weak).
    """
    return random_words(numel, key, device)


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
    x = flat32(x)
    scale = inverse_step * float(1 << FRACTION_BITS)
    y = (x - spread(low, x.numel(), block)) * spread(scale, x.numel(), block)
    ceiling = y.new_tensor(float((top - offset) << FRACTION_BITS))
    floor = y.new_tensor(float(-offset << FRACTION_BITS))
    y = torch.where(y < ceiling, y, ceiling)
    y = torch.where(y > floor, y, floor)
    dither = random_bits(x.numel(), key, device=x.device) >> (32 - FRACTION_BITS)
    codes = (y.to(torch.int32).to(torch.int64) + dither + (offset << FRACTION_BITS)) >> FRACTION_BITS
    return into(out, pack(codes.to(torch.uint8), bits=bits))


def dequantize_add(
    out: Tensor, packed: Tensor, low: Tensor, step: Tensor, *, bits: int, offset: int, block: int
) -> None:
    """out += low + (code - offset) * step, in place; `out` is flat float32."""
    codes = unpack(packed, out.numel(), bits=bits).to(torch.int32) - offset
    grid = codes.to(torch.float32) * spread(step, out.numel(), block)
    out += grid + spread(low, out.numel(), block)


# --------------------------------------------------------------------------------------------- exponential dithering


def exponential_encode(x: Tensor, inverse_scale: Tensor, *, top: int, block: int, key: Key) -> Tensor:
    """Unbiased rounding of x / scale to a signed power of two; one byte per element, sign bit 0x80.

    Code c in 1..top stands for 2**(c - top), 0 for zero; |x| / scale above 1 is clamped. Adding a random mantissa and
    dropping the mantissa rounds up with exactly the right probability (Horvath et al., natural compression).
    """
    x = flat32(x)
    y = x.abs() * spread(inverse_scale, x.numel(), block)
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
    magnitude = field.view(torch.float32) * spread(scale, out.numel(), block)
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


def block_abs_max(x: Tensor, *, block: int) -> Tensor:
    """max |x| of each block, float32. Compared as integers, so inf and NaN come out as inf and NaN."""
    rows = padded_rows(x, block, 0) & 0x7FFFFFFF
    if rows.numel() == 0:
        return torch.zeros(0, dtype=torch.float32, device=x.device)
    return rows.amax(dim=1).view(torch.float32)


def block_min_max(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """min and max of each block, float32. A NaN in the block shows as NaN in one of the two."""
    bits = ordered(flat32(x).view(torch.int32))
    if bits.numel() == 0:
        empty = torch.zeros(0, dtype=torch.float32, device=x.device)
        return empty, empty.clone()
    rows, width = blocks_of(bits.numel(), block), block or bits.numel()
    padded = bits[-1:].repeat(rows * width)  # padding with an element of the last block changes neither end
    padded[: bits.numel()] = bits
    padded = padded.view(rows, width)
    return ordered(padded.amin(dim=1)).view(torch.float32), ordered(padded.amax(dim=1)).view(torch.float32)


def block_square_sum(x: Tensor, *, block: int) -> Tensor:
    """sum of x**2 of each block, accumulated in float64, float64 out."""
    rows = padded_rows(x, block, 0).view(torch.float32).to(torch.float64)
    return (rows * rows).sum(dim=1)


# ---------------------------------------------------------------------------------------------------------- rotation


def rotate(x: Tensor, *, key: Key, out: Tensor | None = None) -> Tensor:
    """Random signs, then a Hadamard transform in blocks of 1024; output of length `rotated_numel` (`out` may be x)."""
    x = flat32(x)
    padded = torch.zeros(rotated_numel(x.numel()), dtype=torch.float32, device=x.device)
    padded[: x.numel()] = x
    return into(out, transform(padded * signs(padded.numel(), key, x.device)))


def unrotate(z: Tensor, numel: int, *, key: Key, out: Tensor | None = None) -> Tensor:
    """The inverse of `rotate`: Hadamard transform, then the same signs; `numel` elements (`out` may be z)."""
    z = flat32(z)
    return into(out, (transform(z) * signs(z.numel(), key, z.device))[:numel])


def codebook_encode(
    z: Tensor, inverse_scale: Tensor, boundaries: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    """Nearest codeword of a sorted codebook, packed: the code is the number of boundaries below z / scale."""
    y = flat32(z) * spread(inverse_scale, z.numel(), block)
    codes = torch.zeros(y.numel(), dtype=torch.uint8, device=y.device)
    for boundary in boundaries:
        codes += (y > boundary).to(torch.uint8)
    return into(out, pack(codes, bits=bits))


def codebook_decode(
    packed: Tensor, numel: int, scale: Tensor, codebook: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    """codebook[code] * scale, float32."""
    words = codebook[unpack(packed, numel, bits=bits).to(torch.int64)]
    return into(out, words * spread(scale, numel, block))


def abs_max_encode(x: Tensor, step: Tensor, out: Tensor, *, levels: int, bits: int, block: int, key: Key) -> None:
    """Rounded at random to `levels` either side of zero: codes into `out`, a step for each block into `step`.

    A step is 0 for a block of zeros and NaN for one that is not finite.
    """
    options = {"levels": levels, "bits": bits, "block": block}
    fused.abs_max_encode(sys.modules[__name__], x, step, out, **options, key=key)


def rotated_encode(
    x: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, boundaries: Tensor, bits: int
) -> None:
    """One or two rotations, then the nearest codewords into `out` and, for each block, |z|^2 / <c, z> into `scale`.

    A block in which few elements dominate is rotated twice, and its scale is negative. A scale is 0 for a block
    of zeros and NaN for one that is not finite.
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
    magnitude = flat32(x).view(torch.int32) & 0x7FFFFFFF
    return int((magnitude > magnitude_bits(threshold)).sum())


def select(x: Tensor, threshold: float, *, capacity: int) -> Selection:
    """The first `capacity` elements with |x| > threshold, in order of position."""
    x = flat32(x)
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    indices = (magnitude > magnitude_bits(threshold)).nonzero().reshape(-1)[:capacity]
    return Selection(x[indices], indices.to(torch.int32), threshold_count(x, threshold))


def select_ef(
    memory: Tensor,
    gradient: Tensor,
    threshold: float,
    *,
    capacity: int,
    out: Tensor | None = None,
    decay: float = 1.0,
) -> Selection:
    """u = gradient + decay * memory; take the first `capacity` elements with |u| > threshold, write the rest to `out`.

    The elements taken are zero in `out`. It may be `memory` (the default) or `gradient`; a memory that is not `out`
    stays as it was. The sum is that of `torch.add(gradient, memory, alpha=decay)`, which rounds once.
    """
    rest = checks.selection_out(memory, gradient, out)
    torch.add(flat32(gradient), memory, alpha=decay, out=rest)
    chosen = select(rest, threshold, capacity=capacity)
    rest[chosen.indices.to(torch.int64)] = 0.0
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
    wide = flat32(x).to(torch.float64)
    return Moments(float(wide.sum()), float((wide * wide).sum()), float(block_abs_max(x, block=0)[0]))


def all_finite(x: Tensor) -> bool:
    """True if there is neither inf nor NaN."""
    return x.numel() == 0 or float(block_abs_max(x, block=0)[0]) < math.inf


def finite(x: Tensor) -> Tensor:
    """As `all_finite`, but a 0-dim bool tensor on the device of x: nothing waits for the device.

    >>> finite(torch.tensor([1.0, 2.0])), finite(torch.tensor([1.0, float("nan")]))
    (tensor(True), tensor(False))
    """
    return flat32(x).isfinite().all()


def hash64(x: Tensor) -> Tensor:
    """A 64-bit hash of the bytes of x and of their order, as a 0-dim int64 tensor on the device of x.

    The sum of all 32-bit words (the last one padded with zeros), each times an odd number that depends on its position:
    word i lies in row i // 64 and lane i % 64, and its multiplier is that of the row times that of the lane. A change
    of one word always changes the hash. Other changes pass with a chance of about 2**-64, or of 2**-32 if only the top
    bits of words differ.

    >>> bool(hash64(torch.tensor([1.0, 2.0])) == hash64(torch.tensor([2.0, 1.0])))
    False
    """
    words, length = checks.words(x)
    return finish_hash(weighted_sum(words), length)


def checksum(data: Tensor) -> int:
    """32-bit sum of the little-endian words of a byte tensor (length a multiple of 4), each mixed with its position.

    Any change of a single word changes the sum; other damage passes with a chance of 2**-32.
    """
    words = data.view(torch.int32).to(torch.int64)
    positions = torch.arange(words.numel(), device=data.device, dtype=torch.int64)
    h = (words + (2 * positions + 1) * WEYL) & MASK32
    h = ((h ^ (h >> 16)) * MIX_1) & MASK32
    return int((h ^ (h >> 15)).sum()) & MASK32
