"""Sums and checks over a whole tensor: moments, finite or not, the checksum and the 64-bit hash."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.bodies import BODIES, DTYPES, assert_same, check, dtypes, few, mixed, random_codes, seeds, sizes, specials
from thinwire import kernels
from thinwire.kernels import reference
from thinwire.kernels.reference_parts import odd_multipliers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter reports inf - inf and such


@few
@given(sizes, seeds, dtypes, specials)
def test_moments(numel: int, seed: int, dtype: torch.dtype, special: tuple[float, ...]) -> None:
    x = mixed(numel, seed, special, dtype)
    check("all_finite", x)
    expected = reference.moments(x)
    room = 1e-6 * float(x.to(torch.float64).abs().nan_to_num(0.0, 0.0).sum())  # a sum may cancel
    for body, device in BODIES:
        found = body.moments(x.to(device))
        assert found.squares == pytest.approx(expected.squares, rel=1e-6, abs=0.0, nan_ok=True)
        assert found.max_abs == pytest.approx(expected.max_abs, rel=0.0, abs=0.0, nan_ok=True)
        assert found.total == pytest.approx(expected.total, rel=0.0, abs=room, nan_ok=True)


@few
@given(sizes, seeds)
def test_checksum(words: int, seed: int) -> None:
    check("checksum", random_codes(4 * words, 8, seed))


@few
@given(sizes, seeds, dtypes, specials)
def test_finite(numel: int, seed: int, dtype: torch.dtype, special: tuple[float, ...]) -> None:
    x = mixed(numel, seed, special, dtype)
    found = check("finite", x)
    assert (found.shape, found.dtype, found.device) == ((), torch.bool, x.device)
    assert bool(found) == reference.all_finite(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_finds_one_element_anywhere(dtype: torch.dtype) -> None:
    for numel in (1, 64, 3001):
        for bad in (float("inf"), float("-inf"), float("nan")):
            for place in (0, numel // 2, numel - 1):
                x = torch.zeros(numel, dtype=dtype)
                assert bool(check("finite", x))
                x[place] = bad
                assert not bool(check("finite", x))


@few
@given(sizes, seeds, st.sampled_from((torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool)))
def test_hash(numel: int, seed: int, dtype: torch.dtype) -> None:
    x = mixed(numel, seed).to(dtype)
    found = check("hash64", x)
    assert (found.shape, found.dtype, found.device) == ((), torch.int64, x.device)
    with_gaps, not_aligned = mixed(2 * numel, seed)[::2], random_codes(numel + 3, 8, seed)[3:]
    for tensor in (with_gaps, not_aligned):
        for body, device in ((reference, "cpu"), *BODIES):
            assert_same(reference.hash64(tensor.clone()), body.hash64(tensor.to(device)))


def test_hash_is_what_it_says() -> None:
    """In Python integers, from the definition: odd multipliers by row and lane, the length, the last mix."""
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def odd(position: int) -> int:
        y = (position * step + 0x94D049BB133111EB) & mask
        y = ((y & 0xFFFFFFFF) * (y >> 32) + y) & mask
        y = ((y ^ (y >> 32)) * 0xBF58476D1CE4E5B9) & mask
        return (y ^ (y >> 29)) | 1

    data = list(range(250, 0, -1)) * 3 + [1, 2, 3]
    padded = bytes(data) + bytes(-len(data) % 4)
    h = len(data) * step
    for i in range(len(padded) // 4):
        h += int.from_bytes(padded[4 * i : 4 * i + 4], "little") * odd(i // 64) * odd(-1 - i % 64)
    h &= mask
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
    h ^= h >> 31
    assert int(check("hash64", torch.tensor(data, dtype=torch.uint8))) & mask == h


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(1, 300), st.integers(0, 299), st.integers(1, 2**32 - 1))
def test_a_changed_word_always_changes_the_hash(seed: int, numel: int, place: int, change: int) -> None:
    """Not by chance: the multiplier is odd, so that no change of 32 bits times it is 0 modulo 2**64."""
    words = mixed(numel, seed).view(torch.int32)
    before = int(kernels.hash64(words))
    words[place % numel] ^= change - (1 << 32) if change >= 1 << 31 else change
    assert int(kernels.hash64(words)) != before


def test_every_multiplier_is_odd() -> None:
    positions = torch.cat((torch.arange(100_000), ~torch.arange(64), torch.tensor([2**40, 2**62])))
    multipliers = odd_multipliers(positions)
    assert bool((multipliers & 1 == 1).all())
    assert len(set(multipliers.tolist())) == positions.numel()
    # Two words that differ in the top bit only may be swapped unseen if their multipliers agree in the low 33 bits.
    assert len(set((multipliers & (2**33 - 1)).tolist())) == positions.numel()


def hashes_of(variants: list[Tensor]) -> set[int]:
    return {int(kernels.hash64(variant)) for variant in variants}


def test_swapped_words_change_the_hash() -> None:
    """All swaps of an element with one in another lane, another row, and both; also where only the sign differs."""
    for x in (mixed(20_000, 3), torch.arange(20_000.0), torch.arange(20_000) % 3 - 1.0):
        variants = [x]
        for i in range(0, 20_000, 611):
            for j in (i + 1, i + 63, i + 64, i + 4096, 19_999 - i):
                if j < x.numel() and x[i] != x[j]:
                    swapped = x.clone()
                    swapped[i], swapped[j] = x[j].clone(), x[i].clone()
                    variants.append(swapped)
        assert len(variants) > 50
        assert len(hashes_of(variants)) == len({variant.numpy().tobytes() for variant in variants})
    signs = torch.zeros(4096)
    one_negative = []
    for i in range(4096):
        moved = signs.clone()
        moved[i] = -0.0
        one_negative.append(moved)
    assert len(hashes_of([signs, *one_negative])) == 4097


def test_length_and_shifts_change_the_hash() -> None:
    """Zeros count, at the end and in front."""
    zeros = [torch.zeros(numel, dtype=torch.uint8) for numel in range(300)]
    assert len(hashes_of(zeros)) == 300
    x = mixed(1000, 1)
    shifts = [torch.cat((torch.zeros(n), x, torch.zeros(300 - n))) for n in range(300)]
    assert len(hashes_of(shifts)) == 300


def test_regular_changes_do_not_cancel() -> None:
    """Differences of sums that a linear multiplier would miss: +1 -2 +1, at any distance."""
    x = torch.arange(30_000, dtype=torch.int32)
    variants = [x]
    for gap in (1, 2, 63, 64, 65, 128, 4096):
        for start in range(0, 20_000, 997):
            changed = x.clone()
            changed[start] += 1
            changed[start + gap] -= 2
            changed[start + 2 * gap] += 1
            variants.append(changed)
    assert len(hashes_of(variants)) == len(variants)


def test_every_bit_of_the_hash_depends_on_every_bit_of_a_word() -> None:
    words = mixed(200, 9).view(torch.int32)
    before = int(kernels.hash64(words))
    flips = torch.zeros(64)
    trials = 0
    for place in range(0, 200, 7):
        for bit in range(32):
            changed = words.clone()
            changed[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            difference = (int(kernels.hash64(changed)) ^ before) & (2**64 - 1)
            flips += torch.tensor([(difference >> position) & 1 for position in range(64)])
            trials += 1
    rate = flips / trials
    assert float(rate.min()) > 0.4
    assert float(rate.max()) < 0.6
