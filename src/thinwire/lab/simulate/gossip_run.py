"""Decentralised training of many workers in one process: the optimizers of `gossip`, real data, a virtual clock."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codecs.base import Codec
from ...errors import ExchangeError
from ...gossip import Decentralized, decentralize
from ...gossip.topology import Topology
from .churn import Absence
from .learners import Learner
from .pace import Pace
from .path import Path
from .transport import SimTransport, rejoin

_log = logging.getLogger(__name__)


class GossipRun:
    """All workers of one algorithm. `step()` is one step of all present workers. It waits in virtual time only."""

    def __init__(
        self,
        learner: Learner,
        transport: SimTransport,
        pace: Pace,
        topology: Topology,
        *,
        algorithm: str,
        codec: Codec,
        coding: Callable[[int], float],
        deadline: float | None = None,
        trace: Sequence[Absence] = (),
        steps: int,
        seed: int = 0,
    ) -> None:
        self.learner, self.transport, self.pace = learner, transport, pace
        self.topology = topology.of(learner.workers)
        self._coding = coding  # seconds of encoding and decoding, by the number of neighbours
        self._options: dict[str, Any] = {
            "algorithm": algorithm,
            "codec": _decoding_once(codec, transport),
            "topology": self.topology,
            "deadline": deadline,
            "seed": seed,
        }
        self.path = Path(learner.workers, steps=steps)
        self.computed = np.zeros(learner.workers)
        self.steps_done = 0
        self.optimizers: dict[int, Decentralized] = {worker: self._build(worker) for worker in range(learner.workers)}
        self.order: Callable[[Iterable[int]], list[int]] = sorted  # within a step; results do not depend on it
        self._leaving = sorted(trace)
        self._returning: list[Absence] = []
        self._waiting: dict[int, float] = {}  # returned, without a neighbour's model yet
        self._incarnations = [1] * learner.workers

    def _build(self, worker: int, *, incarnation: int = 1) -> Decentralized:
        net, optimizer = self.learner.nets[worker], self.learner.optimizers[worker]
        endpoint = self.transport.endpoint(worker, incarnation=incarnation)
        found = decentralize(net, optimizer, transport=endpoint, start_seconds=1.0, **self._options)
        assert isinstance(found, Decentralized)
        return found

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self) -> float:
        """One step of all workers. Returns the mean loss."""
        self._update_presence()
        active = self.order(self.optimizers)
        present, now, transport = np.array(active), self.transport.now, self.transport
        if not active:
            raise ExchangeError("all workers have left: give a --churn trace in which some stay")
        self.learner.set_rates(self.steps_done, [self.optimizers[worker] for worker in active])
        losses = self.learner.gradients(self.steps_done, active)
        seconds = self.pace.seconds(self.steps_done, workers=transport.links.workers)[present]
        now[present] += seconds
        self.computed[present] += seconds
        self.path.begin()
        self.path.computed(seconds, present)
        before = now[present].copy()
        for worker in active:  # no message arrives within a step, so the order does not matter
            transport.cause[worker] = None
            self.optimizers[worker].step()
        self._record_waits(active, before)
        coding = np.array([self._coding(len(self.optimizers[worker].neighbours)) for worker in active])
        now[present] += coding
        self.path.coded(coding, present)
        self.path.post()
        transport.dispatch()
        self.steps_done += 1
        return sum(losses) / len(losses)

    def _record_waits(self, active: Sequence[int], before: np.ndarray[Any, Any]) -> None:
        """Which message each worker waited for, and who waited for a deadline."""
        transport, waited, sources, phases = self.transport, [], [], []
        for place, worker in enumerate(active):
            cause = transport.cause[worker]
            if cause is not None and cause.at == transport.now[worker]:
                waited.append(worker)
                sources.append(cause.source)
                phases.append(cause.phases)
            elif transport.now[worker] > before[place]:
                self.path.idle(np.array([transport.now[worker] - before[place]]), np.array([worker]))
        if waited:
            self.path.waited(np.array(waited), np.array(sources), np.array(phases))

    # ---------------------------------------------------------------------------------------------- leaving, returning

    def _update_presence(self) -> None:
        """Workers leave and return as the trace says."""
        for worker in [one for one in self._waiting if self._rejoins(one)]:
            del self._waiting[worker]
        latest = max((float(self.transport.now[worker]) for worker in self.optimizers), default=0.0)
        for absence in [one for one in self._leaving if one.worker in self.optimizers]:
            if absence.leaves <= self.transport.now[absence.worker] and len(self.optimizers) > 1:
                self._leaving.remove(absence)
                self.optimizers.pop(absence.worker).close()
                self._returning.append(absence)
        for absence in [one for one in self._returning if one.returns <= latest]:
            self._returning.remove(absence)
            rejoin(self.transport, absence.worker, self.topology.all_neighbours(absence.worker), at=absence.returns)
            self._waiting[absence.worker] = absence.returns

    def _rejoins(self, worker: int) -> bool:
        """Rebuild a returned worker from a neighbour's model; False if none has arrived yet."""
        self.learner.renew(worker)
        self._incarnations[worker] += 1
        before = float(self.transport.now[worker])
        try:
            self.optimizers[worker] = self._build(worker, incarnation=self._incarnations[worker])
        except ExchangeError as problem:
            _log.info("worker %d has returned and waits: %s", worker, problem)
            self._incarnations[worker] -= 1
            self.transport.now[worker] = before
            return False
        self.path.idle(np.array([self.transport.now[worker] - self.path.seconds()[worker]]), np.array([worker]))
        return True

    # ------------------------------------------------------------------------------------------------------- results

    @property
    def virtual_seconds(self) -> float:
        """When the last worker that is present finished its last step."""
        return max(float(self.transport.now[worker]) for worker in self.optimizers)

    def look(self) -> dict[str, float | None]:
        """Held-out loss and accuracy of the average model, mean loss of some local ones, and the consensus distance."""
        rows = list(self._models())
        mean = torch.stack(rows).mean(0) if len(rows) <= 64 else _mean(rows)
        apart = sum(float((row - mean).square().sum()) for row in rows) / len(rows)
        loss, accuracy = self.learner.look(mean)
        some = rows[:: max(1, len(rows) // 4)][:4]
        return {
            "held_out": loss,
            "accuracy": accuracy,
            "averaged_loss": loss,
            "local_loss": sum(self.learner.look(row)[0] for row in some) / len(some),
            "consensus_distance": apart**0.5 / max(float(mean.norm()), 1e-30),
        }

    def _models(self) -> Iterator[Tensor]:
        for worker in sorted(self.optimizers):
            yield self.learner.flat(worker)


def _mean(rows: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row in rows:
        total += row
    return (total / len(rows)).to(torch.float32)


def _decoding_once(codec: Codec, transport: SimTransport) -> Codec:
    """The same codec; a payload that goes to several neighbours is decoded once."""
    cached = copy.copy(codec)
    decode = codec.decode

    def decode_once(payload: Tensor, *, shape: Any = None, numel: int | None = None) -> Tensor:
        return transport.parse_once(lambda one: decode(one, shape=shape, numel=numel), "payload")(payload)

    object.__setattr__(cached, "decode", decode_once)
    return cached
