"""Vector instructions for the numba body, written as LLVM vectors of 16 to 64 lanes.

LLVM lowers them to whatever the machine has (AVX2, AVX-512, NEON). Numba's auto-vectoriser does not manage packing,
compaction or butterflies; with these the loops of the numba body run at the speed of memory. Each intrinsic works on a
chunk of 64 elements (masks: 32) starting at a given position and does not check bounds: its callers do.

Here: the building blocks, selection and rotation; `vector_codes.py` has quantising and packing.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .layout import MIX_1, MIX_2

I1, I8, I32, I64, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
F64 = ir.DoubleType()
INDEX, U32, FLOAT = types.intp, types.uint32, types.float32
LANES = 16  # two AVX2 registers, one of AVX-512
_MASK_LANES = 32
_AHEAD = 1024  # elements; the hardware alone does not fetch early enough for loops that compute this much


def vector(element, lanes=LANES):
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


def fetch_ahead(context, builder, array_type, array, index, *, elements=64, ahead=_AHEAD):
    """Ask for the cache lines of a run of float32 some way on; beyond the end this does nothing."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for line in range(0, elements, 16):
        place = _pointer(context, builder, array_type, array, plus(builder, index, ahead + line), I8)
        builder.call(prefetch, [place, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])


def plus(builder, index, amount):
    return builder.add(index, ir.Constant(index.type, amount)) if amount else index


def concat(builder, parts):
    """Vectors one after the other, as one."""
    while len(parts) > 1:
        lanes = 2 * parts[0].type.count
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(a, b, constant(I32, range(lanes), lanes)) for a, b in pairs]
    return parts[0]


def part(builder, value, start, lanes):
    if lanes == value.type.count:
        return value
    undefined = ir.Constant(value.type, ir.Undefined)
    return builder.shuffle_vector(value, undefined, constant(I32, range(start, start + lanes), lanes))


def folded(builder, value, combine):
    """All lanes combined to one number, halves first."""
    while value.type.count > 1:
        half = value.type.count // 2
        value = combine(part(builder, value, 0, half), part(builder, value, half, half))
    return builder.extract_element(value, ir.Constant(I32, 0))


def choose_below(builder, value, limit):
    """value if value < limit else limit: NaN becomes the limit, as in the definition."""
    return builder.select(builder.fcmp_ordered("<", value, limit), value, limit)


def random_words(builder, counter, k0, k1, start):
    """`reference.random_bits` for the elements `counter + start` and following."""
    h = builder.add(splat(builder, builder.add(counter, k0)), constant(I32, range(start, start + LANES)))
    h = builder.mul(builder.xor(h, builder.lshr(h, constant(I32, 16))), constant(I32, MIX_1))
    h = builder.xor(builder.xor(h, builder.lshr(h, constant(I32, 15))), splat(builder, k1))
    return builder.mul(h, constant(I32, MIX_2))


def sign_words(builder, counter, k0, k1):
    """The 64 random signs from element `counter` on, a multiple of 32, as two words: `reference_parts.signs`."""
    first, words = builder.lshr(counter, ir.Constant(I32, 5)), []
    for number in range(2):
        h = builder.add(builder.add(first, ir.Constant(I32, number)), k0)
        h = builder.mul(builder.xor(h, builder.lshr(h, ir.Constant(I32, 16))), ir.Constant(I32, MIX_1))
        h = builder.xor(builder.xor(h, builder.lshr(h, ir.Constant(I32, 15))), k1)
        h = builder.mul(h, ir.Constant(I32, MIX_2))
        words.append(builder.xor(h, builder.lshr(h, ir.Constant(I32, 16))))
    return words


def _multiply_add(builder, a, b, c):
    """a * b + c, in one instruction where there is one: then a product that is not exact is not rounded."""
    name = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.{name}"), [a, b, c])


# --------------------------------------------------------------------------------------------------------- selection


def _mask_of_large(builder, values, threshold):
    """Bit j is set where |values[j]| > threshold; both as float bits, whose integer order is numeric order."""
    bits = builder.bitcast(values, vector(I32, _MASK_LANES))
    magnitude = builder.and_(bits, constant(I32, 0x7FFFFFFF, _MASK_LANES))
    above = builder.icmp_signed(">", magnitude, splat(builder, threshold, _MASK_LANES))
    return builder.bitcast(above, ir.IntType(_MASK_LANES))


