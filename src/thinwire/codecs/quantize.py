"""Codecs that round each element to a few levels times a scale: QSGD, TernGrad, abs-max, min-max, natural, sign.

All but `sign` round at random so that the expectation is the element itself. Scales are float32 at the start of the
body, one per block; what happens to tiny and non-finite blocks is said in `scales.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels, theory
from ..kernels import Spread
from ..recipe.registry import register
from ..rng import Key
from .base import Codec, Shape, State
from .scales import SCALE_BYTES, Grid, block_means, block_rule, put, sharing, take_scales, usable_steps

_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_ONE = 127 << _MANTISSA_BITS  # bit pattern of 1.0
_BITS = Grid(bits=1, top=1, offset=0, block=0)
_LARGEST_EXPONENT = 254  # field of the largest finite float32, 2**127 and above
_NOT_FINITE = 255


@dataclass(frozen=True, repr=False)
class _Symmetric(Codec):
    """Codes times one step per block, around zero; the body is steps, then codes."""

    unbiased: ClassVar[bool] = True

    @abstractmethod
    def _grid(self) -> Grid:
        """How codes are laid out."""

    def _low(self, step: Tensor) -> Tensor:
        return torch.zeros_like(step)

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        grid = self._grid()
        return grid.scales(numel) * SCALE_BYTES + grid.code_bytes(numel)

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        grid = self._grid()
        step, packed = take_scales(body, grid.scales(out.numel()))
        grid.add(out, packed, self._low(step), step)


@dataclass(frozen=True, repr=False)
class _AgainstLargest(_Symmetric):
    """Steps are the block's largest magnitude over the levels."""

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat, grid = x.reshape(-1), self._grid()
        step, codes = take_scales(body, grid.scales(flat.numel()))
        kernels.abs_max_encode(flat, step, codes, levels=grid.offset, bits=grid.bits, block=grid.block, key=key)

    def write_rows(self, x: Tensor | Spread, places: Sequence[slice], rows: Tensor, keys: Sequence[Key]) -> None:
        assert isinstance(x, Tensor)
        grid = self._grid()
        kernels.abs_max_encode_rows(x, places, rows, keys=keys, levels=grid.offset, bits=grid.bits, block=grid.block)


@register
class Qsgd(_Symmetric):
    """Rounds at random to 2**(bits-1) - 1 levels either side of zero, against the L2 norm; 1 bit is a random sign.

    `bits`: 1 to 8. `block`: elements that share a norm, a multiple of 64, or 0 for the whole tensor.
    Reference: Alistarh et al. 2017, QSGD, arXiv 1610.02132.

    >>> codec = qsgd(3)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 2.0, 0.0])))  # the norm is 3, there are 3 levels
    tensor([ 1., -2.,  2.,  0.])
    >>> qsgd(4, block=64).wire_bytes(1000)
    608
    """

    name: ClassVar[str] = "qsgd"
    examples: ClassVar[tuple[str, ...]] = ("qsgd:4", "qsgd:1", "qsgd:8,block=64")
    bits: int
    block: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self._require(isinstance(self.bits, int) and 1 <= self.bits <= 8, f"bits must be 1 to 8, got {self.bits}")
        self._require(*block_rule(self.block))

    @property
    def levels(self) -> int:
        """Levels above zero; 0 for the random sign."""
        return (1 << (self.bits - 1)) - 1

    def omega(self, numel: int) -> float:
        d = sharing(numel, self.block)
        return theory.uniform_l2(d, self.levels) if self.levels else theory.one_bit_l2(d)

    def _grid(self) -> Grid:
        return Grid.symmetric(self.bits, self.levels, self.block) if self.levels else Grid(1, 1, 0, self.block)

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        norm = kernels.block_square_sum(flat, block=self.block).sqrt()
        step, inverse = usable_steps(norm / self.levels if self.levels else norm * 2)
        self._grid().pack(flat, self._low(step), inverse, key, out=put(body, step))

    def _low(self, step: Tensor) -> Tensor:
        return torch.zeros_like(step) if self.levels else step * -0.5


