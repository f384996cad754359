"""Several messages in one call give the bytes and sums of one call per message, in every body."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.bodies import BODIES, assert_same, cpu, dtypes, few, mixed, seeds, specials
from thinwire import kernels
from thinwire.errors import OptionError
from thinwire.kernels import Spread, TwoRounds, blocks_of, packed_bytes, reference, rotated_numel
from thinwire.rng import Key, Keys

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter reports inf - inf and such

ends = st.lists(st.integers(0, 3000), min_size=2, max_size=5).map(sorted)  # neighbours may be equal: an empty piece
NAMES = ("rotated_encode_rows", "rotated_add_rows", "rotated_mean_rows", "abs_max_encode_rows")


def places_of(cuts: list[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


def tables(bits: int) -> dict[str, Any]:
    return {"codebook": torch.linspace(-2, 2, 1 << bits), "bits": bits}


def row_bytes(places: list[slice], bits: int, block: int, length: Callable[[int], int]) -> int:
    """Room for the longest message, and eight bytes that belong to somebody else."""
    sizes = [length(place.stop - place.start) for place in places]
    return max(4 * blocks_of(size, block) + packed_bytes(size, bits) for size in sizes) + 8


def assert_same_rows(expected: Tensor, found: Tensor, places: list[slice], block: int) -> None:
    """Scales as floats, because any NaN is as good as another, and the rest as bytes."""
    for place, row, other in zip(places, expected, found, strict=True):
        scales = 4 * blocks_of(place.stop - place.start, block)
        assert_same(row[:scales].view(torch.float32), other[:scales].view(torch.float32))
        assert_same(row[scales:], other[scales:])


def key_pairs(count: int, seed: int) -> list[tuple[Key, Key]]:
    return [(Key(seed & 0xFFFFFFFF, number), Key(2**32 - 1 - number, seed & 0xFFFF)) for number in range(count)]


def test_signatures_are_those_of_the_definition() -> None:
    for name in NAMES:
        for body in (reference, *(body for body, _ in BODIES)):
            assert inspect.signature(getattr(body, name)) == inspect.signature(getattr(kernels, name)), name


@few
@given(ends, seeds, dtypes, specials, st.sampled_from((1, 2, 3, 4, 5)))
def test_rotated(cuts: list[int], seed: int, dtype: torch.dtype, special: tuple[float, ...], bits: int) -> None:
    places, x = places_of(cuts), mixed(3000, seed, special, dtype)
    keys, boundaries = key_pairs(len(places), seed), torch.linspace(-2, 2, (1 << bits) - 1)
    size = row_bytes(places, bits, 1024, rotated_numel)
    expected, sums = torch.full((len(places), size), 7, dtype=torch.uint8), [mixed(3000, seed + 1) for _ in range(2)]
    for place, row, key in zip(places, expected, keys, strict=True):
        numel = place.stop - place.start
        scale, codes = torch.empty(blocks_of(numel, 1024)), row.new_empty(packed_bytes(rotated_numel(numel), bits))
        reference.rotated_encode(x[place], scale, codes, keys=key, boundaries=boundaries, **tables(bits))
        message = torch.cat((scale.view(torch.uint8), codes))
        row[: message.numel()] = message
        for fresh in (False, True):
            reference.rotated_add(codes, scale, sums[fresh][place], keys=key, fresh=fresh, **tables(bits))
    for body, _ in ((reference, "cpu"), *BODIES):
        rows = torch.full_like(expected, 7)
        body.rotated_encode_rows(x, places, rows, keys=keys, boundaries=boundaries, **tables(bits))
        assert bool((rows[:, -8:] == 7).all())
        found = [mixed(3000, seed + 1) for _ in range(2)]
        for fresh in (False, True):
            body.rotated_add_rows(rows, places, found[fresh], keys=keys, fresh=fresh, **tables(bits))
        assert_same(tuple(sums), tuple(found))
        assert_same_rows(expected, rows, places, 1024)


def in_pieces(x: Tensor, seed: int) -> Spread:
    """The same elements, in runs of odd lengths that lie in another order in a larger buffer."""
    cuts = sorted({0, x.numel(), *torch.randint(0, x.numel() + 1, (5,), generator=generator(seed)).tolist()})
    base, runs, place = torch.full((x.numel() + 7 * len(cuts),), 7.0), [], 0
    for start, stop in reversed(list(itertools.pairwise(cuts))):
        runs.append((start, (place, stop - start)))
        base[place : place + stop - start] = x[start:stop]
        place += stop - start + 7  # elements between that belong to somebody else
    return Spread.of(base, [run for _, run in sorted(runs)])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@few
@given(ends, seeds, specials, st.sampled_from((1, 2, 3)))
def test_a_tensor_in_pieces_gives_the_same(cuts: list[int], seed: int, special: tuple[float, ...], bits: int) -> None:
    places, x = places_of(cuts), mixed(3000, seed, special)
    keys, boundaries = (
        TwoRounds(Keys(Key(seed & 0xFFFF, 3), tuple(range(len(places))))),
        torch.linspace(-2, 2, (1 << bits) - 1),
    )
    size = row_bytes(places, bits, 1024, rotated_numel)
    for body, _ in ((reference, "cpu"), *BODIES[:1]):
        rows, again = (torch.full((len(places), size), 7, dtype=torch.uint8) for _ in range(2))
        body.rotated_encode_rows(x, places, rows, keys=list(keys), boundaries=boundaries, **tables(bits))
        spread = in_pieces(x, seed)
        body.rotated_encode_rows(spread, places, again, keys=keys, boundaries=boundaries, **tables(bits))
        assert_same_rows(rows, again, places, 1024)
        for fresh in (False, True):
            out, pieces = x.clone(), in_pieces(x, seed)
            told = body.rotated_add_rows(rows, places, out, keys=keys, fresh=fresh, **tables(bits))
            others = pieces.base.clone()
            assert told == body.rotated_add_rows(rows, places, pieces, keys=keys, fresh=fresh, **tables(bits))
            assert_same(out, pieces.gather(torch.empty(3000)))
            pieces.scatter(in_pieces(x, seed).gather(torch.empty(3000)))
            assert_same(others, pieces.base)  # nothing between the pieces was touched


@few
@given(st.integers(1, 3000), seeds, specials, st.sampled_from(((1, 1), (1, 2), (2, 3))), st.integers(0, 3))
def test_mean(numel: int, seed: int, special: tuple[float, ...], widths: tuple[int, int], skip: int) -> None:
    """In one pass what adding, dividing and encoding give one after the other, with a memory and without."""
    bits, back_bits = widths
    whole, keys = slice(0, numel), key_pairs(4, seed)
    rows = torch.zeros(4, row_bytes([whole], bits, 1024, rotated_numel), dtype=torch.uint8)
    tensors = [mixed(numel, seed + number, special) for number in range(4)]
    for number, x in enumerate(tensors):
        where, boundaries = [slice(0, 0)] * 4, torch.linspace(-2, 2, (1 << bits) - 1)
        where[number] = whole
        reference.rotated_encode_rows(x, where, rows, keys=keys, boundaries=boundaries, **tables(bits))
    held, (back, _) = mixed(numel, seed + 9), key_pairs(2, seed + 1)
    options: dict[str, Any] = {"skip": skip, "keys": keys, "back": back, **tables(bits)}
    options |= {"back_codebook": torch.linspace(-2, 2, 1 << back_bits), "back_bits": back_bits}
    options |= {"boundaries": torch.linspace(-2, 2, (1 << back_bits) - 1)}
    size = row_bytes([whole], back_bits, 1024, rotated_numel)
    for memory in (None, held):
        expected, lefts = torch.zeros(size, dtype=torch.uint8), list[Tensor]()
        for body, own in (
            (reference, tensors[skip].clone()),
            *((body, tensors[skip].clone()) for body, device in BODIES if device == "cpu"),
            (cpu, in_pieces(tensors[skip], seed)),
        ):
            row, left = torch.zeros(size, dtype=torch.uint8), torch.empty(numel)
            body.rotated_mean_rows(rows, own, row, held=memory, left=None if memory is None else left, **options)
            expected = row if body is reference else expected
            assert_same_rows(expected[None], row[None], [whole], 1024)
            if memory is not None:
                lefts.append(left)
                assert_same(lefts[0], left)


@few
@given(ends, seeds, specials, st.sampled_from((2, 4, 7)), st.sampled_from((0, 64, 192)))
def test_abs_max(cuts: list[int], seed: int, special: tuple[float, ...], bits: int, block: int) -> None:
    places, x = places_of(cuts), mixed(3000, seed, special)
    keys = [pair[0] for pair in key_pairs(len(places), seed)]
    options = {"levels": (1 << (bits - 1)) - 1, "bits": bits, "block": block}
    size = row_bytes(places, bits, block, lambda numel: numel)
    made = []
    for body, _ in ((reference, "cpu"), *BODIES):
        rows = torch.full((len(places), size), 7, dtype=torch.uint8)
        body.abs_max_encode_rows(x, places, rows, keys=keys, **options)
        made.append(rows)
    for place, row, key in zip(places, made[0], keys, strict=True):
        numel = place.stop - place.start
        step, codes = torch.empty(blocks_of(numel, block)), row.new_empty(packed_bytes(numel, bits))
        reference.abs_max_encode(x[place], step, codes, **options, key=key)
        scales = 4 * step.numel()
        assert_same(step, row[:scales].view(torch.float32))
        assert_same(codes, row[scales : scales + codes.numel()])
        assert bool((row[scales + codes.numel() :] == 7).all())
    for rows in made[1:]:
        assert_same_rows(made[0], rows, places, block)


def test_rows_of_several_senders_add_up_in_order() -> None:
    """As a rank does with the messages of all others: every row to the same place."""
    x, places, keys = mixed(6000, 1), [slice(2000 * n, 2000 * n + 2000) for n in range(3)], key_pairs(3, 4)
    rows = torch.zeros(3, row_bytes(places, 2, 1024, rotated_numel), dtype=torch.uint8)
    boundaries = torch.linspace(-1, 1, 3)
    kernels.rotated_encode_rows(x, places, rows, keys=keys, boundaries=boundaries, **tables(2))
    one_by_one = torch.zeros(2000)
    for row, key in zip(rows, keys, strict=True):
        kernels.rotated_add(row[8 : 8 + 512], row[:8].view(torch.float32), one_by_one, keys=key, **tables(2))
    for body, _ in ((reference, "cpu"), *BODIES):
        total = torch.zeros(2000)
        body.rotated_add_rows(rows, [slice(0, 2000)] * 3, total, keys=keys, **tables(2))
        assert_same(one_by_one, total)
        wide = torch.zeros(2000, dtype=torch.float64)
        body.rotated_add_rows(rows, [slice(0, 2000)] * 3, wide, keys=keys, **tables(2))
        assert torch.allclose(wide.float(), total, atol=1e-4)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    x, keys, pairs = torch.ones(200), [Key(1, 2)] * 2, key_pairs(2, 1)
    options = {"levels": 7, "bits": 4, "block": 0}
    for places, size in (
        ([slice(0, 64), slice(150, 201)], 100),  # behind the end
        ([slice(0, 64), slice(-1, 20)], 100),
        ([slice(0, 64), slice(64, 200)], 96),  # 4 + 3 * 32 bytes
        ([slice(0, 64), slice(64, 128)], 38),  # not a multiple of four
    ):
        rows = torch.zeros(2, size, dtype=torch.uint8)
        with pytest.raises(OptionError):
            cpu.abs_max_encode_rows(x, places, rows, keys=keys, **options)
        with pytest.raises(OptionError):
            cpu.rotated_encode_rows(x, places, rows, keys=pairs, boundaries=torch.zeros(15), **tables(4))
        with pytest.raises(OptionError):
            cpu.rotated_add_rows(rows, places, x, keys=pairs, **tables(4))
        assert not rows.any()
    places, rows = [slice(0, 64), slice(64, 128)], torch.zeros(2, 100, dtype=torch.uint8)
    with pytest.raises(OptionError, match="2 rows"):
        cpu.abs_max_encode_rows(x, places, rows, keys=keys[:1], **options)
    with pytest.raises(OptionError, match="contiguous"):
        cpu.abs_max_encode_rows(x, places, rows[:, :40], keys=keys, **options)
    with pytest.raises(OptionError, match="block"):
        cpu.abs_max_encode_rows(x, places, rows, keys=keys, levels=7, bits=4, block=32)
