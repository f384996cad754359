"""decentralize: an optimizer whose step also exchanges messages with the neighbours."""

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
from ..comm.peers import GlooTransport, PeerTransport
from ..errors import OptionError, StateError, ThinwireError
from .absolute import gossip_codec
from .allreduce import AllReduced
from .average import Averager
from .buffers import Buffers
from .choco import Choco
from .dcd import Dcd
from .dpsgd import Dpsgd
from .ecd import Ecd
from .finite import acceptable, clear_state
from .join import join
from .naive import Naive
from .node import Node
from .noise_monitor import NoiseMonitor
from .notes import compare, facts_of, raise_conflict
from .quorum import Quorum
from .rounds import Rounds
from .secret import SecretTransport
from .tensors import Flat, trained
from .topology import Ring, Topology
from .wrapped import Wrapped

_log = logging.getLogger(__name__)
NODES: dict[str, type[Node]] = {kind.name: kind for kind in (Dpsgd, Naive, Dcd, Ecd, Choco)}
ALGORITHMS = (*NODES, "allreduce", "auto")
_SCHEMA = 1


class Decentralized(Wrapped):
    """What `decentralize` returns: `step()` is a step of the inner optimizer and a round of gossip.

    Schedulers and GradScaler can use it; param_groups and state are those of the inner optimizer.

    >>> from thinwire.comm.peers import LocalTransport
    >>> net, alone = nn.Linear(4, 1), LocalTransport.of(1)[0]
    >>> opt = decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), algorithm="dpsgd", transport=alone)
    >>> opt
    Decentralized(dpsgd, ring(1), fp32, SGD (...))
    >>> opt.neighbours, opt.stats()["gossip/alive"]
    ((), 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        algorithm: str,
        topology: Topology,
        codec: Codec,
        transport: PeerTransport,
        overlap: bool,
        deadline: float | None,
        resync_every: int | None,
        consensus_step: float | None,
        seed: int,
        start_seconds: float,
        min_ranks: int | None,
    ) -> None:
        super().__init__(optimizer)
        self.algorithm, self.overlap = algorithm, overlap
        self._model, self._transport = model, transport
        self._names = trained(model, optimizer.param_groups)
        self._parameters, self._buffers = Flat(list(self._names.values())), Buffers(model)
        self._codec = codec
        self.topology = topology
        neighbours = topology.all_neighbours(transport.rank)
        one_sum = deadline is None and topology.static
        weights = {peer: topology.weight(transport.rank, peer) for peer in neighbours} if one_sum else None
        kind = NODES["dcd" if algorithm == "auto" else algorithm]
        self._device = next(iter(self._names.values())).device
        self._whole = all(parameter.dtype == torch.float32 for parameter in self._names.values())
        self._node = kind(
            self._parameters.read().cpu(), rank=transport.rank, peers=neighbours, codec=codec, seed=seed,
            weights=weights, consensus_step=consensus_step,
        )  # fmt: skip
        self._rounds = Rounds(
            self._node,
            transport,
            topology,
            deadline=deadline,
            resync_every=resync_every,
            buffers=self._buffers.read().cpu(),
        )
        self._averager = Averager(self._rounds)
        self._monitor = NoiseMonitor(topology)
        self._quorum = Quorum(self._rounds, min_ranks, seconds=start_seconds)
        self._skipped_updates = self._loads = 0
        self._unconfirmed = True  # no message has come since the start, or since a state was loaded
        self._waited = 0.0
        facts = facts_of(algorithm, codec=codec, topology=topology, parameters=self._names, buffers=self._buffers.numel)
        try:
            join(self._rounds, self._parameters, self._buffers, facts=facts, seconds=start_seconds)
            self._quorum.at_start()
            self._buffers.keep()
        except ThinwireError:
            transport.close()  # the others must not wait for this rank
            raise

    def __repr__(self) -> str:
        return f"Decentralized({self.algorithm}, {self.topology}, {self._codec.spec()}, {self.base!r})"

    # ----------------------------------------------------------------------------------------------------- a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the inner optimizer, then a round of gossip.

        A rank whose gradient or update is not finite takes part in the round with an update of zero.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._receive()
        self._quorum.check()
        update = self._local_update() if self._unscale() else self._no_update("gradient")
        correction = self._rounds.take_correction()
        if correction is not None:
            update += correction
        payload = self._node.step(update, self._rounds.coefficients, self._rounds.round)
        self._check_noise()
        self._parameters.write(self._node.x.to(self._device))
        self._buffers.mix(self._rounds.take_buffers())
        self._rounds.send(payload, self._buffers.read().cpu())
        if not self.overlap:
            self._receive()
        return loss

    def _receive(self) -> None:
        begin, in_flight = time.perf_counter(), not self._rounds.received
        self._rounds.receive()
        self._waited += time.perf_counter() - begin
        if self._unconfirmed and in_flight:
            self._unconfirmed = False
            raise_conflict(self._transport)

    def _local_update(self) -> Tensor:
        """The change of the parameters by the inner optimizer; zero if a gradient is not finite."""
        gradients = [p.grad for p in self._names.values() if p.grad is not None]
        if not all(kernels.all_finite(gradient.detach().reshape(-1).float()) for gradient in gradients):
            return self._no_update("gradient")
        # Parameters with fewer bits hold a rounded model. The rounding error must not become part of the update.
        before = self._node.x if self._whole else self._parameters.read().cpu()
        with torch.no_grad():
            self.base.step()
        update = self._parameters.read().cpu().sub_(before)
        if not acceptable(update, self._node.x):
            clear_state(self.base)
            return self._no_update("update")
        return update

    def _no_update(self, what: str) -> Tensor:
        self._skipped_updates += 1
        _log.warning("the %s of rank %d is not finite: its update is skipped", what, self._transport.rank)
        return torch.zeros_like(self._node.x)

    def _check_noise(self) -> None:
        """If the noise exceeds the topology's limit, warn or switch to CHOCO."""
        if not isinstance(self._node, Dcd):
            return
        exceeded = self._monitor.exceeded(self._node.noise or 0.0)
        if self.algorithm == "auto" and (exceeded or self._rounds.neighbour_switched):
            self._switch()
        elif exceeded:
            self._monitor.warn(self._codec.spec())

    def _switch(self) -> None:
        """Switch from dcd to choco with the next round. The payloads of both have the same meaning for a neighbour."""
        rounds = self._rounds
        self._node = rounds.node = Choco.instead_of(self._node)
        rounds.switched = True
        noise, limit = self._monitor.noise or 0.0, self._monitor.limit
        _log.info("step %d: noise %.2f exceeds the limit %.2f: switch to choco", rounds.round, noise, limit)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The neighbours that are alive."""
        return tuple(self._rounds.edges)

    def finish(self) -> None:
        """Wait for the messages in flight, as the next step would."""
        self._receive()

    # ----------------------------------------------------------------------------------------------------- inspection

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Put the mean of all ranks' models into this one until the end of the block. All ranks call it together."""
        self._quorum.check()
        self._buffers.restore()
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
        """sqrt(mean |x_i - mean|^2) / |mean| over the ranks; 0 if all are equal. All ranks call it together."""
        self._quorum.check()
        own = self._parameters.read().cpu()
        mean = self._averager.mean(own)
        apart = self._averager.mean((own - mean).square().sum()[None])
        return float(apart.sqrt() / mean.norm().clamp_min(1e-30))

    def stats(self) -> dict[str, float]:
        """Counters and last values of this rank."""
        counts, rounds = self._rounds.counts, self._rounds
        found = {
            "gossip/round": float(rounds.round),
            "gossip/sent_bytes": float(self._transport.sent_bytes),
            "gossip/waited_seconds": self._waited,
            "gossip/neighbours": float(len(rounds.edges)),
            "gossip/alive": float(len(rounds.membership.alive())),
            "gossip/noise_limit": self._monitor.limit,
            "gossip/consensus_step": self._node.scale,
            "gossip/skipped_updates": float(self._skipped_updates),
            "gossip/restored_buffers": float(self._buffers.restored),
        }
        if self._node.noise is not None:
            found["gossip/noise"] = self._node.noise
        if self._monitor.noise is not None:
            found["gossip/mean_noise"] = self._monitor.noise
        return found | {f"gossip/{name}": float(value) for name, value in vars(counts).items()}

    # ----------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The whole state of this rank, with its copies of the neighbours' models. Save one for each rank."""
        self._receive()
        return {
            "schema": _SCHEMA,
            "algorithm": self.algorithm,
            "running": self._node.name,
            "codec": self._codec.spec(),
            "topology": str(self.topology),
            "rank": self._transport.rank,
            "base": self.base.state_dict(),
            "node": self._node.state(),
            "rounds": self._rounds.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict`. All ranks load theirs before the next step. Sets the parameters too."""
        mine: dict[str, Any] = {"algorithm": self.algorithm, "codec": self._codec.spec()}
        mine |= {"topology": str(self.topology), "rank": self._transport.rank}
        for key, value in mine.items():
            if state_dict.get(key) != value:
                raise StateError(
                    f"this state has {key} {state_dict.get(key)}, not {value}: give what it was saved with"
                )
        if state_dict["node"]["x"].numel() != self._parameters.numel:
            raise StateError("this state has another number of parameters: build the model that it was saved with")
        self._compare_round(int(state_dict["rounds"]["round"]))
        self.base.load_state_dict(state_dict["base"])
        if state_dict["running"] != self._node.name:
            self._switch()
        self._node.load(state_dict["node"])
        self._rounds.load(state_dict["rounds"])
        self._parameters.write(self._node.x.to(self._device))

    def _compare_round(self, saved: int) -> None:
        """All ranks resume at the same round; a rank that has joined a run keeps the round of the run."""
        self._receive()  # nothing of the rounds before may arrive after
        if self._transport.incarnation > 1 and saved != self._rounds.round:
            raise StateError(
                f"this rank has joined a run at round {self._rounds.round}, and the state is of round {saved}: do not "
                "load a state into a rank that comes back, it has the model of a neighbour"
            )
        if self._transport.incarnation == 1:
            self._loads += 1
            compare(
                self._transport, f"resume-{self._loads}", {"round": str(saved)},
                remedy="load states that all ranks saved after the same step",
            )  # fmt: skip
            self._unconfirmed = True

    def close(self) -> None:
        """Disconnect from the neighbours. The model stays as it is."""
        self._transport.close()


def decentralize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    algorithm: str = "auto",
    topology: Topology | None = None,
    codec: str | Codec = "min_max:4,block=512",
    transport: PeerTransport | None = None,
    network: Network | None = None,
    overlap: bool = True,
    deadline: float | None = 30.0,
    resync_every: int | None = None,
    consensus_step: float | None = None,
    seed: int = 0,
    start_seconds: float = 300.0,
    min_ranks: int | None = None,
    secret: str | bytes | None = None,
) -> Decentralized | AllReduced:
    """Decentralised training: every rank has its own model and exchanges compressed changes with its neighbours.

    Call it on the bare model, on every rank, instead of wrapping it in DistributedDataParallel. All ranks start from
    the model of the lowest rank. `step()` forms the local update with the given optimizer, momentum and Adam included,
    then mixes it with the neighbours' models.

    `algorithm`: `dpsgd`, `dcd`, `ecd`, `choco`, `naive`, `allreduce`, or `auto`, which starts with dcd and switches to
    choco if the noise exceeds the topology's limit.
    `topology`: which ranks are neighbours; `ring()` by default.
    `codec`: one codec as text. dpsgd ignores it and sends float32.
    `transport`: `peers_at("tcp://...")` for processes that may restart; the default process group if not given.
    `network`: the collectives of `allreduce`.
    `overlap`: messages travel while the next gradient is computed, and that step uses them. Without it every step waits
    for its own messages; the results are the same.
    `deadline`: seconds to wait for a neighbour before a round continues without it. None waits for ever, and keeps one
    running sum instead of a copy of each neighbour's model.
    `resync_every`: rounds between two exact snapshots.
    `consensus_step`: the step size of choco; by default it follows from the codec.
    `start_seconds`: how long to wait for the neighbours at the start, and for dead ranks to return.
    `min_ranks`: with fewer live ranks than this (2 by default) training ends with an ExchangeError: at once, or after
    `start_seconds` where ranks may return. 1 permits a rank to train alone.
    `secret`: at least 16 bytes, the same on all ranks. Every message then carries an authentication code, and a rank
    refuses messages without a valid one.

    >>> from thinwire.comm.peers import LocalTransport
    >>> net, alone = nn.Linear(4, 1), LocalTransport.of(1)[0]
    >>> opt = decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), algorithm="dcd", transport=alone)
    >>> net(torch.ones(4)).sum().backward()
    >>> opt.step()
    >>> opt.consensus_distance()
    0.0
    """
    if algorithm not in ALGORITHMS:
        raise OptionError(f"there is no algorithm {algorithm}: choose {', '.join(ALGORITHMS)}")
    if deadline is not None and not deadline > 0:
        raise OptionError(f"deadline must be a number of seconds above 0, or None to wait for ever, not {deadline}")
    if resync_every is not None and resync_every < 1:
        raise OptionError(f"resync_every must be 1 or more rounds, or None, not {resync_every}")
    if consensus_step is not None and not 0 < consensus_step <= 1:
        raise OptionError(f"consensus_step must be above 0 and at most 1, not {consensus_step}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise OptionError(
            "decentralize takes the bare model: DistributedDataParallel averages already, give model.module"
        )
    chosen = gossip_codec("fp32" if algorithm == "dpsgd" else codec)
    if algorithm == "allreduce":
        if secret is not None:
            raise OptionError("allreduce uses collectives, which carry no secret: leave secret out")
        return AllReduced(model, optimizer, network=network)
    transport = GlooTransport.of_default_group() if transport is None else transport
    if secret is not None:
        transport = SecretTransport(transport, secret)
    topology = (topology or Ring()).of(transport.world_size)
    if not topology.static and NODES[algorithm if algorithm != "auto" else "dcd"].tracks:
        raise OptionError(f"{algorithm} needs fixed neighbours, and those of {topology.name} change: use exponential()")
    return Decentralized(
        model,
        optimizer,
        algorithm=algorithm,
        topology=topology,
        codec=chosen,
        transport=transport,
        overlap=overlap,
        deadline=deadline,
        resync_every=resync_every,
        consensus_step=consensus_step,
        seed=seed,
        start_seconds=start_seconds,
        min_ranks=min_ranks,
    )
