"""Global-QSGD: quantise once against a scale that all ranks share, so that the codes themselves can be all-reduced.

What an exchange does with it:

    norm = combine(local_norm(x) of every rank)            MAX for linf, SUM for l2: one small all-reduce
    total = combine(to_sum(x, scale=scale_from(norm)))     integer SUM, or `add_codes` in a balanced tree
    mean = from_sum(total, scale=...) / world_size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels, theory
from ..errors import OptionError
from ..rng import Draw, Key
from .base import Codec, Shape, State
from .scales import SCALE_BYTES, Grid, block_rule, put, sharing, take_scales, times_scale, usable_steps

_SIGN = 0x80  # of an exponential code in its byte
_ADDITION = 1  # purpose of a folded key
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, repr=False)
class GlobalQsgd(Codec):
    """Rounds at random to levels of one scale for all ranks: uniform levels (linear) or powers of two (exponential).

    `bits`: 2 to 8. `dither`: "linear", whose int8 codes any all-reduce can add, with levels left for the sum, or
    "exponential", whose codes are added by `add_codes`. `norm`: "linf" or "l2". `block`: elements that share a scale, a
    multiple of 64, or 0 for the whole tensor as published. As a plain message (`encode`) the scale is the own norm and
    travels along. A block that is not finite on any rank decodes to NaN on all; with l2, so does a block whose norm
    exceeds 2**64, and one below 2**-63 is sent as zero (the squares leave float32).
    Reference: Xin et al. 2023, Global-QSGD, arXiv 2305.18627.

    >>> codec, ranks = global_qsgd(), [torch.tensor([1.0, 0.5]), torch.tensor([-2.0, 1.5])]
    >>> scale = codec.scale_from(torch.stack([codec.local_norm(x) for x in ranks]).amax(0))
    >>> codes = [codec.to_sum(x, scale=scale, world_size=2, draw=Draw(rank=i)) for i, x in enumerate(ranks)]
    >>> codec.from_sum(codes[0] + codes[1], scale=scale, world_size=2) / 2
    tensor([-0.5079,  1.0000])
    >>> codec.levels(world_size=4)
    31
    """

    name: ClassVar[str] = "global_qsgd"
    unbiased: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    bits: int = 8
    dither: Literal["linear", "exponential"] = field(default="linear", kw_only=True)
    norm: Literal["linf", "l2"] = field(default="linf", kw_only=True)
    block: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self._require(isinstance(self.bits, int) and 2 <= self.bits <= 8, f"bits must be 2 to 8, got {self.bits}")
        self._require(
            self.dither in ("linear", "exponential"), f"dither must be 'linear' or 'exponential', got {self.dither!r}"
        )
        self._require(self.norm in ("linf", "l2"), f"norm must be 'linf' or 'l2', got {self.norm!r}")
        self._require(*block_rule(self.block))

    # ------------------------------------------------------------------------------------------------ facts

    @property
    def addition(self) -> Literal["sum", "codes"]:
        """How codes of different ranks are added: "sum" as integers by the network, "codes" by `add_codes`."""
        return "sum" if self.dither == "linear" else "codes"

    @property
    def combination(self) -> Literal["max", "sum"]:
        """How the ranks' `local_norm` become one."""
        return "max" if self.norm == "linf" else "sum"

    @property
    def top(self) -> int:
        """The largest code: the sum of all ranks stays within it."""
        return (1 << (self.bits - 1)) - 1

    def levels(self, world_size: int = 1) -> int:
        """Positive levels of linear dithering that a rank may use, so that the sum over all ranks fits `bits`."""
        levels = self.top // world_size
        if levels < 1:
            enough = world_size.bit_length() + 1
            fix = f"use {enough} bits, or dither='exponential'" if enough <= 8 else "use dither='exponential'"
            raise OptionError(f"{self.name}: {self.bits} bits leave no level for each of {world_size} ranks: {fix}")
        return levels

    def headroom(self, world_size: int = 1) -> int:
        """Doublings that exponential codes leave free, so that a balanced tree over all ranks never exceeds `top`."""
        doublings = (world_size - 1).bit_length()
        if doublings >= self.top:
            enough = (doublings + 1).bit_length() + 1
            raise OptionError(
                f"{self.name}: {self.bits} bits leave no power of two for each of {world_size} ranks: use {enough} bits"
            )
        return doublings

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return kernels.blocks_of(numel, self.block) * SCALE_BYTES + kernels.packed_bytes(numel, self.bits)

    def omega(self, numel: int) -> float:
        """Of a plain message; the mean over n ranks with one scale follows from `theory.global_theta`."""
        d = sharing(numel, self.block)
        if self.dither == "exponential":
            return theory.exponential(d, self.top)  # stated for l2; the maximum is no larger, so it holds for linf too
        return theory.uniform_l2(d, self.top) if self.norm == "l2" else theory.uniform_linf(d, self.top)

    # ---------------------------------------------------------------------------------------- shared scales

    def local_norm(self, x: Tensor) -> Tensor:
        """What the ranks combine, float32 per block: max |x| (linf, by MAX) or the sum of squares (l2, by SUM)."""
        flat = x.detach().reshape(-1)
        if self.norm == "linf":
            local = kernels.block_abs_max(flat, block=self.block)
        else:
            local = kernels.block_square_sum(flat, block=self.block).to(torch.float32)
        # Networks lose a NaN in a maximum, never an inf.
        return torch.where(local.isfinite(), local, torch.inf)

    def scale_from(self, combined: Tensor) -> Tensor:
        """The shared scale, from the combined local norms."""
        if self.norm == "linf":
            return combined
        return torch.where(combined < _SMALLEST_NORMAL, 0.0, combined).sqrt()

    def to_sum(self, x: Tensor, *, scale: Tensor, world_size: int, draw: Draw | None = None) -> Tensor:
        """The codes to add, one byte an element: int8 for linear dithering, uint8 (sign bit 0x80) for exponential.

        Every rank needs a draw of its own (`Draw(rank=...)`), else their errors add up instead of averaging out.
        """
        flat, key = x.detach().reshape(-1), (draw or Draw()).key()
        if self.dither == "exponential":
            return self._exponential_codes(flat, scale, self.headroom(world_size), key)
        levels = self.levels(world_size)
        _, inverse = usable_steps(scale / levels)
        # Eight-bit codes are packed in order, so they need no unpacking; taking off the offset in uint8 gives the
        # two's complement that int8 reads.
        codes = Grid.symmetric(8, levels, self.block).pack(flat, torch.zeros_like(inverse), inverse, key)
        return codes[: flat.numel()].sub_(levels).view(torch.int8)

    def from_sum(
        self, total: Tensor, *, scale: Tensor, world_size: int, mean: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """The sum of the ranks' values, flat float32, from the sum of their codes; with `mean`, their mean."""
        total = total.reshape(-1)
        share = 1.0 / world_size if mean else 1.0
        if out is None:
            out = torch.empty(total.numel(), dtype=torch.float32, device=total.device)
        if self.dither == "linear":
            step, _ = usable_steps(scale / self.levels(world_size))
            return times_scale(out.copy_(total), step * share, self.block, out=out)
        self._exponential_add(out.zero_(), total, scale, self.headroom(world_size))
        return out.mul_(share) if mean else out

    def add_codes(self, a: Tensor, b: Tensor, draw: Draw | None = None) -> Tensor:
        """The code of the sum of two exponential codes, without bias. Add in a balanced tree, with a new draw each."""
        # Folded, or a caller who passes the draw of `to_sum` again would round up the same elements again.
        return kernels.exponential_add(a, b, top=self.top, key=(draw or Draw()).key().fold(_ADDITION))

    # --------------------------------------------------------------------------------------------- messages

    def _pack(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        scale = self.scale_from(self.local_norm(flat))
        if self.dither == "exponential":
            codes = self._exponential_codes(flat, scale, 0, key)
            put(body, scale, kernels.pack(self._narrowed(codes), bits=self.bits))
            return
        _, inverse = usable_steps(scale / self.top)
        grid = Grid.symmetric(self.bits, self.top, self.block)
        grid.pack(flat, torch.zeros_like(inverse), inverse, key, out=put(body, scale))

    def _add(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        scale, packed = take_scales(body, kernels.blocks_of(out.numel(), self.block))
        if self.dither == "exponential":
            codes = self._widened(kernels.unpack(packed, out.numel(), bits=self.bits))
            self._exponential_add(out, codes, scale, 0)
            return
        step, _ = usable_steps(scale / self.top)
        Grid.symmetric(self.bits, self.top, self.block).add(out, packed, torch.zeros_like(step), step)

    def _exponential_codes(self, flat: Tensor, scale: Tensor, headroom: int, key: Key) -> Tensor:
        _, inverse = usable_steps(scale * math.ldexp(1.0, headroom))
        return kernels.exponential_encode(flat, inverse, top=self.top, block=self.block, key=key)

    def _exponential_add(self, out: Tensor, codes: Tensor, scale: Tensor, headroom: int) -> None:
        usable, _ = usable_steps(scale * math.ldexp(1.0, headroom))
        kernels.exponential_decode_add(out, codes, usable, top=self.top, block=self.block)

    def _narrowed(self, codes: Tensor) -> Tensor:
        """Move the sign from bit 7 to the top bit of a code that is `bits` wide."""
        return (codes & (_SIGN - 1)) | ((codes & _SIGN) >> (8 - self.bits))

    def _widened(self, codes: Tensor) -> Tensor:
        sign = 1 << (self.bits - 1)
        return (codes & (sign - 1)) | ((codes & sign) << (8 - self.bits))


global_qsgd = GlobalQsgd