@register
class Terngrad(_AgainstLargest):
    """Rounds at random to -1, 0 or 1 times the largest magnitude; two bits an element.

    `block`: elements that share a scale, a multiple of 64, or 0 for the whole tensor. Without the paper's clipping at
    2.5 standard deviations, which is biased.
    Reference: Wen et al. 2017, TernGrad, arXiv 1705.07878.

    >>> terngrad().decode(terngrad().encode(torch.tensor([2.0, 0.0, -2.0, 2.0])))
    tensor([ 2.,  0., -2.,  2.])
    """

    name: ClassVar[str] = "terngrad"
    block: int = 0

    def __post_init__(self) -> None:
        self._require(*block_rule(self.block))

    def omega(self, numel: int) -> float:
        return theory.ternary(sharing(numel, self.block))

    def _grid(self) -> Grid:
        return Grid.symmetric(2, 1, self.block)


@register
class AbsMax(_AgainstLargest):
    """Rounds at random to 2**(bits-1) - 1 levels either side of zero, against the block's largest magnitude.

    `bits`: 2 to 8. `block`: elements that share a scale, a multiple of 64, or 0 for the whole tensor.
    Reference: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861 (the blocks).

    >>> codec = abs_max(8)
    >>> codec.decode(codec.encode(torch.tensor([127.0, -5.0, 0.0])))
    tensor([127.,  -5.,   0.])
    """

    name: ClassVar[str] = "abs_max"
    examples: ClassVar[tuple[str, ...]] = ("abs_max:8", "abs_max:2,block=0")
    bits: int
    block: int = field(default=64, kw_only=True)

    def __post_init__(self) -> None:
        self._require(isinstance(self.bits, int) and 2 <= self.bits <= 8, f"bits must be 2 to 8, got {self.bits}")
        self._require(*block_rule(self.block))

    @property
    def levels(self) -> int:
        """Levels above zero."""
        return (1 << (self.bits - 1)) - 1

    def omega(self, numel: int) -> float:
        d = sharing(numel, self.block)
        return theory.uniform_linf(d, self.levels) if self.levels > 1 else theory.ternary(d)

    def _grid(self) -> Grid:
        return Grid.symmetric(self.bits, self.levels, self.block)


@register
class MinMax(Codec):
    """Rounds at random to 2**bits values evenly spaced between the block's smallest and largest element.

    `bits`: 2 to 8. `block`: elements that share the two ends, a multiple of 64, or 0 for the whole tensor. A constant
    block is exact; one whose spacing would be below 2**-100 is sent as its smallest element.
    Reference: Markov et al. 2022, CGX, arXiv 2111.08617 (which rounds to nearest by default).

    >>> codec = min_max(2)
    >>> codec.decode(codec.encode(torch.tensor([-1.0, 0.0, 1.0, 2.0])))
    tensor([-1.,  0.,  1.,  2.])
    """

    name: ClassVar[str] = "min_max"
    examples: ClassVar[tuple[str, ...]] = ("min_max:4", "min_max:8,block=64")
    unbiased: ClassVar[bool] = True
    bits: int
    block: int = field(default=512, kw_only=True)

    def __post_init__(self) -> None:
        self._require(isinstance(self.bits, int) and 2 <= self.bits <= 8, f"bits must be 2 to 8, got {self.bits}")
        self._require(*block_rule(self.block))

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        grid = self._grid()
        return 2 * grid.scales(numel) * SCALE_BYTES + grid.code_bytes(numel)

    def omega(self, numel: int) -> float:
        return theory.min_max(sharing(numel, self.block), self.bits)

    def _grid(self) -> Grid:
        return Grid(self.bits, 2**self.bits - 1, 0, self.block)

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat, grid = x.reshape(-1), self._grid()
        low, high = kernels.block_min_max(flat, block=self.block)
        # A range beyond float32 counts as not finite: element - low would overflow as well.
        step, inverse = usable_steps((high - low) / grid.top)
        grid.pack(flat, low, inverse, key, out=put(body, low, step))

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        grid = self._grid()
        low, rest = take_scales(body, grid.scales(out.numel()))
        step, packed = take_scales(rest, grid.scales(out.numel()))
        grid.add(out, packed, low, step)


