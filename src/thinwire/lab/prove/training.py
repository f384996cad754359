"""A small DDP training for the contract: the same numbers in every run, gradients that can be given or spoilt."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

from .place import Place

_BUCKET_MB = 0.02  # several buckets even for a small model
_INPUTS, _BATCH = 48, 8


class Net(nn.Module):
    """Its layers are used in another order than they are made, so that DDP changes its buckets after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 40)
        self.middle = nn.Linear(96, 64)
        self.first = nn.Linear(_INPUTS, 96)
        self.norm = nn.LayerNorm(96)

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> Tensor:
        """The loss of a batch; or, for a list of tensors, a loss whose gradients are exactly these."""
        if not isinstance(inputs, Tensor):
            return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), inputs, strict=True)]).sum()
        x = self.norm(torch.tanh(self.first(inputs)))
        found: Tensor = self.last(torch.tanh(self.middle(x)))
        return found.square().mean()


class Training:
    """One model in training by one recipe; by plain DDP if that is None. Closes its link at the end of a `with`."""

    def __init__(self, recipe: str | None, place: Place, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.place = place
        self.net = Net().to(place.device)
        options: dict[str, Any] = {"device_ids": [place.device]} if place.device.type == "cuda" else {}
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=_BUCKET_MB, **options)
        self.link = None if recipe is None else thinwire.attach(self.model, recipe)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.link is not None:
            self.link.close()

    def loss(self, model: nn.Module, number: int) -> Any:
        """Of this rank's batch of a step, as a tensor."""
        draw = torch.Generator().manual_seed(1000 * number + self.place.rank)
        return model(torch.randn(_BATCH, _INPUTS, generator=draw).to(self.place.device))

    def step(self, number: int) -> bool:
        """One step of training; whether its gradients were finite, which is when the weights change."""
        self._optimizer.zero_grad()
        self.loss(self.model, number).backward()
        finite = all(bool(gradient.isfinite().all()) for gradient in self.gradients())
        if finite:
            self._optimizer.step()
        return finite

    def backward_of(self, gradients: Sequence[Tensor]) -> None:
        """One backward pass in which this rank has the given gradients; the weights stay."""
        self._optimizer.zero_grad()
        self.model(list(gradients)).backward()

    def spoil(self, parameter: str, value: float | None) -> None:
        """Put a value into one element of a gradient in the next backward pass; None for another rank's turn."""
        pending = [value]

        def hook(gradient: Tensor) -> Tensor | None:
            found = pending.pop() if pending else None
            if found is None:
                return None
            gradient = gradient.clone()
            gradient.view(-1)[7] = found
            return gradient

        self.net.get_parameter(parameter).register_hook(hook)  # type: ignore[no-untyped-call]

    def local_copy(self) -> Net:
        """The same weights without DDP."""
        return copy.deepcopy(self.net)

    def gradients(self) -> list[Tensor]:
        return [p.grad.detach().clone() for p in self.net.parameters() if p.grad is not None]

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def all_finite(self) -> bool:
        return all(bool(weight.isfinite().all()) for weight in self.weights())


def given_gradients(net: nn.Module, place: Place, number: int) -> list[Tensor]:
    """Gradients that depend on rank and step alone, of a mean that is not zero."""
    draw = torch.Generator().manual_seed(7919 * number + 31 * place.rank + 1)
    made = [torch.randn(p.shape, generator=draw) + 0.3 for p in net.parameters()]
    return [(gradient / math.sqrt(gradient.numel())).to(place.device) for gradient in made]
