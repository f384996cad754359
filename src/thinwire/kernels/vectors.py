"""Vector instructions for the numba body, written as LLVM vectors of 32 or 64 lanes.

LLVM lowers them to whatever the machine has (AVX2, AVX-512, NEON). Numba's auto-vectoriser does not manage packing,
compaction or butterflies; with these the loops in `cpu_loops.py` run at the speed of memory. Each intrinsic works on a
chunk of 64 elements (masks: 32) starting at a given position and does not check bounds: its callers do.

Numba caches by the source of the *calling* file: after an edit here, remove `__pycache__` (make clean).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I1, I8, I32, I64, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = 32  # four AVX2 registers of float32: enough independent work to hide the latency of the hash
_INDEX, _U32, _F32 = types.intp, types.uint32, types.float32


def vector(element, lanes):
    return ir.VectorType(element, lanes)


def constant(element, values, lanes=LANES):
    return ir.Constant(vector(element, lanes), list(values) if hasattr(values, "__iter__") else [values] * lanes)


def splat(builder, scalar, lanes=LANES):
    undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(I32, 0, lanes))


def _pointer(context, builder, array_type, array, index, kind):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def load(context, builder, array_type, array, index, kind):
    found = builder.load(_pointer(context, builder, array_type, array, index, kind))
    found.align = 1
    return found


def store(context, builder, array_type, array, index, value):
    builder.store(value, _pointer(context, builder, array_type, array, index, value.type)).align = 1


def _plus(builder, index, amount):
    return builder.add(index, ir.Constant(index.type, amount)) if amount else index


def _concat(builder, a, b):
    lanes = a.type.count
    return builder.shuffle_vector(a, b, constant(I32, range(2 * lanes), 2 * lanes))


def _part(builder, value, start, lanes):
    undefined = ir.Constant(value.type, ir.Undefined)
    return builder.shuffle_vector(value, undefined, constant(I32, range(start, start + lanes), lanes))


def _hash(builder, counter, k0, k1, start):
    """`reference.random_bits` for LANES consecutive elements."""
    h = builder.add(splat(builder, builder.add(counter, k0)), constant(I32, range(start, start + LANES)))
    h = builder.mul(builder.xor(h, builder.lshr(h, constant(I32, 16))), constant(I32, 0x7FEB352D))
    h = builder.xor(builder.xor(h, builder.lshr(h, constant(I32, 15))), splat(builder, k1))
    return builder.mul(h, constant(I32, 0x846CA68B))


@intrinsic
def dither_chunk(_typing, x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o):
    """64 codes: clamp((x - low) * scale) in fixed point, plus offset and dither, integer part."""
    signature = types.void(x, _INDEX, _U32, _F32, _F32, _U32, _U32, _F32, _F32, _U32, out, _INDEX)

    def generate(context, builder, signature, args):
        x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o = args
        halves = []
        for start in (0, LANES):
            y = load(context, builder, signature.args[0], x, _plus(builder, i, start), vector(F32, LANES))
            y = builder.fmul(builder.fsub(y, splat(builder, low)), splat(builder, scale))
            top, bottom = splat(builder, ceiling), splat(builder, floor)
            y = builder.select(builder.fcmp_ordered("<", y, top), y, top)
            y = builder.select(builder.fcmp_ordered(">", y, bottom), y, bottom)
            fixed = builder.fptosi(y, vector(I32, LANES))
            dither = builder.lshr(_hash(builder, counter, k0, k1, start), constant(I32, 9))
            code = builder.lshr(builder.add(fixed, builder.add(dither, splat(builder, offset))), constant(I32, 23))
            # The mask changes nothing, but it tells LLVM that a byte suffices, and then it packs in registers.
            halves.append(builder.trunc(builder.and_(code, constant(I32, 255)), vector(I8, LANES)))
        store(context, builder, signature.args[10], out, o, _concat(builder, *halves))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def decode_chunk(_typing, codes, i, offset, low, step, out, o):
    """out += (code - offset) * step + low for 64 elements."""
    signature = types.void(codes, _INDEX, types.int32, _F32, _F32, out, _INDEX)

    def generate(context, builder, signature, args):
        codes, i, offset, low, step, out, o = args
        for start in (0, LANES):
            code = load(context, builder, signature.args[0], codes, _plus(builder, i, start), vector(I8, LANES))
            grid = builder.sub(builder.zext(code, vector(I32, LANES)), splat(builder, offset))
            y = builder.fmul(builder.sitofp(grid, vector(F32, LANES)), splat(builder, step))
            y = builder.fadd(y, splat(builder, low))
            at = _plus(builder, o, start)
            old = load(context, builder, signature.args[5], out, at, vector(F32, LANES))
            store(context, builder, signature.args[5], out, at, builder.fadd(old, y))
        return context.get_dummy_value()

    return signature, generate


def _make_pack(width):
    @intrinsic
    def pack_plane(_typing, codes, i, shift, out, o):
        """Bits shift .. shift + width of 64 codes -> 8 * width bytes (the layout of `reference.pack`)."""
        signature = types.void(codes, _INDEX, types.uint8, out, _INDEX)

        def generate(context, builder, signature, args):
            codes, i, shift, out, o = args
            value = load(context, builder, signature.args[0], codes, i, vector(I8, 64))
            value = builder.lshr(value, splat(builder, shift, 64))
            value = builder.and_(value, constant(I8, (1 << width) - 1, 64))
            lanes = 8 * width
            merged = _part(builder, value, 0, lanes)
            for part in range(1, 8 // width):
                bits = builder.shl(_part(builder, value, part * lanes, lanes), constant(I8, part * width, lanes))
                merged = builder.or_(merged, bits)
            store(context, builder, signature.args[3], out, o, merged)
            return context.get_dummy_value()

        return signature, generate

    return pack_plane


def _make_unpack(width):
    @intrinsic
    def unpack_plane(_typing, packed, i, shift, codes, o):
        """codes |= plane << shift: the inverse of the pack of this width."""
        signature = types.void(packed, _INDEX, types.uint8, codes, _INDEX)

        def generate(context, builder, signature, args):
            packed, i, shift, codes, o = args
            lanes = 8 * width
            plane = load(context, builder, signature.args[0], packed, i, vector(I8, lanes))
            parts = [builder.lshr(plane, constant(I8, part * width, lanes)) for part in range(8 // width)]
            while len(parts) > 1:
                parts = [_concat(builder, a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            value = builder.and_(parts[0], constant(I8, (1 << width) - 1, 64))
            value = builder.shl(value, splat(builder, shift, 64))
            old = load(context, builder, signature.args[3], codes, o, vector(I8, 64))
            store(context, builder, signature.args[3], codes, o, builder.or_(old, value))
            return context.get_dummy_value()

        return signature, generate

    return unpack_plane


pack_plane_4, pack_plane_2, pack_plane_1 = _make_pack(4), _make_pack(2), _make_pack(1)
unpack_plane_4, unpack_plane_2, unpack_plane_1 = _make_unpack(4), _make_unpack(2), _make_unpack(1)


def _mask_of_large(builder, values, threshold):
    """Bit j is set where |values[j]| > threshold; both as float bits, whose integer order is numeric order."""
    magnitude = builder.and_(builder.bitcast(values, vector(I32, LANES)), constant(I32, 0x7FFFFFFF))
    return builder.bitcast(builder.icmp_signed(">", magnitude, splat(builder, threshold)), ir.IntType(LANES))


@intrinsic
def mask_above(_typing, x, i, threshold):
    """A 32-bit mask of the elements i .. i + 32 whose magnitude exceeds the threshold."""
    signature = types.uint32(x, _INDEX, types.int32)

    def generate(context, builder, signature, args):
        x, i, threshold = args
        values = load(context, builder, signature.args[0], x, i, vector(F32, LANES))
        return _mask_of_large(builder, values, threshold)

    return signature, generate


@intrinsic
def accumulate_mask(_typing, memory, gradient, i, threshold):
    """memory += gradient for 32 elements, and the mask of those that now exceed the threshold."""
    signature = types.uint32(memory, gradient, _INDEX, types.int32)

    def generate(context, builder, signature, args):
        memory, gradient, i, threshold = args
        old = load(context, builder, signature.args[0], memory, i, vector(F32, LANES))
        values = builder.fadd(old, load(context, builder, signature.args[1], gradient, i, vector(F32, LANES)))
        store(context, builder, signature.args[0], memory, i, values)
        return _mask_of_large(builder, values, threshold)

    return signature, generate


@intrinsic
def lowest_bit(_typing, mask):
    """The position of the lowest set bit of a non-zero mask."""
    signature = _INDEX(types.uint32)

    def generate(context, builder, signature, args):
        return builder.zext(builder.cttz(args[0], ir.Constant(I1, 1)), I64)

    return signature, generate


@intrinsic
def float_bits(_typing, value):
    """The bit pattern of a float32."""
    signature = types.int32(types.float32)

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return signature, generate


@intrinsic
def bits_float(_typing, bits):
    """The float32 with this bit pattern."""
    signature = types.float32(types.int32)

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return signature, generate


@intrinsic
def flip_signs_chunk(_typing, x, i, counter, k0, k1, out, o):
    """out = x times a random sign, for 64 elements (the top random bit is xored into the sign)."""
    signature = types.void(x, _INDEX, _U32, _U32, _U32, out, _INDEX)

    def generate(context, builder, signature, args):
        x, i, counter, k0, k1, out, o = args
        for start in (0, LANES):
            bits = load(context, builder, signature.args[0], x, _plus(builder, i, start), vector(I32, LANES))
            sign = builder.and_(_hash(builder, counter, k0, k1, start), constant(I32, 0x80000000))
            flipped = builder.bitcast(builder.xor(bits, sign), vector(F32, LANES))
            store(context, builder, signature.args[5], out, _plus(builder, o, start), flipped)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def butterfly_within(_typing, x, i):
    """Hadamard stages with strides 1 to 32 inside 64 elements, in place."""
    signature = types.void(x, _INDEX)

    def generate(context, builder, signature, args):
        value = load(context, builder, signature.args[0], args[0], args[1], vector(F32, 64))
        undefined = ir.Constant(value.type, ir.Undefined)
        for stage in range(int(math.log2(64))):
            stride = 1 << stage
            # (a, b) -> (a + b, a - b) is the swapped pair plus the pair with b negated: one shuffle, one xor, one add.
            swapped = builder.shuffle_vector(value, undefined, constant(I32, [j ^ stride for j in range(64)], 64))
            signs = constant(I32, [0x80000000 if j & stride else 0 for j in range(64)], 64)
            negated = builder.bitcast(builder.xor(builder.bitcast(value, signs.type), signs), value.type)
            value = builder.fadd(swapped, negated)
        store(context, builder, signature.args[0], args[0], args[1], value)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def butterfly_between(_typing, x, i, j):
    """(a, b) -> (a + b, a - b) for the runs of 64 elements at i and j, in place."""
    signature = types.void(x, _INDEX, _INDEX)

    def generate(context, builder, signature, args):
        x, i, j = args
        for start in (0, LANES):
            at, to = _plus(builder, i, start), _plus(builder, j, start)
            a = load(context, builder, signature.args[0], x, at, vector(F32, LANES))
            b = load(context, builder, signature.args[0], x, to, vector(F32, LANES))
            store(context, builder, signature.args[0], x, at, builder.fadd(a, b))
            store(context, builder, signature.args[0], x, to, builder.fsub(a, b))
        return context.get_dummy_value()

    return signature, generate


def _make_codebook(bits):
    @intrinsic
    def codebook_chunk(_typing, z, i, scale, boundaries, out, o):
        """64 codes: how many of the 2**bits - 1 boundaries lie below z * scale."""
        signature = types.void(z, _INDEX, _F32, boundaries, out, _INDEX)

        def generate(context, builder, signature, args):
            z, i, scale, boundaries, out, o = args
            halves = []
            for start in (0, LANES):
                y = load(context, builder, signature.args[0], z, _plus(builder, i, start), vector(F32, LANES))
                y = builder.fmul(y, splat(builder, scale))
                count = constant(I32, 0)
                for j in range((1 << bits) - 1):
                    boundary = load(context, builder, signature.args[3], boundaries, ir.Constant(I64, j), F32)
                    above = builder.fcmp_ordered(">", y, splat(builder, boundary))
                    count = builder.sub(count, builder.sext(above, vector(I32, LANES)))
                halves.append(builder.trunc(builder.and_(count, constant(I32, 255)), vector(I8, LANES)))
            store(context, builder, signature.args[4], out, o, _concat(builder, *halves))
            return context.get_dummy_value()

        return signature, generate

    return codebook_chunk


def _make_lookup(bits):
    @intrinsic
    def lookup_chunk(_typing, codes, i, scale, codebook, out, o):
        """out = codebook[code] * scale for 64 elements: a chain of selects, quicker than a gather for a few words."""
        signature = types.void(codes, _INDEX, _F32, codebook, out, _INDEX)

        def generate(context, builder, signature, args):
            codes, i, scale, codebook, out, o = args
            words = [
                splat(builder, load(context, builder, signature.args[3], codebook, ir.Constant(I64, j), F32))
                for j in range(1 << bits)
            ]
            for start in (0, LANES):
                code = load(context, builder, signature.args[0], codes, _plus(builder, i, start), vector(I8, LANES))
                code = builder.zext(code, vector(I32, LANES))
                value = words[0]
                for j in range(1, 1 << bits):
                    value = builder.select(builder.icmp_signed("==", code, constant(I32, j)), words[j], value)
                value = builder.fmul(value, splat(builder, scale))
                store(context, builder, signature.args[4], out, _plus(builder, o, start), value)
            return context.get_dummy_value()

        return signature, generate

    return lookup_chunk


codebook_chunk_2, codebook_chunk_3, codebook_chunk_4 = _make_codebook(2), _make_codebook(3), _make_codebook(4)
lookup_chunk_2, lookup_chunk_3, lookup_chunk_4 = _make_lookup(2), _make_lookup(3), _make_lookup(4)
