"""Whole messages in the numba body: one pass for a message, and one call for several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..errors import OptionError
from ..rng import Key
from . import checks, cpu_quantize, cpu_rotated, cpu_rows, reference
from . import rows as definition
from .cpu_arrays import CODEBOOK_BITS, WIDTHS, Array, codes_of, empty_packed, flat_array, floats, scales, words
from .fused import Keys
from .layout import ROTATION, blocks_of, rotated_numel


def _known(bits: int, codebook: Tensor, boundaries: Tensor | None = None) -> bool:
    """Whether the loops have code for it, and the tables are as long as they think."""
    fits = bits in CODEBOOK_BITS and codebook.numel() == 1 << bits
    return fits and (boundaries is None or boundaries.numel() == (1 << bits) - 1)


def abs_max_encode(x: Tensor, step: Tensor, out: Tensor, *, levels: int, bits: int, block: int, key: Key) -> None:
    numel = x.numel()
    if not checks.writable(step) or step.numel() != blocks_of(numel, block):
        return reference.abs_max_encode(x, step, out, levels=levels, bits=bits, block=block, key=key)
    codes, values = empty_packed(numel, bits, out).numpy(), floats(x)
    options = (WIDTHS[bits], block, np.int32(levels), *words(key))
    cpu_quantize.abs_max_encode(values, values.view(np.int32), step.numpy(), codes, *options)
    return None


def rotated_encode(
    x: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, boundaries: Tensor, bits: int
) -> None:
    numel = rotated_numel(x.numel())
    writable = checks.writable(scale) and scale.numel() == blocks_of(numel, ROTATION)
    if not writable or not _known(bits, codebook, boundaries):
        return reference.rotated_encode(x, scale, out, keys=keys, codebook=codebook, boundaries=boundaries, bits=bits)
    codes = empty_packed(numel, bits, out).numpy()
    rounds = words(keys[0]), words(keys[1])
    tables = floats(boundaries), floats(codebook)
    cpu_rotated.rotated_encode(floats(x), numel, *rounds, *tables, WIDTHS[bits], scale.numpy(), codes)


def rotated_add(
    packed: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, bits: int, fresh: bool = False
) -> None:
    numel = rotated_numel(out.numel())
    if not checks.writable(out) or not _known(bits, codebook):
        return reference.rotated_add(packed, scale, out, keys=keys, codebook=codebook, bits=bits, fresh=fresh)
    codes, factors = codes_of(packed, numel, bits), scales(scale, numel, ROTATION)
    rounds = words(keys[0]), words(keys[1])
    cpu_rotated.rotated_add(codes, numel, *rounds, floats(codebook), WIDTHS[bits], factors, flat_array(out), fresh)


# ---------------------------------------------------------------------------------------------------- several messages


def _addressed(places: Sequence[slice], count: int, keys: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Starts and stops, and the words of the keys, one line for each of `count` rows."""
    if not len(places) == len(keys) == count:
        raise OptionError(f"give a place and a key for each of the {count} rows, not {len(places)} and {len(keys)}")
    ends = np.array([(place.start, place.stop) for place in places], np.int64).reshape(count, 2)
    return ends, np.array(keys, np.uint32).reshape(count, -1)


def _matrix(rows: Tensor) -> tuple[Array, Array, int]:
    """The rows, flat, as float32 and as bytes, and the bytes of a row."""
    if rows.dim() != 2 or not rows.is_contiguous() or rows.shape[1] % 4 or rows.data_ptr() % 4:
        raise OptionError("give rows as a contiguous matrix of bytes, a multiple of four in each row")
    data: Array = rows.numpy().reshape(-1)
    return data.view(np.float32), data, rows.shape[1]


def _check(fits: bool) -> None:
    if not fits:
        raise OptionError("a place lies outside of the tensor, or its message does not fit into a row")


def rotated_encode_rows(
    x: Tensor,
    places: Sequence[slice],
    rows: Tensor,
    *,
    keys: Sequence[Keys],
    codebook: Tensor,
    boundaries: Tensor,
    bits: int,
) -> None:
    if not _known(bits, codebook, boundaries):
        tables = {"codebook": codebook, "boundaries": boundaries}
        return definition.rotated_encode_rows(x, places, rows, keys=keys, **tables, bits=bits)
    where = _addressed(places, len(rows), [(*first, *second) for first, second in keys])
    tables_of = floats(boundaries), floats(codebook)
    _check(cpu_rows.rotated_encode_rows(floats(x), *where, *_matrix(rows), *tables_of, WIDTHS[bits]))
    return None


def rotated_add_rows(
    rows: Tensor,
    places: Sequence[slice],
    out: Tensor,
    *,
    keys: Sequence[Keys],
    codebook: Tensor,
    bits: int,
    fresh: bool = False,
) -> None:
    if not checks.writable(out) or not _known(bits, codebook):
        return definition.rotated_add_rows(rows, places, out, keys=keys, codebook=codebook, bits=bits, fresh=fresh)
    where = _addressed(places, len(rows), [(*first, *second) for first, second in keys])
    place = floats(codebook), WIDTHS[bits], flat_array(out), fresh
    _check(cpu_rows.rotated_add_rows(*_matrix(rows), *where, *place))
    return None


def abs_max_encode_rows(
    x: Tensor, places: Sequence[slice], rows: Tensor, *, keys: Sequence[Key], levels: int, bits: int, block: int
) -> None:
    checks.check_bits(bits)
    checks.check_block(block)
    values = floats(x)
    where = _addressed(places, len(rows), keys)
    options = WIDTHS[bits], block, np.int32(levels)
    _check(cpu_rows.abs_max_encode_rows(values, values.view(np.int32), *where, *_matrix(rows), *options))
