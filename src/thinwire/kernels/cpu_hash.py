"""The numba body of `hash64`: every row of 64 words shares one multiplier, and each lane has its own sum."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_compile import compiled
from .layout import HASH_ADD, HASH_ODD, HASH_STEP
from .vectors import I32, I64, INDEX, LANES, constant, fetch_ahead, load, plus, splat, store, vector

_AHEAD = 2048  # words; measured: 6 % faster than the 1024 that other loops take


def _row_multiplier(builder, y):
    """`_odd_multiplier` from the point where the position has been multiplied."""
    low, high = builder.and_(y, ir.Constant(I64, 0xFFFFFFFF)), builder.lshr(y, ir.Constant(I64, 32))
    y = builder.add(builder.mul(low, high), y)
    y = builder.mul(builder.xor(y, builder.lshr(y, ir.Constant(I64, 32))), ir.Constant(I64, HASH_ODD))
    return builder.or_(builder.xor(y, builder.lshr(y, ir.Constant(I64, 29))), ir.Constant(I64, 1))


@intrinsic
def _sum_lanes(_typing, words, rows, out):
    """out[lane] = sum over rows of word * multiplier of the row, modulo 2**64. The sums stay in registers."""
    signature = types.void(words, INDEX, out)

    def generate(context, builder, signature, args):
        words, rows, out = args
        sums = [cgutils.alloca_once_value(builder, constant(I64, 0)) for _ in range(64 // LANES)]
        position = cgutils.alloca_once_value(builder, ir.Constant(I64, HASH_ADD))
        with cgutils.for_range(builder, rows) as loop:
            y = builder.load(position)
            builder.store(builder.add(y, ir.Constant(I64, HASH_STEP)), position)
            multiplier = splat(builder, _row_multiplier(builder, y))
            start = builder.mul(loop.index, ir.Constant(I64, 64))
            fetch_ahead(context, builder, signature.args[0], words, start, ahead=_AHEAD)
            for number, total in enumerate(sums):
                at = plus(builder, start, number * LANES)
                found = builder.zext(load(context, builder, signature.args[0], words, at, vector(I32)), vector(I64))
                builder.store(builder.add(builder.load(total), builder.mul(found, multiplier)), total)
        for number, total in enumerate(sums):
            place = ir.Constant(I64, number * LANES)
            store(context, builder, signature.args[2], out, place, builder.load(total))
        return context.get_dummy_value()

    return signature, generate


@compiled
def _odd_multiplier(position):
    """`reference_parts.odd_multipliers` of one position."""
    y = uint64(uint64(position) * uint64(HASH_STEP) + uint64(HASH_ADD))
    y = uint64(uint64(y & uint64(0xFFFFFFFF)) * uint64(y >> uint64(32)) + y)
    y = uint64(uint64(y ^ uint64(y >> uint64(32))) * uint64(HASH_ODD))
    return uint64(uint64(y ^ uint64(y >> uint64(29))) | uint64(1))


@compiled
def hash64(words, length):
    """`length` is in bytes; int64 out. Integer sums wrap around, so their order does not matter."""
    lanes = np.empty(64, np.uint64)
    full = words.size >> 6
    _sum_lanes(words, full, lanes)
    last = _odd_multiplier(full)
    for i in range(full * 64, words.size):
        lanes[i & 63] = uint64(lanes[i & 63] + uint64(uint64(words[i]) * last))
    h = uint64(uint64(length) * uint64(HASH_STEP))
    for lane in range(64):
        h = uint64(h + uint64(lanes[lane] * _odd_multiplier(~lane)))
    h = uint64(uint64(h ^ uint64(h >> uint64(30))) * uint64(HASH_ODD))
    h = uint64(uint64(h ^ uint64(h >> uint64(27))) * uint64(HASH_ADD))
    return int64(h ^ uint64(h >> uint64(31)))
