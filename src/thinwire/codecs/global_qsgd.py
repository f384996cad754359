"""Global-QSGD: quantise once against a scale that all ranks share, so that the codes themselves can be all-reduced.

Ranks add it in two rounds (arXiv 2305.18627):

    norm = combine(local_norm(x) of every rank)            MAX for linf, SUM for l2: one small all-reduce
    total = combine(codes(x, scale=scale_from(norm)))      integer SUM, or `add_codes` in a balanced tree
    mean = values(total, scale=...) / world_size

Linear codes are summed by the network as int8: a rank uses 127 // n levels, so the sum never wraps. Exponential codes
are no numbers that a network can add: ranks add pieces by the unbiased rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels, theory
from ..errors import OptionError
from ..recipe.registry import register
from ..rng import Draw, Key
from .base import Codec, Rounds, Shape, State, flag
from .scales import SCALE_BYTES, Grid, block_rule, put, sharing, take_scales, times_scale, usable_steps
from .stages import Round, RoundCost, Trials, Work

if TYPE_CHECKING:
    from ..exchange.request import Request

_TYPICAL = 1 << 20  # elements that share a scale if all of a bucket do
_NORM_BYTES = 4
_SIGN = 0x80  # of an exponential code in its byte
_ADDITION = 1  # purpose of a folded key
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@register
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
    >>> codes = [codec.codes(x, scale=scale, world_size=2, draw=Draw(rank=i)) for i, x in enumerate(ranks)]
    >>> codec.values(codes[0] + codes[1], scale=scale, world_size=2) / 2
    tensor([-0.5079,  1.0000])
    >>> codec.levels(world_size=4)
    31
    """

    name: ClassVar[str] = "global_qsgd"
    examples: ClassVar[tuple[str, ...]] = (
        "global_qsgd:8,block=128",
        "global_qsgd:8,dither=exponential",
        "global_qsgd:4",
    )
    unbiased: ClassVar[bool] = True
    whole_tensors: ClassVar[bool] = True
    sum_dtype: ClassVar[torch.dtype] = torch.int8
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

    def codes(self, x: Tensor, *, scale: Tensor, world_size: int, draw: Draw | None = None) -> Tensor:
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

    def values(
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
        # Folded, or a caller who passes the draw of `codes` again would round up the same elements again.
        return kernels.exponential_add(a, b, top=self.top, key=(draw or Draw()).key().fold(_ADDITION))

    # ------------------------------------------------------------------------------------------ sums over ranks

    def refuses_ranks(self, ranks: int, *, remembers: bool) -> str | None:
        """Levels shrink with the number of ranks: why this number cannot use the codec, or None."""
        try:
            levels = self.levels(ranks) if self.addition == "sum" else self.top - self.headroom(ranks)
        except OptionError as none_left:
            return str(none_left)
        if not remembers:
            return None
        d = self.block or _TYPICAL
        if self.addition == "codes":
            omega = theory.exponential(d, levels)
        else:
            omega = theory.uniform_l2(d, levels) if self.norm == "l2" else theory.uniform_linf(d, levels)
        if omega < 1:
            return None
        return (
            f"{self.spec()} leaves {levels} levels to each of {ranks} ranks and may then err by more than the "
            "gradient itself, so a memory would grow without end: leave out the memory, or use smaller blocks"
        )

    def omega_of_mean(self, numel: int, ranks: int) -> float | None:
        """Ranks share levels of one scale, so that a rank has fewer than in a message of its own."""
        if self.addition == "sum" and self.norm != "l2":
            return theory.uniform_linf(self.block or numel, self.levels(ranks)) / ranks
        return super().omega_of_mean(numel, ranks)

    def rounds(self, request: Request, ranks: int) -> Rounds:
        norms = yield Round(self.local_norm(request.u), op=self.combination)
        scale = self.scale_from(norms)
        codes = self.codes(request.u, scale=scale, world_size=ranks, draw=request.draw)
        if request.remembers:
            request.u.sub_(self.values(codes, scale=scale, world_size=ranks))
        if self.addition == "sum":
            total = yield Round(codes, elementwise=self._cuts(request))
        else:

            def add(a: Tensor, b: Tensor, number: int) -> Tensor:
                return self.add_codes(a, b, request.drawn(f"sum{number}"))

            total = yield Round(codes, add=add)
        # Integers never exceed the scale; powers of two need headroom above it, which may overflow.
        finite = flag(scale) if self.addition == "sum" else None
        shard = request.shard
        if shard is not None and self._cuts(request) and self.addition == "sum":
            scale = scale[shard.start // self.block : -(-shard.stop // self.block)] if self.block else scale
            return self.values(total, scale=scale, world_size=ranks, mean=True), finite
        mean = self.values(total, scale=scale, world_size=ranks, mean=True, out=request.out)
        return mean if shard is None else mean[shard], finite

    def _cuts(self, request: Request) -> bool:
        """Whether all shards begin with a block, so that their codes and scales can be read alone."""
        shards = request.shards or ()
        return not self.block or all(shard.start % self.block == 0 for shard in shards)

    def round_costs(self, numel: int, ranks: int, shapes: Sequence[Shape]) -> list[Work | RoundCost]:
        norms = RoundCost(_NORM_BYTES * kernels.blocks_of(numel, self.block), "norms", plain=self.combination == "sum")
        tree = None if self.addition == "sum" else self
        codes = RoundCost(numel, "codes", tree=tree)
        return [Work("pass", numel), norms, Work("encode", numel, self), codes, Work("put", numel, self)]

    def trials(self, given: Sequence[Tensor], draw: Draw) -> Trials:
        x, turns = given[0], itertools.cycle(given)
        scale, out = self.scale_from(self.local_norm(x)), torch.empty_like(x)
        codes = self.codes(x, scale=scale, world_size=4, draw=draw)
        trials: Trials = {
            "encode": (lambda: self.codes(next(turns), scale=scale, world_size=4, draw=draw), x.numel()),
            "put": (lambda: self.values(codes, scale=scale, world_size=4, mean=True, out=out), x.numel()),
        }
        if self.addition == "codes":
            trials["add"] = (lambda: self.add_codes(codes, codes, draw), x.numel())
        return trials

    # --------------------------------------------------------------------------------------------- messages

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        scale = self.scale_from(self.local_norm(flat))
        if self.dither == "exponential":
            codes = self._exponential_codes(flat, scale, 0, key)
            put(body, scale, kernels.pack(self._narrowed(codes), bits=self.bits))
            return
        _, inverse = usable_steps(scale / self.top)
        grid = Grid.symmetric(self.bits, self.top, self.block)
        grid.pack(flat, torch.zeros_like(inverse), inverse, key, out=put(body, scale))

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
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
