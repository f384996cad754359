"""Whole encoders put together from the loops of a body: the definition, and the way of a GPU with large blocks.

With the same bits, the numba body has one loop instead of each (`cpu_whole.py`), and the Triton body has one launch
where a block fits into a program (`gpu_whole.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rng import Key
from .layout import ROTATION, blocks_of, rotated_numel, usable_steps

Keys = tuple[Key, Key]  # of the two rounds


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
    """`loops` is the body. See `reference.rotated_encode`."""
    if not x.numel():
        return
    z = loops.rotate(loops.rotate(x, key=keys[0]), key=keys[1])
    squares = loops.block_square_sum(z, block=ROTATION)
    rms, inverse = usable_steps((squares / _block_sizes(z)).sqrt())
    loops.codebook_encode(z, inverse, boundaries, bits=bits, block=ROTATION, out=out)
    nearest = loops.codebook_decode(out, z.numel(), rms, codebook, bits=bits, block=ROTATION)
    # <a, b> = (|a|^2 + |b|^2 - |a - b|^2) / 2: three sums of squares in float64 are exact enough in any order, so
    # that every body sends the same bits. Nothing cancels, because the difference is small.
    own = loops.block_square_sum(nearest, block=ROTATION)
    difference = loops.block_square_sum(nearest.sub_(z), block=ROTATION)
    unbiased = rms * squares / ((own + squares - difference) / 2)
    scale.copy_(torch.where(rms > 0, unbiased, rms))


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
    z = loops.codebook_decode(packed, rotated_numel(out.numel()), scale, codebook, bits=bits, block=ROTATION)
    z = loops.unrotate(z, z.numel(), key=keys[1], out=z)
    values = loops.unrotate(z, out.numel(), key=keys[0])
    torch.add(values, 0.0 if fresh else out, out=out)  # with 0.0, so that a zero is never negative


def _block_sizes(z: Tensor) -> Tensor:
    """1024 for every block but a shorter last one."""
    blocks = blocks_of(z.numel(), ROTATION)
    sizes = torch.full((blocks,), ROTATION, dtype=torch.float64, device=z.device)
    sizes[-1] = z.numel() - (blocks - 1) * ROTATION
    return sizes
