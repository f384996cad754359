"""How a rank begins: with all others from the same model, or later, with a copy of a neighbour's."""

from __future__ import annotations

import torch

from ..errors import ExchangeError
from .average import Averager
from .rounds import Edge, Rounds
from .tensors import Flat

_LOOK = 0.05  # seconds for which one neighbour after the other is listened to


def enter(rounds: Rounds, parameters: Flat, buffers: Flat, *, seconds: float) -> None:
    """Meet the neighbours and have the model that the others have."""
    if rounds.mail.life > 1:
        _come_back(rounds, parameters, buffers, seconds=seconds)
        return
    _meet(rounds, seconds)
    values = torch.cat([parameters.read(), buffers.read()]).cpu()
    if not rounds.mail.same_start:
        values = Averager(rounds).spread(values)
    model, statistics = values[: parameters.numel], values[parameters.numel :]
    parameters.write(model)
    buffers.write(statistics)
    rounds.begin(model, statistics)


def _meet(rounds: Rounds, seconds: float) -> None:
    wanted = set(rounds.edges)
    came = rounds.mail.connect(wanted, seconds=seconds)
    for peer in sorted(wanted - set(came)):
        rounds.remove(peer, f"it did not come within {seconds:.0f} s")


def _come_back(rounds: Rounds, parameters: Flat, buffers: Flat, *, seconds: float) -> None:
    """Copy the model of the neighbour that answers first; the others are heard in the rounds that follow."""
    rounds.mail.knock(rounds.edges)
    _meet(rounds, seconds)
    until = rounds.mail.now() + seconds
    while rounds.edges and rounds.mail.now() < until:
        for edge in list(rounds.edges.values()):
            letter = rounds.next_letter(edge, rounds.mail.now() + _LOOK)
            if letter is not None and letter.snapshot.numel() == parameters.numel:
                model = rounds.begin_from(edge.peer, letter)
                for other in rounds.edges:
                    if other != edge.peer:
                        rounds.edges[other] = Edge(
                            other, last=letter.round, valid=not rounds.node.tracks, wanted=True, entering=True
                        )
                parameters.write(model)
                if letter.buffers.numel() == buffers.numel:
                    buffers.write(letter.buffers)
                return
    raise ExchangeError(f"no neighbour of rank {rounds.mail.rank} answered within {seconds:.0f} s: are they there?")
