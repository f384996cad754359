"""The centralised baseline with the interface of gossip: gradients are averaged over all ranks in every step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..comm.network import Network
from .tensors import Flat, statistics, trained
from .wrapped import Wrapped


class AllReduced(Wrapped):
    """x <- x + update(the mean of all gradients). All ranks have the same model and take part in every step."""

    algorithm = "allreduce"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, network: Network | None = None) -> None:
        super().__init__(optimizer)
        self._network = Communicator() if network is None else network
        self._model = model
        self._names = trained(model, optimizer.param_groups)
        parameters, self._buffers = Flat(list(self._names.values())), Flat(statistics(model))
        start = self._network.broadcast(torch.cat([parameters.read(), self._buffers.read()]), source=0)
        parameters.write(start[: parameters.numel])
        self._buffers.write(start[parameters.numel :])
        self._steps, self._waited = 0, 0.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, then do a step of the inner optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._names.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = Flat([parameter.grad for parameter in self._names.values() if parameter.grad is not None])
        begin = time.perf_counter()
        gradients.write(self._network.all_reduce(gradients.read()).div_(self._network.world_size))
        self._waited += time.perf_counter() - begin
        self.base.step()
        self._steps += 1
        return loss

    def finish(self) -> None:
        """Does nothing: no message is in flight between steps."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model itself, which is the same on all ranks, with averaged running statistics."""
        here = self._buffers.read()
        if here.numel():
            self._buffers.write(self._network.all_reduce(here.clone()).div_(self._network.world_size))
        try:
            yield self._model
        finally:
            self._buffers.write(here)

    def consensus_distance(self) -> float:
        return 0.0

    def stats(self) -> dict[str, float]:
        return {
            "gossip/round": float(self._steps),
            "gossip/sent_bytes": float(self._network.traffic.bytes),
            "gossip/waited_seconds": self._waited,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"schema": 1, "algorithm": self.algorithm, "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])

    def close(self) -> None:
        """Does nothing: the group belongs to the program."""
