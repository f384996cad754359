"""Torch helpers that several kernel definitions in `reference.py` share: padding, block scales, the transform."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rng import Key
from .layout import CHUNK, HASH_ADD, HASH_ODD, HASH_STEP, MIX_1, MIX_2, ROTATION, blocks_of

MASK32 = 0xFFFFFFFF


def spread(per_block: Tensor, numel: int, block: int) -> Tensor:
    """One entry per block -> one per element (or a scalar that broadcasts)."""
    return per_block if block == 0 else per_block.repeat_interleave(block)[:numel]


def flat32(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).to(torch.float32)


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """A caller may give a buffer as `out`: codes are written where they are sent from, and fresh memory is slow."""
    return result if out is None else out.copy_(result)


def random_words(numel: int, key: Key, device: torch.device | str) -> Tensor:
    """32 random bits per element, in an int64 tensor."""
    h = (torch.arange(numel, dtype=torch.int64, device=device) + key.k0) & MASK32
    h = ((h ^ (h >> 16)) * MIX_1) & MASK32
    return ((h ^ (h >> 15) ^ key.k1) * MIX_2) & MASK32


# ------------------------------------------------------------------------------------------------------ block scales


def padded_rows(x: Tensor, block: int, fill: int) -> Tensor:
    """int32 view of float32 data as (blocks, block), padded with `fill`."""
    bits = flat32(x).view(torch.int32)
    width = block or max(bits.numel(), 1)
    rows = blocks_of(bits.numel(), block)
    padded = torch.full((rows * width,), fill, dtype=torch.int32, device=x.device)
    padded[: bits.numel()] = bits
    return padded.view(rows, width)


def ordered(bits: Tensor) -> Tensor:
    """Float bits -> integers of the same order (and back): flips the magnitude bits of negative numbers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# ---------------------------------------------------------------------------------------------------------- rotation


def _hadamard(rows: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of each row; strides 1, 2, 4, ... in this order (the bits depend on it)."""
    count, width = rows.shape
    stride = 1
    while stride < width:
        pairs = rows.view(count, width // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((a + b, a - b), dim=2).reshape(count, width)
        stride *= 2
    return rows * torch.tensor(1.0 / math.sqrt(width), dtype=torch.float32, device=rows.device)


def signs(numel: int, key: Key, device: torch.device) -> Tensor:
    """+1 or -1 per element e: bit e % 32 of word e // 32, whose halves are mixed because low bits are weak."""
    words = random_words(-(-numel // 32), key, device)
    bits = ((words ^ (words >> 16))[:, None] >> torch.arange(32, device=device)) & 1
    return (1.0 - 2.0 * bits.to(torch.float32)).view(-1)[:numel]


def transform(x: Tensor) -> Tensor:
    """The Hadamard transform of each block of 1024 and of the shorter last block."""
    full = x.numel() // ROTATION * ROTATION
    parts = [_hadamard(x[:full].view(-1, ROTATION)).reshape(-1)] if full else []
    if x.numel() > full:
        parts.append(_hadamard(x[full:].view(1, -1)).reshape(-1))
    return torch.cat(parts) if parts else x.clone()


# -------------------------------------------------------------------------------------------------------------- hash


def _signed(constant: int) -> int:
    """An unsigned 64-bit constant as the int64 that torch takes."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _shifted(value: Tensor, places: int) -> Tensor:
    """A right shift that brings in zeros; torch's own repeats the sign."""
    return (value >> places) & ((1 << (64 - places)) - 1)


def odd_multipliers(positions: Tensor) -> Tensor:
    """An odd 64-bit multiplier for each int64 position; int64 arithmetic wraps around."""
    y = positions * _signed(HASH_STEP) + _signed(HASH_ADD)
    y = (y & MASK32) * _shifted(y, 32) + y
    y = (y ^ _shifted(y, 32)) * _signed(HASH_ODD)
    return (y ^ _shifted(y, 29)) | 1


def weighted_sum(words: Tensor) -> Tensor:
    """The sum of int32 words times the multipliers of their row of 64 and of their lane, modulo 2**64."""
    rows = torch.zeros(-(-words.numel() // CHUNK) * CHUNK, dtype=torch.int64, device=words.device)
    rows[: words.numel()] = words.to(torch.int64) & MASK32
    rows = rows.view(-1, CHUNK)
    down, across = (torch.arange(size, dtype=torch.int64, device=words.device) for size in rows.shape)
    return (rows * odd_multipliers(down)[:, None] * odd_multipliers(~across)).sum()


def finish_hash(total: Tensor, length: int) -> Tensor:
    """The sum and the length in bytes -> the hash; one-to-one in the sum."""
    h = total + _signed(length * HASH_STEP & (1 << 64) - 1)
    h = (h ^ _shifted(h, 30)) * _signed(HASH_ODD)
    h = (h ^ _shifted(h, 27)) * _signed(HASH_ADD)
    return h ^ _shifted(h, 31)
