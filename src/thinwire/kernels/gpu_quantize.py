"""Triton kernels on codes: random bits, packing, quantising, exponential dithering, codebooks and the rotation.

Only device code; `gpu.py` has the functions to call and says what has been checked. A tile is `ROWS` chunks of 64
elements, because a chunk is what is packed together and the smallest run of elements that shares a scale.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import layout

# A kernel may only read globals that are compile-time constants.
_MIX_1 = tl.constexpr(layout.MIX_1)
_MIX_2 = tl.constexpr(layout.MIX_2)
_FRACTION = tl.constexpr(layout.FRACTION_BITS)
_UNIT = tl.constexpr(1 << layout.FRACTION_BITS)  # 1 as a fixed-point number
_ONE = tl.constexpr(float(1 << layout.FRACTION_BITS))


@triton.jit
def hash_bits(position, k0, k1):
    """32 random bits per position, uint32; the words of the key come as int32."""
    h = position.to(tl.uint32) + k0.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * _MIX_1
    return (h ^ (h >> 15) ^ k1.to(tl.uint32, bitcast=True)) * _MIX_2


@triton.jit
def _dither(position, k0, k1):
    """The fraction of the random bits that fixed-point rounding adds."""
    return (hash_bits(position, k0, k1) >> (32 - _FRACTION)).to(tl.int32)


@triton.jit
def _tile(ROWS: tl.constexpr):
    """Chunks [ROWS] and elements [ROWS, 64] of this program; int64, so that a tensor may pass 2**31 elements."""
    chunk = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return chunk, chunk[:, None] * 64 + tl.arange(0, 64)[None, :]


@triton.jit
def _scale(per_block, chunk, numel, block_chunks):
    """The entry of each chunk's block, [ROWS, 1]."""
    block = chunk.to(tl.int32) // block_chunks  # 32 bits count chunks up to 2**37 elements, 64 are slow to divide
    return tl.load(per_block + block, mask=chunk * 64 < numel, other=0.0)[:, None]


# A plane of width w follows the wider ones: it starts `BITS // (2 * w) * (2 * w)` bits into the code and 8 times as
# many bytes into the chunk. See `planes` in layout.py and `pack` in reference.py.


