"""Loops of the numba body over data that is kept whole: scales of blocks, sums, checks, selection."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np
from numba import float32, int32, uint32

from .cpu_compile import compiled, summing
from .layout import MIX_1, WEYL
from .vectors import accumulate_mask, lowest_bit, mask_above, multiply_add

_MAGNITUDE = int32(0x7FFFFFFF)


# ------------------------------------------------------------------------------------------------------ block scales


@compiled
def largest_magnitude(bits):
    found = int32(0)
    for i in range(bits.size):
        found = max(found, int32(bits[i] & _MAGNITUDE))
    return found


@compiled
def block_abs_max(bits, block, out):
    width = block if block else max(bits.size, 1)
    for b in range(out.size):
        out[b] = largest_magnitude(bits[b * width : (b + 1) * width])


@compiled
def _ends(bits):
    low, high = int32(0x7FFFFFFF), int32(-0x80000000)
    for i in range(bits.size):
        ordered = int32(bits[i] ^ int32(int32(bits[i] >> int32(31)) & _MAGNITUDE))
        low, high = min(low, ordered), max(high, ordered)
    return low, high


@compiled
def block_min_max(bits, block, out_low, out_high):
    width = block if block else max(bits.size, 1)
    for b in range(out_low.size):
        low, high = _ends(bits[b * width : (b + 1) * width])
        out_low[b] = int32(low ^ int32(int32(low >> int32(31)) & _MAGNITUDE))
        out_high[b] = int32(high ^ int32(int32(high >> int32(31)) & _MAGNITUDE))


@summing
def square_sum(x):
    total = 0.0
    for i in range(x.size):
        wide = np.float64(x[i])
        total += wide * wide
    return total


@compiled
def block_square_sum(x, block, out):
    width = block if block else max(x.size, 1)
    for b in range(out.size):
        out[b] = square_sum(x[b * width : (b + 1) * width])


@summing
def _sums(x):
    total, squares = 0.0, 0.0
    for i in range(x.size):
        wide = np.float64(x[i])
        total += wide
        squares += wide * wide
    return total, squares


@compiled
def moments(x):
    """In runs that stay in the first-level cache, so that the data is read from memory once."""
    bits = x.view(np.int32)
    total, squares, largest = 0.0, 0.0, int32(0)
    for i in range(0, x.size, 4096):
        part_total, part_squares = _sums(x[i : i + 4096])
        total += part_total
        squares += part_squares
        largest = max(largest, largest_magnitude(bits[i : i + 4096]))
    return total, squares, largest


@compiled
def all_finite(bits):
    for i in range(0, bits.size, 65536):  # noqa: SIM110 (numba has no generators)
        if largest_magnitude(bits[i : i + 65536]) >= int32(0x7F800000):
            return False
    return True


@compiled
def checksum(words):
    total, place = uint32(0), uint32(WEYL)
    for i in range(words.size):
        h = uint32(words[i] + place)
        place = uint32(place + uint32(2 * WEYL & 0xFFFFFFFF))
        h = uint32(uint32(h ^ uint32(h >> uint32(16))) * uint32(MIX_1))
        total = uint32(total + uint32(h ^ uint32(h >> uint32(15))))
    return total


# --------------------------------------------------------------------------------------------------------- selection


@compiled
def _tail_mask(bits, low):
    """`mask_above` for the last, shorter run."""
    mask = uint32(0)
    for j in range(bits.size):
        if int32(bits[j] & _MAGNITUDE) > low:
            mask = uint32(mask | uint32(uint32(1) << uint32(j)))
    return mask


@compiled
def select_ef(memory, gradient, out, decay, threshold, values, indices):
    """Adds, selects, compacts and clears in one pass; most runs of 32 hold nothing above the threshold.

    Returns how many were kept and how many exceed the threshold. `out` may be one of the inputs.
    """
    bits = out.view(np.int32)
    full = out.size & ~31
    kept, left = 0, 0
    for i in range(0, out.size, 32):
        if i < full:
            mask = accumulate_mask(memory, gradient, i, decay, threshold, out)
        else:
            for j in range(full, out.size):
                out[j] = multiply_add(memory[j], decay, gradient[j])
            mask = _tail_mask(bits[full:], threshold)
        room = kept + 32 <= indices.size  # for any mask, so that the loop need not ask
        while mask != uint32(0):
            if room or kept < indices.size:
                j = i + lowest_bit(mask)
                indices[kept] = j
                values[kept] = out[j]
                out[j] = float32(0.0)
                kept += 1
            else:
                left += 1
            mask = uint32(mask & uint32(mask - uint32(1)))
    return kept, kept + left


@compiled
def select(x, threshold, values, indices):
    """As `select_ef`, from data that is left as it is."""
    bits = x.view(np.int32)
    full = x.size & ~31
    kept, left = 0, 0
    for i in range(0, x.size, 32):
        mask = mask_above(x, i, threshold) if i < full else _tail_mask(bits[i:], threshold)
        room = kept + 32 <= indices.size
        while mask != uint32(0):
            if room or kept < indices.size:
                j = i + lowest_bit(mask)
                indices[kept] = j
                values[kept] = x[j]
                kept += 1
            else:
                left += 1
            mask = uint32(mask & uint32(mask - uint32(1)))
    return kept, kept + left


@compiled
def _count_run(bits, threshold):
    count = int32(0)
    for i in range(bits.size):
        count = int32(count + int32(int32(bits[i] & _MAGNITUDE) > threshold))
    return count


@compiled
def threshold_count(bits, threshold):
    """In runs short enough for a 32-bit counter, which runs in vector registers."""
    total = 0
    for i in range(0, bits.size, 65536):
        total += _count_run(bits[i : i + 65536], threshold)
    return total


@compiled
def _rank(bits, low, shift):
    """How far above the threshold; a candidate below it, which should not be there, comes last."""
    return max((int32(bits & _MAGNITUDE) - low) >> shift, 0)


@compiled
def _fall_below(histogram, k):
    """The highest bin at or above which there are at least k, and how many are above it."""
    cut, above = histogram.size - 1, 0
    while above + histogram[cut] < k:
        above += histogram[cut]
        cut -= 1
    return cut, above


@compiled
def keep_largest(values, indices, k, low, shift, memory, restore, kept_values, kept_indices):
    """Finds the rank of the k-th largest by histograms of its upper and of its lower 13 bits, then splits there."""
    bits = values.view(np.int32)
    upper, lower = np.zeros(8192, np.int64), np.zeros(8192, np.int64)
    for i in range(values.size):
        upper[_rank(bits[i], low, shift) >> 13] += 1
    high, above = _fall_below(upper, k)
    for i in range(values.size):
        rank = _rank(bits[i], low, shift)
        if rank >> 13 == high:
            lower[rank & 8191] += 1
    rest, between = _fall_below(lower, k - above)
    cut, room = (high << 13) | rest, k - above - between
    kept = 0
    for i in range(values.size):
        rank = _rank(bits[i], low, shift)
        if rank > cut or (rank == cut and room > 0):
            room -= rank == cut
            kept_values[kept] = values[i]
            kept_indices[kept] = indices[i]
            kept += 1
        elif restore and 0 <= indices[i] < memory.size:
            memory[indices[i]] = values[i]
    return cut


@compiled
def scatter_add(out, indices, values):
    """False at the first position outside of `out`: a wrong one must not write into other people's memory."""
    for i in range(indices.size):
        j = indices[i]
        if j < 0 or j >= out.size:
            return False
        out[j] += values[i]
    return True
