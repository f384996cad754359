"""Loops of the numba body that rotate and quantise in one pass: a block of 1024 stays in the first-level cache."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np
from numba import float32, uint32

from .cpu_compile import compiled
from .cpu_quantize import hadamard_across
from .cpu_select import square_sum
from .layout import DOMINATES, FEW, LARGEST_SCALE, SMALLEST_STEP
from .vector_codes import codebook_match_chunk, look_up_chunk
from .vectors import (
    butterfly_within,
    flip_signs_add_chunk,
    flip_signs_butterfly,
    flip_signs_chunk,
    flip_signs_put_chunk,
    largest_and_many,
)

_SMALLEST = float32(SMALLEST_STEP)
_DOMINATES = np.float64(DOMINATES)
_LARGEST = float32(LARGEST_SCALE)


@compiled
def _run(table, at):
    """The line of a `Spread`'s table that holds element `at`."""
    low, high = 0, table.shape[0] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if table[middle, 0] <= at:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _fetch(base, table, run, at, stop, block):
    """Elements from `at` on, the first of them in this run, into `block`; from `stop` on zeros."""
    i = 0
    while i < block.size and at + i < stop:
        end, shift = min(table[run, 1], stop, at + block.size), table[run, 2] + at
        for e in range(i, end - at):
            block[e] = base[e + shift]
        i, run = end - at, run + 1
    for e in range(i, block.size):
        block[e] = float32(0.0)


@compiled
def _bring(block, base, table, run, at, stop, fresh):
    """The inverse: `block` to its places, or added there."""
    i = 0
    while i < block.size and at + i < stop:
        end, shift = min(table[run, 1], stop, at + block.size), table[run, 2] + at
        for e in range(i, end - at):
            base[e + shift] = block[e] if fresh else base[e + shift] + block[e]
        i, run = end - at, run + 1


@compiled
def _rotate(x, start, position, k0, k1, z):
    """z = the elements of x from `start` on, rotated; `position` is where they lie in their message."""
    for j in range(0, z.size, 64):
        flip_signs_butterfly(x, start + j, uint32(position + j), k0, k1, z, j)
    hadamard_across(z, 0, z.size)


@compiled
def _uneven(integers, start, size, squares, held, single):
    """`fused.uneven` of one block; `integers` is x, and `held` is the one number `single`, as integers."""
    if not np.isfinite(squares):
        return False
    single[0] = float32(0.5) * float32(np.sqrt(squares / np.float64(size)))
    limit, largest, many = held[0], np.int64(0), np.int64(0)
    for i in range(start, start + size, 64):
        found = largest_and_many(integers, i, limit)
        largest, many = max(largest, found >> 32), many + (found & 0xFFFFFFFF)
    held[0] = largest
    wide = np.float64(single[0])
    return wide * wide * _DOMINATES > squares or many * FEW < size