@triton.jit
def _store_plane(packed, chunk, codes, mask, WIDTH: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Write one plane of a tile of codes."""
    SHIFT: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)
    plane = (codes >> SHIFT) & ((1 << WIDTH) - 1)
    parts = tl.reshape(plane, (ROWS, 8 // WIDTH, 8 * WIDTH))
    place = tl.arange(0, 8 // WIDTH) * WIDTH
    merged = tl.sum(parts << place[None, :, None], axis=1)  # the parts share no bit, so the sum is their union
    target = packed + chunk[:, None] * (8 * BITS) + 8 * SHIFT + tl.arange(0, 8 * WIDTH)[None, :]
    tl.store(target, merged.to(tl.uint8), mask=mask[:, None])


@triton.jit
def store_codes(packed, chunk, codes, mask, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Pack int32 codes [ROWS, 64] into the bytes of their chunks."""
    for i in tl.static_range(4):
        if BITS & (8 >> i):
            _store_plane(packed, chunk, codes, mask, 8 >> i, BITS, ROWS)


@triton.jit
def _load_plane(packed, element, mask, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """One plane's share of the codes of the elements."""
    SHIFT: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)
    inside = (element & 63).to(tl.int32)
    source = packed + (element >> 6) * (8 * BITS) + 8 * SHIFT + (inside & (8 * WIDTH - 1))
    part = inside // (8 * WIDTH)
    return ((tl.load(source, mask=mask, other=0).to(tl.int32) >> (part * WIDTH)) & ((1 << WIDTH) - 1)) << SHIFT


@triton.jit
def load_codes(packed, element, mask, BITS: tl.constexpr):
    """Unpack the codes of the elements, int32, 0 where masked."""
    codes = (element & 0).to(tl.int32)
    for i in tl.static_range(4):
        if BITS & (8 >> i):
            codes = codes | _load_plane(packed, element, mask, 8 >> i, BITS)
    return codes


@triton.jit(do_not_specialize=["k0", "k1"])
def random_bits_kernel(out, numel, k0, k1, ROWS: tl.constexpr):
    _, element = _tile(ROWS)
    tl.store(out + element, hash_bits(element, k0, k1).to(tl.int64), mask=element < numel)


@triton.jit
def pack_kernel(packed, codes, numel, BITS: tl.constexpr, ROWS: tl.constexpr):
    chunk, element = _tile(ROWS)
    values = tl.load(codes + element, mask=element < numel, other=0).to(tl.int32)
    store_codes(packed, chunk, values, chunk * 64 < numel, BITS, ROWS)


@triton.jit
def unpack_kernel(codes, packed, numel, BITS: tl.constexpr, ROWS: tl.constexpr):
    _, element = _tile(ROWS)
    mask = element < numel
    tl.store(codes + element, load_codes(packed, element, mask, BITS).to(tl.uint8), mask=mask)


@triton.jit
def rounded_codes(y, element, k0, k1, TOP: tl.constexpr, OFFSET: tl.constexpr):
    """Fixed-point numbers rounded at random to codes 0..TOP; OFFSET is the code of zero."""
    # Not tl.minimum and tl.maximum: the comparison decides where NaN goes (to the top).
    y = tl.where(y < (TOP - OFFSET) * _ONE, y, (TOP - OFFSET) * _ONE)
    y = tl.where(y > -OFFSET * _ONE, y, -OFFSET * _ONE)
    return (y.to(tl.int32) + _dither(element, k0, k1) + OFFSET * _UNIT) >> _FRACTION


@triton.jit(do_not_specialize=["k0", "k1"])
def quantize_kernel(
    packed, x, low, inverse_step, numel, block_chunks, k0, k1,
    BITS: tl.constexpr, TOP: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk, element = _tile(ROWS)
    mask = element < numel
    scale = _scale(inverse_step, chunk, numel, block_chunks) * _ONE
    y = (tl.load(x + element, mask=mask, other=0.0) - _scale(low, chunk, numel, block_chunks)) * scale
    codes = rounded_codes(y, element, k0, k1, TOP, OFFSET)
    store_codes(packed, chunk, tl.where(mask, codes, 0), chunk * 64 < numel, BITS, ROWS)


@triton.jit
def dequantize_add_kernel(
    out, packed, low, step, numel, block_chunks, BITS: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr
):
    chunk, element = _tile(ROWS)
    mask = element < numel
    codes = load_codes(packed, element, mask, BITS) - OFFSET
    grid = codes.to(tl.float32) * _scale(step, chunk, numel, block_chunks)
    value = grid + _scale(low, chunk, numel, block_chunks)
    tl.store(out + element, tl.load(out + element, mask=mask, other=0.0) + value, mask=mask)


@triton.jit(do_not_specialize=["k0", "k1"])
def exponential_encode_kernel(
    codes, x, inverse_scale, numel, block_chunks, k0, k1, TOP: tl.constexpr, ROWS: tl.constexpr
):
    chunk, element = _tile(ROWS)
    mask = element < numel
    value = tl.load(x + element, mask=mask, other=0.0)
    y = tl.abs(value) * _scale(inverse_scale, chunk, numel, block_chunks)
    y = tl.where(y < 1.0, y, 1.0)  # NaN goes to 1
    dither = _dither(element, k0, k1)
    bits = y.to(tl.int32, bitcast=True)
    code = ((bits + dither) >> _FRACTION) - 127 + TOP
    # Two multiplications as in the reference: their product as one factor may overflow float32.
    lowest = (y * 2.0 ** (TOP - 1)) * _ONE
    lowest = tl.where(lowest < _ONE, lowest, _ONE).to(tl.int32)
    below = (bits >> _FRACTION) - 127 + TOP < 1
    code = tl.where(below, (dither < lowest).to(tl.int32), code)
    sign = (value.to(tl.int32, bitcast=True) < 0) & (code > 0)
    tl.store(codes + element, (code + sign.to(tl.int32) * 128).to(tl.uint8), mask=mask)


@triton.jit
def exponential_decode_add_kernel(out, codes, scale, numel, block_chunks, TOP: tl.constexpr, ROWS: tl.constexpr):
    chunk, element = _tile(ROWS)
    mask = element < numel
    code = tl.load(codes + element, mask=mask, other=0).to(tl.int32)
    exponent = code & 0x7F
    # The sign goes in as a bit: Triton's unary minus is 0 - x, which loses the sign of zero.
    field = (tl.where(exponent > 0, exponent - TOP + 127, 0) << 23) | ((code & 0x80) << 24)
    value = field.to(tl.float32, bitcast=True) * _scale(scale, chunk, numel, block_chunks)
    tl.store(out + element, tl.load(out + element, mask=mask, other=0.0) + value, mask=mask)


@triton.jit(do_not_specialize=["k0", "k1"])
def exponential_add_kernel(out, a, b, numel, k0, k1, TOP: tl.constexpr, ROWS: tl.constexpr):
    _, element = _tile(ROWS)
    mask = element < numel
    left = tl.load(a + element, mask=mask, other=0).to(tl.int32)
    right = tl.load(b + element, mask=mask, other=0).to(tl.int32)
    swap = (right & 0x7F) > (left & 0x7F)
    large = tl.where(swap, right, left)
    exponent = large & 0x7F
    small = tl.where(swap, left, right) & 0x7F
    gap = exponent - small
    same = (left & 0x80) == (right & 0x80)
    shift = tl.where(same, gap, tl.maximum(gap - 1, 0))
    # random < 2**(32 - shift) without a 33rd bit: 2**31 >> (shift - 1), and always if shift is 0.
    halvings = tl.minimum(tl.maximum(shift - 1, 0), 31)
    bound = tl.full((ROWS, 64), 0x80000000, tl.uint32) >> halvings.to(tl.uint32)
    rounds = ((shift == 0) | (hash_bits(element, k0, k1) < bound)).to(tl.int32)
    moved = tl.where(same, exponent + rounds, exponent - rounds)
    moved = tl.minimum(tl.where(same | (gap != 0), moved, 0), TOP)
    result = tl.where(moved > 0, moved | (large & 0x80), 0)
    tl.store(out + element, tl.where(small == 0, large, result).to(tl.uint8), mask=mask)


@triton.jit
def random_signs(position, k0, k1):
    """+1 or -1: `reference_parts.signs`."""
    word = hash_bits(position >> 5, k0, k1)
    bit = ((word ^ (word >> 16)) >> (position & 31).to(tl.uint32)) & 1
    return 1.0 - 2.0 * bit.to(tl.float32)


@triton.jit
def hadamard(row, factor, LOG_WIDTH: tl.constexpr):
    """The Hadamard transform of 2**LOG_WIDTH elements, times `factor`."""
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    if LOG_WIDTH > 0:
        # Constant geometry: each pass pairs neighbours and moves the pair's bit of the index to the top, so the passes
        # see the strides 1, 2, 4, ... of the reference, and after the last one the order is the natural one again.
        for _ in tl.static_range(LOG_WIDTH):
            even, odd = tl.split(tl.reshape(row, (WIDTH // 2, 2)))
            row = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (1, 0)), (WIDTH,))
    return row * factor


@triton.jit(do_not_specialize=["k0", "k1"])
def rotate_kernel(out, x, first, numel_in, numel_out, scale, k0, k1, LOG_WIDTH: tl.constexpr, FORWARD: tl.constexpr):
    """One Hadamard transform of 2**LOG_WIDTH elements per program, the random signs before it (FORWARD) or after."""
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    position = first + tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(x + position, mask=position < numel_in, other=0.0)
    signs = random_signs(position, k0, k1)
    if FORWARD:
        row = hadamard(row * signs, scale, LOG_WIDTH)
    else:
        row = hadamard(row, scale, LOG_WIDTH) * signs
    tl.store(out + position, row, mask=position < numel_out)


@triton.jit
def codebook_encode_kernel(
    packed, z, inverse_scale, boundaries, count, numel, block_chunks, BITS: tl.constexpr, ROWS: tl.constexpr
):
    chunk, element = _tile(ROWS)
    mask = element < numel
    y = tl.load(z + element, mask=mask, other=0.0) * _scale(inverse_scale, chunk, numel, block_chunks)
    codes = tl.zeros((ROWS, 64), tl.int32)
    for i in range(count):
        codes += (y > tl.load(boundaries + i)).to(tl.int32)
    store_codes(packed, chunk, tl.where(mask, codes, 0), chunk * 64 < numel, BITS, ROWS)


@triton.jit
def codebook_decode_kernel(
    out, packed, scale, codebook, levels, numel, block_chunks, BITS: tl.constexpr, ROWS: tl.constexpr
):
    chunk, element = _tile(ROWS)
    mask = element < numel
    codes = load_codes(packed, element, mask, BITS)
    level = tl.load(codebook + codes, mask=mask & (codes < levels), other=0.0)
    tl.store(out + element, level * _scale(scale, chunk, numel, block_chunks), mask=mask)
