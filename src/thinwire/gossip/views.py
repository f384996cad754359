"""The neighbours' models as this rank knows them: one copy for each neighbour, or only their weighted sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..codecs.base import Codec
from ..errors import ExchangeError, MessageError, StateError
from .validate import LARGEST, within


def apply_payload(view: Tensor, payload: Tensor, codec: Codec, keep: float, take: float) -> None:
    """view <- keep * view + take * C, where C is the decoded payload."""
    if keep == 1.0 and take == 1.0:
        codec.add(payload, view)
    elif keep == 0.0 and take == 1.0:
        codec.put(payload, view)
    else:
        view.mul_(keep).add_(codec.decode(payload, numel=view.numel()), alpha=take)


class Replicas:
    """One copy of each neighbour's model. A round can leave out any neighbour.

    >>> import torch
    >>> views = Replicas(torch.zeros(2), [1])
    >>> views.of(1).fill_(3.0)
    tensor([3., 3.])
    >>> views.mixed(torch.zeros(2), 0, {1: 0.5})
    tensor([1.5000, 1.5000])
    """

    per_peer = True

    def __init__(self, start: Tensor, peers: Iterable[int]) -> None:
        self._of = {peer: start.clone() for peer in peers}
        self._numel = start.numel()

    def reset(self, model: Tensor) -> None:
        """All neighbours have this model."""
        for view in self._of.values():
            view.copy_(model)

    def of(self, peer: int) -> Tensor:
        return self._of[peer]

    def put(self, peer: int, snapshot: Tensor) -> None:
        """Replace the copy of one neighbour."""
        if peer in self._of:
            self._of[peer].copy_(snapshot)
        else:
            self._of[peer] = snapshot.clone()

    def remove(self, peer: int) -> None:
        self._of.pop(peer, None)

    def apply(self, payloads: Mapping[int, Tensor], codec: Codec, keep: float, take: float) -> None:
        for peer, payload in payloads.items():
            if peer in self._of:
                apply_payload(self._of[peer], payload, codec, keep, take)
            else:  # a peer that rejoined sends a whole model; where payloads are changes, a snapshot came first
                self._of[peer] = codec.decode(payload, numel=self._numel)

    def mixed(self, own: Tensor, rank: int, coefficients: Mapping[int, float]) -> Tensor:
        """The weighted sum of `own` and the neighbours' copies, added in the order of ranks."""
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
            raise StateError("this state has one running sum of all neighbours: give the deadline it was saved with")
        self._of = {int(peer): view.clone() for peer, view in state["each"].items()}


class RunningSum:
    """The weighted sum of all neighbours' models: one vector for any number of neighbours. None can be left out.

    >>> import torch
    >>> views = RunningSum(torch.ones(2), {1: 0.25, 2: 0.25})
    >>> views.mixed(torch.ones(2), 0, {1: 0.25, 2: 0.25})
    tensor([1., 1.])
    """

    per_peer = False

    def __init__(self, start: Tensor, weights: Mapping[int, float]) -> None:
        self._weights = dict(sorted(weights.items()))
        self._sum = start * sum(self._weights.values())

    def reset(self, model: Tensor) -> None:
        """All neighbours have this model."""
        self._sum = model * sum(self._weights.values())

    def of(self, peer: int) -> Tensor:
        raise StateError("there is one running sum of all neighbours: give a deadline to keep a copy of each")

    def put(self, peer: int, snapshot: Tensor) -> None:
        raise ExchangeError(f"one running sum cannot take a snapshot of rank {peer}: give a deadline")

    def remove(self, peer: int) -> None:
        raise ExchangeError(f"one running sum cannot leave out rank {peer}: give a deadline")

    def apply(self, payloads: Mapping[int, Tensor], codec: Codec, keep: float, take: float) -> None:
        if keep != 1.0:
            self._sum.mul_(keep)
        for peer, weight in self._weights.items():
            change = codec.decode(payloads[peer], numel=self._sum.numel())
            if not within(change, LARGEST):
                raise MessageError(f"the payload of rank {peer} has values that are not finite")
            self._sum.add_(change, alpha=weight * take)

    def mixed(self, own: Tensor, rank: int, coefficients: Mapping[int, float]) -> Tensor:
        """The coefficients are the weights of the sum times one common factor, which is below 1 for CHOCO only."""
        if not coefficients:
            return own.clone()
        whole = sum(self._weights.values())
        factor = sum(coefficients.values()) / whole
        return (own * (1.0 - factor * whole)).add_(self._sum, alpha=factor)

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum.clone()}

    def load(self, state: Mapping[str, Any]) -> None:
        if "sum" not in state:
            raise StateError("this state has a copy of each neighbour's model: give the deadline it was saved with")
        self._sum.copy_(state["sum"])
