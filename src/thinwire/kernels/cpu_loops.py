"""The compiled loops of the numba body: one thread each, GIL released, compiled once and cached on disk."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np
from numba import float32, int32, njit, uint8, uint32

from .vectors import (
    accumulate_mask,
    bits_float,
    butterfly_between,
    butterfly_within,
    codebook_chunk_2,
    codebook_chunk_3,
    codebook_chunk_4,
    decode_chunk,
    dither_chunk,
    flip_signs_chunk,
    float_bits,
    lookup_chunk_2,
    lookup_chunk_3,
    lookup_chunk_4,
    lowest_bit,
    mask_above,
    pack_plane_1,
    pack_plane_2,
    pack_plane_4,
    unpack_plane_1,
    unpack_plane_2,
    unpack_plane_4,
)


def _compiled(function, **options):
    """Compile on first call; the disk cache is a help, not a need (a read-only home has none)."""
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        return njit(nogil=True, **options)(function)


def _summing(function):
    """Sums may be reordered, so that they run in vector registers."""
    return _compiled(function, fastmath={"reassoc", "nsz", "contract"})


_ONE = float32(8388608.0)  # 1.0 in fixed point, 2**23
_MAGNITUDE = int32(0x7FFFFFFF)


@_compiled
def _random(i, k0, k1):
    """`reference.random_bits` of element i. Every step is cast back: numba widens 32-bit arithmetic to 64 bits."""
    h = uint32(uint32(i) + k0)
    h = uint32(uint32(h ^ uint32(h >> uint32(16))) * uint32(0x7FEB352D))
    h = uint32(h ^ uint32(uint32(h >> uint32(15)) ^ k1))
    return uint32(h * uint32(0x846CA68B))


# --------------------------------------------------------------------------------------------- packing and quantising


@_compiled
def pack_chunk(codes, i, bits, out, o):
    shift = uint8(0)
    if bits & 8:
        for j in range(64):
            out[o + j] = codes[i + j]
        return
    if bits & 4:
        pack_plane_4(codes, i, shift, out, o)
        shift += uint8(4)
        o += 32
    if bits & 2:
        pack_plane_2(codes, i, shift, out, o)
        shift += uint8(2)
        o += 16
    if bits & 1:
        pack_plane_1(codes, i, shift, out, o)


@_compiled
def unpack_chunk(packed, i, bits, codes, o):
    for j in range(64):
        codes[o + j] = packed[i + j] if bits & 8 else uint8(0)
    shift = uint8(0)
    if bits & 4:
        unpack_plane_4(packed, i, shift, codes, o)
        shift += uint8(4)
        i += 32
    if bits & 2:
        unpack_plane_2(packed, i, shift, codes, o)
        shift += uint8(2)
        i += 16
    if bits & 1:
        unpack_plane_1(packed, i, shift, codes, o)


@_compiled
def pack(codes, bits, out):
    full = codes.size >> 6
    for c in range(full):
        pack_chunk(codes, c * 64, bits, out, c * 8 * bits)
    if codes.size & 63:
        tail = np.zeros(64, np.uint8)
        tail[: codes.size & 63] = codes[full * 64 :]
        pack_chunk(tail, 0, bits, out, full * 8 * bits)


@_compiled
def unpack(packed, bits, codes):
    full = codes.size >> 6
    for c in range(full):
        unpack_chunk(packed, c * 8 * bits, bits, codes, c * 64)
    if codes.size & 63:
        tail = np.empty(64, np.uint8)
        unpack_chunk(packed, full * 8 * bits, bits, tail, 0)
        codes[full * 64 :] = tail[: codes.size & 63]


@_compiled
def _dither(value, low, scale, i, k0, k1, floor, ceiling, offset):
    y = (value - low) * scale
    y = y if y < ceiling else ceiling
    y = y if y > floor else floor
    dither = uint32(_random(i, k0, k1) >> uint32(9))
    return uint8(uint32(uint32(int32(y)) + uint32(dither + offset)) >> uint32(23))


@_compiled
def quantize(x, low, inverse_step, out, bits, block, floor, ceiling, offset, k0, k1):
    codes = np.zeros(64, np.uint8)
    full = x.size >> 6
    block_chunks = block >> 6 if block else full + 1
    for b in range(low.size):
        start = low[b]
        scale = inverse_step[b] * _ONE
        first = b * block_chunks
        last = min(full, first + block_chunks)
        if bits == 8:
            for c in range(first, last):
                i = c * 64
                dither_chunk(x, i, uint32(i), start, scale, k0, k1, floor, ceiling, offset, out, i)
        else:
            for c in range(first, last):
                i = c * 64
                dither_chunk(x, i, uint32(i), start, scale, k0, k1, floor, ceiling, offset, codes, 0)
                pack_chunk(codes, 0, bits, out, c * 8 * bits)
    if x.size & 63:
        b = low.size - 1
        codes[:] = 0
        for i in range(full * 64, x.size):
            codes[i & 63] = _dither(x[i], low[b], inverse_step[b] * _ONE, i, k0, k1, floor, ceiling, offset)
        pack_chunk(codes, 0, bits, out, full * 8 * bits)


@_compiled
def dequantize_add(out, packed, low, step, bits, offset, block):
    codes = np.zeros(64, np.uint8)
    full = out.size >> 6
    block_chunks = block >> 6 if block else full + 1
    for b in range(low.size):
        first = b * block_chunks
        last = min(full, first + block_chunks)
        if bits == 8:
            for c in range(first, last):
                decode_chunk(packed, c * 64, offset, low[b], step[b], out, c * 64)
        else:
            for c in range(first, last):
                unpack_chunk(packed, c * 8 * bits, bits, codes, 0)
                decode_chunk(codes, 0, offset, low[b], step[b], out, c * 64)
    if out.size & 63:
        b = low.size - 1
        unpack_chunk(packed, full * 8 * bits, bits, codes, 0)
        for i in range(full * 64, out.size):
            out[i] += float32(int32(codes[i & 63]) - offset) * step[b] + low[b]


# --------------------------------------------------------------------------------------------- exponential dithering


@_compiled
def _exponential_encode(x, inverse_scale, top, counter, k0, k1, out):
    bits_of = x.view(np.int32)
    lowest_scale = float32(2.0) ** int32(top - 1)
    for j in range(x.size):
        y = np.abs(x[j]) * inverse_scale
        y = y if y < float32(1.0) else float32(1.0)
        bits = float_bits(y)
        dither = int32(_random(uint32(counter + uint32(j)), k0, k1) >> uint32(9))
        code = int32(int32(int32(bits + dither) >> int32(23)) - int32(127) + top)
        lowest = (y * lowest_scale) * _ONE
        lowest = lowest if lowest < _ONE else _ONE
        below = int32(int32(bits >> int32(23)) - int32(127) + top) < int32(1)
        code = int32(dither < int32(lowest)) if below else code
        sign = int32(128) if (bits_of[j] < int32(0)) and (code > int32(0)) else int32(0)
        out[j] = uint8(int32(code + sign))


@_compiled
def exponential_encode(x, inverse_scale, top, block, k0, k1, out):
    width = block if block else max(x.size, 1)
    for b in range(inverse_scale.size):
        i = b * width
        _exponential_encode(x[i : i + width], inverse_scale[b], top, uint32(i), k0, k1, out[i : i + width])


@_compiled
def _exponential_decode_add(out, codes, top, scale):
    for i in range(out.size):
        code = int32(codes[i])
        exponent = int32(code & int32(0x7F))
        field = int32(int32(exponent - top) + int32(127)) if exponent > int32(0) else int32(0)
        magnitude = bits_float(int32(field << int32(23))) * scale
        out[i] += -magnitude if code >= int32(128) else magnitude


@_compiled
def exponential_decode_add(out, codes, top, scale, block):
    width = block if block else max(out.size, 1)
    for b in range(scale.size):
        i = b * width
        _exponential_decode_add(out[i : i + width], codes[i : i + width], top, scale[b])


@_compiled
def exponential_add(a, b, top, k0, k1, out):
    for i in range(out.size):
        first, second = int32(a[i]), int32(b[i])
        ea, eb = int32(first & int32(0x7F)), int32(second & int32(0x7F))
        large = second if eb > ea else first
        el, es = max(ea, eb), min(ea, eb)
        gap = int32(el - es)
        same = int32(first ^ second) < int32(0x80)
        shift = gap if same else max(int32(gap - int32(1)), int32(0))
        shift = min(shift, int32(32))
        # random < 2**(32 - shift), without leaving 32 bits
        rest = uint32(_random(uint32(i), k0, k1) >> uint32(uint32(int32(32) - shift) & uint32(31)))
        rounds = int32(1) if shift == int32(0) or rest == uint32(0) else int32(0)
        moved = int32(el + rounds) if same else int32(el - rounds)
        moved = int32(0) if (not same) and gap == int32(0) else min(moved, top)
        result = int32(moved | int32(large & int32(0x80))) if moved > int32(0) else int32(0)
        out[i] = uint8(large if es == int32(0) else result)


# ------------------------------------------------------------------------------------------------------ block scales


@_compiled
def _largest(bits):
    found = int32(0)
    for i in range(bits.size):
        found = max(found, int32(bits[i] & _MAGNITUDE))
    return found


@_compiled
def block_abs_max(bits, block, out):
    width = block if block else max(bits.size, 1)
    for b in range(out.size):
        out[b] = _largest(bits[b * width : (b + 1) * width])


@_compiled
def _ends(bits):
    low, high = int32(0x7FFFFFFF), int32(-0x80000000)
    for i in range(bits.size):
        ordered = int32(bits[i] ^ int32(int32(bits[i] >> int32(31)) & _MAGNITUDE))
        low, high = min(low, ordered), max(high, ordered)
    return low, high


@_compiled
def block_min_max(bits, block, out_low, out_high):
    width = block if block else max(bits.size, 1)
    for b in range(out_low.size):
        low, high = _ends(bits[b * width : (b + 1) * width])
        out_low[b] = int32(low ^ int32(int32(low >> int32(31)) & _MAGNITUDE))
        out_high[b] = int32(high ^ int32(int32(high >> int32(31)) & _MAGNITUDE))


@_summing
def _square_sum(x):
    total = 0.0
    for i in range(x.size):
        wide = np.float64(x[i])
        total += wide * wide
    return total


@_compiled
def block_square_sum(x, block, out):
    width = block if block else max(x.size, 1)
    for b in range(out.size):
        out[b] = _square_sum(x[b * width : (b + 1) * width])


@_summing
def _sums(x):
    total, squares = 0.0, 0.0
    for i in range(x.size):
        wide = np.float64(x[i])
        total += wide
        squares += wide * wide
    return total, squares


@_compiled
def moments(x):
    """In runs that stay in the first-level cache, so that the data is read from memory once."""
    bits = x.view(np.int32)
    total, squares, largest = 0.0, 0.0, int32(0)
    for i in range(0, x.size, 4096):
        part_total, part_squares = _sums(x[i : i + 4096])
        total += part_total
        squares += part_squares
        largest = max(largest, _largest(bits[i : i + 4096]))
    return total, squares, largest


@_compiled
def all_finite(bits):
    for i in range(0, bits.size, 65536):  # noqa: SIM110 (numba has no generators)
        if _largest(bits[i : i + 65536]) >= int32(0x7F800000):
            return False
    return True


@_compiled
def checksum(words):
    total = uint32(0)
    for i in range(words.size):
        weight = uint32(uint32(uint32(i) * uint32(2) + uint32(1)) * uint32(0x9E3779B1))
        total = uint32(total + uint32(words[i] * weight))
    return total


# ---------------------------------------------------------------------------------------------------------- rotation


@_compiled
def _hadamard(x, start, width):
    for i in range(start, start + width, 64):
        butterfly_within(x, i)
    stride = 64
    while stride < width:
        for group in range(start, start + width, 2 * stride):
            for i in range(group, group + stride, 64):
                butterfly_between(x, i, i + stride)
        stride *= 2
    factor = float32(1.0 / np.sqrt(np.float64(width)))
    for i in range(start, start + width):
        x[i] *= factor


@_compiled
def rotate(x, out, k0, k1):
    """`out` is longer than x by the padding, which stays zero."""
    for i in range(0, out.size, 1024):
        width = min(1024, out.size - i)
        for j in range(i, i + width, 64):
            if j + 64 <= x.size:
                flip_signs_chunk(x, j, uint32(j), k0, k1, out, j)
            else:
                for e in range(j, j + 64):
                    value = x[e] if e < x.size else float32(0.0)
                    out[e] = -value if _random(e, k0, k1) >= uint32(0x80000000) else value
        _hadamard(out, i, width)


@_compiled
def unrotate(z, out, k0, k1):
    run = np.empty(1024, np.float32)
    for i in range(0, z.size, 1024):
        width = min(1024, z.size - i)
        run[:width] = z[i : i + width]
        _hadamard(run, 0, width)
        for j in range(0, width, 64):
            if i + j + 64 <= out.size:
                flip_signs_chunk(run, j, uint32(i + j), k0, k1, out, i + j)
            else:
                for e in range(i + j, min(i + j + 64, out.size)):
                    out[e] = -run[e - i] if _random(e, k0, k1) >= uint32(0x80000000) else run[e - i]


@_compiled
def codebook_encode(z, inverse_scale, boundaries, bits, block, out):
    codes = np.zeros(64, np.uint8)
    full = z.size >> 6
    block_chunks = block >> 6 if block else full + 1
    for b in range(inverse_scale.size):
        scale = inverse_scale[b]
        for c in range(b * block_chunks, min(full, (b + 1) * block_chunks)):
            if bits == 2:
                codebook_chunk_2(z, c * 64, scale, boundaries, codes, 0)
            elif bits == 3:
                codebook_chunk_3(z, c * 64, scale, boundaries, codes, 0)
            else:
                codebook_chunk_4(z, c * 64, scale, boundaries, codes, 0)
            pack_chunk(codes, 0, bits, out, c * 8 * bits)
    if z.size & 63:
        codes[:] = 0
        for i in range(full * 64, z.size):
            for boundary in boundaries:
                codes[i & 63] += z[i] * inverse_scale[inverse_scale.size - 1] > boundary
        pack_chunk(codes, 0, bits, out, full * 8 * bits)


@_compiled
def _look_up(codes, bits, scale, codebook, out, o):
    if bits == 2:
        lookup_chunk_2(codes, 0, scale, codebook, out, o)
    elif bits == 3:
        lookup_chunk_3(codes, 0, scale, codebook, out, o)
    else:
        lookup_chunk_4(codes, 0, scale, codebook, out, o)


@_compiled
def codebook_decode(packed, scale, codebook, bits, block, out):
    codes = np.empty(64, np.uint8)
    full = out.size >> 6
    width = block if block else max(out.size, 1)
    for c in range(full):
        unpack_chunk(packed, c * 8 * bits, bits, codes, 0)
        _look_up(codes, bits, scale[c * 64 // width], codebook, out, c * 64)
    if out.size & 63:
        tail = np.empty(64, np.float32)
        unpack_chunk(packed, full * 8 * bits, bits, codes, 0)
        _look_up(codes, bits, scale[full * 64 // width], codebook, tail, 0)
        out[full * 64 :] = tail[: out.size & 63]


# --------------------------------------------------------------------------------------------------------- selection


@_compiled
def _tail_mask(bits, low):
    """`mask_above` for the last, shorter run."""
    mask = uint32(0)
    for j in range(bits.size):
        if int32(bits[j] & _MAGNITUDE) > low:
            mask = uint32(mask | uint32(uint32(1) << uint32(j)))
    return mask


@_compiled
def select_ef(memory, gradient, low, mid, high, values, indices):
    """Adds, selects, compacts and clears in one pass; most runs of 32 hold nothing above the threshold.

    Returns how many were kept and how many exceed the three thresholds.
    """
    bits = memory.view(np.int32)
    full = memory.size & ~31
    kept, above_low, above_mid, above_high = 0, 0, 0, 0
    for i in range(0, memory.size, 32):
        if i < full:
            mask = accumulate_mask(memory, gradient, i, low)
        else:
            for j in range(full, memory.size):
                memory[j] += gradient[j]
            mask = _tail_mask(bits[full:], low)
        while mask != uint32(0):
            j = i + lowest_bit(mask)
            mask = uint32(mask & uint32(mask - uint32(1)))
            magnitude = int32(bits[j] & _MAGNITUDE)
            above_low += 1
            above_high += magnitude > high
            if magnitude > mid:
                above_mid += 1
                if kept < indices.size:
                    indices[kept] = j
                    values[kept] = memory[j]
                    memory[j] = float32(0.0)
                    kept += 1
    return kept, above_low, above_mid, above_high


@_compiled
def select(x, low, mid, high, values, indices):
    """As `select_ef`, from data that is left as it is."""
    bits = x.view(np.int32)
    full = x.size & ~31
    kept, above_low, above_mid, above_high = 0, 0, 0, 0
    for i in range(0, x.size, 32):
        mask = mask_above(x, i, low) if i < full else _tail_mask(bits[i:], low)
        while mask != uint32(0):
            j = i + lowest_bit(mask)
            mask = uint32(mask & uint32(mask - uint32(1)))
            magnitude = int32(bits[j] & _MAGNITUDE)
            above_low += 1
            above_high += magnitude > high
            if magnitude > mid:
                above_mid += 1
                if kept < indices.size:
                    indices[kept] = j
                    values[kept] = x[j]
                    kept += 1
    return kept, above_low, above_mid, above_high


@_compiled
def _count_run(bits, low, mid, high):
    a, b, c = int32(0), int32(0), int32(0)
    for i in range(bits.size):
        magnitude = int32(bits[i] & _MAGNITUDE)
        a = int32(a + int32(magnitude > low))
        b = int32(b + int32(magnitude > mid))
        c = int32(c + int32(magnitude > high))
    return a, b, c


@_compiled
def threshold_count(bits, low, mid, high):
    total_a, total_b, total_c = 0, 0, 0
    for start in range(0, bits.size, 65536):
        a, b, c = _count_run(bits[start : start + 65536], low, mid, high)
        total_a += a
        total_b += b
        total_c += c
    return total_a, total_b, total_c


@_compiled
def keep_largest(values, indices, k, low, bins, shift, memory, restore, kept_values, kept_indices):
    """Two passes over the candidates: a histogram of magnitudes, then the split at the bin where the k-th one lies."""
    bits = values.view(np.int32)
    histogram = np.zeros(bins, np.int64)
    for i in range(values.size):
        histogram[min((int32(bits[i] & _MAGNITUDE) - low) >> shift, bins - 1)] += 1
    cut = bins - 1
    above = 0
    while above + histogram[cut] < k:
        above += histogram[cut]
        cut -= 1
    room = k - above
    kept = 0
    for i in range(values.size):
        found = min((int32(bits[i] & _MAGNITUDE) - low) >> shift, bins - 1)
        if found > cut or (found == cut and room > 0):
            room -= found == cut
            kept_values[kept] = values[i]
            kept_indices[kept] = indices[i]
            kept += 1
        elif restore:
            memory[indices[i]] = values[i]
    return cut


@_compiled
def scatter_add(out, indices, values):
    """False at the first position outside of `out`: a wrong one must not write into other people's memory."""
    for i in range(indices.size):
        j = indices[i]
        if j < 0 or j >= out.size:
            return False
        out[j] += values[i]
    return True