@intrinsic
def mask_above(_typing, x, i, threshold):
    """A 32-bit mask of the elements i .. i + 32 whose magnitude exceeds the threshold."""
    signature = types.uint32(x, INDEX, types.int32)

    def generate(context, builder, signature, args):
        x, i, threshold = args
        values = load(context, builder, signature.args[0], x, i, vector(F32, _MASK_LANES))
        return _mask_of_large(builder, values, threshold)

    return signature, generate


@intrinsic
def largest_and_many(_typing, x, i, limit):
    """Of 64 elements the largest magnitude and how many exceed the limit, all as float bits: largest << 32 | many."""
    signature = types.int64(x, INDEX, types.int32)

    def generate(context, builder, signature, args):
        x, i, limit = args
        largest, many, border = None, constant(I32, 0), splat(builder, limit)
        for start in range(0, 64, LANES):
            bits = load(context, builder, signature.args[0], x, plus(builder, i, start), vector(I32))
            magnitude = builder.and_(bits, constant(I32, 0x7FFFFFFF))
            many = builder.sub(many, builder.sext(builder.icmp_signed(">", magnitude, border), vector(I32)))
            largest = magnitude if largest is None else _larger(builder, largest, magnitude)
        top = builder.zext(folded(builder, largest, lambda a, b: _larger(builder, a, b)), I64)
        return builder.or_(
            builder.shl(top, ir.Constant(I64, 32)), builder.zext(folded(builder, many, builder.add), I64)
        )

    return signature, generate


