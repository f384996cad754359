"""What a rank knows of its neighbours' models: each of them, or only their weighted sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..codecs.base import Codec
from ..errors import ExchangeError, StateError


def move(view: Tensor, message: Tensor, codec: Codec, keep: float, take: float) -> None:
    """view <- keep view + take C, where C is what the message says."""
    if keep == 1.0 and take == 1.0:
        codec.add(message, view)
    elif keep == 0.0 and take == 1.0:
        codec.put(message, view)
    else:
        view.mul_(keep).add_(codec.decode(message, numel=view.numel()), alpha=take)


class Replicas:
    """A copy of every neighbour's model as that neighbour says it is: any of them can be left out of a round.

    >>> import torch
    >>> views = Replicas(torch.zeros(2), [1])
    >>> views.of(1).fill_(3.0)
    tensor([3., 3.])
    >>> views.mixed(torch.zeros(2), 0, {1: 0.5})
    tensor([1.5000, 1.5000])
    """

    each = True

    def __init__(self, start: Tensor, peers: Iterable[int]) -> None:
        self._of = {peer: start.clone() for peer in peers}

    def restart(self, model: Tensor) -> None:
        for view in self._of.values():
            view.copy_(model)

    def of(self, peer: int) -> Tensor:
        return self._of[peer]

    def put(self, peer: int, view: Tensor) -> None:
        """A snapshot of the neighbour."""
        if peer in self._of:
            self._of[peer].copy_(view)
        else:
            self._of[peer] = view.clone()

    def remove(self, peer: int) -> None:
        self._of.pop(peer, None)

    def absorb(self, messages: Mapping[int, Tensor], codec: Codec, keep: float, take: float) -> None:
        for peer, message in messages.items():
            if peer in self._of:
                move(self._of[peer], message, codec, keep, take)
            else:  # it has come back, with a whole model: what tracks changes begins with a snapshot
                self._of[peer] = codec.decode(message)

    def mixed(self, own: Tensor, rank: int, coefficients: Mapping[int, float]) -> Tensor:
        """own and the neighbours' views, weighted, added in the order of ranks."""
        shares = {**coefficients, rank: 1.0 - sum(coefficients.values())}
        total: Tensor | None = None
        for peer in sorted(shares):
            view = own if peer == rank else self._of[peer]
            total = view * shares[peer] if total is None else total.add_(view, alpha=shares[peer])
        assert total is not None
        return total

    def state(self) -> dict[str, Any]:
        return {"each": {peer: view.clone() for peer, view in self._of.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        if "each" not in state:
            raise StateError("this state has one running sum for all neighbours: give the same deadline as when saving")
        self._of = {int(peer): view.clone() for peer, view in state["each"].items()}


class RunningSum:
    """The weighted sum of all neighbours' models: one vector, however many there are, but none can be left out.

    >>> import torch
    >>> views = RunningSum(torch.ones(2), {1: 0.25, 2: 0.25})
    >>> views.mixed(torch.ones(2), 0, {1: 0.25, 2: 0.25})
    tensor([1., 1.])
    """

    each = False

    def __init__(self, start: Tensor, weights: Mapping[int, float]) -> None:
        self._weights = dict(sorted(weights.items()))
        self._sum = start * sum(self._weights.values())

    def restart(self, model: Tensor) -> None:
        self._sum = model * sum(self._weights.values())

    def of(self, peer: int) -> Tensor:
        raise StateError("there is one running sum for all neighbours: give a deadline to have a view of each")

    def put(self, peer: int, view: Tensor) -> None:
        raise ExchangeError(f"one sum for all neighbours cannot take a snapshot of rank {peer}: give a deadline")

    def remove(self, peer: int) -> None:
        raise ExchangeError(f"one sum for all neighbours cannot do without rank {peer}: give a deadline")

    def absorb(self, messages: Mapping[int, Tensor], codec: Codec, keep: float, take: float) -> None:
        if keep != 1.0:
            self._sum.mul_(keep)
        for peer, weight in self._weights.items():
            self._sum.add_(codec.decode(messages[peer], numel=self._sum.numel()), alpha=weight * take)

    def mixed(self, own: Tensor, rank: int, coefficients: Mapping[int, float]) -> Tensor:
        """The coefficients are those of the sum times a factor that is the same for all, 1 but for CHOCO."""
        if not coefficients:
            return own.clone()
        whole = sum(self._weights.values())
        factor = sum(coefficients.values()) / whole
        return (own * (1.0 - factor * whole)).add_(self._sum, alpha=factor)

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum.clone()}

    def load(self, state: Mapping[str, Any]) -> None:
        if "sum" not in state:
            raise StateError("this state has a view of each neighbour: give the same deadline as when saving")
        self._sum.copy_(state["sum"])
