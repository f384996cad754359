"""Whole encoders put together from the loops of a body: the definition, and the way of a GPU with large blocks.

With the same bits, the numba body has one loop instead of each (`cpu_whole.py`), and the Triton body has one launch
where a block fits into a program (`gpu_whole.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ..rng import Key
from .layout import DOMINATES, FEW, ROTATION, blocks_of, rotated_numel, usable_steps

Keys = tuple[Key, Key]  # of the two rounds


class TwoRounds(Sequence[Keys]):
    """The keys of the two rounds of several messages, from the keys of these.

    >>> [first == Key(1, 2).fold(0) for first, _ in TwoRounds([Key(1, 2), Key(3, 4)])]
    [True, False]
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Keys: ...

    @overload
    def __getitem__(self, index: slice) -> TwoRounds: ...

    def __getitem__(self, index: int | slice) -> Keys | TwoRounds:
        if isinstance(index, slice):
            return TwoRounds(self.keys[index])
        key = self.keys[index]
        return key.fold(0), key.fold(1)


def abs_max_encode(
    loops: Any, x: Tensor, step: Tensor, out: Tensor, *, levels: int, bits: int, block: int, key: Key
) -> None:
    """`loops` is the body. See `reference.abs_max_encode`."""
    if not x.numel():
        return
    largest = loops.block_abs_max(x, block=block)
    found, inverse = usable_steps(largest / torch.full_like(largest, levels))  # on a GPU, / 3 would be * (1 / 3)
    step.copy_(found)
    grid = {"bits": bits, "top": 2 * levels, "offset": levels, "block": block}
    loops.quantize(x, torch.zeros_like(found), inverse, **grid, key=key, out=out)


def rotated_encode(
    loops: Any, x: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, boundaries: Tensor, bits: int
) -> None:
    """`loops` is the body. See `reference.rotated_encode`.

    Most blocks are rotated once. A second rotation is as dear as the first, and needed only where few elements outweigh
    the others. The scale of a block that was rotated twice is negative.
    """
    if not x.numel():
        return
    z = loops.rotate(x, key=keys[0])
    twice = uneven(x.reshape(-1).to(torch.float32), loops.block_square_sum(z, block=ROTATION), _block_sizes(z))
    z = torch.where(_of_elements(twice, z.numel()), loops.rotate(z, key=keys[1]), z)
    squares = loops.block_square_sum(z, block=ROTATION)
    rms, inverse = usable_steps((squares / _block_sizes(z)).sqrt())
    loops.codebook_encode(z, inverse, boundaries, bits=bits, block=ROTATION, out=out)
    nearest = loops.codebook_decode(out, z.numel(), torch.ones_like(rms), codebook, bits=bits, block=ROTATION)
    # No product is negative, so nothing cancels: a sum in float64 is exact enough in any order, and every body sends
    # the same bits.
    unbiased = squares / _rows(nearest.mul_(z)).to(torch.float64).sum(1)
    scale.copy_(torch.where(rms > 0, torch.where(twice, -unbiased, unbiased), rms))


def rotated_add(
    loops: Any,
    packed: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    keys: Keys,
    codebook: Tensor,
    bits: int,
    fresh: bool = False,
) -> None:
    """`loops` is the body. See `reference.rotated_add`."""
    z = loops.codebook_decode(packed, rotated_numel(out.numel()), scale.abs(), codebook, bits=bits, block=ROTATION)
    z = torch.where(_of_elements(scale < 0, z.numel()), loops.unrotate(z, z.numel(), key=keys[1]), z)
    values = loops.unrotate(z, out.numel(), key=keys[0])
    torch.add(values, 0.0 if fresh else out, out=out)  # with 0.0, so that a zero is never negative


def uneven(x: Tensor, squares: Tensor, sizes: Tensor) -> Tensor:
    """Which blocks need a second rotation; `squares` and `sizes` are those of blocks after the first.

    >>> spike = torch.zeros(1024).index_fill(0, torch.tensor([5]), 3.0)
    >>> x = torch.cat((torch.ones(1024), spike))
    >>> uneven(x, x.view(2, -1).square().sum(1).double(), torch.full((2,), 1024.0))
    tensor([False,  True])
    """
    rows = _rows(x.abs())
    half = 0.5 * (squares / sizes).sqrt().to(torch.float32)
    largest = rows.amax(1).to(torch.float64)
    many = (rows > half[:, None]).sum(1)
    return squares.isfinite() & ((largest * largest * DOMINATES > squares) | (many * FEW < sizes))


def _rows(x: Tensor) -> Tensor:
    """Blocks as rows; the last one is filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % ROTATION)).view(-1, ROTATION)


def _of_elements(of_blocks: Tensor, numel: int) -> Tensor:
    """A value for each block as one for each element."""
    return of_blocks.repeat_interleave(ROTATION)[:numel]


def _block_sizes(z: Tensor) -> Tensor:
    """1024 for every block but a shorter last one."""
    blocks = blocks_of(z.numel(), ROTATION)
    sizes = torch.full((blocks,), ROTATION, dtype=torch.float64, device=z.device)
    sizes[-1] = z.numel() - (blocks - 1) * ROTATION
    return sizes