def _larger(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@intrinsic
def accumulate_mask(_typing, memory, gradient, i, decay, threshold, out):
    """out = gradient + decay * memory for 32 elements, and the mask of those that exceed the threshold."""
    signature = types.uint32(memory, gradient, INDEX, FLOAT, types.int32, out)

    def generate(context, builder, signature, args):
        memory, gradient, i, decay, threshold, out = args
        for kind, array in zip(signature.args[:2], (memory, gradient), strict=True):
            fetch_ahead(context, builder, kind, array, i, elements=_MASK_LANES, ahead=256)
        wide = vector(F32, _MASK_LANES)
        old = load(context, builder, signature.args[0], memory, i, wide)
        new = load(context, builder, signature.args[1], gradient, i, wide)
        values = _multiply_add(builder, old, splat(builder, decay, _MASK_LANES), new)
        store(context, builder, signature.args[5], out, i, values)
        return _mask_of_large(builder, values, threshold)

    return signature, generate


@intrinsic
def multiply_add(_typing, a, b, c):
    """a * b + c of three float32, rounded once where the processor can: as torch does on the same processor."""
    signature = FLOAT(FLOAT, FLOAT, FLOAT)

    def generate(context, builder, signature, args):
        return _multiply_add(builder, *args)

    return signature, generate


@intrinsic
def lowest_bit(_typing, mask):
    """The position of the lowest set bit of a non-zero mask."""
    signature = INDEX(types.uint32)

    def generate(context, builder, signature, args):
        return builder.zext(builder.cttz(args[0], ir.Constant(I1, 1)), I64)

    return signature, generate


# ---------------------------------------------------------------------------------------------------------- rotation


def _flipped(context, builder, array_type, x, i, words, start):
    """LANES elements of x from i + start on; a random bit for each is xored into its sign."""
    bits = load(context, builder, array_type, x, plus(builder, i, start), vector(I32))
    few = builder.trunc(builder.lshr(words[start // 32], ir.Constant(I32, start % 32)), ir.IntType(LANES))
    chosen = builder.bitcast(few, vector(I1))  # bit j is lane j
    sign = builder.select(chosen, constant(I32, 0x80000000), constant(I32, 0))
    return builder.bitcast(builder.xor(bits, sign), vector(F32))


def _stages_within(builder, values):
    """Hadamard stages with strides 1 to 32 over 64 elements in vectors of LANES."""
    undefined = ir.Constant(vector(F32), ir.Undefined)
    stride = 1
    while stride < LANES:
        # (a, b) -> (a + b, a - b) is the swapped pair plus the pair with b negated: one shuffle, one multiply-add.
        swap = constant(I32, [j ^ stride for j in range(LANES)])
        signs = constant(F32, [-1.0 if j & stride else 1.0 for j in range(LANES)])
        values = [_multiply_add(builder, v, signs, builder.shuffle_vector(v, undefined, swap)) for v in values]
        stride *= 2
    return _stages_between(builder, values)


def _stages_between(builder, values):
    """The stages between vectors."""
    values, stride = list(values), 1
    while stride < len(values):
        for row in range(len(values)):
            if not row & stride:
                a, b = values[row], values[row + stride]
                values[row], values[row + stride] = builder.fadd(a, b), builder.fsub(a, b)
        stride *= 2
    return values


def _store_chunk(context, builder, array_type, array, index, values):
    for number, value in enumerate(values):
        store(context, builder, array_type, array, plus(builder, index, number * LANES), value)


@intrinsic
def butterfly_within(_typing, x, i):
    """Hadamard stages with strides 1 to 32 inside 64 elements, in place."""
    signature = types.void(x, INDEX)

    def generate(context, builder, signature, args):
        x, i = args
        places = [plus(builder, i, start) for start in range(0, 64, LANES)]
        values = [load(context, builder, signature.args[0], x, at, vector(F32)) for at in places]
        _store_chunk(context, builder, signature.args[0], x, i, _stages_within(builder, values))
        return context.get_dummy_value()

    return signature, generate


def _make_flip_signs(finish, ahead_of_out=False):
    @intrinsic
    def flip_signs(_typing, x, i, counter, k0, k1, out, o):
        """64 elements of x times random signs, and what `finish` makes of them, to out."""
        signature = types.void(x, INDEX, U32, U32, U32, out, INDEX)

        def generate(context, builder, signature, args):
            x, i, *keys, out, o = args
            kind, target = signature.args[0], signature.args[5]
            fetched = (target, out, o) if ahead_of_out else (kind, x, i)
            fetch_ahead(context, builder, *fetched)
            words = sign_words(builder, *keys)
            values = [_flipped(context, builder, kind, x, i, words, start) for start in range(0, 64, LANES)]
            _store_chunk(context, builder, target, out, o, finish(context, builder, target, out, o, values))
            return context.get_dummy_value()

        return signature, generate

    return flip_signs


def _added(context, builder, target, out, o, values):
    places = [plus(builder, o, start) for start in range(0, 64, LANES)]
    old = [load(context, builder, target, out, at, vector(F32)) for at in places]
    return [builder.fadd(a, b) for a, b in zip(old, values, strict=True)]


def _on_zero(context, builder, target, out, o, values):
    """As if added to zero: minus zero becomes plus zero."""
    return [builder.fadd(value, constant(F32, 0.0)) for value in values]


flip_signs_chunk = _make_flip_signs(lambda context, builder, *place: place[-1])
flip_signs_add_chunk = _make_flip_signs(_added, ahead_of_out=True)
flip_signs_put_chunk = _make_flip_signs(_on_zero, ahead_of_out=True)
flip_signs_butterfly = _make_flip_signs(lambda context, builder, *place: _stages_within(builder, place[-1]))


def _make_butterfly_across(rows):
    @intrinsic
    def butterfly_across(_typing, x, i, factor):
        """The stages between `rows` runs of 64 elements, strides 64 and up, then times `factor`, in place.

        A column of all runs is held in registers, so that the stages cost one load and one store together.
        """
        signature = types.void(x, INDEX, FLOAT)

        def generate(context, builder, signature, args):
            x, i, factor = args
            lanes = 8
            for column in range(0, 64, lanes):
                places = [plus(builder, i, 64 * row + column) for row in range(rows)]
                values = [load(context, builder, signature.args[0], x, at, vector(F32, lanes)) for at in places]
                for at, value in zip(places, _stages_between(builder, values), strict=True):
                    scaled = builder.fmul(value, splat(builder, factor, lanes))
                    store(context, builder, signature.args[0], x, at, scaled)
            return context.get_dummy_value()

        return signature, generate

    return butterfly_across


butterfly_across_1, butterfly_across_2, butterfly_across_4 = (_make_butterfly_across(rows) for rows in (1, 2, 4))
butterfly_across_8, butterfly_across_16 = _make_butterfly_across(8), _make_butterfly_across(16)
