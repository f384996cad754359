"""Codes of a few bits with a codebook that is sent: the mean of the values in each bin."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..recipe.registry import register
from ..rng import Key
from .base import Codec, Shape, State
from .scales import SCALE_BYTES, block_rule, put, sharing, take_scales

_SIGMAS = 6.0  # the width of all bins together


@register
class BinMean(Codec):
    """Sends the bin of each element, and for each block the mean of the elements in every bin.

    Bins are 6 standard deviations / 2**bits wide, around the block's mean; what lies beyond is in the outer ones. The
    means are the best values for these bins, so the error is never larger than the block; it is biased, so use it with
    error feedback. `bits`: 2 to 4. `block`: elements that share a codebook, a multiple of 64, or 0 for the whole
    tensor. A block with inf or NaN decodes to NaN.
    Reference: Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706 (2 bits, one codebook for a tensor).

    >>> codec = bin_mean(2)
    >>> codec.decode(codec.encode(torch.tensor([3.0, 3.0, -1.0, -1.0])))
    tensor([ 3.,  3., -1., -1.])
    """

    name: ClassVar[str] = "bin_mean"
    examples: ClassVar[tuple[str, ...]] = ("bin_mean:2", "bin_mean:4,block=0")
    bits: int
    block: int = field(default=1024, kw_only=True)

    def __post_init__(self) -> None:
        self._require(isinstance(self.bits, int) and 2 <= self.bits <= 4, f"bits must be 2 to 4, got {self.bits}")
        self._require(*block_rule(self.block))

    @property
    def bins(self) -> int:
        """How many codes there are."""
        return 1 << self.bits

    def delta(self, numel: int, *, shape: Shape | None = None) -> float:
        return 1.0 if numel and sharing(numel, self.block) == 1 else 0.0

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        books = kernels.blocks_of(numel, self.block) * self.bins * SCALE_BYTES
        return books + kernels.packed_bytes(numel, self.bits) if numel else 0

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        rows, sizes = _rows(flat, self.block)
        codes = _codes(rows, sizes, self.bins)
        book = _means(rows, codes, sizes, self.bins)
        put(body, book.view(-1), kernels.pack(codes.view(-1)[: flat.numel()].contiguous(), bits=self.bits))

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        books = kernels.blocks_of(out.numel(), self.block)
        book, packed = take_scales(body, books * self.bins)
        codes = kernels.unpack(packed, out.numel(), bits=self.bits).to(torch.int64)
        if books > 1:
            codes += torch.arange(out.numel(), device=out.device) // self.block * self.bins
        out += book[codes]


def _rows(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """One block in each row, float64, the last one padded with zeros; and how many elements each has."""
    blocks, width = kernels.blocks_of(flat.numel(), block), block or flat.numel()
    rows = torch.zeros(blocks * width, dtype=torch.float64, device=flat.device)
    rows[: flat.numel()] = flat
    sizes = torch.full((blocks,), width, dtype=torch.int64, device=flat.device)
    sizes[-1] = flat.numel() - (blocks - 1) * width
    return rows.view(blocks, width), sizes


def _codes(rows: Tensor, sizes: Tensor, bins: int) -> Tensor:
    """The bin of each element, uint8. A constant block has one bin; of a block that is not finite no bin matters."""
    inside = torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]
    mean = rows.sum(dim=1) / sizes
    centred = (rows - mean[:, None]) * inside
    width = _SIGMAS / bins * (centred.square().sum(dim=1) / sizes).sqrt()
    scaled = centred / torch.where(width > 0, width, 1.0)[:, None]
    return (scaled + bins // 2).round().nan_to_num(nan=0.0).clamp(0, bins - 1).to(torch.uint8)


def _means(rows: Tensor, codes: Tensor, sizes: Tensor, bins: int) -> Tensor:
    """The mean of the elements in each bin, float32; 0 where there is none, NaN all over a block that is not finite."""
    inside = torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]
    sums = torch.zeros(rows.shape[0], bins, dtype=torch.float64, device=rows.device)
    counts = torch.zeros_like(sums)
    places = codes.to(torch.int64)
    counts.scatter_add_(1, places, inside.to(torch.float64))
    sums.scatter_add_(1, places, rows * inside)
    means = (sums / counts.clamp(min=1.0)).to(torch.float32)
    finite = rows.isfinite().all(dim=1, keepdim=True)
    return torch.where(finite, means, torch.nan)


bin_mean = BinMean
