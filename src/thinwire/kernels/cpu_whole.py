"""Whole messages in the numba body: one pass for a message, and one call for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError
from ..rng import Key
from . import checks, cpu_quantize, cpu_rotated, cpu_rows, reference
from . import rows as definition
from .cpu_arrays import (
    CODEBOOK_BITS,
    WIDTHS,
    Array,
    codes_of,
    empty_packed,
    flat_array,
    floats,
    four_words,
    key_words,
    scales,
    words,
)
from .fused import Keys
from .layout import ROTATION, blocks_of, packed_bytes, rotated_numel
from .spread import Spread


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
    tables = floats(boundaries), floats(codebook)
    message = four_words(keys), *tables, WIDTHS[bits], scale.numpy(), codes
    cpu_rotated.rotated_encode(floats(x), _whole(x.numel()), 0, x.numel(), numel, *message)


def rotated_add(
    packed: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, bits: int, fresh: bool = False
) -> None:
    numel = rotated_numel(out.numel())
    if not checks.writable(out) or not _known(bits, codebook):
        return reference.rotated_add(packed, scale, out, keys=keys, codebook=codebook, bits=bits, fresh=fresh)
    codes, factors = codes_of(packed, numel, bits), scales(scale, numel, ROTATION)
    tables = four_words(keys), floats(codebook), WIDTHS[bits]
    size = out.numel()
    cpu_rotated.rotated_add(codes, numel, *tables, factors, flat_array(out), _whole(size), 0, size, fresh)


# ---------------------------------------------------------------------------------------------------- several messages


def _whole(numel: int) -> Array:
    """The table of a tensor that lies in one place."""
    return np.array([[0, numel, 0]], np.int64)


def _elements(x: Tensor | Spread) -> tuple[Array, Array, int, int]:
    """A buffer, the table of what lies in it, its first element, and how many there are."""
    if isinstance(x, Spread):
        return flat_array(x.base), x.table, x.start, x.numel()
    values = floats(x)
    return values, _whole(values.size), 0, values.size


def _changeable(x: Tensor | Spread) -> bool:
    return checks.writable(x.base if isinstance(x, Spread) else x)


def _addressed(places: Sequence[slice], count: int, keys: Sequence[Any]) -> tuple[Array, Array]:
    """Starts and stops, and the words of the keys, one line for each of `count` rows."""
    if not len(places) == len(keys) == count:
        raise OptionError(f"give a place and a key for each of the {count} rows, not {len(places)} and {len(keys)}")
    ends = np.array([(place.start, place.stop) for place in places], np.int64).reshape(count, 2)
    return ends, key_words(keys)


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
    x: Tensor | Spread,
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
    where = _addressed(places, len(rows), keys)
    tables_of = floats(boundaries), floats(codebook)
    _check(cpu_rows.rotated_encode_rows(*_elements(x), *where, *_matrix(rows), *tables_of, WIDTHS[bits]))
    return None


def rotated_add_rows(
    rows: Tensor,
    places: Sequence[slice],
    out: Tensor | Spread,
    *,
    keys: Sequence[Keys],
    codebook: Tensor,
    bits: int,
    fresh: bool = False,
) -> Tensor:
    if not _changeable(out) or not _known(bits, codebook):
        return definition.rotated_add_rows(rows, places, out, keys=keys, codebook=codebook, bits=bits, fresh=fresh)
    where = _addressed(places, len(rows), keys)
    place = floats(codebook), WIDTHS[bits], *_elements(out), fresh
    fits, finite = cpu_rows.rotated_add_rows(*_matrix(rows), *where, *place)
    _check(fits)
    return torch.tensor(finite)


def rotated_mean_rows(
    rows: Tensor,
    own: Tensor | Spread,
    row: Tensor,
    *,
    skip: int,
    keys: Sequence[Keys],
    codebook: Tensor,
    bits: int,
    back: Keys,
    back_codebook: Tensor,
    boundaries: Tensor,
    back_bits: int,
    matched: Tensor | None = None,
    held: Tensor | None = None,
    left: Tensor | None = None,
) -> None:
    known = _known(bits, codebook) and _known(back_bits, back_codebook, boundaries)
    known = known and (matched is None or matched.numel() == back_codebook.numel())
    changed = [tensor for tensor in (own, held, left) if tensor is not None]
    if not known or not all(map(_changeable, changed)) or not _aligned(row):
        tables: dict[str, Any] = {"codebook": codebook, "bits": bits, "back_codebook": back_codebook}
        tables |= {"boundaries": boundaries, "back_bits": back_bits, "matched": matched, "held": held, "left": left}
        return definition.rotated_mean_rows(rows, own, row, skip=skip, keys=keys, back=back, **tables)
    scale_bytes = 4 * blocks_of(own.numel(), ROTATION)
    message, length = row.numpy(), scale_bytes + packed_bytes(rotated_numel(own.numel()), back_bits)
    _check(message.size >= length and len(keys) == len(rows))
    first = key_words(keys), floats(codebook), WIDTHS[bits]
    beside = [_NOTHING if tensor is None else flat_array(tensor) for tensor in (held, left)]
    places = message[:scale_bytes].view(np.float32), message[scale_bytes:length]
    words_of = floats(back_codebook if matched is None else matched), floats(back_codebook)
    second = four_words(back), floats(boundaries), *words_of, WIDTHS[back_bits], *places
    _check(cpu_rows.rotated_mean_rows(*_matrix(rows), skip, *first, *_elements(own), *beside, second))
    return None


_NOTHING = np.empty(0, np.float32)


def _aligned(row: Tensor) -> bool:
    """Whether its first bytes can be read as float32 in place."""
    return row.dtype == torch.uint8 and row.dim() == 1 and row.is_contiguous() and row.data_ptr() % 4 == 0


def abs_max_encode_rows(
    x: Tensor, places: Sequence[slice], rows: Tensor, *, keys: Sequence[Key], levels: int, bits: int, block: int
) -> None:
    checks.check_bits(bits)
    checks.check_block(block)
    values = floats(x)
    where = _addressed(places, len(rows), keys)
    options = WIDTHS[bits], block, np.int32(levels)
    _check(cpu_rows.abs_max_encode_rows(values, values.view(np.int32), *where, *_matrix(rows), *options))
