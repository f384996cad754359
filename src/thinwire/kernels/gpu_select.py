"""Triton kernels that select or reduce: block scales, thresholds, compaction, sums and the checksum.

Only device code; `gpu.py` has the functions to call and says what has been checked. No atomics: every program writes
partial results of its own and torch combines the few that there are, so a run repeats bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import layout
from .gpu_quantize import load_codes, store_codes

ABS_MAX, MIN_MAX, SQUARE_SUM = 0, 1, 2  # what `block_reduce_kernel` computes
_ABS_MAX, _MIN_MAX = tl.constexpr(ABS_MAX), tl.constexpr(MIN_MAX)  # a kernel only reads constexpr globals
_INT32_MAX = tl.constexpr(0x7FFFFFFF)
_WEYL, _MIX_1 = tl.constexpr(layout.WEYL), tl.constexpr(layout.MIX_1)


@triton.jit
def _elements(TILE: tl.constexpr):
    """Positions of this program's elements, int64, so that a tensor may pass 2**31 elements."""
    return tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)


@triton.jit
def block_reduce_kernel(x, out, high, numel, block, tiles, KIND: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Reduce ROWS blocks by TILE elements to out[block, tile]; `high` is the maximum's place for MIN_MAX."""
    tile = (tl.program_id(0) % tiles).to(tl.int64)  # one block may be the whole tensor and pass 2**31 elements
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tile * TILE + tl.arange(0, TILE)
    position = rows[:, None] * block + inside[None, :]
    mask = (inside < block)[None, :] & (position < numel)
    values = tl.load(x + position, mask=mask, other=0.0)
    target = rows * tiles + tile
    keep = rows * block < numel
    bits = values.to(tl.int32, bitcast=True)
    if KIND == _ABS_MAX:
        tl.store(out + target, tl.max(bits & _INT32_MAX, axis=1), mask=keep)
    elif KIND == _MIN_MAX:
        ordered = bits ^ ((bits >> 31) & _INT32_MAX)  # integers in the order of the floats
        tl.store(out + target, tl.min(tl.where(mask, ordered, _INT32_MAX), axis=1), mask=keep)
        tl.store(high + target, tl.max(tl.where(mask, ordered, -_INT32_MAX - 1), axis=1), mask=keep)
    else:
        wide = values.to(tl.float64)
        tl.store(out + target, tl.sum(wide * wide, axis=1), mask=keep)


@triton.jit(do_not_specialize=["threshold"])
def mark_kernel(
    x, gradient, marks, counts, numel, threshold, ADD: tl.constexpr, MARK: tl.constexpr, ROWS: tl.constexpr
):
    """x += gradient (ADD), count |x| above the threshold, and write one bit for each element above it (MARK).

    The bits, packed like codes, let `take_kernel` find the elements without reading all of x again.
    """
    element = _elements(ROWS * 64)
    mask = element < numel
    values = tl.load(x + element, mask=mask, other=0.0)
    if ADD:
        values = values + tl.load(gradient + element, mask=mask, other=0.0)
        tl.store(x + element, values, mask=mask)
    magnitude = values.to(tl.int32, bitcast=True) & _INT32_MAX
    above = (mask & (magnitude > threshold)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(above, axis=0))
    if MARK:
        chunk = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        store_codes(marks, chunk, tl.reshape(above, (ROWS, 64)), chunk * 64 < numel, 1, ROWS)


@triton.jit(do_not_specialize=["capacity"])
def take_kernel(x, marks, starts, values, indices, numel, capacity, ZERO: tl.constexpr, ROWS: tl.constexpr):
    """Move marked elements to their place in order of position; those past `capacity` stay untouched."""
    element = _elements(ROWS * 64)
    marked = load_codes(marks, element, element < numel, 1)
    rank = tl.load(starts + tl.program_id(0)) + tl.cumsum(marked, axis=0) - marked
    take = (marked > 0) & (rank < capacity)
    tl.store(values + rank, tl.load(x + element, mask=take, other=0.0), mask=take)
    tl.store(indices + rank, element.to(tl.int32), mask=take)
    if ZERO:
        tl.store(x + element, tl.zeros((ROWS * 64,), tl.float32), mask=take)


@triton.jit
def scatter_add_kernel(out, indices, values, count, TILE: tl.constexpr):
    """out[indices] += values; plain loads and stores, because the indices are unique."""
    place = _elements(TILE)
    mask = place < count
    target = out + tl.load(indices + place, mask=mask, other=0)
    tl.store(target, tl.load(target, mask=mask, other=0.0) + tl.load(values + place, mask=mask, other=0.0), mask=mask)


@triton.jit
def moments_kernel(x, sums, peaks, numel, TILE: tl.constexpr):
    """Each program's sum and sum of squares (float64) and the bits of its max |x|."""
    element = _elements(TILE)
    values = tl.load(x + element, mask=element < numel, other=0.0)
    wide = values.to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(wide, axis=0))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide, axis=0))
    tl.store(peaks + tl.program_id(0), tl.max(values.to(tl.int32, bitcast=True) & _INT32_MAX, axis=0))


@triton.jit
def checksum_kernel(words, sums, count, TILE: tl.constexpr):
    """Each program's sum of mixed words, modulo 2**32."""
    place = _elements(TILE)
    inside = place < count
    word = tl.load(words + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    h = word + (place * 2 + 1).to(tl.uint32) * _WEYL
    h = (h ^ (h >> 16)) * _MIX_1
    h = tl.where(inside, h ^ (h >> 15), 0)
    tl.store(sums + tl.program_id(0), tl.sum(h, axis=0).to(tl.int32, bitcast=True))
