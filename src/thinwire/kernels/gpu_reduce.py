"""Triton kernels that keep the data whole, as functions: block scales, selection, sums and checks.

`gpu.py` says what has been checked. The device code is in `gpu_select.py`.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from . import checks, gpu_select, reference
from .gpu_launch import TILE, launch, launch_tiles, tiles_of
from .layout import CHUNK, Moments, Selection, blocks_of, magnitude_bits
from .reference_parts import ordered

_WINDOW = 64  # tiles that a program of `select_kernel` looks back over at once


# ------------------------------------------------------------------------------------------------------ block scales


def _block_reduce(x: Tensor, block: int, kind: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Partial results (blocks, tiles of a block); the second tensor is the maxima of MIN_MAX."""
    x = checks.flat32(x)
    blocks, width = blocks_of(x.numel(), block), block or max(x.numel(), 1)
    tile = min(TILE, max(CHUNK, triton.next_power_of_2(width)))
    tiles, rows = -(-width // tile), TILE // tile
    out = torch.empty(blocks, tiles, dtype=dtype, device=x.device)
    high = torch.empty_like(out) if kind == gpu_select.MIN_MAX else out
    launch(
        gpu_select.block_reduce_kernel, -(-blocks // rows) * tiles, x, out, high, x.numel(), width, tiles,
        KIND=kind, ROWS=rows, TILE=tile,
    )  # fmt: skip
    return out, high


def block_abs_max(x: Tensor, *, block: int) -> Tensor:
    """max |x| of each block, float32. Compared as integers, so inf and NaN come out as inf and NaN."""
    return _block_reduce(x, block, gpu_select.ABS_MAX, torch.int32)[0].amax(dim=1).view(torch.float32)


def block_min_max(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """min and max of each block, float32. A NaN in the block shows as NaN in one of the two."""
    low, high = _block_reduce(x, block, gpu_select.MIN_MAX, torch.int32)
    return ordered(low.amin(dim=1)).view(torch.float32), ordered(high.amax(dim=1)).view(torch.float32)


def block_square_sum(x: Tensor, *, block: int) -> Tensor:
    """sum of x**2 of each block, accumulated in float64, float64 out."""
    return _block_reduce(x, block, gpu_select.SQUARE_SUM, torch.float64)[0].sum(dim=1)


# --------------------------------------------------------------------------------------------------------- selection


def threshold_count(x: Tensor, threshold: float) -> int:
    """How many |x| exceed the threshold (inf and NaN exceed every finite one)."""
    x = checks.flat32(x)
    counts = torch.empty(tiles_of(x.numel()), dtype=torch.int32, device=x.device)
    launch_tiles(gpu_select.count_kernel, x.numel(), x, counts, x.numel(), magnitude_bits(threshold))
    return int(counts.sum())


def _take(
    x: Tensor,
    threshold: float,
    capacity: int,
    *,
    gradient: Tensor | None = None,
    out: Tensor | None = None,
    decay: float = 1.0,
) -> Selection:
    """Select from flat float32 data; with a gradient from the sum, whose rest goes to `out`."""
    values = torch.empty(capacity, dtype=torch.float32, device=x.device)
    indices = torch.empty(capacity, dtype=torch.int32, device=x.device)
    state = torch.zeros(1 + tiles_of(x.numel()), dtype=torch.int64, device=x.device)
    launch_tiles(
        gpu_select.select_kernel, x.numel(), x, x if gradient is None else gradient, x if out is None else out,
        values, indices, state, decay, x.numel(), magnitude_bits(threshold), capacity,
        ADD=gradient is not None, WINDOW=_WINDOW,
    )  # fmt: skip
    count = int(state[-1]) >> gpu_select.STATUS_BITS if x.numel() else 0  # the one wait for the device
    return Selection(values[:count], indices[:count], count)


def select(x: Tensor, threshold: float, *, capacity: int) -> Selection:
    """The first `capacity` elements with |x| > threshold, in order of position."""
    return _take(checks.flat32(x), threshold, capacity)


def select_ef(
    memory: Tensor,
    gradient: Tensor,
    threshold: float,
    *,
    capacity: int,
    out: Tensor | None = None,
    decay: float = 1.0,
) -> Selection:
    """u = gradient + decay * memory; take the first `capacity` elements with |u| > threshold, write the rest to `out`.

    One launch. The number of elements taken is read back: it sizes the result.
    """
    rest = checks.selection_out(memory, gradient, out)
    if not (checks.writable(rest) and checks.writable(memory)):
        return reference.select_ef(memory, gradient, threshold, capacity=capacity, out=rest, decay=decay)
    return _take(memory, threshold, capacity, gradient=checks.flat32(gradient), out=rest, decay=decay)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] += values, in place; indices (int32, unique, in range) come from a checked decoder."""
    checks.same_length(indices, values)
    if not checks.writable(out):
        return reference.scatter_add(out, indices, values)
    count, indices, values = values.numel(), indices.contiguous(), checks.flat32(values)
    launch(gpu_select.scatter_add_kernel, tiles_of(count), out, indices, values, count, TILE=TILE)
    return None


# -------------------------------------------------------------------------------------------------- sums and checks


def moments(x: Tensor) -> Moments:
    """Sum, sum of squares (both in float64) and max |x| (inf or NaN if there is one)."""
    if x.numel() == 0:
        return Moments(0.0, 0.0, 0.0)
    x, programs = checks.flat32(x), tiles_of(x.numel())
    sums = torch.empty(2, programs, dtype=torch.float64, device=x.device)
    peaks = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(gpu_select.moments_kernel, programs, x, sums, peaks, x.numel(), TILE=TILE)
    peak = peaks.amax().view(torch.float32).to(torch.float64)
    total, squares, max_abs = torch.cat((sums.sum(dim=1), peak.reshape(1))).tolist()  # one copy to the host
    return Moments(total, squares, max_abs)


def all_finite(x: Tensor) -> bool:
    """True if there is neither inf nor NaN."""
    return x.numel() == 0 or float(block_abs_max(x, block=0)[0]) < math.inf


def finite(x: Tensor) -> Tensor:
    """As `all_finite`, but a 0-dim bool tensor on the device of x: nothing waits for the device."""
    if x.numel() == 0 or x.dtype in (torch.bfloat16, torch.float16):  # a copy in float32 would cost more
        return x.detach().isfinite().all()
    return _block_reduce(x, 0, gpu_select.ABS_MAX, torch.int32)[0].amax() < 0x7F800000


def hash64(x: Tensor) -> Tensor:
    """A 64-bit hash of the bytes of x and of their order, as a 0-dim int64 tensor on the device of x."""
    data, length = checks.words(x)
    sums = torch.empty(tiles_of(data.numel()), dtype=torch.int64, device=x.device)
    launch_tiles(gpu_select.hash_kernel, data.numel(), data, sums, data.numel())
    out = torch.empty((), dtype=torch.int64, device=x.device)
    launch(gpu_select.hash_finish_kernel, 1, sums, out, sums.numel(), length, TILE=TILE)
    return out


def checksum(data: Tensor) -> int:
    """32-bit sum of the little-endian words of a byte tensor, each mixed with its position."""
    words = data.view(torch.int32)
    sums = torch.empty(tiles_of(words.numel()), dtype=torch.int32, device=data.device)
    launch(gpu_select.checksum_kernel, sums.numel(), words, sums, words.numel(), TILE=TILE)
    return int(sums.sum()) & 0xFFFFFFFF
