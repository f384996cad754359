"""Codes for the positions a sparsifier keeps: a strictly increasing int32 list below `numel`.

A code's region has a size that depends on (capacity, numel) only, so that messages have one; with fewer than `capacity`
positions the rest of it is zero. Bits per position at 1 % (entropy 8.08), capacity = number of positions:

    int32 32 | packed ceil(log2 numel) | bitmap 100 | u16 16 and 32 per 65,536 elements | elias_fano 8.6

Elias-Fano (Elias 1974, Fano 1971) stores the low l = floor(log2(numel / capacity)) bits of every position as they are
and the high parts as a bitmap in which position i sets bit high + i.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..comm import streams
from ..errors import MessageError, OptionError

_CHUNK_BITS = 16
_CHUNK = 1 << _CHUNK_BITS  # elements whose offsets fit in a uint16


# ------------------------------------------------------------------------------------------------------- byte planes


def _bytes_as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A fresh copy, because a view of another dtype needs an aligned start and a region may begin anywhere."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def _set(flags: int, positions: Tensor) -> Tensor:
    """`flags` packed bits, ones at the given positions."""
    bits = torch.zeros(flags, dtype=torch.uint8, device=positions.device)
    bits.index_fill_(0, positions.to(torch.int64), 1)
    return kernels.pack(bits, bits=1)


def _ones(packed: Tensor, flags: int, count: int) -> Tensor:
    """Where the ones are; on a resident device the first `count`, whatever the data say."""
    bits = kernels.unpack(packed, flags, bits=1).view(torch.bool)
    if streams.resident(bits.device):
        places = torch.where(bits, bits.cumsum(0) - 1, count).clamp_(max=count)
        found = torch.zeros(count + 1, dtype=torch.int64, device=bits.device)
        return found.scatter_(0, places, torch.arange(flags, device=bits.device))[:count]
    if bits.device.type == "cpu":  # a tenth of the time of torch's nonzero
        return torch.from_numpy(np.flatnonzero(bits.numpy()))
    return bits.nonzero().view(-1)


def planes_bytes(capacity: int, bits: int) -> int:
    """Numbers of `bits` bits as planes: one byte each for every full 8 bits, the remaining bits packed."""
    full, rest = divmod(bits, 8)
    return full * capacity + (kernels.packed_bytes(capacity, rest) if rest else 0)


def write_planes(region: Tensor, numbers: Tensor, capacity: int, bits: int) -> None:
    """The low `bits` bits of int32 numbers; whatever stands above them is ignored."""
    count = numbers.numel()
    rows = numbers.view(torch.uint8).view(count, 4)
    full, rest = divmod(bits, 8)
    for plane in range(full):
        region[plane * capacity : plane * capacity + count] = rows[:, plane]
    if rest and count:
        packed = kernels.pack(rows[:, full] & ((1 << rest) - 1), bits=rest)
        region[full * capacity : full * capacity + packed.numel()] = packed


def read_planes(region: Tensor, count: int, capacity: int, bits: int) -> Tensor:
    """`count` non-negative int32 numbers."""
    rows = torch.zeros(count, 4, dtype=torch.uint8, device=region.device)
    full, rest = divmod(bits, 8)
    for plane in range(full):
        rows[:, plane] = region[plane * capacity : plane * capacity + count]
    if rest and count:
        rows[:, full] = kernels.unpack(region[full * capacity :], count, bits=rest)
    return rows.view(torch.int32).view(-1)


# ------------------------------------------------------------------------------------------------- one code at a time


def _int32_bytes(capacity: int, numel: int) -> int:
    return 4 * capacity


def _int32_write(region: Tensor, indices: Tensor, capacity: int, numel: int) -> None:
    region[: 4 * indices.numel()] = indices.view(torch.uint8)


def _int32_read(region: Tensor, count: int, capacity: int, numel: int) -> Tensor:
    return _bytes_as(region[: 4 * count], torch.int32)


def _position_bits(numel: int) -> int:
    return max(numel - 1, 0).bit_length()


def _packed_bytes(capacity: int, numel: int) -> int:
    return planes_bytes(capacity, _position_bits(numel))


def _packed_write(region: Tensor, indices: Tensor, capacity: int, numel: int) -> None:
    write_planes(region, indices, capacity, _position_bits(numel))


def _packed_read(region: Tensor, count: int, capacity: int, numel: int) -> Tensor:
    return read_planes(region, count, capacity, _position_bits(numel))


def _bitmap_bytes(capacity: int, numel: int) -> int:
    return kernels.packed_bytes(numel, 1)


def _bitmap_write(region: Tensor, indices: Tensor, capacity: int, numel: int) -> None:
    region.copy_(_set(numel, indices))


def _bitmap_read(region: Tensor, count: int, capacity: int, numel: int) -> Tensor:
    found = _ones(region, numel, count)
    if found.numel() != count:
        raise MessageError(f"the bitmap marks {found.numel()} positions, the message says {count}")
    return found.to(torch.int32)


def _u16_split(numel: int) -> tuple[int, int]:
    chunks = -(-numel // _CHUNK)
    return chunks, 4 * chunks


def _u16_bytes(capacity: int, numel: int) -> int:
    return _u16_split(numel)[1] + 2 * capacity


def _u16_write(region: Tensor, indices: Tensor, capacity: int, numel: int) -> None:
    chunks, offsets_at = _u16_split(numel)
    last_of_chunk = torch.arange(1, chunks + 1, dtype=torch.int64, device=indices.device) * _CHUNK - 1
    ends = torch.searchsorted(indices, last_of_chunk.to(torch.int32), right=True, out_int32=True)
    region[:offsets_at] = ends.view(torch.uint8)
    low_halves = indices.to(torch.int16)  # the conversion drops the upper bits
    region[offsets_at : offsets_at + 2 * indices.numel()] = low_halves.view(torch.uint8)


def _u16_read(region: Tensor, count: int, capacity: int, numel: int) -> Tensor:
    chunks, offsets_at = _u16_split(numel)
    ends = _bytes_as(region[:offsets_at], torch.int32).to(torch.int64)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    damaged = not streams.resident(region.device) and ((chunks and int(ends[-1]) != count) or bool((sizes < 0).any()))
    if damaged:
        raise MessageError(f"the ends of the chunks do not divide {count} positions")
    halves = torch.empty(count, 2, dtype=torch.int16, device=region.device)
    halves[:, 0] = _bytes_as(region[offsets_at : offsets_at + 2 * count], torch.int16)
    numbers = torch.arange(chunks, dtype=torch.int16, device=region.device)  # at most 32,768 chunks below 2**31
    halves[:, 1] = torch.repeat_interleave(numbers, sizes, output_size=count)
    return halves.view(torch.int32).view(-1)


def _low_bits(capacity: int, numel: int) -> int:
    return max(0, (numel // max(capacity, 1)).bit_length() - 1)


def _elias_fano_split(capacity: int, numel: int) -> tuple[int, int, int]:
    """(low bits, bytes of the low planes, flags of the high bitmap)."""
    low = _low_bits(capacity, numel)
    return low, planes_bytes(capacity, low), capacity + (numel >> low) + 1


def _elias_fano_bytes(capacity: int, numel: int) -> int:
    _, high_at, flags = _elias_fano_split(capacity, numel)
    return high_at + kernels.packed_bytes(flags, 1)


def _elias_fano_write(region: Tensor, indices: Tensor, capacity: int, numel: int) -> None:
    low, high_at, flags = _elias_fano_split(capacity, numel)
    write_planes(region, indices, capacity, low)
    order = torch.arange(indices.numel(), dtype=torch.int32, device=indices.device)
    region[high_at:] = _set(flags, (indices >> low) + order)


def _elias_fano_read(region: Tensor, count: int, capacity: int, numel: int) -> Tensor:
    low, high_at, flags = _elias_fano_split(capacity, numel)
    found = _ones(region[high_at:], flags, count)
    if found.numel() != count:
        raise MessageError(f"the high parts stand for {found.numel()} positions, the message says {count}")
    high = found.to(torch.int32) - torch.arange(count, dtype=torch.int32, device=region.device)
    if (
        count and not streams.resident(region.device) and int(high[-1]) > (numel - 1) >> low
    ):  # they never fall, so the last is the largest: no overflow below
        raise MessageError(f"a position lies beyond the {numel} elements")
    return (high << low) | read_planes(region, count, capacity, low)


class _Code(NamedTuple):
    bytes: Callable[[int, int], int]
    write: Callable[[Tensor, Tensor, int, int], None]
    read: Callable[[Tensor, int, int, int], Tensor]


_CODES = {  # the cheapest to decode first
    "int32": _Code(_int32_bytes, _int32_write, _int32_read),
    "u16": _Code(_u16_bytes, _u16_write, _u16_read),
    "packed": _Code(_packed_bytes, _packed_write, _packed_read),
    "elias_fano": _Code(_elias_fano_bytes, _elias_fano_write, _elias_fano_read),
    "bitmap": _Code(_bitmap_bytes, _bitmap_write, _bitmap_read),
}
INDEX_CODES = tuple(_CODES)


def _code(kind: str) -> _Code:
    if kind not in _CODES:
        raise OptionError(f"there is no index code {kind!r}: use one of {', '.join(INDEX_CODES)}, or auto in a codec")
    return _CODES[kind]


# ------------------------------------------------------------------------------------------------------------- public


def index_bytes(kind: str, capacity: int, numel: int) -> int:
    """Exact size of the region for at most `capacity` positions below `numel`.

    >>> [index_bytes(kind, 1000, 100_000) for kind in INDEX_CODES]
    [4000, 2008, 2128, 1096, 12504]
    """
    return _code(kind).bytes(capacity, numel)


@functools.lru_cache(maxsize=4096)
def choose_index_code(capacity: int, numel: int) -> str:
    """The code with the smallest region; of equal ones the cheapest to decode. This is what `auto` stands for.

    >>> choose_index_code(1000, 100_000), choose_index_code(40_000, 100_000), choose_index_code(1, 100_000)
    ('elias_fano', 'bitmap', 'int32')
    """
    return min(INDEX_CODES, key=lambda kind: index_bytes(kind, capacity, numel))  # min keeps the first of equals


def encode_indices(kind: str, indices: Tensor, *, capacity: int, numel: int) -> Tensor:
    """A strictly increasing int32 list as `index_bytes(kind, capacity, numel)` bytes.

    >>> encode_indices("bitmap", torch.tensor([0, 2, 9], dtype=torch.int32), capacity=4, numel=16)
    tensor([1, 2, 1, 0, 0, 0, 0, 0], dtype=torch.uint8)
    """
    if indices.dtype != torch.int32 or indices.dim() != 1 or indices.numel() > min(capacity, numel):
        raise OptionError(f"positions must be a flat int32 tensor of at most {min(capacity, numel)} elements")
    region = torch.zeros(index_bytes(kind, capacity, numel), dtype=torch.uint8, device=indices.device)
    _code(kind).write(region, indices.contiguous(), capacity, numel)
    return region


def decode_indices(kind: str, region: Tensor, count: int, *, capacity: int, numel: int) -> Tensor:
    """The `count` positions a region holds, int32; `MessageError` unless they increase strictly within the range.

    >>> region = torch.tensor([1, 2, 1, 0, 0, 0, 0, 0], dtype=torch.uint8)
    >>> decode_indices("bitmap", region, 3, capacity=4, numel=16)
    tensor([0, 2, 9], dtype=torch.int32)
    """
    if not 0 <= count <= min(capacity, numel):
        raise MessageError(f"{count} positions do not fit: at most {min(capacity, numel)} of {numel} can be kept")
    if region.dtype != torch.uint8 or region.dim() != 1 or region.numel() != index_bytes(kind, capacity, numel):
        raise MessageError(f"the region of positions has {region.numel()} bytes instead of those of {kind}")
    indices = _code(kind).read(region, count, capacity, numel)
    if streams.resident(region.device):
        return indices.clamp_(0, numel - 1)  # damaged bytes must not lead outside; the ranks' hashes will tell
    if count and (int(indices[0]) < 0 or int(indices[-1]) >= numel or not bool((indices[1:] > indices[:-1]).all())):
        raise MessageError("the positions do not increase from one to the next, or leave the tensor: damaged message")
    return indices
