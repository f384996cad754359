"""Helpers of codecs with a scale per block: usable steps, the layout of a body, uniform grids.

Two rules keep special values harmless. A step below 2**-100 counts as 0, because its inverse times 2**23 would
overflow: the block is sent as zero. A step that is not finite is sent as NaN, so that the whole block decodes to NaN:
every rank learns of an inf in a gradient (GradScaler skips the step); it never becomes a wild finite number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels.layout import usable_steps as usable_steps
from ..rng import Key

SCALE_BYTES = 4  # float32


def block_rule(block: int) -> tuple[bool, str]:
    """Whether the kernels can work in such blocks, and the sentence to say if not."""
    fits = isinstance(block, int) and block >= 0 and block % kernels.CHUNK == 0
    return fits, f"block must be 0 (one scale for the whole tensor) or a multiple of {kernels.CHUNK}, got {block}"


def sharing(numel: int, block: int) -> int:
    """How many elements share a scale, at most; at least 1 so that the bounds of an empty tensor are defined."""
    return max(1, min(numel, block) if block else numel)


def times_scale(flat: Tensor, per_block: Tensor, block: int, *, out: Tensor | None = None) -> Tensor:
    """flat * scale of its block, float32, without spreading the scales to one per element; `out` may be `flat`."""
    if out is None:
        out = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
    if block == 0:
        return torch.mul(flat, per_block, out=out)
    full = flat.numel() // block
    whole = full * block
    torch.mul(flat[:whole].view(full, block), per_block[:full, None], out=out[:whole].view(full, block))
    torch.mul(flat[whole:], per_block[full:], out=out[whole:])
    return out


def block_means(flat: Tensor, block: int) -> Tensor:
    """Mean of each block, float64: chunks are summed in float32, which is fast, and the chunks' sums in float64."""
    chunks = -(-flat.numel() // kernels.CHUNK)
    whole = flat.numel() // kernels.CHUNK * kernels.CHUNK
    sums = torch.zeros(chunks, dtype=torch.float64, device=flat.device)
    sums[: whole // kernels.CHUNK] = flat[:whole].view(-1, kernels.CHUNK).sum(dim=1)
    if chunks * kernels.CHUNK != whole:
        sums[-1] = flat[whole:].sum()
    blocks, width = kernels.blocks_of(flat.numel(), block), block or flat.numel()
    sizes = torch.full((blocks,), width, dtype=torch.float64, device=flat.device)
    sizes[-1] = flat.numel() - (blocks - 1) * width
    of_block = torch.arange(chunks, device=flat.device) * kernels.CHUNK // width
    return torch.zeros_like(sizes).index_add_(0, of_block, sums) / sizes


def put(body: Tensor, *parts: Tensor) -> Tensor:
    """Write the parts' bytes one after another into a body; the rest of the body. Scales first, where they are aligned.

    >>> body = torch.zeros(6, dtype=torch.uint8)
    >>> put(body, torch.ones(1)).numel()
    2
    """
    for part in parts:
        data = part.contiguous().view(torch.uint8)
        body[: data.numel()] = data
        body = body[data.numel() :]
    return body


def take_scales(body: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split a body into its first `count` float32 scales and the rest."""
    return body[: count * SCALE_BYTES].view(torch.float32), body[count * SCALE_BYTES :]


class Grid(NamedTuple):
    """A uniform grid: code c in 0..top stands for low + (c - offset) * step, with `low` and `step` per block."""

    bits: int
    top: int
    offset: int
    block: int

    @classmethod
    def symmetric(cls, bits: int, levels: int, block: int) -> Grid:
        """`levels` values on either side of an exact zero."""
        return cls(bits, 2 * levels, levels, block)

    def code_bytes(self, numel: int) -> int:
        return kernels.packed_bytes(numel, self.bits)

    def scales(self, numel: int) -> int:
        return kernels.blocks_of(numel, self.block)

    def pack(self, flat: Tensor, low: Tensor, inverse_step: Tensor, key: Key, out: Tensor | None = None) -> Tensor:
        """Packed codes, rounded at random so that their expectation is `flat`; written to `out` if given."""
        return kernels.quantize(flat, low, inverse_step, **self._asdict(), key=key, out=out)

    def add(self, out: Tensor, packed: Tensor, low: Tensor, step: Tensor) -> None:
        """out += the values of packed codes."""
        kernels.dequantize_add(out, packed, low, step, bits=self.bits, offset=self.offset, block=self.block)
