"""Triton kernels that select or reduce: block scales, thresholds, compaction, sums and the checksum.

Only device code; `gpu.py` has the functions to call and says what has been checked. No atomics: every program writes
partial results of its own and torch combines the few that there are, so a run repeats bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import layout

ABS_MAX, MIN_MAX, SQUARE_SUM = 0, 1, 2  # what `block_reduce_kernel` computes
_ABS_MAX, _MIN_MAX = tl.constexpr(ABS_MAX), tl.constexpr(MIN_MAX)  # a kernel only reads constexpr globals
_INT32_MAX = tl.constexpr(0x7FFFFFFF)
STATUS_BITS = 2  # of a word of `select_kernel`'s state, below the count
_STATUS_BITS, _STATUS_MASK = tl.constexpr(STATUS_BITS), tl.constexpr((1 << STATUS_BITS) - 1)
_WITH_SUM = tl.constexpr(2)  # the status of a tile that knows the sum so far
_HASH_STEP, _HASH_ADD = tl.constexpr(layout.HASH_STEP), tl.constexpr(layout.HASH_ADD)
_HASH_ODD = tl.constexpr(layout.HASH_ODD)
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
def count_kernel(x, counts, numel, threshold, ROWS: tl.constexpr):
    """Each program's number of |x| above the threshold, which comes as float bits."""
    element = _elements(ROWS * 64)
    mask = element < numel
    magnitude = tl.load(x + element, mask=mask, other=0.0).to(tl.int32, bitcast=True) & _INT32_MAX
    tl.store(counts + tl.program_id(0), tl.sum((mask & (magnitude > threshold)).to(tl.int32), axis=0))


@triton.jit
def _sum_before(state, number, WINDOW: tl.constexpr):
    """The sum of the counts of all tiles before `number`: looks back until a tile that knows its own sum.

    A window that has a tile without a count in front of that one is read again. Such a tile has started earlier than
    this one and needs nothing from it, so the wait ends.
    """
    near = tl.arange(0, WINDOW).to(tl.int64)
    total = number * 0
    end = number
    while end > 0:
        tile = end - 1 - near
        word = tl.load(state + tile, mask=tile >= 0, other=_WITH_SUM, volatile=True)
        status = word & _STATUS_MASK
        known = tl.min(tl.where(status == _WITH_SUM, near, WINDOW), axis=0)
        unknown = tl.min(tl.where(status == 0, near, WINDOW), axis=0)
        found = tl.sum(tl.where(near <= known, word >> _STATUS_BITS, 0), axis=0)
        ready = unknown >= known
        total = tl.where(ready, total + found, total)
        end = tl.where(ready, tl.where(known < WINDOW, 0, end - WINDOW), end)
    return total


@triton.jit(do_not_specialize=["threshold", "capacity"])
def select_kernel(
    x, gradient, out, values, indices, state, decay, numel, threshold, capacity,
    ADD: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Elements above the threshold to `values` and `indices` in order of position; with ADD the rest to `out`.

    One pass: programs tell each other how many they found in `state`, which starts as zeros. Its first word counts the
    programs that have started; then one word per tile holds a count (status 1) or the sum so far (status 2).
    """
    number = tl.atomic_add(state, 1)  # not the program's id: a tile waits only for tiles that have started
    element = number * (ROWS * 64) + tl.arange(0, ROWS * 64)
    mask = element < numel
    found = tl.load(x + element, mask=mask, other=0.0)
    if ADD:
        found = tl.fma(found, decay, tl.load(gradient + element, mask=mask, other=0.0))
    magnitude = found.to(tl.int32, bitcast=True) & _INT32_MAX
    above = (mask & (magnitude > threshold)).to(tl.int32)
    count = tl.sum(above, axis=0).to(tl.int64)
    tl.atomic_xchg(state + 1 + number, (count << _STATUS_BITS) + 1)
    before = _sum_before(state + 1, number, WINDOW)
    tl.atomic_xchg(state + 1 + number, ((before + count) << _STATUS_BITS) + _WITH_SUM)
    rank = before + tl.cumsum(above, axis=0) - above
    take = (above > 0) & (rank < capacity)
    tl.store(values + rank, found, mask=take)
    tl.store(indices + rank, element.to(tl.int32), mask=take)
    if ADD:
        tl.store(out + element, tl.where(take, 0.0, found), mask=mask)


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


@triton.jit
def _odd_multiplier(position):
    """`reference_parts.odd_multipliers`, in uint64."""
    y = position * _HASH_STEP + _HASH_ADD
    y = (y & 0xFFFFFFFF) * (y >> 32) + y
    y = (y ^ (y >> 32)) * _HASH_ODD
    return (y ^ (y >> 29)) | 1


@triton.jit
def hash_kernel(words, sums, count, ROWS: tl.constexpr):
    """Each program's sum of words times their multipliers, modulo 2**64."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 64)
    place = row[:, None] * 64 + lane[None, :]
    word = tl.load(words + place, mask=place < count, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    down, across = _odd_multiplier(row.to(tl.uint64)), _odd_multiplier((-1 - lane).to(tl.int64).to(tl.uint64))
    lanes = tl.sum(word * down[:, None], axis=0)
    tl.store(sums + tl.program_id(0), tl.sum(lanes * across, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["length"])
def hash_finish_kernel(sums, out, count, length, TILE: tl.constexpr):
    """One program: the sum of all, with the length in bytes, mixed."""
    part = tl.zeros((TILE,), tl.int64)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        part += tl.load(sums + place, mask=place < count, other=0)
    h = tl.sum(part, axis=0).to(tl.uint64) + length.to(tl.uint64) * _HASH_STEP
    h = (h ^ (h >> 30)) * _HASH_ODD
    h = (h ^ (h >> 27)) * _HASH_ADD
    tl.store(out, (h ^ (h >> 31)).to(tl.int64))
