"""Vector instructions for codes: quantise, pack, unpack, look up, 64 elements at a time and packed in registers.

The layout of packed codes is that of `reference.pack`. The number of bits has to be known when a loop is compiled, and
only the widths in use should be: `width` is a tuple of that many elements, whose length is part of its numba type.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .layout import planes
from .vectors import (
    F32,
    F64,
    FLOAT,
    I8,
    I32,
    I64,
    INDEX,
    LANES,
    U32,
    choose_below,
    concat,
    constant,
    fetch_ahead,
    folded,
    load,
    part,
    plus,
    random_words,
    splat,
    store,
    vector,
)

_STARTS = range(0, 64, LANES)


def _narrow(builder, words):
    """int32 lanes to bytes. The mask changes nothing, but tells LLVM that a byte suffices: it packs in registers."""
    return builder.trunc(builder.and_(words, constant(I32, 255)), vector(I8))


def _store_packed(context, builder, array_type, array, index, codes, bits):
    """64 codes, as bytes in registers, to 8 * bits packed bytes."""
    for width, shift in planes(bits):
        plane = builder.lshr(codes, constant(I8, shift, 64)) if shift else codes
        if shift + width < bits:
            plane = builder.and_(plane, constant(I8, (1 << width) - 1, 64))
        lanes = 8 * width
        merged = part(builder, plane, 0, lanes)
        for place in range(1, 8 // width):
            moved = builder.shl(part(builder, plane, place * lanes, lanes), constant(I8, place * width, lanes))
            merged = builder.or_(merged, moved)
        store(context, builder, array_type, array, index, merged)
        index = plus(builder, index, lanes)


def _load_packed(context, builder, array_type, array, index, bits):
    """The inverse: 64 codes as bytes in registers."""
    codes = None
    for width, shift in planes(bits):
        lanes = 8 * width
        plane = load(context, builder, array_type, array, index, vector(I8, lanes))
        index = plus(builder, index, lanes)
        moved = [
            builder.lshr(plane, constant(I8, place * width, lanes)) if place else plane for place in range(8 // width)
        ]
        value = concat(builder, moved)
        if width < 8:
            value = builder.and_(value, constant(I8, (1 << width) - 1, 64))
        value = builder.shl(value, constant(I8, shift, 64)) if shift else value
        codes = value if codes is None else builder.or_(codes, value)
    return codes


@intrinsic
def pack_chunk(_typing, codes, i, width, out, o):
    """64 codes of one byte each to 8 * bits bytes."""
    signature, bits = types.void(codes, INDEX, width, out, INDEX), width.count

    def generate(context, builder, signature, args):
        codes, i, _, out, o = args
        value = load(context, builder, signature.args[0], codes, i, vector(I8, 64))
        if bits < 8:  # stray upper bits must not reach a neighbour
            value = builder.and_(value, constant(I8, (1 << bits) - 1, 64))
        _store_packed(context, builder, signature.args[3], out, o, value, bits)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def unpack_chunk(_typing, packed, i, width, codes, o):
    """8 * bits bytes to 64 codes of one byte each."""
    signature = types.void(packed, INDEX, width, codes, INDEX)

    def generate(context, builder, signature, args):
        packed, i, _, codes, o = args
        value = _load_packed(context, builder, signature.args[0], packed, i, width.count)
        store(context, builder, signature.args[3], codes, o, value)
        return context.get_dummy_value()

    return signature, generate


def _make_quantize(shifted):
    @intrinsic
    def quantize_chunk(_typing, x, i, counter, low, scale, k0, k1, floor, ceiling, offset, width, out, o):
        """clamp((x - low) * scale) in fixed point, plus offset and dither, integer part, packed: 64 elements.

        Not `shifted` leaves the subtraction out, for low = 0; that alone saves a tenth of the time.
        """
        signature = types.void(x, INDEX, U32, FLOAT, FLOAT, U32, U32, FLOAT, FLOAT, U32, width, out, INDEX)

        def generate(context, builder, signature, args):
            x, i, counter, low, scale, k0, k1, floor, ceiling, offset, _, out, o = args
            fetch_ahead(context, builder, signature.args[0], x, i)
            parts = []
            for start in _STARTS:
                y = load(context, builder, signature.args[0], x, plus(builder, i, start), vector(F32))
                y = builder.fsub(y, splat(builder, low)) if shifted else y
                y = builder.fmul(y, splat(builder, scale))
                y = choose_below(builder, y, splat(builder, ceiling))
                bottom = splat(builder, floor)
                y = builder.select(builder.fcmp_ordered(">", y, bottom), y, bottom)
                fixed = builder.fptosi(y, vector(I32))
                dither = builder.lshr(random_words(builder, counter, k0, k1, start), constant(I32, 9))
                total = builder.add(fixed, builder.add(dither, splat(builder, offset)))
                parts.append(_narrow(builder, builder.lshr(total, constant(I32, 23))))
            _store_packed(context, builder, signature.args[11], out, o, concat(builder, parts), width.count)
            return context.get_dummy_value()

        return signature, generate

    return quantize_chunk


@intrinsic
def dequantize_chunk(_typing, packed, i, offset, low, step, width, out, o):
    """out += (code - offset) * step + low for 64 elements."""
    signature = types.void(packed, INDEX, types.int32, FLOAT, FLOAT, width, out, INDEX)

    def generate(context, builder, signature, args):
        packed, i, offset, low, step, _, out, o = args
        codes = _load_packed(context, builder, signature.args[0], packed, i, width.count)
        for start in _STARTS:
            code = builder.zext(part(builder, codes, start, LANES), vector(I32))
            grid = builder.sitofp(builder.sub(code, splat(builder, offset)), vector(F32))
            y = builder.fadd(builder.fmul(grid, splat(builder, step)), splat(builder, low))
            at = plus(builder, o, start)
            old = load(context, builder, signature.args[6], out, at, vector(F32))
            store(context, builder, signature.args[6], out, at, builder.fadd(old, y))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def codebook_chunk(_typing, z, i, scale, boundaries, width, out, o):
    """How many of the 2**bits - 1 boundaries lie below z * scale, packed: 64 elements."""
    signature, bits = types.void(z, INDEX, FLOAT, boundaries, width, out, INDEX), width.count

    def generate(context, builder, signature, args):
        z, i, scale, boundaries, _, out, o = args
        parts = []
        for start in _STARTS:
            y = load(context, builder, signature.args[0], z, plus(builder, i, start), vector(F32))
            y = builder.fmul(y, splat(builder, scale))
            count = constant(I32, 0)
            for j in range((1 << bits) - 1):
                boundary = load(context, builder, signature.args[3], boundaries, ir.Constant(I64, j), F32)
                above = builder.fcmp_ordered(">", y, splat(builder, boundary))
                count = builder.sub(count, builder.sext(above, vector(I32)))
            parts.append(_narrow(builder, count))
        _store_packed(context, builder, signature.args[5], out, o, concat(builder, parts), bits)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def codebook_match_chunk(_typing, z, i, scale, boundaries, codebook, width, out, o):
    """As `codebook_chunk`; returns the sum of codeword times z, each product in float32, their sum in float64."""
    signature = types.float64(z, INDEX, FLOAT, boundaries, codebook, width, out, INDEX)
    bits = width.count

    def generate(context, builder, signature, args):
        z, i, scale, boundaries, codebook, _, out, o = args
        words = [
            splat(builder, load(context, builder, signature.args[4], codebook, ir.Constant(I64, j), F32))
            for j in range(1 << bits)
        ]
        parts, total = [], None
        for start in _STARTS:
            given = load(context, builder, signature.args[0], z, plus(builder, i, start), vector(F32))
            y = builder.fmul(given, splat(builder, scale))
            count, word = constant(I32, 0), words[0]
            for j in range((1 << bits) - 1):
                boundary = load(context, builder, signature.args[3], boundaries, ir.Constant(I64, j), F32)
                above = builder.fcmp_ordered(">", y, splat(builder, boundary))
                count = builder.sub(count, builder.sext(above, vector(I32)))
                word = builder.select(above, words[j + 1], word)  # boundaries ascend: the last one below y counts
            parts.append(_narrow(builder, count))
            product = builder.fpext(builder.fmul(word, given), vector(F64))
            total = product if total is None else builder.fadd(total, product)
        _store_packed(context, builder, signature.args[6], out, o, concat(builder, parts), bits)
        return folded(builder, total, builder.fadd)

    return signature, generate


@intrinsic
def look_up_chunk(_typing, packed, i, scale, codebook, width, out, o):
    """out = codebook[code] * scale for 64 elements: a chain of selects, quicker than a gather for a few words."""
    signature, bits = types.void(packed, INDEX, FLOAT, codebook, width, out, INDEX), width.count

    def generate(context, builder, signature, args):
        packed, i, scale, codebook, _, out, o = args
        words = [
            splat(builder, load(context, builder, signature.args[3], codebook, ir.Constant(I64, j), F32))
            for j in range(1 << bits)
        ]
        codes = _load_packed(context, builder, signature.args[0], packed, i, bits)
        for start in _STARTS:
            code = builder.zext(part(builder, codes, start, LANES), vector(I32))
            value = words[0]
            for j in range(1, 1 << bits):
                value = builder.select(builder.icmp_signed("==", code, constant(I32, j)), words[j], value)
            value = builder.fmul(value, splat(builder, scale))
            store(context, builder, signature.args[5], out, plus(builder, o, start), value)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exponential_encode_chunk(_typing, x, i, counter, inverse, lowest_scale, top, k0, k1, out, o):
    """`reference.exponential_encode` of 64 elements; `lowest_scale` is 2**(top - 1)."""
    signature = types.void(x, INDEX, U32, FLOAT, FLOAT, types.int32, U32, U32, out, INDEX)

    def generate(context, builder, signature, args):
        x, i, counter, inverse, lowest_scale, top, k0, k1, out, o = args
        fetch_ahead(context, builder, signature.args[0], x, i)
        shift = splat(builder, builder.sub(top, ir.Constant(I32, 127)))
        one = constant(F32, float(1 << 23))
        parts = []
        for start in _STARTS:
            sign_and_bits = load(context, builder, signature.args[0], x, plus(builder, i, start), vector(I32))
            magnitude = builder.bitcast(builder.and_(sign_and_bits, constant(I32, 0x7FFFFFFF)), vector(F32))
            y = choose_below(builder, builder.fmul(magnitude, splat(builder, inverse)), constant(F32, 1.0))
            bits = builder.bitcast(y, vector(I32))
            dither = builder.lshr(random_words(builder, counter, k0, k1, start), constant(I32, 9))
            code = builder.add(builder.lshr(builder.add(bits, dither), constant(I32, 23)), shift)
            lowest = builder.fmul(builder.fmul(y, splat(builder, lowest_scale)), one)
            lowest = builder.fptosi(choose_below(builder, lowest, one), vector(I32))
            up = builder.zext(builder.icmp_signed("<", dither, lowest), vector(I32))
            exponent = builder.add(builder.lshr(bits, constant(I32, 23)), shift)
            code = builder.select(builder.icmp_signed("<", exponent, constant(I32, 1)), up, code)
            sign = builder.and_(builder.lshr(sign_and_bits, constant(I32, 24)), constant(I32, 0x80))
            signed = builder.icmp_signed(">", code, constant(I32, 0))
            code = builder.add(code, builder.select(signed, sign, constant(I32, 0)))
            parts.append(_narrow(builder, code))
        store(context, builder, signature.args[8], out, o, concat(builder, parts))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exponential_add_chunk(_typing, a, b, i, counter, top, k0, k1, out, o):
    """`reference.exponential_add` of 64 pairs of codes."""
    signature = types.void(a, b, INDEX, U32, types.int32, U32, U32, out, INDEX)

    def generate(context, builder, signature, args):
        a, b, i, counter, top, k0, k1, out, o = args
        zero, one, all_bits = constant(I32, 0), constant(I32, 1), constant(I32, 32)
        parts = []
        for start in _STARTS:
            at = plus(builder, i, start)
            first = builder.zext(load(context, builder, signature.args[0], a, at, vector(I8)), vector(I32))
            second = builder.zext(load(context, builder, signature.args[1], b, at, vector(I8)), vector(I32))
            ea, eb = (builder.and_(code, constant(I32, 0x7F)) for code in (first, second))
            swap = builder.icmp_signed(">", eb, ea)
            large = builder.select(swap, second, first)
            el, es = builder.select(swap, eb, ea), builder.select(swap, ea, eb)
            gap = builder.sub(el, es)
            same = builder.icmp_signed("<", builder.xor(first, second), constant(I32, 0x80))
            level = builder.icmp_signed("==", gap, zero)
            less = builder.select(level, zero, builder.sub(gap, one))
            shift = builder.select(same, gap, less)
            shift = builder.select(builder.icmp_signed("<", shift, all_bits), shift, all_bits)
            # random < 2**(32 - shift), without leaving 32 bits
            left = builder.and_(builder.sub(all_bits, shift), constant(I32, 31))
            rest = builder.lshr(random_words(builder, counter, k0, k1, start), left)
            certain = builder.icmp_signed("==", shift, zero)
            rounds = builder.or_(certain, builder.icmp_signed("==", rest, zero))
            moved = builder.select(same, one, constant(I32, -1))
            moved = builder.add(el, builder.select(rounds, moved, zero))
            limit = splat(builder, top)
            moved = builder.select(builder.icmp_signed("<", moved, limit), moved, limit)
            moved = builder.select(builder.and_(builder.not_(same), level), zero, moved)
            signed = builder.or_(moved, builder.and_(large, constant(I32, 0x80)))
            result = builder.select(builder.icmp_signed(">", moved, zero), signed, zero)
            result = builder.select(builder.icmp_signed("==", es, zero), large, result)
            parts.append(_narrow(builder, result))
        store(context, builder, signature.args[7], out, o, concat(builder, parts))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def bits_float(_typing, bits):
    """The float32 with this bit pattern."""
    signature = types.float32(types.int32)

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return signature, generate


quantize_chunk, centred_chunk = _make_quantize(True), _make_quantize(False)
