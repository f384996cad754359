"""Loops of the numba body over several messages: row r of a byte matrix holds the scales, then the codes of a piece.

`single` and `data` are the rows, flat, as float32 and as bytes; `stride` is the bytes of a row. `places` holds a start
and a stop for each row. Nothing is written, and the result is False, if a piece or its message does not fit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np

from . import cpu_quantize, cpu_rotated
from .cpu_compile import compiled

_encode_abs_max = cpu_quantize.abs_max_encode
_encode_rotated = cpu_rotated.rotated_encode
_add_rotated = cpu_rotated.rotated_add
_mean_rotated = cpu_rotated.rotated_mean
_rotated_numel = cpu_rotated.rotated_length
_usable = cpu_rotated.usable


@compiled
def _fit(places, numel, block, rotated, bits, stride):
    """Whether every piece lies in `numel` elements and every message in its row."""
    for r in range(places.shape[0]):
        start, stop = places[r, 0], places[r, 1]
        if stop > start:
            size = _rotated_numel(stop - start) if rotated else stop - start
            blocks = (size + block - 1) // block if block else 1
            if start < 0 or stop > numel or 4 * blocks + ((size + 63) >> 6) * 8 * bits > stride:
                return False
    return True


@compiled
def rotated_encode_rows(base, table, first, size, places, keys, single, data, stride, boundaries, codebook, width):
    """Of the `size` elements from `first` on of a `Spread`."""
    if not _fit(places, size, 1024, True, len(width), stride):
        return False
    for r in range(places.shape[0]):
        start, stop = places[r, 0], places[r, 1]
        if stop > start:
            numel, blocks, row = _rotated_numel(stop - start), (stop - start + 1023) >> 10, r * stride
            scale, codes = single[row >> 2 : (row >> 2) + blocks], data[row + 4 * blocks : row + stride]
            message = boundaries, codebook, width, scale, codes
            _encode_rotated(base, table, first + start, first + stop, numel, keys[r], *message)
    return True


@compiled
def rotated_add_rows(single, data, stride, places, keys, codebook, width, base, table, first, size, fresh):
    """Whether everything fits, and whether all that was added is finite."""
    if not _fit(places, size, 1024, True, len(width), stride):
        return False, False
    finite = True
    for r in range(places.shape[0]):
        start, stop = places[r, 0], places[r, 1]
        if stop > start:
            numel, blocks, row = _rotated_numel(stop - start), (stop - start + 1023) >> 10, r * stride
            scale, codes = single[row >> 2 : (row >> 2) + blocks], data[row + 4 * blocks : row + stride]
            ends = first + start, first + stop
            _add_rotated(codes, numel, keys[r], codebook, width, scale, base, table, *ends, fresh)
            finite = finite and _usable(scale)
    return True, finite


@compiled
def rotated_mean_rows(single, data, stride, skip, keys, codebook, width, base, table, first, size, held, left, message):
    """See `cpu_rotated.rotated_mean`."""
    whole, row, codes = np.array([[0, size]]), message[5], message[6]
    fits = _fit(whole, size, 1024, True, len(width), stride)
    fits = fits and _fit(whole, size, 1024, True, len(message[4]), 4 * row.size + codes.size)
    if not fits or row.size != (size + 1023) >> 10 or held.size not in (0, size) or left.size not in (0, size):
        return False
    share = np.float32(1.0 / keys.shape[0])
    own = base, table, first, size, share
    _mean_rotated(single, data, stride, skip, keys, codebook, width, *own, held, left, message)
    return True


@compiled
def abs_max_encode_rows(x, bits, places, keys, single, data, stride, width, block, levels):
    """`bits` is x as integers."""
    if not _fit(places, x.size, block, False, len(width), stride):
        return False
    for r in range(places.shape[0]):
        start, stop = places[r, 0], places[r, 1]
        if stop > start:
            blocks, row = (stop - start + block - 1) // block if block else 1, r * stride
            step, codes = single[row >> 2 : (row >> 2) + blocks], data[row + 4 * blocks : row + stride]
            _encode_abs_max(x[start:stop], bits[start:stop], step, codes, width, block, levels, keys[r, 0], keys[r, 1])
    return True
