"""The exact mean over all live ranks, along a tree of the topology's edges: for evaluation.

First the ranks spread membership updates, with enough hops for an update to cross the graph. So all ranks build the
same tree, with the lowest live rank as its root. Then sums travel up the tree and the mean travels down: every rank
gets the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ExchangeError
from .edge import Edge
from .message import GossipMessage, Kind
from .rounds import Rounds
from .topology import reachable


class Averager:
    """Means over the ranks of `rounds`. All ranks must ask after the same step."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._call: tuple[int, int] = (0, 0)  # the round, and the number of the call in it

    def mean(self, values: Tensor) -> Tensor:
        """The mean of flat float32 values over all live ranks that are connected to this one."""
        parent, children = self._tree()
        total = torch.cat([values.to(torch.float32).cpu(), torch.ones(1)])
        for child in children:
            total += self._receive(child, Kind.UP, total.numel())
        if parent is None:
            total /= total[-1].clone()
        else:
            self._send(parent, Kind.UP, total)
            total = self._receive(parent, Kind.DOWN, total.numel())
        for child in children:
            self._send(child, Kind.DOWN, total)
        return total[:-1].to(values.device)

    def broadcast(self, values: Tensor) -> Tensor:
        """The values of the lowest rank, on all ranks."""
        parent, children = self._tree()
        if parent is not None:
            values = self._receive(parent, Kind.DOWN, values.numel())
        for child in children:
            self._send(child, Kind.DOWN, values)
        return values

    def _tree(self) -> tuple[int | None, list[int]]:
        """The parent and the children of this rank."""
        rounds = self._rounds
        rounds.receive()
        number, calls = self._call
        self._call = (rounds.round, calls + 1 if number == rounds.round else 0)
        self._spread_membership()
        rank, alive = rounds.transport.rank, rounds.membership.alive()
        # If deaths have disconnected the graph, every component has its own root.
        component = reachable(rounds.topology, alive, rank)
        parents = reachable(rounds.topology, alive, min(component))
        return parents[rank], [child for child, parent in parents.items() if parent == rank]

    def _spread_membership(self) -> None:
        rounds = self._rounds
        ranks = rounds.transport.world_size
        depth, farthest = {0: 0}, 0
        for peer, parent in reachable(rounds.topology, range(ranks), 0).items():
            if parent is not None:
                depth[peer] = depth[parent] + 1
                farthest = max(farthest, depth[peer])
        # Deaths may lengthen the paths, but no path is longer than one through all ranks.
        for hop in range(min(ranks - 1, 4 * farthest + 2)):
            edges = [edge for edge in rounds.edges.values() if not edge.joining]
            for edge in edges:
                self._send(edge.peer, Kind.MEMBERSHIP, torch.empty(0), hop=hop)
            for edge in edges:
                message = self._wait(edge, Kind.MEMBERSHIP, hop)
                if message is not None:
                    rounds.membership.merge(message.updates)

    def _send(self, peer: int, kind: Kind, values: Tensor, *, hop: int = 0) -> None:
        rounds = self._rounds
        message = GossipMessage(
            self._call[0],
            kind,
            incarnation=rounds.transport.incarnation,
            tag=self._tag(hop),
            snapshot=values,
            updates=rounds.membership.updates(),
        )
        rounds.transport.send(peer, message.pack())

    def _tag(self, hop: int) -> int:
        return (self._call[1] << 32) | hop

    def _wait(self, edge: Edge, kind: Kind, hop: int) -> GossipMessage | None:
        """This message of a neighbour; messages of rounds that arrive before it are kept for later."""
        rounds = self._rounds
        wait = float("inf") if rounds.deadline is None else max(rounds.deadline, 1.0) * 4
        until = rounds.transport.now() + wait
        early, edge.early = edge.early, []
        while (message := early.pop(0) if early else rounds.next_message(edge, until)) is not None:
            if message.kind == Kind.ROUND:
                edge.early.append(message)
                if message.round > self._call[0]:  # it trains on: its part of this average will not come
                    edge.early += early
                    return None
            elif (message.kind, message.round, message.tag) == (kind, self._call[0], self._tag(hop)):
                edge.early += early
                edge.unused = 0
                return message
            else:
                edge.unused += 1
        return None

    def _receive(self, peer: int, kind: Kind, numel: int) -> Tensor:
        edge = self._rounds.edges.get(peer)
        message = None if edge is None else self._wait(edge, kind, 0)
        if message is None or message.snapshot.numel() != numel:
            raise ExchangeError(
                f"rank {peer} did not take part in an average: call it on all ranks after the same step"
            )
        return message.snapshot.clone()
