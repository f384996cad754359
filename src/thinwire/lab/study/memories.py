"""u = g + e without changing e: the input of the codec, computed on a copy of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...attach import Link
from ...errors import OptionError
from ...memory import ErrorFeedback, Memory
from ...recipe.compose import Recipe
from ...reduce.buckets import one_dimensional_or_tiny
from ...reduce.local_group import LocalGroup


def compensated(gradient: Tensor, kept: Mapping[str, Tensor], memory: Memory) -> Tensor:
    """u of a flat gradient, given the residual that a memory of this kind keeps; changes neither.

    >>> compensated(torch.tensor([1.0, 2.0]), {"residual": torch.tensor([0.5, 0.0])}, ErrorFeedback())
    tensor([1.5000, 2.0000])
    """
    twin = memory.start()
    twin.put("u", {key: kept[key].reshape(-1).clone() for key in twin.keeps})
    u = gradient.to(torch.float32, copy=True)
    found = twin.begin(u, name="u")
    return u if found.residual is None else u.add_(found.residual, alpha=found.decay)


class Source(Protocol):
    """Where e comes from."""

    def offered(self, name: str, gradient: Tensor) -> Tensor | None:
        """u of a parameter whose flat gradient is ready, or None if it is the gradient itself."""

    def end_step(self, gradients: Mapping[str, Tensor]) -> None:
        """All gradients of a step are ready."""

    @property
    def recipe(self) -> str: ...


class NoMemory:
    """u = g."""

    recipe = "no memory"

    def offered(self, name: str, gradient: Tensor) -> Tensor | None:
        return None

    def end_step(self, gradients: Mapping[str, Tensor]) -> None:
        pass


class OfLink:
    """The memory of the attached recipe on this rank. It changes after backward, so e is there during it."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @property
    def recipe(self) -> str:
        return str(self.link.recipe)

    def offered(self, name: str, gradient: Tensor) -> Tensor | None:
        # Not link.residual(name), which copies the memory of the whole model for each name.
        residuals, bucket = self.link.reducer.residuals, self.link.layout.of.get(name)
        if residuals.memory is None or bucket is None:
            return None
        part = next((part for part in bucket.parts if part.name == name), None)
        kept = residuals.memory.tensors(bucket.name)
        if part is None or not kept:  # it is sent exactly, or has no residual yet
            return None
        kind = residuals.recipe_of(bucket.name).memory or ErrorFeedback()
        return compensated(gradient, {key: part.of(tensor.view(-1)) for key, tensor in kept.items()}, kind)

    def end_step(self, gradients: Mapping[str, Tensor]) -> None:
        pass


class OwnMemory:
    """Error feedback for the study alone: a memory that is fed with the gradients of training.

    Every parameter is compressed for itself; those that `attach` would send exact are left out.
    """

    def __init__(self, recipe: Recipe, named: Mapping[str, Tensor], *, seed: int) -> None:
        if recipe.memory is None:
            raise OptionError(
                f"{recipe} has no memory, so u would be the gradient: leave recipe out, or begin with ef|"
            )
        self._recipe, self._memory, self._step = recipe, recipe.memory, 0
        self._group = LocalGroup(recipe, 1, seed=seed)
        self._shapes = {name: tuple(p.shape) for name, p in named.items() if not one_dimensional_or_tiny(name, p)}

    @property
    def recipe(self) -> str:
        return str(self._recipe)

    def offered(self, name: str, gradient: Tensor) -> Tensor | None:
        kept = self._group.memories[0].tensors(name)
        return compensated(gradient, kept, self._memory) if kept else None

    def end_step(self, gradients: Mapping[str, Tensor]) -> None:
        known = {name: gradients[name].view(shape) for name, shape in self._shapes.items() if name in gradients}
        if known:
            self._group.mean([known], step=self._step)
        self._step += 1


def unwrapped(model: nn.Module) -> tuple[nn.Module, Link | None]:
    """The module inside DDP, and the recipe attached to it, if any.

    >>> layer = nn.Linear(2, 2)
    >>> unwrapped(layer) == (layer, None)
    True
    """
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(inner, DistributedDataParallel):
        return inner, None
    states = [state for _, state in getattr(inner, "_comm_hooks", [])]
    return inner.module, next((state for state in states if isinstance(state, Link)), None)
