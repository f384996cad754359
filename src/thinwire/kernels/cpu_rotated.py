"""Loops of the numba body that rotate and quantise in one pass: a block of 1024 stays in the first-level cache."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np
from numba import float32, uint32

from .cpu_compile import compiled, random_word, summing
from .cpu_quantize import hadamard_across
from .cpu_select import square_sum
from .layout import SMALLEST_STEP
from .vector_codes import codebook_chunk, look_up_chunk
from .vectors import butterfly_within, flip_signs_add_chunk, flip_signs_butterfly, flip_signs_put_chunk

_SMALLEST = float32(SMALLEST_STEP)


@summing
def _match(nearest, z):
    """Sums of the squares of `nearest`, and of how far it is from z."""
    own, difference = 0.0, 0.0
    for i in range(z.size):
        wide = np.float64(nearest[i])
        own += wide * wide
        apart = np.float64(float32(nearest[i] - z[i]))
        difference += apart * apart
    return own, difference


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
def rotated_encode(x, numel, first, second, boundaries, codebook, width, scale, out):
    """`numel` is the length after rotation; `first` and `second` are the keys of the two rounds."""
    bits = len(width)
    buffer, nearest = np.empty(1024, np.float32), np.empty(1024, np.float32)
    for b in range(scale.size):
        start = b * 1024
        z = buffer[: min(1024, numel - start)]
        _rotate_first(x, start, first[0], first[1], z)
        _rotate_again(z, start, second[0], second[1])
        squares = square_sum(z)
        rms = float32(np.sqrt(squares / np.float64(z.size)))
        if not np.isfinite(rms):
            rms = float32(np.nan)
        elif rms < _SMALLEST:
            rms = float32(0.0)
        inverse = float32(1.0) / rms if rms > float32(0.0) else float32(0.0)
        for j in range(0, z.size, 64):
            o = (start + j) // 8 * bits
            codebook_chunk(z, j, inverse, boundaries, width, out, o)
            look_up_chunk(out, o, rms, codebook, width, nearest, j)
        if rms > float32(0.0):
            own, difference = _match(nearest[: z.size], z)
            scale[b] = float32(np.float64(rms) * squares / ((own + squares - difference) / 2.0))
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
            look_up_chunk(packed, (start + j) // 8 * bits, scale[b], codebook, width, z, j)
            butterfly_within(z, j)
        hadamard_across(z, 0, z.size)
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
