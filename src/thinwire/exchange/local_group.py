"""A network in one process: n ranks encode, all messages are decoded and averaged. For trying out and for tests."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, State
from ..codecs.global_qsgd import GlobalQsgd
from ..codecs.low_rank import LowRank
from ..draw import Draw
from ..errors import OptionError, RecipeError
from .declared import AllGather, AllReduce, Local

if TYPE_CHECKING:
    from ..recipe import Recipe  # recipes know exchanges, not the other way round

_ONLY = "gradient"  # the name of tensors that come without one


class LocalGroup:
    """All ranks of a recipe in this process, each with its own memory, codec state and random draws.

    Stands in for `all_gather` and `all_reduce`, where the result is the mean of what the messages say; the scale of
    `global_qsgd` and the factors of `low_rank` are shared between the ranks as an all-reduce shares them. If the
    gradient of any rank is not finite, neither is the mean, and no memory changes: GradScaler will skip the step.

    >>> import torch
    >>> from thinwire import parse
    >>> group = LocalGroup(parse("ef|top_k:0.5|local"), 2)
    >>> group.mean([torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])], step=0)
    tensor([2., 1.])
    >>> group.memories[0].residual("gradient")
    tensor([0., 1.])
    """

    def __init__(self, recipe: Recipe, world_size: int, *, seed: int = 0) -> None:
        if not isinstance(recipe.exchange, (AllGather, AllReduce, Local)):
            raise RecipeError(
                f"LocalGroup has no {recipe.exchange.name}: write all_gather, all_reduce or local in its place"
            )
        if world_size < 1:
            raise OptionError(f"a group has at least 1 rank, got world_size {world_size}")
        self.recipe = recipe
        self.world_size = world_size
        self.seed = seed
        self.memories = [recipe.memory.start() for _ in range(world_size)] if recipe.memory else []
        self._states: list[dict[str, State]] = [{} for _ in range(world_size)]

    @overload
    def mean(self, tensors: Sequence[Tensor], step: int) -> Tensor: ...

    @overload
    def mean(self, tensors: Sequence[Mapping[str, Tensor]], step: int) -> dict[str, Tensor]: ...

    def mean(self, tensors: Sequence[Tensor] | Sequence[Mapping[str, Tensor]], step: int) -> Tensor | dict[str, Tensor]:
        """The mean over the ranks as the recipe delivers it: of one tensor a rank, or of named tensors."""
        if len(tensors) != self.world_size:
            raise OptionError(f"this group has {self.world_size} ranks, {len(tensors)} gave tensors: give one each")
        plain = [gradient for gradient in tensors if isinstance(gradient, Tensor)]
        if plain:
            return self._mean_of(_ONLY, plain, step)
        named = [gradients for gradients in tensors if not isinstance(gradients, Tensor)]
        if any(gradients.keys() != named[0].keys() for gradients in named):
            raise OptionError("the ranks name different tensors: give the same parameters on every rank")
        return {name: self._mean_of(name, [rank[name] for rank in named], step) for name in named[0]}

    def _mean_of(self, name: str, gradients: list[Tensor], step: int) -> Tensor:
        first = gradients[0]
        if len(gradients) != self.world_size or any(gradient.shape != first.shape for gradient in gradients):
            raise OptionError(f"the shapes of {name} differ between the ranks: give the same parameter on every rank")
        draws = [Draw(seed=self.seed, step=step, stream=name, rank=rank) for rank in range(self.world_size)]
        codec = self.recipe.codec
        summing = not isinstance(self.recipe.exchange, AllGather)
        if not all(kernels.all_finite(gradient) for gradient in gradients):
            total = self._sum_of([codec.encode(x, draw=draw) for x, draw in zip(gradients, draws, strict=True)], first)
        elif isinstance(codec, GlobalQsgd) and summing:
            total = self._shared_scale_sum(codec, name, gradients, draws)
        elif isinstance(codec, LowRank) and summing and codec.pays(tuple(first.shape)):
            total = self._factor_sum(codec, name, gradients, draws)
        else:
            total = self._sum_of(
                [self._encode(name, *rank) for rank in enumerate(zip(gradients, draws, strict=True))], first
            )
        return (total / self.world_size).view(first.shape).to(first.dtype)

    # ------------------------------------------------------------------------------------------ messages of ranks

    def _encode(self, name: str, rank: int, given: tuple[Tensor, Draw]) -> Tensor:
        gradient, draw = given
        if self.memories:
            return self.memories[rank].encode(self.recipe.codec, gradient, name=name, draw=draw)
        return self.recipe.codec.encode(gradient, draw=draw, state=self._state(name, rank))

    def _sum_of(self, messages: list[Tensor], like: Tensor) -> Tensor:
        """Added in rank order, so that every rank would get the same bits."""
        total = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        for message in messages:
            self.recipe.codec.add(message, total, shape=tuple(like.shape))
        return total

    def _state(self, name: str, rank: int) -> State:
        codec: Codec = self.recipe.codec
        if self.memories:
            return self.memories[rank].codec_state(codec, name=name)
        return self._states[rank].setdefault(name, codec.new_state())

    # ------------------------------------------------------------------------- sums that the ranks prepare together

    def _compensated(self, name: str, gradients: list[Tensor]) -> list[Tensor]:
        if not self.memories:
            return [gradient.detach().to(torch.float32) for gradient in gradients]
        return [m.compensate(gradient, name=name) for m, gradient in zip(self.memories, gradients, strict=True)]

    def _shared_scale_sum(self, codec: GlobalQsgd, name: str, gradients: list[Tensor], draws: list[Draw]) -> Tensor:
        n = self.world_size
        inputs = self._compensated(name, gradients)
        norms = torch.stack([codec.local_norm(x) for x in inputs])
        scale = codec.scale_from(norms.amax(dim=0) if codec.combination == "max" else norms.sum(dim=0))
        codes = [codec.to_sum(x, scale=scale, world_size=n, draw=d) for x, d in zip(inputs, draws, strict=True)]
        for memory, x, own in zip(self.memories, inputs, codes, strict=bool(self.memories)):
            memory.remember(x, codec.from_sum(own, scale=scale, world_size=n).view(x.shape), name=name)
        if codec.addition == "sum":
            total = functools.reduce(torch.add, codes)  # in the codes' own narrow type, as on the wire
        else:
            total = self._tree_sum(codec, codes, draws[0])
        return codec.from_sum(total, scale=scale, world_size=n)

    def _tree_sum(self, codec: GlobalQsgd, codes: list[Tensor], draw: Draw) -> Tensor:
        """Exponential codes, neighbour with neighbour, until one is left; every addition has a draw of its own."""
        fresh = self.world_size  # ranks below draw for encoding
        while len(codes) > 1:
            level = []
            for left, right in zip(codes[::2], codes[1::2], strict=False):
                level.append(codec.add_codes(left, right, Draw(draw.seed, draw.step, draw.stream, fresh)))
                fresh += 1
            codes = level + codes[2 * len(level) :]
        return codes[0]

    def _factor_sum(self, codec: LowRank, name: str, gradients: list[Tensor], draws: list[Draw]) -> Tensor:
        inputs = self._compensated(name, gradients)
        states = [self._state(name, rank) for rank in range(self.world_size)]
        for _ in range(codec.iterations):
            lefts = [codec.left(x, state=s, draw=d) for x, s, d in zip(inputs, states, draws, strict=True)]
            p = codec.orthonormal(self._factor_mean(codec, lefts))
            q = self._factor_mean(codec, [codec.right(x, p) for x in inputs])
            for state in states:
                codec.warm(state, q)
        mean = codec.restore(p, q, tuple(gradients[0].shape))
        for memory, x in zip(self.memories, inputs, strict=bool(self.memories)):
            memory.remember(x, mean, name=name)
        return mean.reshape(-1) * self.world_size

    def _factor_mean(self, codec: LowRank, factors: list[Tensor]) -> Tensor:
        sent = [codec.factors.decode(codec.factors.encode(factor), shape=tuple(factor.shape)) for factor in factors]
        return functools.reduce(torch.add, sent) / self.world_size
