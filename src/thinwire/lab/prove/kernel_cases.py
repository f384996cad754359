"""The calls by which every kernel is compared with its definition: sizes, widths, blocks, dtypes and edge values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels import ROTATION, blocks_of, packed_bytes, reference, rotated_numel
from ...rng import Key
from .inputs import BIG, BLOCKS, DTYPES, TINY, mixed, random_codes, scales

HERE = torch.device("meta")  # in the options of a case: the device that is checked
KEYS = (Key(1, 2), Key(2**32 - 5, 2**31), Key(0, 0), Key(0x9E3779B9, 2**32 - 1))
THRESHOLDS = (0.0, 1e-42, 0.5, 65504.0, 3.4e38)
_TOLERANCES = {"block_square_sum": (1e-6,), "moments": (1e-6, 1e-6, 0.0)}
Special = tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """One call. Tensors among the arguments may be changed by it and are compared too.

    Results are equal bit for bit, except for sums in float64, which every body adds in an order of its own:
    `tolerances` has the relative error granted to each result, and `scale` what it is relative to, if not the result.
    """

    kernel: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tolerances: tuple[float, ...] = ()
    scale: float | None = None
    label: str = ""

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.options.items() if isinstance(value, int | float | str)]
        return " ".join(filter(None, [self.label, *words]))


def cases(numel: int, *, seed: int, special: Special, about: str = "") -> Iterator[Case]:
    """Every kernel on one length, one seed and one set of special values.

    >>> {"quantize", "rotated_encode", "select_ef"} <= {case.kernel for case in cases(65, seed=0, special=TINY)}
    True
    """
    label = f"{numel} elements, seed {seed}{f', {about}' if about else ''}"
    for family in _FAMILIES:
        for kernel, args, options in family(numel, seed, special):
            scale = None
            if kernel == "moments":  # a sum of both signs may cancel, so its error is relative to the sum of |x|
                scale = float(args[0].to(torch.float64).abs().nan_to_num(0.0, 0.0).sum())
            yield Case(kernel, args, options, _TOLERANCES.get(kernel, ()), scale, label)


Call = tuple[str, tuple[Any, ...], dict[str, Any]]
_Family = Callable[[int, int, Special], Iterator[Call]]


def _packing(numel: int, seed: int, special: Special) -> Iterator[Call]:
    key = KEYS[seed % len(KEYS)]
    yield "random_bits", (numel, key), {"device": HERE}
    for bits in range(1, 9):
        codes = random_codes(numel, bits, seed)
        yield "pack", (codes,), {"bits": bits}
        yield "unpack", (reference.pack(codes, bits=bits), numel), {"bits": bits}


def _quantizing(numel: int, seed: int, special: Special) -> Iterator[Call]:
    for bits in range(1, 9):
        block, dtype, key = _pick(BLOCKS, seed + bits), _pick(DTYPES, seed + bits // 3), _pick(KEYS, seed + bits)
        top, low = (1 << bits) - 1, mixed(blocks_of(numel, block), seed)
        offset, step = top // 2, scales(numel, block, seed, special)
        x = mixed(numel, seed, special, dtype)
        grid: dict[str, Any] = {"bits": bits, "offset": offset, "block": block}
        yield "quantize", (x, low, step), {**grid, "top": top, "key": key}
        packed = reference.quantize(x, low, step, **grid, top=top, key=key)
        yield "dequantize_add", (mixed(numel, seed + 1), packed, low, step), grid
        if bits > 1:
            x = x.clone()
            x[64:192] = 0.0  # a block of zeros
            places = torch.full((blocks_of(numel, block),), 7.0), torch.zeros(packed_bytes(numel, bits)).byte()
            levels = {"levels": (1 << (bits - 1)) - 1, "bits": bits, "block": block, "key": key}
            yield "abs_max_encode", (x, *places), levels


def _exponential(numel: int, seed: int, special: Special) -> Iterator[Call]:
    for turn, top in enumerate((1, 30, 127)):
        block, dtype, key = _pick(BLOCKS, seed + turn), _pick(DTYPES, seed + turn), _pick(KEYS, seed + turn)
        scale, x = scales(numel, block, seed, special), mixed(numel, seed, special, dtype)
        yield "exponential_encode", (x, scale), {"top": top, "block": block, "key": key}
        codes = reference.exponential_encode(x, scale, top=top, block=block, key=key)
        yield "exponential_decode_add", (mixed(numel, seed + 1), codes, scale), {"top": top, "block": block}
        yield "exponential_add", (codes, random_codes(numel, 8, seed)), {"top": top, "key": key}


def _block_scales(numel: int, seed: int, special: Special) -> Iterator[Call]:
    for turn, block in enumerate((0, 64, 192, 1024, 3008)):
        x = mixed(numel, seed, special, _pick(DTYPES, seed + turn))
        x[64:256] = 0.0 if turn % 2 else -0.0  # blocks of zeros
        for kernel in ("block_abs_max", "block_min_max", "block_square_sum"):
            yield kernel, (x,), {"block": block}


def _rotation(numel: int, seed: int, special: Special) -> Iterator[Call]:
    key, dtype = _pick(KEYS, seed), _pick(DTYPES, seed)
    x = mixed(numel, seed, special, dtype)
    rotated = reference.rotate(x, key=key)
    yield "rotate", (x,), {"key": key}
    yield "unrotate", (rotated, numel), {"key": key}
    yield "rotate", (rotated,), {"key": key, "out": rotated}  # in place
    yield "unrotate", (rotated, rotated.numel()), {"key": key, "out": rotated}


def _rotated(numel: int, seed: int, special: Special) -> Iterator[Call]:
    for bits in (1, 2, 3, 4):
        key = _pick(KEYS, seed + bits)
        x = mixed(numel, seed, special, _pick(DTYPES, seed + bits))
        x[1024:2048] = 0.0  # a block of zeros
        boundaries, codebook = (torch.linspace(-2, 2, (1 << bits) - end) for end in (1, 0))
        options: dict[str, Any] = {"keys": (key, key.fold(1)), "codebook": codebook, "bits": bits}
        scale = torch.full((blocks_of(numel, 1024),), 7.0)
        codes = torch.zeros(packed_bytes(rotated_numel(numel), bits), dtype=torch.uint8)
        yield "rotated_encode", (x, scale.clone(), codes.clone()), {**options, "boundaries": boundaries}
        reference.rotated_encode(x, scale, codes, boundaries=boundaries, **options)
        for fresh in (False, True):
            yield "rotated_add", (codes, scale, mixed(numel, seed + 1)), {**options, "fresh": fresh}


def _rows(numel: int, seed: int, special: Special) -> Iterator[Call]:
    """Pieces of one tensor, an empty one among them. No NaN: here scales are bytes, and NaN has many of these."""
    x, third = mixed(numel, seed, TINY), numel // 3
    places = [slice(0, third), slice(third, third), slice(third, 2 * third), slice(2 * third, numel)]
    pieces = [place.stop - place.start for place in places]
    keys = [_pick(KEYS, seed).fold(number) for number in range(len(places))]
    for bits in (1, 2, 4):
        boundaries, codebook = (torch.linspace(-2, 2, (1 << bits) - end) for end in (1, 0))
        sizes = [4 * blocks_of(n, ROTATION) + packed_bytes(rotated_numel(n), bits) for n in pieces]
        rows = torch.full((len(places), max(sizes) + 8), 7, dtype=torch.uint8)
        options: dict[str, Any] = {"keys": [(key, key.fold(1)) for key in keys], "codebook": codebook, "bits": bits}
        yield "rotated_encode_rows", (x, places, rows.clone()), {**options, "boundaries": boundaries}
        reference.rotated_encode_rows(x, places, rows, boundaries=boundaries, **options)
        for fresh in (False, True):
            yield "rotated_add_rows", (rows, places, mixed(numel, seed + 1)), {**options, "fresh": fresh}
        yield from _means(numel, seed, bits) if numel else ()
    for bits, block in ((2, 0), (4, 64), (8, 1024)):
        sizes = [4 * blocks_of(n, block) + packed_bytes(n, bits) for n in pieces]
        rows = torch.full((len(places), max(sizes) + 8), 7, dtype=torch.uint8)
        levels = {"levels": (1 << (bits - 1)) - 1, "bits": bits, "block": block, "keys": keys}
        yield "abs_max_encode_rows", (x, places, rows), levels


def _means(numel: int, seed: int, bits: int) -> Iterator[Call]:
    """The mean of three messages of one place and one own tensor, sent back with one bit more, with a memory or not."""
    keys = [(key, key.fold(1)) for key in (_pick(KEYS, seed).fold(number) for number in range(4))]
    boundaries, codebook = (torch.linspace(-2, 2, (1 << bits) - end) for end in (1, 0))
    size, back = 4 * blocks_of(numel, ROTATION), bits % 4 + 1
    rows = torch.zeros(3, size + packed_bytes(rotated_numel(numel), bits), dtype=torch.uint8)
    row = torch.zeros(size + packed_bytes(rotated_numel(numel), back), dtype=torch.uint8)
    for number, one in enumerate(rows):
        scale, codes, x = one[:size].view(torch.float32), one[size:], mixed(numel, seed + number, TINY)
        tables: dict[str, Any] = {"boundaries": boundaries, "codebook": codebook, "bits": bits}
        reference.rotated_encode(x, scale, codes, keys=keys[number], **tables)
    options: dict[str, Any] = {"skip": 1, "keys": keys[:3], "codebook": codebook, "bits": bits, "back": keys[3]}
    options |= {"back_codebook": torch.linspace(-2, 2, 1 << back), "back_bits": back}
    options |= {"boundaries": torch.linspace(-2, 2, (1 << back) - 1)}
    yield "rotated_mean_rows", (rows, mixed(numel, seed + 3, TINY), row), options


def _codebook(numel: int, seed: int, special: Special) -> Iterator[Call]:
    for bits in range(1, 9):
        block = _pick(BLOCKS, seed + bits)
        scale, x = scales(numel, block, seed, special), mixed(numel, seed, special, _pick(DTYPES, seed + bits))
        boundaries = mixed((1 << bits) - 1, seed, BIG).sort().values
        grid: dict[str, Any] = {"bits": bits, "block": block}
        yield "codebook_encode", (x, scale, boundaries), grid
        packed = reference.codebook_encode(x, scale, boundaries, **grid)
        yield "codebook_decode", (packed, numel, scale, mixed(1 << bits, seed)), grid


def _selection(numel: int, seed: int, special: Special) -> Iterator[Call]:
    for turn, threshold in enumerate(THRESHOLDS):
        x = mixed(numel, seed, special, _pick(DTYPES, seed + turn))
        yield "threshold_count", (x, threshold), {}
        for capacity in (0, 10, numel // 4, numel):
            yield "select", (x, threshold), {"capacity": capacity}
            yield "select_ef", (mixed(numel, seed + 1), x, threshold), {"capacity": capacity}
        rest, single = torch.full((numel,), 7.0), x.to(torch.float32, copy=True)
        for out, gradient in ((rest, x), (single, single)):  # the memory stays as it was; `out` may be the gradient
            options = {"capacity": numel // 4, "out": out, "decay": 0.9 if turn % 2 else 1.0}
            yield "select_ef", (mixed(numel, seed + 1), gradient, threshold), options
        chosen = reference.select(x, threshold, capacity=numel)
        yield "scatter_add", (mixed(numel, seed + 2), chosen.indices.flip(0), chosen.values), {}
        finite = mixed(numel, seed, tuple(value for value in special if abs(value) < torch.inf))
        found = reference.select(finite, threshold, capacity=numel)
        for k in (1, max(1, found.values.numel() // 2), numel + 1):
            kept = {"k": k, "threshold": threshold, "memory": torch.zeros(numel)}
            yield "keep_largest", (found.values, found.indices), kept


def _sums(numel: int, seed: int, special: Special) -> Iterator[Call]:
    for dtype in DTYPES:
        for values in (special, TINY):
            x = mixed(numel, seed, values, dtype)
            yield "moments", (x,), {}
            yield "all_finite", (x,), {}
            yield "finite", (x,), {}
        yield "hash64", (x,), {}
    yield "hash64", (random_codes(numel, 8, seed),), {}  # also bytes that fill no word
    yield "checksum", (random_codes(4 * numel, 8, seed),), {}


def _pick(choices: tuple[Any, ...], turn: int) -> Any:
    return choices[turn % len(choices)]


_FAMILIES: tuple[_Family, ...] = (
    _packing,
    _quantizing,
    _exponential,
    _block_scales,
    _rotation,
    _rotated,
    _rows,
    _codebook,
    _selection,
    _sums,
)
