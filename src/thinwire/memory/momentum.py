"""Momentum correction: error feedback on the velocity instead of the gradient (Deep Gradient Compression)."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..errors import OptionError, StateError
from ..recipe.registry import register
from ..rng import Draw
from .base import Compensation, Idle, Memory, RunningMemory


@register
class MomentumCorrection(Memory):
    """m = momentum * m + g, v = v + m, send the largest of v (Lin et al. 2018, arXiv 1712.01887, algorithm 1).

    It replaces the optimizer's momentum: train with plain SGD. `nesterov` is m = momentum * (m + g), v = v + m + g.
    `masking` sets m to zero where v was sent, so that stale momentum does not push the same way once more; v keeps
    there only what rounding the values lost.

    >>> import torch
    >>> from thinwire.codecs import top_k
    >>> memory = MomentumCorrection(0.5).start()
    >>> codec = top_k(0.5)
    >>> codec.decode(memory.encode(codec, torch.tensor([4.0, 1.0]), name="weight"))
    tensor([4., 0.])
    >>> codec.decode(memory.encode(codec, torch.tensor([0.0, 1.0]), name="weight"))
    tensor([0.0000, 2.5000])
    """

    name = "momentum_correction"

    momentum: float = 0.9
    nesterov: bool = field(default=False, kw_only=True)
    masking: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        fits = isinstance(self.momentum, (int, float)) and 0.0 <= self.momentum < 1.0
        self._require(fits, f"momentum must be at least 0 and below 1, got {self.momentum}")

    def start(self) -> MomentumMemory:
        return MomentumMemory(self)

    def accepts(self, codec: Codec) -> str | None:
        if codec.sparse:
            return None
        return (
            f"momentum_correction keeps the velocity of elements that are not sent, and {codec.name} sends all: "
            "use it with a sparsifier such as top_k:0.01, or use error_feedback"
        )


class MomentumMemory(RunningMemory):
    """Momentum and unsent velocity (`residual`) of one training run.

    >>> import torch
    >>> memory = MomentumCorrection(0.5).start()
    >>> u = torch.tensor([1.0, 2.0])
    >>> memory.begin(u, name="bias")
    Compensation(residual=None, decay=1.0)
    >>> spare = memory.keep(torch.tensor([1.0, 0.0]), name="bias", positions=torch.tensor([1]))
    >>> memory.residual("bias"), memory.momentum("bias")
    (tensor([1., 0.]), tensor([1., 0.]))
    """

    kind = MomentumCorrection.name
    keeps = ("residual", "momentum")

    def __init__(self, options: MomentumCorrection) -> None:
        super().__init__()
        self.options = options
        self._advanced: dict[str, Tensor] = {}  # momenta between begin and keep
        self._spare: dict[str, Tensor] = {}  # tensors that hold no momentum any more

    def momentum(self, name: str) -> Tensor:
        """The momentum of a parameter: the live tensor, clone it to keep it."""
        self.residual(name)
        return self._kept[name]["momentum"]

    def _step(self, momentum: Tensor, gradient: Tensor) -> Tensor:
        """Advance the momentum in place and return what the velocity grows by."""
        if self.options.nesterov:
            momentum.add_(gradient).mul_(self.options.momentum)
            return momentum + gradient
        return momentum.mul_(self.options.momentum).add_(gradient)

    def encode(self, codec: Codec, gradient: Tensor, *, name: str, draw: Draw | None = None) -> Tensor:
        if refusal := self.options.accepts(codec):
            raise OptionError(refusal)
        return super().encode(codec, gradient, name=name, draw=draw)

    def begin(self, gradient: Tensor, *, name: str) -> Compensation:
        kept = self._kept_of(name, gradient)
        advanced = self._spare.pop(name, None)
        advanced = kept["momentum"].clone() if advanced is None else advanced.copy_(kept["momentum"])
        growth = self._step(advanced, gradient)
        self._advanced[name] = advanced
        torch.add(kept["residual"], growth, out=gradient)
        return Compensation(None)

    def keep(self, rest: Tensor, *, name: str, positions: Tensor | None = None, idle: Idle = ()) -> Tensor:
        advanced = self._advanced.pop(name, None)
        if advanced is None:
            raise StateError(f"keep({name}) follows begin({name}) of the same step: call begin first")
        if self.options.masking and positions is not None:
            advanced.view(-1)[positions.to(torch.int64)] = 0.0
        kept = self._kept_of(name, rest)
        for part, flag in idle:
            old, new = kept["momentum"].view(-1)[part], advanced.view(-1)[part]
            advanced.view(-1)[part] = torch.where(flag, old, new) if isinstance(flag, Tensor) else old
        kept["momentum"], self._spare[name] = advanced, kept["momentum"]
        return super().keep(rest, name=name, idle=idle)

    def discard(self, *, name: str) -> None:
        if name in self._advanced:
            self._spare[name] = self._advanced.pop(name)

    def rescale(self, factor: float, *, codec: Codec | None = None) -> None:
        super().rescale(factor, codec=codec)
        for advanced in self._advanced.values():
            advanced *= factor

    def reset(self) -> None:
        super().reset()
        self._advanced.clear()
        self._spare.clear()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._advanced.clear()
        self._spare.clear()


momentum_correction = MomentumCorrection
