"""What a second shot kept back, given to the memory where a bucket has no second shot any more.

It lies with one rank alone. It is part of a mean, and a residual part of a sum: hence times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..exchange.first_shot import pieces
from ..memory import ErrorFeedback
from ..recipe.compose import Recipe
from .buckets import Bucket
from .residuals import Residuals

if TYPE_CHECKING:
    from .reducer import Reducer


def keep(reducer: Reducer, old: Residuals, new: Residuals, *, names: Collection[str] | None = None) -> None:
    """Move what second shots of `old` kept back into the memory of `new`: of the buckets with these names, or of all.

    Without a memory there is one from now on, whose content goes with the next step.
    """
    backs = {name: old.backs.pop(name) for name in list(old.backs) if names is None or name in names}
    if not backs:
        return
    if new.memory is None:
        new.memory = ErrorFeedback().start()
    for bucket in reducer.layout.buckets:
        if bucket.name in backs:
            if bucket.name not in new.memory.names():
                new.memory.put(bucket.name, {key: _blank(bucket) for key in new.memory.keeps})
            mine = pieces(bucket.numel, reducer.world_size)[reducer.rank]
            new.memory.residual(bucket.name).view(-1)[mine].add_(backs[bucket.name], alpha=reducer.world_size)


def override(reducer: Reducer, overrides: Mapping[str, Recipe]) -> None:
    """Let these buckets travel by other recipes in this step; what a second shot kept back goes with it."""
    residuals = reducer.residuals
    residuals.override(overrides)
    left = [name for name in residuals.backs if not residuals.recipe_of(name).exchange.feedback]
    if left:
        with reducer.timeline.beside():
            keep(reducer, residuals, residuals, names=left)


def _blank(bucket: Bucket) -> Tensor:
    shape = bucket.parts[0].shape if len(bucket.parts) == 1 else (bucket.numel,)
    return torch.zeros(shape, device=bucket.device)