@register
class Natural(Codec):
    """Rounds at random to a neighbouring power of two: nine bits an element, sign and exponent, no scale.

    Takes no arguments. Zero stays zero; subnormal numbers become 0 or 2**-126 without bias, but with more variance than
    `omega` says; magnitudes above 2**127 become 2**127; inf and NaN decode to NaN.
    Reference: Horvath et al. 2019, Natural Compression for Distributed Deep Learning, arXiv 1905.10988.

    >>> natural().decode(natural().encode(torch.tensor([4.0, -0.5, 0.0])))
    tensor([ 4.0000, -0.5000,  0.0000])
    """

    name: ClassVar[str] = "natural"
    unbiased: ClassVar[bool] = True

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return kernels.packed_bytes(numel, 1) + numel

    def not_summable(self) -> str:
        return "the network cannot add numbers in natural: use bf16, all_gather or two_shot"

    def omega(self, numel: int) -> float:
        return theory.natural()

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        bits = x.reshape(-1).view(torch.int32)
        exponent = (bits & 0x7FFFFFFF) >> _MANTISSA_BITS
        # Rounding the mantissa to 0 or 1 tells whether to take the next power of two. For subnormals (exponent field
        # 0, mantissa without the leading 1) the same bit chooses between 0 and 2**-126.
        mantissa = ((bits & _MANTISSA) | _ONE).view(torch.float32) - 1.0
        scale = torch.ones(1, dtype=torch.float32, device=x.device)
        up = _BITS.pack(mantissa, torch.zeros_like(scale), scale, key)
        rounded = (exponent + kernels.unpack(up, bits.numel(), bits=1)).clamp_(max=_LARGEST_EXPONENT)
        rounded[exponent == _NOT_FINITE] = _NOT_FINITE
        put(body, kernels.pack((bits < 0).to(torch.uint8), bits=1), rounded.to(torch.uint8))

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        sign_bytes = kernels.packed_bytes(out.numel(), 1)
        exponent = body[sign_bytes:].to(torch.int32)
        bits = exponent << _MANTISSA_BITS
        bits[exponent == _NOT_FINITE] |= _MANTISSA  # inf becomes NaN
        bits |= kernels.unpack(body[:sign_bytes], out.numel(), bits=1).to(torch.int32) << 31
        out += bits.view(torch.float32)


@register
class Sign(Codec):
    """Sends the sign of each element and the mean magnitude; biased, so use it with error feedback.

    `block`: elements that share a magnitude, a multiple of 64, or 0 for the whole tensor. Zero counts as positive; a
    block of zeros stays zero; a block with inf or NaN decodes to NaN.
    Reference: Karimireddy et al. 2019, Error Feedback Fixes SignSGD, arXiv 1901.09847.

    >>> sign().decode(sign().encode(torch.tensor([1.0, -2.0, 3.0])))
    tensor([ 2., -2.,  2.])
    """

    name: ClassVar[str] = "sign"
    block: int = 0

    def __post_init__(self) -> None:
        self._require(*block_rule(self.block))

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return kernels.blocks_of(numel, self.block) * SCALE_BYTES + kernels.packed_bytes(numel, 1)

    def delta(self, numel: int, *, shape: Shape | None = None) -> float:
        return theory.sign(sharing(numel, self.block))

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        step, _ = usable_steps(2 * block_means(flat.abs(), self.block))  # from minus to plus the magnitude
        put(body, step, kernels.pack((flat >= 0).to(torch.uint8), bits=1))

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        step, packed = take_scales(body, kernels.blocks_of(out.numel(), self.block))
        Grid(1, 1, 0, self.block).add(out, packed, step * -0.5, step)


qsgd = Qsgd
terngrad = Terngrad
abs_max = AbsMax
min_max = MinMax
natural = Natural
sign = Sign
