"""All ranks of a recipe in one process, each a Reducer in its own thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import Tensor

from ..comm.local import LocalNetwork, on_all_ranks
from ..errors import OptionError
from ..memory import RunningMemory
from ..recipe.compose import Recipe
from .reducer import Reducer

_ONLY = "gradient"  # the name of tensors that come without one


class LocalGroup:
    """All ranks of a recipe in this process, each with its own memory, codec state and random draws.

    Every rank is a Reducer, as in a real process, over a network of threads. If the gradient of any rank is not finite,
    neither is the mean, and no memory changes: GradScaler will skip the step.

    >>> import torch
    >>> from thinwire import parse
    >>> group = LocalGroup(parse("ef|top_k:0.5|local"), 2)
    >>> group.mean([torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])], step=0)
    tensor([2., 1.])
    >>> group.memories[0].residual("gradient")
    tensor([0., 1.])
    """

    def __init__(self, recipe: Recipe, world_size: int, *, seed: int = 0, check_every: int = 0) -> None:
        if world_size < 1:
            raise OptionError(f"a group has at least 1 rank, got world_size {world_size}")
        self.recipe = recipe
        self.world_size = world_size
        self.seed = seed
        self._networks = LocalNetwork.of(world_size)
        self.reducers = on_all_ranks(
            self._networks,
            lambda network: Reducer(recipe, group=network, seed=seed, check_every=check_every),
        )

    @property
    def memories(self) -> list[RunningMemory]:
        """What every rank remembers, if the recipe has a memory."""
        memories = [reducer.residuals.memory for reducer in self.reducers]
        return [memory for memory in memories if memory is not None]

    @property
    def networks(self) -> list[LocalNetwork]:
        """The rank's sides of the network, which count what would have been sent."""
        return self._networks

    @overload
    def mean(self, tensors: Sequence[Tensor], step: int) -> Tensor: ...

    @overload
    def mean(self, tensors: Sequence[Mapping[str, Tensor]], step: int) -> dict[str, Tensor]: ...

    def mean(self, tensors: Sequence[Tensor] | Sequence[Mapping[str, Tensor]], step: int) -> Tensor | dict[str, Tensor]:
        """The mean over the ranks as the recipe delivers it: of one tensor a rank, or of named tensors."""
        first: Tensor | dict[str, Tensor] = self.means(tensors, step)[0]
        return first

    def means(self, tensors: Sequence[Tensor] | Sequence[Mapping[str, Tensor]], step: int) -> list[Any]:
        """What every rank gets: the same bits."""
        if len(tensors) != self.world_size:
            raise OptionError(f"this group has {self.world_size} ranks, {len(tensors)} gave tensors: give one each")
        plain: list[Mapping[str, Tensor]] = [{_ONLY: given} for given in tensors if isinstance(given, Tensor)]
        named = plain or [gradients for gradients in tensors if not isinstance(gradients, Tensor)]
        self._check(named)

        def work(network: LocalNetwork) -> dict[str, Tensor]:
            reducer = self.reducers[network.rank]
            reducer.step = step
            means = {name: reducer.reduce(name, gradient) for name, gradient in named[network.rank].items()}
            reducer.commit()
            return means

        results = on_all_ranks(self._networks, work)
        return [rank[_ONLY] for rank in results] if plain else results

    def _check(self, named: Sequence[Mapping[str, Tensor]]) -> None:
        if len(named) != self.world_size or any(gradients.keys() != named[0].keys() for gradients in named):
            raise OptionError("the ranks name different tensors: give the same parameters on every rank")
        for name, first in named[0].items():
            if any(gradients[name].shape != first.shape for gradients in named):
                raise OptionError(
                    f"the shapes of {name} differ between the ranks: give the same parameter on every rank"
                )
