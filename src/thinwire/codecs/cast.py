"""Codecs that change the number format only: float32, float16, bfloat16, and float8 with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels, theory
from ..comm import streams
from ..recipe.registry import register
from ..rng import Key
from .base import Codec, Shape, State
from .scales import SCALE_BYTES, block_rule, put, sharing, take_scales, times_scale, usable_steps

_FP8_MAX = 448.0  # of float8_e4m3fn
_FP8_HALF_STEP = 2.0**-10  # largest rounding error below its normal range


def saturated(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite values beyond the type's range become its largest, inf and NaN stay; casting then rounds to nearest."""
    largest = torch.finfo(dtype).max
    # One cheap pass decides for nearly every gradient that the plain cast will do; a device is not asked.
    if streams.resident(flat.device) or (flat.numel() and not float(kernels.block_abs_max(flat, block=0)) <= largest):
        flat = torch.where(flat.isinf(), flat, flat.clamp(-largest, largest))
    return flat


@dataclass(frozen=True, repr=False)
class _Cast(Codec):
    """A float type on the wire; messages may be added because the network adds that type."""

    dtype: ClassVar[torch.dtype]

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return numel * self.dtype.itemsize

    def to_sum(self, x: Tensor) -> Tensor:
        """The flat tensor to all-reduce, new memory that may be summed in place."""
        return saturated(x.detach().reshape(-1), self.dtype).to(self.dtype, copy=True)

    def put_sum(self, total: Tensor, out: Tensor) -> Tensor:
        return out.copy_(total)

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        body.view(self.dtype).copy_(saturated(x.reshape(-1), self.dtype))

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        out += body.view(self.dtype)


@register
class Fp32(_Cast):
    """Sends float32 as it is: no compression.

    Reference: none; the dense baseline. Takes no arguments. inf and NaN pass.

    >>> fp32().decode(fp32().encode(torch.tensor([0.1, -3.0])))
    tensor([ 0.1000, -3.0000])
    """

    name: ClassVar[str] = "fp32"
    unbiased: ClassVar[bool] = True
    lossless: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float32
    sum_dtype: ClassVar[torch.dtype] = torch.float32

    def to_sum(self, x: Tensor) -> Tensor:
        return x.detach().reshape(-1).to(torch.float32, copy=True)

    def omega(self, numel: int) -> float:
        return 0.0


@register
class Fp16(_Cast):
    """Rounds to float16: 11 significant bits between 6e-5 and 65504.

    Takes no arguments. Finite values beyond 65504 are sent as 65504, inf and NaN pass. `delta` holds for elements
    that are zero or of magnitude 6.1e-5 to 65504; smaller ones lose bits and vanish below 3e-8.
    Reference: Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740.

    >>> fp16().decode(fp16().encode(torch.tensor([0.5, 1e9, -1e9])))
    tensor([ 5.0000e-01,  6.5504e+04, -6.5504e+04])
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    sum_dtype: ClassVar[torch.dtype] = torch.float16

    def delta(self, numel: int, *, shape: Shape | None = None) -> float:
        return theory.rounding(10)


@register
class Bf16(_Cast):
    """Rounds to bfloat16: float32's range with 8 significant bits.

    Takes no arguments. Nearest even; finite values that would round to inf are sent as the largest bfloat16, inf and
    NaN pass. `delta` holds for elements that are zero or of magnitude at least 1.2e-38.
    Reference: Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training, arXiv 1905.12322.

    >>> bf16().decode(bf16().encode(torch.tensor([1.0, 1.001, 1.01])))
    tensor([1.0000, 1.0000, 1.0078])
    """

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    sum_dtype: ClassVar[torch.dtype] = torch.bfloat16

    def delta(self, numel: int, *, shape: Shape | None = None) -> float:
        return theory.rounding(7)


@register
class Fp8(Codec):
    """Rounds to float8 (e4m3fn) after scaling each block so that its largest magnitude becomes 448.

    `block`: elements that share a scale, a multiple of 64, or 0 for the whole tensor. A block with inf or NaN decodes
    to NaN; one whose largest magnitude is below 448 * 2**-100 (3.5e-28) decodes to zero.
    Reference: Micikevicius et al. 2022, FP8 Formats for Deep Learning, arXiv 2209.05433.

    >>> fp8().decode(fp8().encode(torch.tensor([448.0, 17.0, 1.0, -1.1])))
    tensor([448.0000,  16.0000,   1.0000,  -1.1250])
    >>> fp8(64).wire_bytes(1000)
    1096
    """

    name: ClassVar[str] = "fp8"
    block: int = 128

    def __post_init__(self) -> None:
        self._require(*block_rule(self.block))

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return kernels.blocks_of(numel, self.block) * SCALE_BYTES + numel

    def not_summable(self) -> str:
        return "the network cannot add numbers in fp8: use bf16, all_gather or two_shot"

    def delta(self, numel: int, *, shape: Shape | None = None) -> float:
        # Elements below the normal range err by half its step, absolutely; the largest element is 448.
        below_normal = (sharing(numel, self.block) - 1) * (_FP8_HALF_STEP / _FP8_MAX) ** 2
        return max(0.0, theory.rounding(3) - below_normal)

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        scale, inverse = usable_steps(kernels.block_abs_max(flat, block=self.block) / _FP8_MAX)
        put(body, scale, times_scale(flat, inverse, self.block).to(torch.float8_e4m3fn))

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        scale, codes = take_scales(body, kernels.blocks_of(out.numel(), self.block))
        out += times_scale(codes.view(torch.float8_e4m3fn).to(torch.float32), scale, self.block)


fp32 = Fp32
fp16 = Fp16
bf16 = Bf16
fp8 = Fp8
