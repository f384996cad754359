"""Loops of the numba body over several messages: row r of a byte matrix holds the scales, then the codes of a piece.

`single` and `data` are the rows, flat, as float32 and as bytes; `stride` is the bytes of a row. `places` holds a start
and a stop for each row. Nothing is written, and the result is False, if a piece or its message does not fit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

from . import cpu_quantize, cpu_rotated
from .cpu_compile import compiled

_encode_abs_max = cpu_quantize.abs_max_encode
_encode_rotated = cpu_rotated.rotated_encode
_add_rotated = cpu_rotated.rotated_add


@compiled
def _rotated_numel(numel):
    """`layout.rotated_numel`."""
    rest, width = numel & 1023, 64
    while width < rest:
        width *= 2
    return numel - rest + (width if rest else 0)


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
def rotated_encode_rows(x, places, keys, single, data, stride, boundaries, codebook, width):
    if not _fit(places, x.size, 1024, True, len(width), stride):
        return False
    for r in range(places.shape[0]):
        start, stop = places[r, 0], places[r, 1]
        if stop > start:
            numel, blocks, row = _rotated_numel(stop - start), (stop - start + 1023) >> 10, r * stride
            scale, codes = single[row >> 2 : (row >> 2) + blocks], data[row + 4 * blocks : row + stride]
            first, second = (keys[r, 0], keys[r, 1]), (keys[r, 2], keys[r, 3])
            _encode_rotated(x[start:stop], numel, first, second, boundaries, codebook, width, scale, codes)
    return True


@compiled
def rotated_add_rows(single, data, stride, places, keys, codebook, width, out, fresh):
    if not _fit(places, out.size, 1024, True, len(width), stride):
        return False
    for r in range(places.shape[0]):
        start, stop = places[r, 0], places[r, 1]
        if stop > start:
            numel, blocks, row = _rotated_numel(stop - start), (stop - start + 1023) >> 10, r * stride
            scale, codes = single[row >> 2 : (row >> 2) + blocks], data[row + 4 * blocks : row + stride]
            first, second = (keys[r, 0], keys[r, 1]), (keys[r, 2], keys[r, 3])
            _add_rotated(codes, numel, first, second, codebook, width, scale, out[start:stop], fresh)
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
