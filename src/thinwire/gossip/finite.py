"""Values that are not finite stay on the rank that made them: updates, buffers, and the optimizer's state."""

from __future__ import annotations

import torch
from torch import Tensor

from .validate import largest_value, within

_MARGIN = 100.0  # an update this much below what neighbours refuse is taken


def acceptable(update: Tensor, model: Tensor) -> bool:
    """Whether the update is finite and leaves a model that the neighbours accept.

    >>> model = torch.ones(2)
    >>> [acceptable(torch.tensor([0.1, value]), model) for value in (3.0, 1e9, float("nan"))]
    [True, False, False]
    """
    return within(update, largest_value(model) / _MARGIN)


def restore_finite(now: Tensor, before: Tensor) -> tuple[Tensor, int]:
    """`now`, with the values of `before` where only `now` is not finite; and how many those are.

    Values that were not finite before are meant to be so, such as those of an attention mask.

    >>> inf = float("inf")
    >>> restore_finite(torch.tensor([inf, 2.0, -inf]), torch.tensor([1.0, 1.0, -inf]))
    (tensor([1., 2., -inf]), 1)
    """
    lost = ~torch.isfinite(now) & torch.isfinite(before)
    count = int(lost.sum())
    return (torch.where(lost, before, now), count) if count else (now, 0)


def only_finite(values: Tensor) -> Tensor:
    """A copy with 0 in place of every value that is not finite.

    >>> only_finite(torch.tensor([1.0, float("nan"), float("-inf")]))
    tensor([1., 0., 0.])
    """
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    """Set values of the optimizer's state that are not finite to 0. Otherwise every later update would be skipped.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.tensor([float("inf"), 2.0])
    >>> clear_state(optimizer)
    >>> optimizer.state[weight]["momentum_buffer"]
    tensor([0., 2.])
    """
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