@compiled
def encode_block(x, integers, start, position, keys, boundaries, codebook, width, z, held, single, out, o):
    """One block of a message: its codes to `out` from `o` on, and its scale. `integers` is x; all of z is written.

    x has as many elements from `start` on as z. `keys` are the four words of the two rounds, see `fused.py`.
    """
    bits = len(width)
    _rotate(x, start, position, keys[0], keys[1], z)
    squares = square_sum(z)
    twice = _uneven(integers, start, z.size, squares, held, single)
    if twice:
        _rotate(z, 0, position, keys[2], keys[3], z)
        squares = square_sum(z)
    rms = float32(np.sqrt(squares / np.float64(z.size)))
    if not np.isfinite(rms):
        rms = float32(np.nan)
    elif rms < _SMALLEST:
        rms = float32(0.0)
    inverse = float32(1.0) / rms if rms > float32(0.0) else float32(0.0)
    match = 0.0
    for j in range(0, z.size, 64):
        match += codebook_match_chunk(z, j, inverse, boundaries, codebook, width, out, o + j // 8 * bits)
    if rms > float32(0.0):
        unbiased = float32(squares / match)
        return -unbiased if twice else unbiased
    return rms


@compiled
def decode_block(packed, p, scale, position, keys, codebook, width, z):
    """z = the block of a message whose codes begin at `p`, but for the signs of the first round."""
    bits = len(width)
    for j in range(0, z.size, 64):
        look_up_chunk(packed, p + j // 8 * bits, abs(scale), codebook, width, z, j)
        butterfly_within(z, j)
    hadamard_across(z, 0, z.size)
    if scale < float32(0.0):
        _rotate_back(z, position, keys[2], keys[3])


@compiled
def _rotate_back(z, position, k0, k1):
    """The signs of the second round, and the transform of the first."""
    for j in range(0, z.size, 64):
        flip_signs_butterfly(z, j, uint32(position + j), k0, k1, z, j)
    hadamard_across(z, 0, z.size)


@compiled
def rotated_encode(base, table, first, stop, numel, keys, boundaries, codebook, width, scale, out):
    """Of elements `first` to `stop` of a `Spread`; `numel` is their number after rotation."""
    bits = len(width)
    integers, held = base.view(np.int32), np.empty(1, np.int32)
    single = held.view(np.float32)
    buffer, block = np.empty(1024, np.float32), np.empty(1024, np.float32)
    block_integers = block.view(np.int32)
    for b in range(scale.size):
        start = b * 1024
        z, o, at = buffer[: min(1024, numel - start)], start // 8 * bits, first + start
        run = _run(table, at)
        if at + z.size <= min(stop, table[run, 1]):
            place = at + table[run, 2]
            scale[b] = encode_block(
                base, integers, place, start, keys, boundaries, codebook, width, z, held, single, out, o
            )
        else:
            _fetch(base, table, run, at, stop, block[: z.size])
            scale[b] = encode_block(
                block, block_integers, 0, start, keys, boundaries, codebook, width, z, held, single, out, o
            )


@compiled
def rotated_add(packed, numel, keys, codebook, width, scale, base, table, first, stop, fresh):
    """To elements `first` to `stop` of a `Spread`."""
    bits = len(width)
    buffer, block = np.empty(1024, np.float32), np.empty(1024, np.float32)
    for b in range(scale.size):
        start = b * 1024
        z, at = buffer[: min(1024, numel - start)], first + start
        decode_block(packed, start // 8 * bits, scale[b], start, keys, codebook, width, z)
        run = _run(table, at)
        direct = at + z.size <= min(stop, table[run, 1])
        for j in range(0, z.size, 64):
            place = at + table[run, 2] + j
            if direct and fresh:
                flip_signs_put_chunk(z, j, uint32(start + j), keys[0], keys[1], base, place)
            elif direct:
                flip_signs_add_chunk(z, j, uint32(start + j), keys[0], keys[1], base, place)
            elif fresh:
                flip_signs_put_chunk(z, j, uint32(start + j), keys[0], keys[1], block, j)
            else:
                flip_signs_chunk(z, j, uint32(start + j), keys[0], keys[1], block, j)
        if not direct:
            _bring(block[: z.size], base, table, run, at, stop, fresh)


@compiled
def usable(scale):
    """Whether every element that these scales stand for is finite."""
    found = True
    for value in scale:
        found = found and abs(value) < _LARGEST
    return found


@compiled
def rotated_mean(
    single, data, stride, skip, keys, codebook, width, base, table, first, numel, share, held, left, message
):
    """`rows.rotated_mean_rows`: a block stays in the first-level cache from sum to message.

    `single` and `data` are the rows, flat, as float32 and as bytes, and `keys` has a line for each. This rank's own
    elements are `numel` from `first` on of a `Spread`. `held` and `left` may be empty. `message` is what is written:
    its key, tables and width, where its scales go, and where its codes go.
    """
    back, boundaries, matched, words, wide, row, out = message
    bits = len(width)
    blocks = (numel + 1023) >> 10
    rotated = rotated_length(numel)
    mean, buffer, z = np.empty(1024, np.float32), np.empty(1024, np.float32), np.empty(1024, np.float32)
    integers, number = mean.view(np.int32), np.empty(1, np.int32)
    real = number.view(np.float32)
    for b in range(blocks):
        start = b * 1024
        size, inside = min(1024, rotated - start), min(1024, numel - start)
        part, code = z[:size], start // 8 * bits
        _fetch(base, table, _run(table, first + start), first + start, first + numel, mean[:size])
        for r in range(keys.shape[0]):
            if r != skip:
                begin = r * stride
                scale = single[(begin >> 2) + b]
                decode_block(data, begin + 4 * blocks + code, scale, start, keys[r], codebook, width, part)
                for j in range(0, size, 64):
                    flip_signs_add_chunk(part, j, uint32(start + j), keys[r, 0], keys[r, 1], mean, j)
        for i in range(inside):
            mean[i] *= share
        for i in range(inside, size):
            mean[i] = float32(0.0)
        if held.size:
            for i in range(inside):
                mean[i] += held[start + i]
        o = start // 8 * len(wide)
        row[b] = encode_block(
            mean, integers, 0, start, back, boundaries, matched, wide, buffer[:size], number, real, out, o
        )
        if left.size:
            decode_block(out, o, row[b], start, back, words, wide, part)
            for j in range(0, size, 64):
                flip_signs_put_chunk(part, j, uint32(start + j), back[0], back[1], buffer, j)
            for i in range(inside):
                left[start + i] = mean[i] - buffer[i]


@compiled
def rotated_length(numel):
    """`layout.rotated_numel`."""
    rest, width = numel & 1023, 64
    while width < rest:
        width *= 2
    return numel - rest + (width if rest else 0)
