"""The counter-based generator: even, independent from element to element and from draw to draw, and never changing.

Every limit is a number of standard deviations that chance exceeds less than once in a million; seeds are fixed.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.rng import Draw, Key

MANY = 1 << 18
TOP_BITS = 23  # those that rounding uses
LIMIT = 5.5
BUCKETS = 8.0  # two rounds of mixing scatter chi-squares up to 1.5 times as far as true chance does, at any length
DRAWS = [
    Draw(),
    Draw(seed=1),
    Draw(step=1),
    Draw(rank=1),
    Draw(stream="layer.0.weight"),
    Draw(seed=123456789, step=99_999, stream="embedding", rank=63),
    Draw(seed=-7, step=2**40, stream=12, rank=1023),
]


def words(draw: Draw | Key, numel: int = MANY) -> Tensor:
    return kernels.random_bits(numel, draw if isinstance(draw, Key) else draw.key())


def standardised(draw: Draw | Key, numel: int = MANY) -> Tensor:
    """The top 23 bits as numbers of mean 0 and variance 1."""
    centred: Tensor = (words(draw, numel) >> (32 - TOP_BITS)).double() + 0.5 - 2 ** (TOP_BITS - 1)
    return centred.mul(math.sqrt(12) / 2**TOP_BITS)


def chi_square(counts: Tensor, expected: float) -> float:
    """In standard deviations from its mean; nearly normal for many buckets."""
    degrees = counts.numel() - 1
    return (float((counts.double() - expected).square().sum()) / expected - degrees) / math.sqrt(2 * degrees)


def reference_word(position: int, key: Key) -> int:
    """The definition once more, in Python integers."""
    h = (position + key.k0) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    return ((h ^ (h >> 15) ^ key.k1) * 0x846CA68B) & 0xFFFFFFFF


def reference_key(seed: int, step: int, stream: int, rank: int) -> int:
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    state = 0
    for word in (seed, step, stream, rank):
        state = mix(state ^ mix(word & mask))
    return state


# ---------------------------------------------------------------------------------------------------- within a sequence


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_mean_and_variance(draw: Draw) -> None:
    z = standardised(draw)
    assert abs(float(z.mean())) * math.sqrt(MANY) < LIMIT
    # The square of a standardised uniform has variance 4/5.
    assert abs(float(z.square().mean()) - 1) * math.sqrt(MANY / 0.8) < LIMIT


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_buckets_are_even(draw: Draw) -> None:
    bits = words(draw)
    for shift in (24, 20, 16, 9 + 7):  # the top byte, and bytes that reach down to the last bits in use
        counts = torch.bincount((bits >> shift) & 0xFF, minlength=256)
        assert abs(chi_square(counts, MANY / 256)) < BUCKETS


def test_buckets_are_even_in_short_sequences() -> None:
    """As many bits as a small layer draws, over many draws: neither too uneven nor too even."""
    found = [chi_square(torch.bincount(words(Draw(step=step), 4096) >> 24, minlength=256), 16.0) for step in range(400)]
    assert max(found) < 7  # the tail of a chi-square is longer than that of a normal
    assert min(found) > -LIMIT
    assert abs(sum(found) / len(found)) * math.sqrt(len(found)) < LIMIT
    spread = math.sqrt(sum(value * value for value in found) / len(found))
    assert 0.85 < spread < 1.2


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_every_bit_in_use_is_balanced(draw: Draw) -> None:
    bits = words(draw)
    for bit in range(31, 31 - TOP_BITS, -1):
        share = float(((bits >> bit) & 1).double().mean())
        assert abs(share - 0.5) * 2 * math.sqrt(MANY) < LIMIT


def test_pairs_of_bits_are_independent() -> None:
    bits = words(Draw(seed=3))
    signs = torch.stack([((bits >> bit) & 1).float() * 2 - 1 for bit in range(31, 31 - TOP_BITS, -1)])
    correlations = (signs @ signs.T) / math.sqrt(MANY)
    correlations.fill_diagonal_(0.0)
    assert float(correlations.abs().max()) < LIMIT


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_neighbours_are_uncorrelated(draw: Draw) -> None:
    z = standardised(draw)
    for lag in [*range(1, 65), 127, 128, 512, 1000, 1023, 1024, 1025, 4096, 65_535, 65_536, 65_537, 131_072]:
        correlation = float(z[:-lag] @ z[lag:]) / math.sqrt(MANY - lag)
        assert abs(correlation) < LIMIT, lag


def test_pairs_and_triples_of_neighbours_fill_their_space() -> None:
    bits = words(Draw(seed=4))
    fours = bits >> 28
    for lag in (1, 2, 3, 8, 16, 64, 1024):
        pairs = torch.bincount(fours[:-lag] * 16 + fours[lag:], minlength=256)
        assert abs(chi_square(pairs, (MANY - lag) / 256)) < BUCKETS
    threes = bits >> 29
    triples = torch.bincount((threes[:-2] * 8 + threes[1:-1]) * 8 + threes[2:], minlength=512)
    assert abs(chi_square(triples, (MANY - 2) / 512)) < BUCKETS


def test_no_word_repeats() -> None:
    """A counter through a bijection; the top bits repeat as often as chance has it."""
    assert int(torch.unique(words(Draw())).numel()) == MANY
    tops = torch.unique(words(Draw()) >> 9).numel()
    expected = 2**TOP_BITS * (1 - math.exp(-MANY / 2**TOP_BITS))
    assert abs(tops - expected) < 0.01 * expected


def test_a_longer_sequence_begins_with_the_shorter() -> None:
    assert torch.equal(words(Draw(seed=8), 1000), words(Draw(seed=8), 5000)[:1000])


# ---------------------------------------------------------------------------------------------------- between sequences


def related(base: Draw) -> list[Draw]:
    """Draws that differ from `base` in little: one bit of a number, one letter of a name, places exchanged."""
    one_bit = [
        *(Draw(base.seed ^ (1 << bit), base.step, base.stream, base.rank) for bit in range(64)),
        *(Draw(base.seed, base.step ^ (1 << bit), base.stream, base.rank) for bit in range(40)),
        *(Draw(base.seed, base.step, base.stream, base.rank ^ (1 << bit)) for bit in range(12)),
    ]
    following = [
        Draw(base.seed, base.step + i, base.stream, base.rank + j) for i in range(8) for j in range(8) if i + j
    ]
    names = [
        *(
            Draw(base.seed, base.step, name, base.rank)
            for name in ("a", "b", "A", "ab", "ba", "", "layer.1", "layer.2")
        ),
        *(Draw(base.seed, base.step, number, base.rank) for number in range(1, 9)),
    ]
    exchanged = [Draw(*numbers) for numbers in itertools.permutations((11, 12, 13, 14))]
    return list(dict.fromkeys([base, *one_bit, *following, *names, *exchanged]))


def test_draws_that_differ_in_little_are_uncorrelated() -> None:
    draws = related(Draw(seed=1, step=5, stream="w", rank=2))
    assert len(draws) > 200
    numel = 1 << 14
    z = torch.stack([standardised(draw, numel) for draw in draws])
    correlations = (z @ z.T) / math.sqrt(numel)
    correlations.fill_diagonal_(0.0)
    assert float(correlations.abs().max()) < LIMIT
    # All of them together: as many pairs as this are to scatter like a unit normal.
    pairs = correlations[torch.triu(torch.ones_like(correlations), diagonal=1) > 0]
    assert float(pairs.square().mean()) == pytest.approx(1.0, abs=0.05)


def test_draws_that_differ_in_little_are_uncorrelated_at_any_shift() -> None:
    """Shifted copies of each other would be as bad as equal ones: the correlation at all shifts, by FFT."""
    draws = related(Draw(seed=1, step=5, stream="w", rank=2))[:40]
    numel = 1 << 12
    spectra = [torch.fft.rfft(standardised(draw, numel)) for draw in draws]
    for a, b in itertools.combinations(spectra, 2):
        at_shifts = torch.fft.irfft(a * b.conj(), n=numel) / math.sqrt(numel)
        assert float(at_shifts.abs().max()) < 6.5  # 780 pairs of 4096 shifts


def test_no_two_draws_give_the_same_key_or_words() -> None:
    draws = related(Draw(seed=9, step=1000, stream="layer", rank=0))
    keys = [draw.key() for draw in draws]
    assert len(set(keys)) == len(keys)
    assert len({key.k0 for key in keys}) == len(keys)
    assert len({key.k1 for key in keys}) == len(keys)
    assert len({tuple(words(key, 4).tolist()) for key in keys}) == len(keys)
    grid = {
        Draw(seed, step, stream, rank).key()
        for seed in range(6)
        for step in range(30)
        for stream in range(10)
        for rank in range(10)
    }
    assert len(grid) == 18_000


def test_keys_use_all_their_bits() -> None:
    """One changed bit of any input changes half of the 64 bits of the key, on average and for every output bit."""
    flips = torch.zeros(64)
    cases = 0
    for step in range(40):
        base = Draw(seed=step, step=step, stream=3, rank=1)
        for other in related(base)[1:60]:
            changed = base.key().packed ^ other.key().packed
            flips += torch.tensor([(changed >> bit) & 1 for bit in range(64)], dtype=torch.float32)
            cases += 1
    assert float((flips / cases - 0.5).abs().max()) * 2 * math.sqrt(cases) < LIMIT


def test_elements_are_independent_over_steps() -> None:
    """What one element draws from step to step: error feedback relies on errors that do not pile up."""
    steps = 512
    z = torch.stack([standardised(Draw(step=step, stream="w"), 512) for step in range(steps)])
    assert abs(float(z.mean(dim=0).abs().max())) * math.sqrt(steps) < LIMIT
    for lag in range(1, 9):
        correlation = float((z[:-lag] * z[lag:]).sum()) / math.sqrt(z[lag:].numel())
        assert abs(correlation) < LIMIT
        for element_lag in (1, 2, 64):
            diagonal = float((z[:-lag, :-element_lag] * z[lag:, element_lag:]).sum())
            assert abs(diagonal) / math.sqrt((steps - lag) * (512 - element_lag)) < LIMIT


def test_folded_keys_are_uncorrelated() -> None:
    keys = [Draw(seed=2).key(), *(Draw(seed=2).key().fold(purpose) for purpose in range(40))]
    keys += [Draw(seed=2).key().fold(1).fold(purpose) for purpose in range(8)]
    assert len(set(keys)) == len(keys)
    numel = 1 << 14
    z = torch.stack([standardised(key, numel) for key in keys])
    correlations = (z @ z.T) / math.sqrt(numel)
    correlations.fill_diagonal_(0.0)
    assert float(correlations.abs().max()) < LIMIT


# ----------------------------------------------------------------------------------------------------------- its values


def test_known_values() -> None:
    """Messages of one version must be read by the next: these numbers never change."""
    assert Draw().key() == Key(3480830352, 365602825)
    assert Draw(seed=1, step=7, stream="layer.weight", rank=3).key() == Key(1756362938, 4085164075)
    assert Draw(seed=-1, step=2**40, stream=-5, rank=9).key() == Key(4276104481, 4044577809)
    assert words(Draw(), 4).tolist() == [828225670, 2588525203, 2368765119, 16203898]
    assert Draw().key().fold(1) == Key(2003868020, 1261798116)


@pytest.mark.parametrize("draw", [d for d in DRAWS if isinstance(d.stream, int)], ids=str)
def test_keys_and_words_match_their_definition(draw: Draw) -> None:
    assert isinstance(draw.stream, int)
    key = draw.key()
    assert key.packed == reference_key(draw.seed, draw.step, draw.stream, draw.rank)
    assert words(draw, 300).tolist() == [reference_word(i, key) for i in range(300)]


def test_positions_wrap_where_32_bits_do() -> None:
    key = Key(0xFFFFFFFF - 2, 5)
    assert words(key, 8).tolist() == [reference_word(i, key) for i in range(8)]
    assert words(key, 8)[3:].tolist() == words(Key(0, 5), 5).tolist()


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**64, 2**200 + 3, -(2**200)])
def test_any_integer_is_a_seed(seed: int) -> None:
    key = Draw(seed=seed, step=seed, stream=seed, rank=seed).key()
    assert 0 <= key.k0 < 2**32
    assert 0 <= key.k1 < 2**32
    assert Key.unpack(key.packed) == key
    assert words(key, 10).min() >= 0
    assert words(key, 10).max() < 2**32


def test_a_name_is_the_same_in_every_process() -> None:
    """Python's own hash of a string differs from process to process."""
    script = "from thinwire import Draw; print(Draw(seed=1, stream='schicht.gewicht.\\u00fc').key().packed)"
    expected = Draw(seed=1, stream="schicht.gewicht.\u00fc").key().packed
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) == expected


def test_names_and_numbers_are_different_streams() -> None:
    assert Draw(stream="1").key() != Draw(stream=1).key()
    assert Draw(stream="").key() != Draw(stream=0).key()
    assert Draw(stream="a").key() == Draw(stream="a").key()


def test_no_elements_draw_nothing() -> None:
    assert words(Draw(), 0).shape == (0,)
