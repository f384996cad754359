"""Sizes, results and the layout of codes in bytes, shared by all bodies of the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # elements packed together: `bits` * 8 bytes a chunk
ROTATION = 1024  # elements rotated together
# A block is rotated twice if its largest element has more than 1 / DOMINATES of the energy, or if less than 1 / FEW of
# its elements exceed half of their root mean square: then one rotation gives few distinct values. Of the blocks of
# gradients, 92 to 96 % of a transformer and of a recurrent network, and 0 to 64 % of a convolutional one, need one.
DOMINATES, FEW = 32.0, 4
FRACTION_BITS = 23  # of the fixed-point number that is rounded stochastically
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B  # the multipliers of the lowbias32 integer hash
WEYL = 0x9E3779B1  # 2**32 over the golden ratio: spreads positions
SMALLEST_STEP = 2.0**-100  # of a scale: the inverse of a smaller one, times 2**23, would overflow
LARGEST_SCALE = 1e36  # of a rotated block: what it stands for is finite below it
HASH_STEP, HASH_ADD = 0x9E3779B97F4A7C15, 0x94D049BB133111EB  # of `hash64`: spread positions over 64 bits
HASH_ODD = 0xBF58476D1CE4E5B9  # of `hash64`: one more multiplier, as in splitmix64
CUT_SHIFT = 5  # of `keep_largest`: magnitudes within 2**5 float32 steps count as equal


class Selection(NamedTuple):
    """What a selecting kernel found; `above` counts all elements above the threshold, room or not."""

    values: Tensor
    indices: Tensor
    above: int


class Moments(NamedTuple):
    total: float
    squares: float
    max_abs: float


def blocks_of(numel: int, block: int) -> int:
    """How many scales a tensor needs."""
    if numel == 0:
        return 0
    return 1 if block == 0 else -(-numel // block)


def packed_bytes(numel: int, bits: int) -> int:
    """Size of `numel` packed codes: whole chunks of 64."""
    return -(-numel // CHUNK) * 8 * bits


def planes(bits: int) -> list[tuple[int, int]]:
    """A code of `bits` bits is stored as planes of 8, 4, 2 and 1 bits: (width, shift), low bits first."""
    found, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((width, shift))
            shift += width
    return found


def rotated_numel(numel: int) -> int:
    """Length after rotation: blocks of 1024, the last one the smallest power of two (>= 64) that holds the rest."""
    full, rest = divmod(numel, ROTATION)
    return full * ROTATION + (0 if rest == 0 else max(CHUNK, 1 << (rest - 1).bit_length()))


def usable_steps(step: Tensor) -> tuple[Tensor, Tensor]:
    """Steps as they are sent (float32, NaN if not finite, 0 if too small) and the inverses to encode with.

    >>> usable_steps(torch.tensor([2.0, 1e-40, float("inf")]))
    (tensor([2., 0., nan]), tensor([0.5000, 0.0000, 0.0000]))
    """
    step = step.to(torch.float32)
    step = torch.where(step.isfinite(), step, torch.nan)
    step = torch.where(step < SMALLEST_STEP, 0.0, step)
    return step, torch.where(step > 0, 1.0 / step, 0.0)


def magnitude_bits(threshold: float) -> int:
    """A threshold as a float32 bit pattern: for magnitudes, integer order is numeric order."""
    return int(torch.tensor(threshold, dtype=torch.float32).view(torch.int32))


def checksum_term(word: int, position: int) -> int:
    """What one word adds to `checksum`: a one-to-one mix of the word, another one at every position."""
    h = (word + (2 * position + 1) * WEYL) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * MIX_1) & 0xFFFFFFFF
    return h ^ (h >> 15)
