"""Index codes: every list survives, sizes are exact, and bytes that are no list are refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs.indices import INDEX_CODES, choose_index_code, decode_indices, encode_indices, index_bytes
from thinwire.errors import MessageError, OptionError

CASES = [  # numel, count, capacity
    (1, 0, 1),
    (1, 1, 1),
    (2, 1, 1),
    (2, 2, 2),
    (63, 7, 7),
    (64, 64, 64),
    (65, 1, 65),
    (65, 65, 65),
    (1000, 0, 10),
    (1000, 10, 10),
    (1000, 9, 14),
    (1000, 1000, 1000),
    (65_536, 300, 300),
    (65_537, 655, 700),
    (200_000, 199_999, 200_000),
    (1_000_003, 1, 10_000),
    (1_000_003, 10_000, 10_000),
]


def random_list(numel: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(numel, generator=generator)[:count].sort().values.to(torch.int32)


def assert_valid_list(indices: Tensor, count: int, numel: int) -> None:
    assert indices.dtype == torch.int32
    assert indices.shape == (count,)
    assert count == 0 or (indices[0] >= 0 and indices[-1] < numel)
    assert bool((indices[1:] > indices[:-1]).all())


def decode_or_none(kind: str, region: Tensor, count: int, capacity: int, numel: int) -> Tensor | None:
    try:
        return decode_indices(kind, region, count, capacity=capacity, numel=numel)
    except MessageError:
        return None


@pytest.mark.parametrize("kind", INDEX_CODES)
@pytest.mark.parametrize(("numel", "count", "capacity"), CASES)
def test_round_trip_and_exact_size(kind: str, numel: int, count: int, capacity: int) -> None:
    indices = random_list(numel, count)
    region = encode_indices(kind, indices, capacity=capacity, numel=numel)
    assert region.dtype == torch.uint8
    assert region.shape == (index_bytes(kind, capacity, numel),)
    assert torch.equal(decode_indices(kind, region, count, capacity=capacity, numel=numel), indices)


@pytest.mark.parametrize("kind", INDEX_CODES)
@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True), (True, True)])
def test_the_ends_of_the_range(kind: str, first: bool, last: bool) -> None:
    for numel in (2, 64, 65_536, 65_537, 131_072):
        indices = torch.tensor([0] * first + [numel - 1] * last, dtype=torch.int32)
        region = encode_indices(kind, indices, capacity=2, numel=numel)
        assert torch.equal(decode_indices(kind, region, indices.numel(), capacity=2, numel=numel), indices)


@pytest.mark.parametrize("kind", [kind for kind in INDEX_CODES if kind != "bitmap"])
def test_the_largest_tensor(kind: str) -> None:
    numel = 2**31 - 1
    indices = torch.tensor([0, 65_535, 65_536, 2**24 + 1, 2**30, numel - 1], dtype=torch.int32)
    region = encode_indices(kind, indices, capacity=8, numel=numel)
    assert torch.equal(decode_indices(kind, region, 6, capacity=8, numel=numel), indices)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_round_trip_of_any_list(data: st.DataObject) -> None:
    numel = data.draw(st.one_of(st.integers(1, 300), st.integers(65_000, 140_000)))
    positions = data.draw(st.sets(st.integers(0, numel - 1), max_size=60))
    capacity = data.draw(st.integers(len(positions), len(positions) + 80))
    indices = torch.tensor(sorted(positions), dtype=torch.int32)
    for kind in INDEX_CODES:
        region = encode_indices(kind, indices, capacity=capacity, numel=numel)
        assert region.numel() == index_bytes(kind, capacity, numel)
        assert torch.equal(decode_indices(kind, region, len(positions), capacity=capacity, numel=numel), indices)


@pytest.mark.parametrize("kind", INDEX_CODES)
def test_an_unaligned_region_is_read(kind: str) -> None:
    indices = random_list(70_000, 50)
    region = encode_indices(kind, indices, capacity=60, numel=70_000)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), region))[1:]
    assert torch.equal(decode_indices(kind, shifted, 50, capacity=60, numel=70_000), indices)


@pytest.mark.parametrize("kind", INDEX_CODES)
def test_what_is_not_used_is_zero(kind: str) -> None:
    assert not encode_indices(kind, random_list(1000, 0), capacity=100, numel=1000).any()


# ------------------------------------------------------------------------------------------------------------ sizes


def test_elias_fano_is_near_the_entropy() -> None:
    numel = 1_000_000
    for ratio in (0.001, 0.01, 0.05):
        k = round(numel * ratio)
        entropy = -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio)) / ratio
        bits = 8 * index_bytes("elias_fano", k, numel) / k
        assert entropy < bits < entropy + 0.65


@settings(max_examples=100, deadline=None)
@given(numel=st.integers(1, 10**9), share=st.floats(0, 1))
def test_the_chosen_code_is_the_smallest(numel: int, share: float) -> None:
    capacity = max(1, round(share * numel))
    sizes = {kind: index_bytes(kind, capacity, numel) for kind in INDEX_CODES}
    chosen = choose_index_code(capacity, numel)
    assert sizes[chosen] == min(sizes.values())
    assert chosen == next(kind for kind in INDEX_CODES if sizes[kind] == sizes[chosen])


# ----------------------------------------------------------------------------------------------------------- damage


@settings(max_examples=150, deadline=None)
@given(numel=st.integers(1, 3000), seed=st.integers(0, 10**6), data=st.data())
def test_random_bytes_are_refused_or_a_list(numel: int, seed: int, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, min(numel, 200)))
    count = data.draw(st.integers(-1, capacity + 1))
    generator = torch.Generator().manual_seed(seed)
    for kind in INDEX_CODES:
        region = torch.randint(0, 256, (index_bytes(kind, capacity, numel),), dtype=torch.uint8, generator=generator)
        found = decode_or_none(kind, region, count, capacity, numel)
        if found is not None:
            assert_valid_list(found, count, numel)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), byte=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_damaged_byte_is_refused_or_gives_a_list(seed: int, byte: int, flip: int) -> None:
    numel, capacity = 140_000, 90
    indices = random_list(numel, 80, seed)
    for kind in INDEX_CODES:
        region = encode_indices(kind, indices, capacity=capacity, numel=numel)
        region[byte % region.numel()] ^= flip
        found = decode_or_none(kind, region, 80, capacity, numel)
        if found is not None:
            assert_valid_list(found, 80, numel)


@pytest.mark.parametrize("kind", INDEX_CODES)
def test_regions_of_another_size_are_refused(kind: str) -> None:
    region = encode_indices(kind, random_list(1000, 20), capacity=20, numel=1000)
    for wrong in (region[:-1], region[:0], torch.cat((region, region[:1])), region.view(1, -1), region.to(torch.int16)):
        with pytest.raises(MessageError):
            decode_indices(kind, wrong, 20, capacity=20, numel=1000)


@pytest.mark.parametrize("kind", INDEX_CODES)
def test_counts_that_cannot_be_are_refused(kind: str) -> None:
    region = encode_indices(kind, random_list(30, 20), capacity=40, numel=30)
    for count in (-1, 31, 41, 2**31):
        with pytest.raises(MessageError):
            decode_indices(kind, region, count, capacity=40, numel=30)


def test_unsorted_and_repeated_positions_are_refused() -> None:
    for positions in ([5, 4], [4, 4], [-1, 4], [4, 100]):
        region = torch.tensor(positions, dtype=torch.int32).view(torch.uint8)
        with pytest.raises(MessageError):
            decode_indices("int32", region, 2, capacity=2, numel=100)


def test_wrong_use_names_the_fix() -> None:
    with pytest.raises(OptionError, match="use one of"):
        index_bytes("golomb", 1, 1)
    with pytest.raises(OptionError, match="int32"):
        encode_indices("int32", torch.tensor([1, 2]), capacity=2, numel=4)
    with pytest.raises(OptionError, match="at most 1"):
        encode_indices("int32", random_list(4, 2), capacity=1, numel=4)
