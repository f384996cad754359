"""Loops of the numba body that make and read codes: packing, quantising, exponential dithering, rotation, codebooks."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np
from numba import float32, int32, uint32

from .cpu_compile import compiled, negative
from .cpu_select import largest_magnitude
from .layout import SMALLEST_STEP
from .vector_codes import (
    bits_float,
    centred_chunk,
    codebook_chunk,
    dequantize_chunk,
    exponential_add_chunk,
    exponential_encode_chunk,
    look_up_chunk,
    pack_chunk,
    quantize_chunk,
    unpack_chunk,
)
from .vectors import (
    butterfly_across_1,
    butterfly_across_2,
    butterfly_across_4,
    butterfly_across_8,
    butterfly_across_16,
    butterfly_within,
    flip_signs_chunk,
)

_ONE = float32(8388608.0)  # 1.0 in fixed point, 2**23
_SMALLEST = float32(SMALLEST_STEP)

# --------------------------------------------------------------------------------------------- packing and quantising


@compiled
def pack(codes, width, out):
    bits = len(width)
    full = codes.size >> 6
    for c in range(full):
        pack_chunk(codes, c * 64, width, out, c * 8 * bits)
    if codes.size & 63:
        tail = np.zeros(64, np.uint8)
        tail[: codes.size & 63] = codes[full * 64 :]
        pack_chunk(tail, 0, width, out, full * 8 * bits)


@compiled
def unpack(packed, width, codes):
    bits = len(width)
    full = codes.size >> 6
    for c in range(full):
        unpack_chunk(packed, c * 8 * bits, width, codes, c * 64)
    if codes.size & 63:
        tail = np.empty(64, np.uint8)
        unpack_chunk(packed, full * 8 * bits, width, tail, 0)
        codes[full * 64 :] = tail[: codes.size & 63]


@compiled
def _padded_tail(x):
    """The last elements, fewer than 64, in a chunk of their own."""
    tail = np.zeros(64, np.float32)
    tail[: x.size & 63] = x[x.size & ~63 :]
    return tail


@compiled
def _clear_padding(packed, start, width, used):
    """Codes behind the last element are zero on the wire, whatever the padding was rounded to."""
    codes = np.empty(64, np.uint8)
    unpack_chunk(packed, start, width, codes, 0)
    codes[used:] = 0
    pack_chunk(codes, 0, width, packed, start)


@compiled
def quantize(x, low, inverse_step, out, width, block, floor, ceiling, offset, k0, k1):
    bits = len(width)
    full = x.size >> 6
    block_chunks = block >> 6 if block else full + 1
    for b in range(low.size):
        start, scale = low[b], inverse_step[b] * _ONE
        first, last = b * block_chunks, min(full, (b + 1) * block_chunks)
        if start == 0:
            for c in range(first, last):
                i, o = c * 64, c * 8 * bits
                centred_chunk(x, i, uint32(i), start, scale, k0, k1, floor, ceiling, offset, width, out, o)
        else:
            for c in range(first, last):
                i, o = c * 64, c * 8 * bits
                quantize_chunk(x, i, uint32(i), start, scale, k0, k1, floor, ceiling, offset, width, out, o)
    if x.size & 63:
        b, i, o = low.size - 1, full * 64, full * 8 * bits
        start, scale = low[b], inverse_step[b] * _ONE
        quantize_chunk(_padded_tail(x), 0, uint32(i), start, scale, k0, k1, floor, ceiling, offset, width, out, o)
        _clear_padding(out, o, width, x.size & 63)


@compiled
def abs_max_encode(x, bits, step, out, width, block, levels, k0, k1):
    """`bits` is x as integers. A block is read once from memory: what follows finds it in the cache."""
    code_bytes = 8 * len(width)
    full = x.size >> 6
    size = block if block else max(x.size, 1)
    ends = float32(levels) * _ONE
    offset = uint32(uint32(levels) << uint32(23))
    scale = float32(0.0)
    for b in range(step.size):
        found = bits_float(largest_magnitude(bits[b * size : (b + 1) * size])) / float32(levels)
        if not np.isfinite(found):
            found = float32(np.nan)
        elif found < _SMALLEST:
            found = float32(0.0)
        step[b] = found
        scale = (float32(1.0) / found if found > float32(0.0) else float32(0.0)) * _ONE
        for c in range(b * size >> 6, min(full, (b + 1) * size >> 6)):
            i, o = c * 64, c * code_bytes
            centred_chunk(x, i, uint32(i), float32(0.0), scale, k0, k1, -ends, ends, offset, width, out, o)
    if x.size & 63:
        i, o = full * 64, full * code_bytes
        tail = _padded_tail(x)
        centred_chunk(tail, 0, uint32(i), float32(0.0), scale, k0, k1, -ends, ends, offset, width, out, o)
        _clear_padding(out, o, width, x.size & 63)


@compiled
def dequantize_add(out, packed, low, step, width, offset, block):
    bits = len(width)
    full = out.size >> 6
    block_chunks = block >> 6 if block else full + 1
    for b in range(low.size):
        for c in range(b * block_chunks, min(full, (b + 1) * block_chunks)):
            dequantize_chunk(packed, c * 8 * bits, offset, low[b], step[b], width, out, c * 64)
    if out.size & 63:
        b, tail = low.size - 1, _padded_tail(out)
        dequantize_chunk(packed, full * 8 * bits, offset, low[b], step[b], width, tail, 0)
        out[full * 64 :] = tail[: out.size & 63]


# --------------------------------------------------------------------------------------------- exponential dithering


@compiled
def exponential_encode(x, inverse_scale, top, block, k0, k1, out):
    full = x.size >> 6
    block_chunks = block >> 6 if block else full + 1
    lowest_scale = float32(2.0) ** int32(top - 1)
    for b in range(inverse_scale.size):
        inverse = inverse_scale[b]
        for c in range(b * block_chunks, min(full, (b + 1) * block_chunks)):
            exponential_encode_chunk(x, c * 64, uint32(c * 64), inverse, lowest_scale, top, k0, k1, out, c * 64)
    if x.size & 63:
        codes, i = np.empty(64, np.uint8), full * 64
        inverse = inverse_scale[inverse_scale.size - 1]
        exponential_encode_chunk(_padded_tail(x), 0, uint32(i), inverse, lowest_scale, top, k0, k1, codes, 0)
        out[i:] = codes[: x.size & 63]


@compiled
def _exponential_decode_add(out, codes, top, scale):
    for i in range(out.size):
        code = int32(codes[i])
        exponent = int32(code & int32(0x7F))
        field = int32(int32(exponent - top) + int32(127)) if exponent > int32(0) else int32(0)
        magnitude = bits_float(int32(field << int32(23))) * scale
        out[i] += -magnitude if code >= int32(128) else magnitude


@compiled
def exponential_decode_add(out, codes, top, scale, block):
    width = block if block else max(out.size, 1)
    for b in range(scale.size):
        i = b * width
        _exponential_decode_add(out[i : i + width], codes[i : i + width], top, scale[b])


@compiled
def exponential_add(a, b, top, k0, k1, out):
    full = out.size >> 6
    for c in range(full):
        exponential_add_chunk(a, b, c * 64, uint32(c * 64), top, k0, k1, out, c * 64)
    if out.size & 63:
        i, used = full * 64, out.size & 63
        tails = np.zeros((3, 64), np.uint8)
        tails[0, :used], tails[1, :used] = a[i:], b[i:]
        exponential_add_chunk(tails[0], tails[1], 0, uint32(i), top, k0, k1, tails[2], 0)
        out[i:] = tails[2, :used]


# ---------------------------------------------------------------------------------------------------------- rotation


@compiled
def hadamard(x, start, width):
    """In place; the stages come in the order of the definition, strides 1, 2, 4, ..., because the bits depend on it."""
    for i in range(start, start + width, 64):
        butterfly_within(x, i)
    hadamard_across(x, start, width)


@compiled
def hadamard_across(x, start, width):
    """The stages from stride 64 on, and the scale."""
    factor = float32(1.0 / np.sqrt(np.float64(width)))
    if width == 64:
        butterfly_across_1(x, start, factor)
    elif width == 128:
        butterfly_across_2(x, start, factor)
    elif width == 256:
        butterfly_across_4(x, start, factor)
    elif width == 512:
        butterfly_across_8(x, start, factor)
    else:
        butterfly_across_16(x, start, factor)


@compiled
def rotate(x, out, k0, k1):
    """`out` is longer than x by the padding, which is rotated like the rest."""
    for i in range(0, out.size, 1024):
        width = min(1024, out.size - i)
        for j in range(i, i + width, 64):
            if j + 64 <= x.size:
                flip_signs_chunk(x, j, uint32(j), k0, k1, out, j)
            else:
                for e in range(j, j + 64):
                    value = x[e] if e < x.size else float32(0.0)
                    out[e] = -value if negative(e, k0, k1) else value
        hadamard(out, i, width)


@compiled
def unrotate(z, out, k0, k1):
    run = np.empty(1024, np.float32)
    for i in range(0, z.size, 1024):
        width = min(1024, z.size - i)
        run[:width] = z[i : i + width]
        hadamard(run, 0, width)
        for j in range(0, width, 64):
            if i + j + 64 <= out.size:
                flip_signs_chunk(run, j, uint32(i + j), k0, k1, out, i + j)
            else:
                for e in range(i + j, min(i + j + 64, out.size)):
                    out[e] = -run[e - i] if negative(e, k0, k1) else run[e - i]


# --------------------------------------------------------------------------------------------------------- codebooks


@compiled
def codebook_encode(z, inverse_scale, boundaries, width, block, out):
    bits = len(width)
    full = z.size >> 6
    shared = block if block else max(z.size, 1)
    for c in range(full):
        codebook_chunk(z, c * 64, inverse_scale[c * 64 // shared], boundaries, width, out, c * 8 * bits)
    if z.size & 63:
        o = full * 8 * bits
        codebook_chunk(_padded_tail(z), 0, inverse_scale[full * 64 // shared], boundaries, width, out, o)
        _clear_padding(out, o, width, z.size & 63)


@compiled
def codebook_decode(packed, scale, codebook, width, block, out):
    bits = len(width)
    full = out.size >> 6
    shared = block if block else max(out.size, 1)
    for c in range(full):
        look_up_chunk(packed, c * 8 * bits, scale[c * 64 // shared], codebook, width, out, c * 64)
    if out.size & 63:
        tail = np.empty(64, np.float32)
        look_up_chunk(packed, full * 8 * bits, scale[full * 64 // shared], codebook, width, tail, 0)
        out[full * 64 :] = tail[: out.size & 63]
