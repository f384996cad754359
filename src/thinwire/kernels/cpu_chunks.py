"""Which vector instruction serves how many bits: numba needs each by name, so the choice is written out here."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg"
from __future__ import annotations

from .cpu_compile import inlined

# fmt: off
from .vector_codes import (
    centred_1,
    centred_2,
    centred_3,
    centred_4,
    centred_5,
    centred_6,
    centred_7,
    centred_8,
    codebook_2,
    codebook_3,
    codebook_4,
    dequantize_1,
    dequantize_2,
    dequantize_3,
    dequantize_4,
    dequantize_5,
    dequantize_6,
    dequantize_7,
    dequantize_8,
    look_up_2,
    look_up_3,
    look_up_4,
    pack_1,
    pack_2,
    pack_3,
    pack_4,
    pack_5,
    pack_6,
    pack_7,
    pack_8,
    quantize_1,
    quantize_2,
    quantize_3,
    quantize_4,
    quantize_5,
    quantize_6,
    quantize_7,
    quantize_8,
    unpack_1,
    unpack_2,
    unpack_3,
    unpack_4,
    unpack_5,
    unpack_6,
    unpack_7,
    unpack_8,
)

# fmt: on


@inlined
def pack_chunk(codes, i, bits, out, o):
    if bits == 1:
        pack_1(codes, i, out, o)
    elif bits == 2:
        pack_2(codes, i, out, o)
    elif bits == 3:
        pack_3(codes, i, out, o)
    elif bits == 4:
        pack_4(codes, i, out, o)
    elif bits == 5:
        pack_5(codes, i, out, o)
    elif bits == 6:
        pack_6(codes, i, out, o)
    elif bits == 7:
        pack_7(codes, i, out, o)
    elif bits == 8:
        pack_8(codes, i, out, o)


@inlined
def unpack_chunk(packed, i, bits, codes, o):
    if bits == 1:
        unpack_1(packed, i, codes, o)
    elif bits == 2:
        unpack_2(packed, i, codes, o)
    elif bits == 3:
        unpack_3(packed, i, codes, o)
    elif bits == 4:
        unpack_4(packed, i, codes, o)
    elif bits == 5:
        unpack_5(packed, i, codes, o)
    elif bits == 6:
        unpack_6(packed, i, codes, o)
    elif bits == 7:
        unpack_7(packed, i, codes, o)
    elif bits == 8:
        unpack_8(packed, i, codes, o)


@inlined
def quantize_chunk(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, bits, out, o):
    if bits == 1:
        quantize_1(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 2:
        quantize_2(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 3:
        quantize_3(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 4:
        quantize_4(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 5:
        quantize_5(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 6:
        quantize_6(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 7:
        quantize_7(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 8:
        quantize_8(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)


@inlined
def centred_chunk(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, bits, out, o):
    if bits == 1:
        centred_1(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 2:
        centred_2(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 3:
        centred_3(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 4:
        centred_4(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 5:
        centred_5(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 6:
        centred_6(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 7:
        centred_7(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)
    elif bits == 8:
        centred_8(x, i, counter, low, scale, k0, k1, floor, ceiling, offset, out, o)


@inlined
def dequantize_chunk(packed, i, offset, low, step, bits, out, o):
    if bits == 1:
        dequantize_1(packed, i, offset, low, step, out, o)
    elif bits == 2:
        dequantize_2(packed, i, offset, low, step, out, o)
    elif bits == 3:
        dequantize_3(packed, i, offset, low, step, out, o)
    elif bits == 4:
        dequantize_4(packed, i, offset, low, step, out, o)
    elif bits == 5:
        dequantize_5(packed, i, offset, low, step, out, o)
    elif bits == 6:
        dequantize_6(packed, i, offset, low, step, out, o)
    elif bits == 7:
        dequantize_7(packed, i, offset, low, step, out, o)
    elif bits == 8:
        dequantize_8(packed, i, offset, low, step, out, o)


@inlined
def codebook_chunk(z, i, scale, boundaries, bits, out, o):
    if bits == 2:
        codebook_2(z, i, scale, boundaries, out, o)
    elif bits == 3:
        codebook_3(z, i, scale, boundaries, out, o)
    else:
        codebook_4(z, i, scale, boundaries, out, o)


@inlined
def look_up_chunk(packed, i, scale, codebook, bits, out, o):
    if bits == 2:
        look_up_2(packed, i, scale, codebook, out, o)
    elif bits == 3:
        look_up_3(packed, i, scale, codebook, out, o)
    else:
        look_up_4(packed, i, scale, codebook, out, o)
