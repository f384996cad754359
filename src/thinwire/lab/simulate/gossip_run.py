"""Decentralised training of many workers in one process: the optimizers of `gossip`, a virtual clock, real data."""

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
from .office import Office, come_back
from .pace import Pace
from .path import Path

_log = logging.getLogger(__name__)


class GossipRun:
    """All workers of one algorithm. `step()` is a step of everyone who is there; nothing in it waits for real."""

    def __init__(
        self,
        learner: Learner,
        office: Office,
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
        self.learner, self.office, self.pace = learner, office, pace
        self.topology = topology.of(learner.workers)
        self._coding = coding  # seconds, by the number of neighbours
        self._options: dict[str, Any] = {
            "algorithm": algorithm,
            "codec": _decoding_once(codec, office),
            "topology": self.topology,
            "deadline": deadline,
            "seed": seed,
        }
        self.path = Path(learner.workers, steps=steps)
        self.computed = np.zeros(learner.workers)
        self.steps_done = 0
        self.optimizers: dict[int, Decentralized] = {worker: self._made(worker) for worker in range(learner.workers)}
        self.order: Callable[[Iterable[int]], list[int]] = sorted  # in which workers are driven; nothing depends on it
        self._leaving = sorted(trace)
        self._returning: list[Absence] = []
        self._knocked: dict[int, float] = {}
        self._lives = [1] * learner.workers

    def _made(self, worker: int, *, life: int = 1) -> Decentralized:
        net, optimizer = self.learner.nets[worker], self.learner.optimizers[worker]
        found = decentralize(
            net, optimizer, mail=self.office.mail(worker, life=life), start_seconds=1.0, **self._options
        )
        assert isinstance(found, Decentralized)
        return found

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self) -> float:
        """One step of everyone; the mean loss."""
        self._come_and_go()
        active = self.order(self.optimizers)
        there, now, office = np.array(active), self.office.now, self.office
        if not active:
            raise ExchangeError("all workers have left: nobody trains")
        self.learner.set_rates(self.steps_done, [self.optimizers[worker] for worker in active])
        losses = self.learner.gradients(self.steps_done, active)
        seconds = self.pace.seconds(self.steps_done, workers=office.links.workers)[there]
        now[there] += seconds
        self.computed[there] += seconds
        self.path.begin()
        self.path.computed(seconds, there)
        before = now[there].copy()
        for worker in active:  # they do not meet within a step, so that it does not matter who goes first
            office.cause[worker] = None
            self.optimizers[worker].step()
        self._follow(active, before)
        coding = np.array([self._coding(len(self.optimizers[worker].neighbours)) for worker in active])
        now[there] += coding
        self.path.coded(coding, there)
        self.path.post()
        office.dispatch()
        self.steps_done += 1
        return sum(losses) / len(losses)

    def _follow(self, active: Sequence[int], before: np.ndarray[Any, Any]) -> None:
        """Who went on because of which letter, and who just waited."""
        office, waited, sources, phases = self.office, [], [], []
        for place, worker in enumerate(active):
            cause = office.cause[worker]
            if cause is not None and cause.at == office.now[worker]:
                waited.append(worker)
                sources.append(cause.source)
                phases.append(cause.phases)
            elif office.now[worker] > before[place]:
                self.path.idle(np.array([office.now[worker] - before[place]]), np.array([worker]))
        if waited:
            self.path.waited(np.array(waited), np.array(sources), np.array(phases))

    # ---------------------------------------------------------------------------------------------- leaving, returning

    def _come_and_go(self) -> None:
        for worker in [one for one in self._knocked if self._enters(one)]:
            del self._knocked[worker]
        latest = max((float(self.office.now[worker]) for worker in self.optimizers), default=0.0)
        for absence in [one for one in self._leaving if one.worker in self.optimizers]:
            if absence.leaves <= self.office.now[absence.worker] and len(self.optimizers) > 1:
                self._leaving.remove(absence)
                self.optimizers.pop(absence.worker).close()
                self._returning.append(absence)
        for absence in [one for one in self._returning if one.returns <= latest]:
            self._returning.remove(absence)
            come_back(self.office, absence.worker, self.topology.ever(absence.worker), at=absence.returns)
            self._knocked[absence.worker] = absence.returns

    def _enters(self, worker: int) -> bool:
        """Whether a neighbour's model has come, from which a worker that is back goes on."""
        self.learner.renew(worker)
        self._lives[worker] += 1
        before = float(self.office.now[worker])
        try:
            self.optimizers[worker] = self._made(worker, life=self._lives[worker])
        except ExchangeError as problem:
            _log.info("worker %d is back and waits: %s", worker, problem)
            self._lives[worker] -= 1
            self.office.now[worker] = before
            return False
        self.path.idle(np.array([self.office.now[worker] - self.path.seconds()[worker]]), np.array([worker]))
        return True

    # ------------------------------------------------------------------------------------------------------ looking

    @property
    def virtual_seconds(self) -> float:
        """When the last of those who are there was done with its last step."""
        return max(float(self.office.now[worker]) for worker in self.optimizers)

    def look(self) -> dict[str, float | None]:
        """Held-out loss and accuracy of the average model, of some local ones, and how far models are apart."""
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


def _decoding_once(codec: Codec, office: Office) -> Codec:
    """The same codec; what a worker said to many neighbours is decoded for the first of them only."""
    same = copy.copy(codec)
    decode = codec.decode

    def shared(message: Tensor, *, shape: Any = None, numel: int | None = None) -> Tensor:
        return office.once(lambda letter: decode(letter, shape=shape, numel=numel), "message")(message)

    object.__setattr__(same, "decode", shared)
    return same
