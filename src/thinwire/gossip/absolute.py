"""A quantiser with a fixed grid, as the theory of ECD-PSGD requires; and the codecs that gossip accepts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape, State
from ..codecs.scales import Grid
from ..errors import OptionError, RecipeError
from ..recipe.compose import parse
from ..rng import Key


@dataclass(frozen=True, repr=False)
class Absolute(Codec):
    """Rounds stochastically to multiples of `step`; larger values are clipped to the last level.

    The noise is at most step^2 / 4 for each element, whatever its size, as assumption 2 of ECD-PSGD requires. It is not
    proportional to the input. So there is neither `omega` nor `delta`, and the codec is not for gradients.

    >>> codec = Absolute(8, step=0.5)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.5, 100.0])))
    tensor([ 1.0000, -2.5000, 63.5000])
    """

    name: ClassVar[str] = "absolute"
    bits: int
    step: float = field(default=0.01, kw_only=True)

    def __post_init__(self) -> None:
        self._require(isinstance(self.bits, int) and 2 <= self.bits <= 8, f"bits must be 2 to 8, got {self.bits}")
        self._require(2.0**-60 < self.step < 2.0**60, f"step must be a positive number, got {self.step}")

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return self._grid().code_bytes(numel)

    def _grid(self) -> Grid:
        return Grid.symmetric(self.bits, (1 << (self.bits - 1)) - 1, 0)

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        grid = self._grid()
        end = grid.offset * self.step
        flat = x.reshape(-1).nan_to_num(nan=end, posinf=end, neginf=-end).clamp(-end, end)
        low, inverse = torch.zeros(1), torch.full((1,), 1 / self.step)
        grid.pack(flat, low.to(flat.device), inverse.to(flat.device), key, out=body)

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        low, step = torch.zeros(1, device=out.device), torch.full((1,), self.step, device=out.device)
        self._grid().add(out, body, low, step)


def gossip_codec(spelled: str | Codec) -> Codec:
    """The codec of a text such as `min_max:4,block=512` or `absolute:8,step=0.01`: no memory, no exchange.

    >>> gossip_codec("min_max:4,block=512")
    min_max(4)
    >>> gossip_codec("ef|top_k:0.01")
    Traceback (most recent call last):
    thinwire.errors.OptionError: gossip takes one codec without a memory: leave the first word out
    """
    if isinstance(spelled, Codec):
        codec = spelled
    elif spelled.partition(":")[0] == Absolute.name:
        codec = _absolute(spelled)
    else:
        try:
            recipe = parse(f"{spelled}|local")
        except RecipeError as refusal:
            raise OptionError(str(refusal)) from None
        if recipe.memory is not None:
            raise OptionError("gossip takes one codec without a memory: leave the first word out")
        codec = recipe.codec
    if codec.needs_shape:
        raise OptionError(f"{codec.spec()} needs matrices, and gossip sends one flat tensor: use another codec")
    return codec


def _absolute(spelled: str) -> Absolute:
    bits, _, step = spelled.partition(":")[2].partition(",")
    try:
        options = {"step": float(step.partition("step=")[2])} if step else {}
        return Absolute(int(bits), **options)
    except ValueError as problem:
        raise OptionError(f"{spelled}: write absolute:8,step=0.01 ({problem})") from None


def gaussian_noise(codec: Codec, numel: int) -> float:
    """|C(x) - x|^2 / |x|^2 for Gaussian x. Every rank computes the same value, without communication.

    >>> gaussian_noise(gossip_codec("min_max:4,block=512"), 1 << 16) < 0.05
    True
    """
    numel = max(64, min(numel, 1 << 16))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    left = x.clone()
    codec.encode_taking(left)
    return float(left.square().sum() / x.square().sum())
