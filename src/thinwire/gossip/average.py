"""The exact mean over all ranks that are alive, along a tree of the topology's edges: for evaluation.

First everyone tells its neighbours who is alive, as often as it takes for news to come from the farthest rank; so all
build the same tree, with the lowest living rank as its root. Then sums go up and the mean comes down, the same bits for
everyone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ExchangeError
from .letter import Kind, Letter
from .rounds import Edge, Rounds
from .topology import reachable


class Averager:
    """Means over the ranks of `rounds`, which must all ask at the same step."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._asked: tuple[int, int] = (0, 0)  # step, how often in it

    def mean(self, values: Tensor) -> Tensor:
        """The mean of flat float32 values over the living ranks that can be reached."""
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

    def spread(self, values: Tensor) -> Tensor:
        """The values of the lowest rank, for everyone."""
        parent, children = self._tree()
        if parent is not None:
            values = self._receive(parent, Kind.DOWN, values.numel())
        for child in children:
            self._send(child, Kind.DOWN, values)
        return values

    def _tree(self) -> tuple[int | None, list[int]]:
        """Who is above and who is below this rank."""
        rounds = self._rounds
        rounds.arrive()
        step, times = self._asked
        self._asked = (rounds.round, times + 1 if step == rounds.round else 0)
        self._spread_news()
        rank, alive = rounds.mail.rank, rounds.membership.alive()
        # Where deaths have cut the graph, every part has a root of its own.
        part = reachable(rounds.topology, alive, rank)
        ways = reachable(rounds.topology, alive, min(part))
        return ways[rank], [child for child, above in ways.items() if above == rank]

    def _spread_news(self) -> None:
        rounds = self._rounds
        ranks = rounds.mail.world_size
        ways = reachable(rounds.topology, range(ranks), 0)
        depth, farthest = {0: 0}, 0
        for peer, above in ways.items():
            if above is not None:
                depth[peer] = depth[above] + 1
                farthest = max(farthest, depth[peer])
        # The deaths of some may make the way longer, but never longer than through everyone.
        for hop in range(min(ranks - 1, 4 * farthest + 2)):
            edges = [edge for edge in rounds.edges.values() if not edge.entering]
            for edge in edges:
                self._send(edge.peer, Kind.NEWS, torch.empty(0), hop=hop)
            for edge in edges:
                letter = self._wait(edge, Kind.NEWS, hop)
                if letter is not None:
                    rounds.membership.hear(letter.news)

    def _send(self, peer: int, kind: Kind, values: Tensor, *, hop: int = 0) -> None:
        rounds = self._rounds
        letter = Letter(
            self._asked[0],
            kind,
            life=rounds.mail.life,
            tag=self._tag(hop),
            snapshot=values,
            news=rounds.membership.news(),
        )
        rounds.mail.send(peer, letter.pack())

    def _tag(self, hop: int) -> int:
        return (self._asked[1] << 32) | hop

    def _wait(self, edge: Edge, kind: Kind, hop: int) -> Letter | None:
        rounds = self._rounds
        until = rounds.mail.now() + (float("inf") if rounds.deadline is None else max(rounds.deadline, 1.0) * 4)
        early, edge.held = edge.held, []
        while (letter := early.pop(0) if early else rounds.next_letter(edge, until)) is not None:
            if letter.kind == Kind.ROUND:
                edge.held.append(letter)
            elif (letter.kind, letter.round, letter.tag) == (kind, self._asked[0], self._tag(hop)):
                edge.held += early
                return letter
        return None

    def _receive(self, peer: int, kind: Kind, numel: int) -> Tensor:
        edge = self._rounds.edges.get(peer)
        letter = None if edge is None else self._wait(edge, kind, 0)
        if letter is None or letter.snapshot.numel() != numel:
            raise ExchangeError(
                f"rank {peer} did not take part in an average: call it on all ranks after the same step"
            )
        return letter.snapshot.clone()
