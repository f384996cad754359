"""Outer optimizers: what a round does with the mean pseudo-gradient. They are those of torch.optim."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import OptionError, StateError

_KINDS = {  # the numbers that may follow, and their defaults
    "average": (),
    "none": (1.0,),
    "sgd": (1.0, 0.0),
    "nesterov": (0.7, 0.9),
}


@dataclasses.dataclass(frozen=True)
class Outer:
    """start = start - lr * (momentum applied to the mean of start - end); torch.optim.SGD does it.

    `average` is lr 1 without momentum: the mean of the ranks' parameters. `none` has no momentum either, because the
    decayed feedback of the recipe takes its place (SparseLoCo, arXiv 2508.15706).

    >>> print(outer_of("nesterov"), outer_of("nesterov:0.4,0.9"), outer_of("average"))
    nesterov:0.7,0.9 nesterov:0.4,0.9 average
    """

    kind: str
    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise OptionError(f"there is no outer optimizer {self.kind}: use {', '.join(_KINDS)}")
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise OptionError(f"outer has a rate above 0 and a momentum from 0 to below 1, not {self}")
        if self.kind == "nesterov" and not self.momentum:
            raise OptionError("nesterov needs a momentum above 0: write nesterov:0.7,0.9, or sgd:0.7")

    def __call__(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        """Over these tensors."""
        return torch.optim.SGD(tensors, lr=self.lr, momentum=self.momentum, nesterov=self.kind == "nesterov")

    def __str__(self) -> str:
        numbers = (self.lr, self.momentum)[: len(_KINDS[self.kind])]
        return f"{self.kind}:{','.join(f'{number:g}' for number in numbers)}" if numbers else self.kind


def outer_of(text: Outer | str) -> Outer:
    """An outer optimizer from `name:lr,momentum`; what is left out has its default."""
    if isinstance(text, Outer):
        return text
    if not isinstance(text, str):
        raise OptionError(f'outer is a text such as "nesterov:0.7,0.9", or builds an optimizer, not {text!r}')
    kind, _, written = text.strip().partition(":")
    if kind not in _KINDS:
        raise OptionError(f"there is no outer optimizer {kind}: use {', '.join(_KINDS)}")
    defaults = _KINDS[kind]
    try:
        given = tuple(float(number) for number in written.split(",")) if written else ()
    except ValueError:
        raise OptionError(f"outer {text}: write the rate and the momentum as numbers, nesterov:0.7,0.9") from None
    if len(given) > len(defaults):
        raise OptionError(f"outer {text} gives {len(given)} numbers, {kind} takes {len(defaults)}: leave out the rest")
    return Outer(kind, *(given + defaults[len(given) :]))


class OuterSteps:
    """One optimizer for each fragment, over the copies of the start."""

    def __init__(self, build: Any, fragments: Sequence[Sequence[Tensor]]) -> None:
        self._tensors = [list(tensors) for tensors in fragments]
        self._optimizers: list[torch.optim.Optimizer] = []
        for tensors in self._tensors:
            optimizer = build(list(tensors))
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise OptionError(f"outer builds a torch.optim.Optimizer from tensors, and gave {optimizer!r}")
            self._optimizers.append(optimizer)

    def step(self, fragment: int, means: Sequence[Tensor]) -> None:
        """Apply the means to the start, in place."""
        tensors = self._tensors[fragment]
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.grad = mean.to(tensor.device)
        self._optimizers[fragment].step()
        for tensor in tensors:
            tensor.grad = None

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(self._optimizers):
            raise StateError(f"the state has {len(states)} fragments, here are {len(self._optimizers)}: use as many")
        for optimizer, state in zip(self._optimizers, states, strict=True):
            try:
                optimizer.load_state_dict(dict(state))
            except ValueError as refusal:
                raise StateError(f"the state of the outer optimizer does not fit ({refusal}): use the same") from None
