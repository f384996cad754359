"""Several messages per call: pieces of one tensor to the rows of a byte matrix and back, each with a key of its own.

A row holds one message, its scales first and then its codes, as the codecs lay them out. The rest of the row is left
as it is. `places` are slices with a start and a stop, one for each row: the elements of the flat tensor that belong to
it. The row of an empty slice is not touched. Rows are contiguous, and their length is a multiple of four bytes.

Here is the definition, which calls the single function once per row. The numba body loops in compiled code, because the
Python around a short message takes as long as the message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rng import Key
from .fused import Keys
from .layout import LARGEST_SCALE, ROTATION, blocks_of, packed_bytes, rotated_numel
from .spread import Spread

_SCALE_BYTES = 4  # of a float32


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
    """`rotated_encode` of x[place] into each row.

    >>> x, places = torch.ones(2048), [slice(0, 1024), slice(1024, 2048)]
    >>> rows, keys = torch.zeros(2, 132, dtype=torch.uint8), [(Key(1, 2), Key(3, 4)), (Key(5, 6), Key(7, 8))]
    >>> codebook, boundaries = torch.tensor([-0.8, 0.8]), torch.tensor([0.0])
    >>> rotated_encode_rows(x, places, rows, keys=keys, codebook=codebook, boundaries=boundaries, bits=1)
    >>> rows[:, :4].view(torch.float32).reshape(-1) > 0
    tensor([True, True])
    """
    tables, x = {"codebook": codebook, "boundaries": boundaries}, _gathered(x)
    for numel, place, row, key in _messages(places, rows, keys):
        scale, codes = _split(row, blocks_of(numel, ROTATION), packed_bytes(rotated_numel(numel), bits))
        _single("rotated_encode")(x[place], scale, codes, keys=key, **tables, bits=bits)


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
    """`rotated_add` of each row to out[place], in the order of the rows; several rows may have the same place.

    Returns whether all that the rows say is finite, as a tensor: on a device no value is read.

    >>> out, codebook, keys = torch.ones(64), torch.tensor([-0.8, 0.8]), [(Key(1, 2), Key(3, 4))] * 2
    >>> rows = torch.zeros(2, 12, dtype=torch.uint8)  # scales of zero
    >>> finite = rotated_add_rows(rows, [slice(0, 64)] * 2, out, keys=keys, codebook=codebook, bits=1)
    >>> bool(finite), bool((out == 1).all())
    (True, True)
    """
    if isinstance(out, Spread):
        whole = _gathered(out)
        finite = rotated_add_rows(rows, places, whole, keys=keys, codebook=codebook, bits=bits, fresh=fresh)
        out.scatter(whole)
        return finite
    finite = torch.ones((), dtype=torch.bool, device=rows.device)
    for numel, place, row, key in _messages(places, rows, keys):
        scale, codes = _split(row, blocks_of(numel, ROTATION), packed_bytes(rotated_numel(numel), bits))
        _single("rotated_add")(codes, scale, out[place], keys=key, codebook=codebook, bits=bits, fresh=fresh)
        finite = (scale.abs() < LARGEST_SCALE).all() & finite
    return finite


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
    """The mean of all rows but one and of `own` in its place, plus `held`, encoded into `row`.

    `matched` is the codebook that the scales are reckoned by, if not the one of decoders, `back_codebook`.
    `left`, if it is given, becomes what `row` does not say; it may be `own`, which else stays as it is.

    >>> rows, row, key = torch.zeros(2, 12, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8), Key(1, 2)
    >>> left, words, options = torch.empty(64), torch.tensor([-0.8, 0.8]), {"skip": 0, "bits": 1, "back_bits": 1}
    >>> options |= {"keys": [(key, key)] * 2, "back": (key, key), "codebook": words, "back_codebook": words}
    >>> rotated_mean_rows(rows, torch.ones(64), row, boundaries=torch.zeros(1), left=left, **options)
    >>> bool(row[:4].view(torch.float32) > 0), bool(left.norm() < (0.5 * torch.ones(64)).norm())
    (True, True)
    """
    total = own.clone() if isinstance(own, Tensor) else _gathered(own)
    places = [slice(0, 0) if number == skip else slice(0, total.numel()) for number in range(len(rows))]
    _single("rotated_add_rows")(rows, places, total, keys=keys, codebook=codebook, bits=bits)
    total.mul_(1.0 / len(rows))
    if held is not None:
        total += held
    scale, codes = _split(
        row, blocks_of(total.numel(), ROTATION), packed_bytes(rotated_numel(total.numel()), back_bits)
    )
    tables = {"codebook": back_codebook, "bits": back_bits}
    encoder = tables if matched is None else {**tables, "codebook": matched}
    _single("rotated_encode")(total, scale, codes, keys=back, boundaries=boundaries, **encoder)
    if left is not None:
        said = torch.empty_like(total)
        _single("rotated_add")(codes, scale, said, keys=back, **tables, fresh=True)
        torch.sub(total, said, out=left)


def abs_max_encode_rows(
    x: Tensor, places: Sequence[slice], rows: Tensor, *, keys: Sequence[Key], levels: int, bits: int, block: int
) -> None:
    """`abs_max_encode` of x[place] into each row.

    >>> x, rows = torch.tensor([1.0, -2.0, 7.0, 14.0]), torch.zeros(2, 36, dtype=torch.uint8)
    >>> keys = [Key(1, 2), Key(3, 4)]
    >>> abs_max_encode_rows(x, [slice(0, 2), slice(2, 4)], rows, keys=keys, levels=7, bits=4, block=0)
    >>> rows[:, :4].view(torch.float32).reshape(-1) * 7
    tensor([ 2., 14.])
    """
    for numel, place, row, key in _messages(places, rows, keys):
        step, codes = _split(row, blocks_of(numel, block), packed_bytes(numel, bits))
        _single("abs_max_encode")(x[place], step, codes, levels=levels, bits=bits, block=block, key=key)


def _gathered(x: Tensor | Spread) -> Tensor:
    return x if isinstance(x, Tensor) else x.gather(torch.empty(x.numel(), dtype=torch.float32, device=x.device))


def _single(name: str) -> Any:
    """The kernel for one message, which picks the body of its tensor. The package imports this module first."""
    assert __package__
    return getattr(sys.modules[__package__], name)


def _messages(places: Sequence[slice], rows: Tensor, keys: Sequence[Any]) -> Iterator[tuple[int, slice, Tensor, Any]]:
    for place, row, key in zip(places, rows, keys, strict=True):
        if place.stop > place.start:
            yield place.stop - place.start, place, row, key


def _split(row: Tensor, blocks: int, code_bytes: int) -> tuple[Tensor, Tensor]:
    """The scales and the codes of a row."""
    start = blocks * _SCALE_BYTES
    return row[:start].view(torch.float32), row[start : start + code_bytes]
