"""Loops of the numba body that rotate and quantise in one pass: a block of 1024 stays in the first-level cache."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np
from numba import float32, uint32

from .cpu_compile import compiled, random_word
from .cpu_quantize import hadamard_across
from .cpu_select import square_sum
from .layout import DOMINATES, FEW, SMALLEST_STEP
from .vector_codes import codebook_match_chunk, look_up_chunk
from .vectors import (
    butterfly_within,
    flip_signs_add_chunk,
    flip_signs_butterfly,
    flip_signs_put_chunk,
    largest_and_many,
)

_SMALLEST = float32(SMALLEST_STEP)
_DOMINATES = np.float64(DOMINATES)


@compiled
def _rotate_first(x, start, k0, k1, z):
    """Elements of x from `start` on, rotated; beyond its end zeros, with signs like the rest."""
    for j in range(0, z.size, 64):
        if start + j + 64 <= x.size:
            flip_signs_butterfly(x, start + j, uint32(start + j), k0, k1, z, j)
        else:
            for e in range(start + j, start + j + 64):
                value = x[e] if e < x.size else float32(0.0)
                z[e - start] = -value if random_word(e, k0, k1) >= uint32(0x80000000) else value
            butterfly_within(z, j)
    hadamard_across(z, 0, z.size)


@compiled
def _rotate_again(z, start, k0, k1):
    for j in range(0, z.size, 64):
        flip_signs_butterfly(z, j, uint32(start + j), k0, k1, z, j)
    hadamard_across(z, 0, z.size)


@compiled
def _uneven(integers, start, size, squares, held, single):
    """`fused.uneven` of one block; `integers` is x, and `held` is the one number `single`, as integers."""
    if not np.isfinite(squares):
        return False
    single[0] = float32(0.5) * float32(np.sqrt(squares / np.float64(size)))
    limit, largest, many = held[0], np.int64(0), np.int64(0)
    stop = min(start + size, integers.size)
    whole = stop - ((stop - start) & 63)
    for i in range(start, whole, 64):
        found = largest_and_many(integers, i, limit)
        largest, many = max(largest, found >> 32), many + (found & 0xFFFFFFFF)
    for i in range(whole, stop):
        magnitude = np.int64(integers[i] & np.int32(0x7FFFFFFF))
        largest, many = max(largest, magnitude), many + np.int64(magnitude > limit)
    held[0] = largest
    wide = np.float64(single[0])
    return wide * wide * _DOMINATES > squares or many * FEW < size


@compiled
def rotated_encode(x, numel, first, second, boundaries, codebook, width, scale, out):
    """`numel` is the length after rotation; `first` and `second` are the keys of the rounds, see `fused.py`."""
    bits = len(width)
    integers, held = x.view(np.int32), np.empty(1, np.int32)
    single = held.view(np.float32)
    buffer = np.empty(1024, np.float32)
    for b in range(scale.size):
        start = b * 1024
        z = buffer[: min(1024, numel - start)]
        _rotate_first(x, start, first[0], first[1], z)
        squares = square_sum(z)
        twice = _uneven(integers, start, z.size, squares, held, single)
        if twice:
            _rotate_again(z, start, second[0], second[1])
            squares = square_sum(z)
        rms = float32(np.sqrt(squares / np.float64(z.size)))
        if not np.isfinite(rms):
            rms = float32(np.nan)
        elif rms < _SMALLEST:
            rms = float32(0.0)
        inverse = float32(1.0) / rms if rms > float32(0.0) else float32(0.0)
        match = 0.0
        for j in range(0, z.size, 64):
            o = (start + j) // 8 * bits
            match += codebook_match_chunk(z, j, inverse, boundaries, codebook, width, out, o)
        if rms > float32(0.0):
            unbiased = float32(squares / match)
            scale[b] = -unbiased if twice else unbiased
        else:
            scale[b] = rms


@compiled
def rotated_add(packed, numel, first, second, codebook, width, scale, out, fresh):
    bits = len(width)
    buffer = np.empty(1024, np.float32)
    for b in range(scale.size):
        start = b * 1024
        z = buffer[: min(1024, numel - start)]
        for j in range(0, z.size, 64):
            look_up_chunk(packed, (start + j) // 8 * bits, abs(scale[b]), codebook, width, z, j)
            butterfly_within(z, j)
        hadamard_across(z, 0, z.size)
        if scale[b] < float32(0.0):
            _rotate_again(z, start, second[0], second[1])
        for j in range(0, z.size, 64):
            if start + j + 64 <= out.size and fresh:
                flip_signs_put_chunk(z, j, uint32(start + j), first[0], first[1], out, start + j)
            elif start + j + 64 <= out.size:
                flip_signs_add_chunk(z, j, uint32(start + j), first[0], first[1], out, start + j)
            else:
                for e in range(start + j, min(start + j + 64, out.size)):
                    value = z[e - start]
                    old = float32(0.0) if fresh else out[e]
                    out[e] = old + (-value if random_word(e, first[0], first[1]) >= uint32(0x80000000) else value)
