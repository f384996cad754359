"""decentralize: an optimizer whose step also talks to the neighbours, and what its users hold."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..codecs.base import Codec
from ..comm.network import Network
from ..comm.peers import GlooMail, Mail
from ..errors import OptionError, StateError
from .absolute import gossip_codec
from .allreduce import AllReduced
from .average import Averager
from .choco import Choco
from .dcd import Dcd
from .dpsgd import Dpsgd
from .ecd import Ecd
from .guard import Guard
from .join import enter
from .naive import Naive
from .node import Node
from .rounds import Rounds
from .tensors import Flat, statistics, trained
from .topology import Ring, Topology
from .wrapped import Wrapped

_log = logging.getLogger(__name__)
NODES: dict[str, type[Node]] = {kind.name: kind for kind in (Dpsgd, Naive, Dcd, Ecd, Choco)}
ALGORITHMS = (*NODES, "allreduce", "auto")
_SCHEMA = 1


class Decentralized(Wrapped):
    """What `decentralize` returns: `step()` is a step of the given optimizer and a round with the neighbours.

    It is an Optimizer to schedulers and to GradScaler; param_groups and state are those of the given one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        algorithm: str,
        topology: Topology,
        codec: Codec,
        mail: Mail,
        overlap: bool,
        deadline: float | None,
        resync_every: int | None,
        consensus_step: float | None,
        seed: int,
        start_seconds: float,
    ) -> None:
        super().__init__(optimizer)
        self.algorithm, self.overlap = algorithm, overlap
        self._model, self._mail = model, mail
        self._names = trained(model, optimizer.param_groups)
        self._parameters, self._buffers = Flat(list(self._names.values())), Flat(statistics(model))
        self._codec = codec
        self.topology = topology
        neighbours = topology.ever(mail.rank)
        lean = deadline is None and topology.static
        weights = {peer: topology.weight(mail.rank, peer) for peer in neighbours} if lean else None
        kind = NODES["dcd" if algorithm == "auto" else algorithm]
        self._device = next(iter(self._names.values())).device
        self._whole = all(parameter.dtype == torch.float32 for parameter in self._names.values())
        self._node = kind(
            self._parameters.read().cpu(), rank=mail.rank, peers=neighbours, codec=codec, seed=seed, weights=weights,
            consensus_step=consensus_step,
        )  # fmt: skip
        self._rounds = Rounds(
            self._node, mail, topology, deadline=deadline, resync_every=resync_every, buffers=self._buffers.read().cpu()
        )
        self._averager = Averager(self._rounds)
        self._guard = Guard(topology)
        self._skipped_updates = 0
        self._waited = 0.0
        enter(self._rounds, self._parameters, self._buffers, seconds=start_seconds)

    def __repr__(self) -> str:
        return f"Decentralized({self.algorithm}, {self.topology}, {self._codec.spec()}, {self.base!r})"

    # ----------------------------------------------------------------------------------------------------- a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the given optimizer, then a round with the neighbours."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arrive()
        update = self._local_update()
        correction = self._rounds.take_correction()
        if correction is not None:
            update += correction
        message = self._node.step(update, self._rounds.coefficients, self._rounds.round)
        self._watch()
        self._parameters.write(self._node.x.to(self._device))
        self._follow_buffers()
        self._rounds.post(message, self._buffers.read().cpu())
        if not self.overlap:
            self._arrive()
        return loss

    def _arrive(self) -> None:
        begin = time.perf_counter()
        self._rounds.arrive()
        self._waited += time.perf_counter() - begin

    def _local_update(self) -> Tensor:
        """What the given optimizer does to the parameters; nothing, where a gradient is not finite."""
        gradients = [p.grad for p in self._names.values() if p.grad is not None]
        if not all(kernels.all_finite(gradient.detach().reshape(-1).float()) for gradient in gradients):
            self._skipped_updates += 1
            _log.warning("a gradient of rank %d is not finite: its update is left out", self._mail.rank)
            return torch.zeros_like(self._node.x)
        # Parameters of fewer bits hold the model rounded: what rounding took must not count as an update.
        before = self._node.x if self._whole else self._parameters.read().cpu()
        with torch.no_grad():
            self.base.step()
        return self._parameters.read().cpu().sub_(before)

    def _follow_buffers(self) -> None:
        change = self._rounds.take_buffers()
        if change is not None:
            self._buffers.write((self._buffers.read().cpu() + change).to(self._device))

    def _watch(self) -> None:
        """Noise above what the topology bears: a warning, or CHOCO."""
        if not isinstance(self._node, Dcd):
            return
        exceeded = self._guard.exceeded(self._node.noise or 0.0)
        if self.algorithm == "auto" and (exceeded or self._rounds.heard_switch):
            self._switch()
        elif exceeded:
            self._guard.warn(self._codec.spec())

    def _switch(self) -> None:
        """From dcd to choco, whose messages mean the same to a neighbour: from the next round on, for this rank."""
        rounds = self._rounds
        self._node = rounds.node = Choco.instead_of(self._node)
        rounds.switched = True
        _log.info("step %d: noise %.2f is above %.2f: choco", rounds.round, self._guard.noise or 0.0, self._guard.limit)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that letters go to, without those that are gone."""
        return tuple(self._rounds.edges)

    def finish(self) -> None:
        """Wait for the letters that are under way; the next step would."""
        self._arrive()

    # -------------------------------------------------------------------------------------------------- looking at it

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean of all ranks' models in place of this one, until the end of the block. All ranks call it at once."""
        own, statistics_here = self._parameters.read(), self._buffers.read()
        mean = self._averager.mean(torch.cat([own, statistics_here]))
        self._parameters.write(mean[: own.numel()])
        self._buffers.write(mean[own.numel() :])
        try:
            yield self._model
        finally:
            self._parameters.write(own)
            self._buffers.write(statistics_here)

    def consensus_distance(self) -> float:
        """sqrt(mean |x_i - mean|^2) / |mean| over the ranks, 0 if all are the same. All ranks call it at once."""
        own = self._parameters.read().cpu()
        mean = self._averager.mean(own)
        apart = self._averager.mean((own - mean).square().sum()[None])
        return float(apart.sqrt() / mean.norm().clamp_min(1e-30))

    def stats(self) -> dict[str, float]:
        """Numbers of this rank so far."""
        counts, rounds = self._rounds.counts, self._rounds
        found = {
            "gossip/round": float(rounds.round),
            "gossip/sent_bytes": float(self._mail.sent_bytes),
            "gossip/waited_seconds": self._waited,
            "gossip/neighbours": float(len(rounds.edges)),
            "gossip/alive": float(len(rounds.membership.alive())),
            "gossip/noise_limit": self._guard.limit,
            "gossip/consensus_step": self._node.scale,
            "gossip/skipped_updates": float(self._skipped_updates),
        }
        if self._node.noise is not None:
            found["gossip/noise"] = self._node.noise
        if self._guard.noise is not None:
            found["gossip/mean_noise"] = self._guard.noise
        return found | {f"gossip/{name}": float(value) for name, value in vars(counts).items()}

    # ----------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything of this rank, its neighbours' models as it knows them included; save one for each rank."""
        self._arrive()
        return {
            "schema": _SCHEMA,
            "algorithm": self.algorithm,
            "running": self._node.name,
            "codec": self._codec.spec(),
            "topology": str(self.topology),
            "rank": self._mail.rank,
            "base": self.base.state_dict(),
            "node": self._node.state(),
            "rounds": self._rounds.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; all ranks load theirs before the next step. Sets the parameters too."""
        mine: dict[str, Any] = {"algorithm": self.algorithm, "codec": self._codec.spec()}
        mine |= {"topology": str(self.topology), "rank": self._mail.rank}
        for key, value in mine.items():
            if state_dict.get(key) != value:
                raise StateError(
                    f"this state has {key} {state_dict.get(key)}, not {value}: give what it was saved with"
                )
        if state_dict["node"]["x"].numel() != self._parameters.numel:
            raise StateError("this state is of another model")
        self.base.load_state_dict(state_dict["base"])
        if state_dict["running"] != self._node.name:
            self._switch()
        self._node.load(state_dict["node"])
        self._rounds.load(state_dict["rounds"])
        self._parameters.write(self._node.x.to(self._device))

    def close(self) -> None:
        """Say goodbye to the neighbours; the model stays as it is."""
        self._mail.close()


def decentralize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    algorithm: str = "auto",
    topology: Topology | None = None,
    codec: str | Codec = "min_max:4,block=512",
    mail: Mail | None = None,
    network: Network | None = None,
    overlap: bool = True,
    deadline: float | None = 30.0,
    resync_every: int | None = None,
    consensus_step: float | None = None,
    seed: int = 0,
    start_seconds: float = 300.0,
) -> Decentralized | AllReduced:
    """Train without a centre: every rank has a model of its own and exchanges compressed changes with its neighbours.

    Call it on the bare model, on every rank, instead of wrapping it in DistributedDataParallel. All start from the
    model of the lowest rank. `step()` forms the local update with the given optimizer, momentum and Adam included, then
    mixes.

    `algorithm`: `dpsgd`, `dcd`, `ecd`, `choco`, `naive`, `allreduce`, or `auto`: dcd, and choco where the noise is too
    much. `topology`: who talks to whom, `ring()` if not given. `codec`: one codec as text; dpsgd sends float32 whatever
    it is. `overlap`: letters travel while the next gradient is computed, and count in that step; without, every step
    waits for its own letters, and the numbers are the same. `deadline`: seconds after which a round goes on without a
    neighbour, None to wait for ever and to keep one sum instead of a copy of each neighbour's model. `resync_every`:
    rounds between two exact snapshots. `consensus_step`: of choco, chosen by the codec if not given. `mail`:
    `mail_at("tcp://...")` for processes that may come back; otherwise the default process group. `network`: what
    allreduce travels by. `start_seconds`: how long to wait for the others at the start.

    >>> from thinwire.comm.peers import LocalMail
    >>> net = nn.Linear(4, 1)
    >>> opt = decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), algorithm="dcd", mail=LocalMail.of(1)[0])
    >>> net(torch.ones(4)).sum().backward()
    >>> opt.step()
    >>> opt.consensus_distance()
    0.0
    """
    if algorithm not in ALGORITHMS:
        raise OptionError(f"there is no algorithm {algorithm}: choose {', '.join(ALGORITHMS)}")
    if deadline is not None and not deadline > 0:
        raise OptionError(f"deadline is a number of seconds, or None to wait for ever, not {deadline}")
    if resync_every is not None and resync_every < 1:
        raise OptionError(f"resync_every is a number of rounds of 1 or more, or None, not {resync_every}")
    if consensus_step is not None and not 0 < consensus_step <= 1:
        raise OptionError(f"consensus_step is above 0 and at most 1, not {consensus_step}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise OptionError(
            "decentralize takes the bare model: DistributedDataParallel averages already, give model.module"
        )
    chosen = gossip_codec("fp32" if algorithm == "dpsgd" else codec)
    if algorithm == "allreduce":
        return AllReduced(model, optimizer, network=network)
    mail = GlooMail.here() if mail is None else mail
    topology = (topology or Ring()).of(mail.world_size)
    if not topology.static and NODES[algorithm if algorithm != "auto" else "dcd"].tracks:
        raise OptionError(
            f"{algorithm} keeps copies of fixed neighbours, those of {topology.name} change: use exponential()"
        )
    return Decentralized(
        model,
        optimizer,
        algorithm=algorithm,
        topology=topology,
        codec=chosen,
        mail=mail,
        overlap=overlap,
        deadline=deadline,
        resync_every=resync_every,
        consensus_step=consensus_step,
        seed=seed,
        start_seconds=start_seconds,
    )
