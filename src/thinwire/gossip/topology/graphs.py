"""The topologies: ring, torus, exponential, one-peer exponential, complete, star, and any networkx graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from ...errors import OptionError
from .base import Topology, Weights, reachable


@dataclasses.dataclass(frozen=True)
class Ring(Topology):
    """Each rank has two neighbours: the next rank and the previous one.

    >>> ring(5).neighbours(4)
    (0, 3)
    """

    name: ClassVar[str] = "ring"
    vertex_transitive: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        yield from ((rank + 1) % ranks, (rank - 1) % ranks)


@dataclasses.dataclass(frozen=True)
class Torus(Topology):
    """A grid that wraps around in both directions, as square as the number allows. A prime number gives a ring.

    >>> torus(12).neighbours(0)
    (1, 3, 4, 8)
    """

    name: ClassVar[str] = "torus"
    vertex_transitive: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        rows = next(side for side in range(math.isqrt(ranks), 0, -1) if ranks % side == 0)
        columns = ranks // rows
        row, column = divmod(rank, columns)
        for step in (1, -1):
            yield row * columns + (column + step) % columns
            yield (row + step) % rows * columns + column


@dataclasses.dataclass(frozen=True)
class Exponential(Topology):
    """The neighbours are 1, 2, 4, 8, ... places away, in both directions: at most 2 log2 n.

    >>> exponential(16).neighbours(0)
    (1, 2, 4, 8, 12, 14, 15)
    """

    name: ClassVar[str] = "exponential"
    vertex_transitive: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        distance = 1
        while distance < ranks:
            yield from ((rank + distance) % ranks, (rank - distance) % ranks)
            distance *= 2


@dataclasses.dataclass(frozen=True)
class OnePeerExponential(Topology):
    """One neighbour in each round: in round t, the rank whose number differs in bit t mod log2 n.

    For a power of two, every rank has the exact average after log2 n rounds; otherwise some ranks have no neighbour in
    some rounds. Only for `dpsgd` and `naive`: the other algorithms keep copies of fixed neighbours.
    Reference: Ying et al. 2021, Exponential Graph is Provably Efficient for Decentralized Deep Training.

    >>> [one_peer_exponential(8).neighbours(5, turn) for turn in range(3)]
    [(4,), (7,), (1,)]
    """

    name: ClassVar[str] = "one_peer_exponential"
    static: ClassVar[bool] = False

    @property
    def period(self) -> int:
        return max(1, (self.size - 1).bit_length())

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        if (peer := rank ^ (1 << turn)) < ranks:
            yield peer


@dataclasses.dataclass(frozen=True)
class Complete(Topology):
    """Every rank is a neighbour of every other."""

    name: ClassVar[str] = "complete"
    vertex_transitive: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        yield from range(ranks)


@dataclasses.dataclass(frozen=True)
class Star(Topology):
    """Rank 0 is the only neighbour of all others."""

    name: ClassVar[str] = "star"

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        yield from (range(ranks) if rank == 0 else (0,))


@dataclasses.dataclass(frozen=True)
class Graph(Topology):
    """The edges of a graph; built by `from_graph`."""

    name: ClassVar[str] = "graph"
    edges: frozenset[tuple[int, int]] = frozenset()

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        for a, b in self.edges:
            if rank in (a, b):
                yield b if rank == a else a


ring, torus, exponential, complete, star = Ring, Torus, Exponential, Complete, Star
one_peer_exponential = OnePeerExponential
TOPOLOGIES: dict[str, type[Topology]] = {
    kind.name: kind for kind in (Ring, Torus, Exponential, OnePeerExponential, Complete, Star)
}


def from_graph(graph: Any, *, weights: Weights = "metropolis") -> Topology:
    """The topology of a networkx graph whose nodes are the ranks 0, 1, 2, ...

    >>> import networkx
    >>> from_graph(networkx.path_graph(3)).neighbours(1)
    (0, 2)
    """
    nodes = sorted(graph.nodes)
    if not nodes or nodes != list(range(len(nodes))):
        raise OptionError(
            "the nodes of a graph must be the ranks 0, 1, 2, ...: use networkx.convert_node_labels_to_integers"
        )
    if graph.is_directed():
        raise OptionError("averaging needs edges in both directions: give graph.to_undirected()")
    found = Graph(len(nodes), weights=weights, edges=frozenset((min(e), max(e)) for e in graph.edges if e[0] != e[1]))
    if len(reachable(found, range(len(nodes)), 0)) < len(nodes):
        raise OptionError("this graph is not connected: its parts would never agree. Add edges between them")
    return found


def named_topology(text: str) -> Topology:
    """The topology with this name, as on the command line.

    >>> named_topology("ring")
    Ring(ranks=None, weights='metropolis')
    """
    if text not in TOPOLOGIES:
        raise OptionError(f"there is no topology {text}: choose {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[text]()
