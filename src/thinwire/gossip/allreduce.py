"""The centralised baseline with the interface of gossip: gradients are averaged over all ranks in every step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import kernels
from ..comm.communicator import Communicator
from ..comm.network import Network
from ..comm.peers import GlooTransport
from ..errors import StateError
from ..reduce.agree import check_agreement
from .notes import compare, facts_of
from .tensors import Flat, statistics, trained
from .wrapped import Wrapped

_log = logging.getLogger(__name__)
_REMEDY = "call decentralize with the same arguments on every rank"


class AllReduced(Wrapped):
    """x <- x + update(the mean of all gradients). All ranks have the same model and take part in every step."""

    algorithm = "allreduce"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, network: Network | None = None) -> None:
        super().__init__(optimizer)
        self._model = model
        self._names = trained(model, optimizer.param_groups)
        parameters, self._buffers = Flat(list(self._names.values())), Flat(statistics(model))
        facts = facts_of(self.algorithm, codec=None, topology=None, parameters=self._names, buffers=self._buffers.numel)
        if network is None and dist.is_initialized():
            # Ranks with another algorithm take part in no collective, so the notes of all algorithms come first.
            compare(GlooTransport.of_default_group(), "start", facts, remedy=_REMEDY)
        self._network = Communicator() if network is None else network
        self._device = next(iter(self._names.values())).device
        check_agreement(self._network, facts, device=self._device)
        start = self._network.broadcast(torch.cat([parameters.read(), self._buffers.read()]), source=0)
        parameters.write(start[: parameters.numel])
        self._buffers.write(start[parameters.numel :])
        self._steps, self._skipped_updates, self._waited = 0, 0, 0.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, then do a step of the inner optimizer; no rank does if the mean is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._unscale()
        for parameter in self._names.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = Flat([parameter.grad for parameter in self._names.values() if parameter.grad is not None])
        begin = time.perf_counter()
        mean = self._network.all_reduce(gradients.read()).div_(self._network.world_size)
        self._waited += time.perf_counter() - begin
        if kernels.all_finite(mean):  # the same on all ranks, whatever GradScaler found on this one
            gradients.write(mean)
            self.base.step()
        else:
            self._skipped_updates += 1
            _log.warning("step %d: the mean of the gradients is not finite: no rank does an update", self._steps)
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
            "gossip/skipped_updates": float(self._skipped_updates),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"schema": 1, "algorithm": self.algorithm, "round": self._steps, "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict`. All ranks load theirs before the next step."""
        if state_dict.get("algorithm") != self.algorithm:
            raise StateError(f"this state is of algorithm {state_dict.get('algorithm')}, not {self.algorithm}")
        steps = int(state_dict.get("round", 0))  # 0.1 did not save it
        check_agreement(self._network, {"round of the state": str(steps)}, device=self._device)
        self.base.load_state_dict(state_dict["base"])
        self._steps = steps

    def close(self) -> None:
        """Does nothing: the group belongs to the program."""
