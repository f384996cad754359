"""How a rank starts: together with all others from one model, or later from a neighbour's model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import ExchangeError
from .average import Averager
from .edge import Edge
from .notes import compare, raise_conflict
from .rounds import Rounds
from .tensors import Flat

_POLL_SECONDS = 0.05  # for the message of one neighbour, before the next neighbour is asked


def join(rounds: Rounds, parameters: Flat, buffers: Flat, *, facts: Mapping[str, str], seconds: float) -> None:
    """Compare options with the other ranks, connect to the neighbours and start from the model that they have."""
    compare(rounds.transport, "start", facts, remedy="call decentralize with the same arguments on every rank")
    if rounds.transport.incarnation > 1:
        _rejoin(rounds, parameters, buffers, seconds=seconds)
        return
    _connect(rounds, seconds)
    values = torch.cat([parameters.read(), buffers.read()]).cpu()
    if not rounds.transport.same_start:
        try:
            values = Averager(rounds).broadcast(values)
        finally:
            raise_conflict(rounds.transport)  # the cause, if a rank has left because of one
    model, statistics = values[: parameters.numel], values[parameters.numel :]
    parameters.write(model)
    buffers.write(statistics)
    rounds.start(model, statistics)


def _connect(rounds: Rounds, seconds: float) -> None:
    wanted = set(rounds.edges)
    connected = rounds.transport.connect(wanted, seconds=seconds)
    raise_conflict(rounds.transport)
    for peer in sorted(wanted - set(connected)):
        rounds.remove(peer, f"it did not connect within {seconds:.0f} s")


def _rejoin(rounds: Rounds, parameters: Flat, buffers: Flat, *, seconds: float) -> None:
    """Copy the model of the neighbour that answers first. The other edges become valid in later rounds."""
    transport = rounds.transport
    transport.announce(rounds.edges)
    _connect(rounds, seconds)
    until = transport.now() + seconds
    while rounds.edges and transport.now() < until:
        for edge in list(rounds.edges.values()):
            message = rounds.next_message(edge, transport.now() + _POLL_SECONDS)
            model = None if message is None else rounds.start_from(edge.peer, message)
            if message is not None and model is not None:
                for other in rounds.edges:
                    if other != edge.peer:
                        rounds.edges[other] = Edge(
                            other, last=message.round, valid=not rounds.node.tracks, snapshot_due=True, joining=True
                        )
                parameters.write(model)
                if message.buffers.numel() == buffers.numel:
                    own = buffers.read().cpu()
                    buffers.write(torch.where(torch.isfinite(own), message.buffers, own))
                rounds.buffers = buffers.read().cpu()
                return
    raise ExchangeError(
        f"no neighbour of rank {transport.rank} answered within {seconds:.0f} s: check that they run and give a larger "
        "start_seconds; if all ranks start again, give peers_at another run name or a new file"
    )
