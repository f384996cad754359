"""Who talks to whom in decentralised training, with which weight, and how much noise that allows.

A topology is a graph for any number of ranks; `ring(8)`, or `ring()` and its number later (`of`). Its mixing matrix is
symmetric and doubly stochastic: averaging with it keeps the mean, and repeating it leads everyone there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import OptionError

if TYPE_CHECKING:
    from ..codecs.base import Codec  # its facts are asked for, nothing is run

Weights = Literal["metropolis", "uniform"]
WEIGHTS: tuple[Weights, ...] = ("metropolis", "uniform")
_MANY = 96  # ranks beyond which the exact noise limit of irregular graphs, n^4 multiplications, is not computed


@dataclasses.dataclass(frozen=True)
class Topology(ABC):
    """A connected graph over `ranks` ranks, None for as many as there will be.

    `weights`: what an edge counts in the average. `metropolis` is 1 / (1 + the larger degree of its ends), `uniform`
    is 1 / (1 + the largest degree of all); the same where all degrees are equal.

    >>> ring(8).neighbours(0)
    (1, 7)
    >>> ring(8).matrix()[0, :3]
    tensor([0.3333, 0.3333, 0.0000], dtype=torch.float64)
    >>> round(ring(8).spectral_gap(), 3), round(ring(8).noise_limit(), 3)
    (0.195, 1.366)
    """

    name: ClassVar[str]
    static: ClassVar[bool] = True  # the same edges in every round
    alike: ClassVar[bool] = False  # every rank sees the same graph around it
    ranks: int | None = None
    weights: Weights = dataclasses.field(default="metropolis", kw_only=True)

    def __post_init__(self) -> None:
        if self.ranks is not None and (not isinstance(self.ranks, int) or self.ranks < 1):
            raise OptionError(f"{self.name} needs 1 rank or more, not {self.ranks}")
        if self.weights not in WEIGHTS:
            raise OptionError(f"there are no weights {self.weights!r}: choose {' or '.join(WEIGHTS)}")

    @abstractmethod
    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        """Neighbours of a rank, in any order; itself and repetitions do not count."""

    # -------------------------------------------------------------------------------------------------- the graph

    def of(self, ranks: int) -> Topology:
        """This topology over so many ranks; an error if it was made for another number.

        >>> ring().of(3).neighbours(0)
        (1, 2)
        """
        if self.ranks not in (None, ranks):
            raise OptionError(f"{self.name} was made for {self.ranks} ranks, there are {ranks}: leave its number out")
        return dataclasses.replace(self, ranks=ranks)

    @property
    def size(self) -> int:
        if self.ranks is None:
            raise OptionError(f"of how many ranks? Write {self.name}(8), or {self.name}().of(8)")
        return self.ranks

    @property
    def period(self) -> int:
        """After how many rounds the edges repeat; 1 for static graphs."""
        return 1

    def neighbours(self, rank: int, turn: int = 0) -> tuple[int, ...]:
        """The ranks that `rank` talks to in round `turn`, in order."""
        return _peers_of(self, turn % self.period)[rank]

    def ever(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` talks to in any round."""
        return tuple(sorted({peer for turn in range(self.period) for peer in self.neighbours(rank, turn)}))

    def degree(self, rank: int, turn: int = 0) -> int:
        return len(self.neighbours(rank, turn))

    def weight(self, rank: int, peer: int, turn: int = 0) -> float:
        """What the model of `peer` counts in the average of `rank`."""
        if self.weights == "uniform":
            return 1.0 / (1 + max(len(peers) for peers in _peers_of(self, turn % self.period)))
        return metropolis(self.degree(rank, turn), self.degree(peer, turn))

    # -------------------------------------------------------------------------------------- the matrix and its facts

    def matrix(self, turn: int = 0) -> Tensor:
        """The mixing matrix of a round: float64, symmetric, rows that sum to 1."""
        return _matrix(self, turn % self.period).clone()

    def spectral_gap(self) -> float:
        """1 - the second largest magnitude of an eigenvalue: how much closer to the mean everyone comes in a round.

        Of time-varying graphs: of all rounds of a period together.

        >>> complete(5).spectral_gap()
        1.0
        >>> one_peer_exponential(8).spectral_gap()  # exact average after three rounds
        1.0
        """
        product = functools.reduce(torch.matmul, [_matrix(self, turn) for turn in range(self.period)])
        apart = product - 1.0 / self.size
        return 1.0 - round(float(torch.linalg.matrix_norm(apart, 2)), 12)

    def published_noise_limit(self) -> float:
        """Compression noise (alpha squared) below which DCD-PSGD is proven to converge: (1 - rho)^2 / (4 mu^2).

        Reference: Tang et al. 2018, arXiv 1803.06443, theorem 1. Sufficient, and far below what is necessary.
        """
        values = self._eigenvalues()
        if len(values) == 0:
            return math.inf
        rho, mu = float(values.abs().max()), float((values - 1).abs().max())
        return (1 - rho) ** 2 / (4 * mu**2)

    def noise_limit(self) -> float:
        """Compression noise (alpha squared) above which the ranks of DCD-PSGD drift apart in mean square.

        With independent noise of energy alpha^2 |z|^2 on every rank, what rank j adds comes back to rank i as
        T_ij = sum over eigenvalues a, b of (1-a)(1-b)/(1-ab) u_ai u_aj u_bi u_bj; the limit is 1 over the largest
        eigenvalue of T. Where all ranks look alike that is n / sum (1-a)/(1+a), which also stands for it where
        there are more than 96 ranks.

        >>> round(torus(16).noise_limit(), 3), round(star(8).noise_limit(), 3)
        (1.067, 1.302)
        """
        return _noise_limit(self)

    def _eigenvalues(self) -> Tensor:
        """All but the 1 of the mean."""
        if not self.static:
            raise OptionError(f"the edges of {self.name} change with the rounds: noise limits are for static graphs")
        values: Tensor = torch.linalg.eigvalsh(self.matrix())
        return values[:-1]

    def allows(self, codec: Codec, *, numel: int = 1 << 20) -> bool:
        """Whether the worst noise of an unbiased codec is below the limit for DCD-PSGD. False for biased codecs.

        A False says nothing about a real model, whose noise is often far below the worst: training measures it.

        >>> from thinwire.codecs import min_max, qsgd
        >>> ring(8).allows(min_max(4, block=64)), ring(8).allows(qsgd(4))
        (True, False)
        """
        omega = codec.omega(numel)
        return codec.unbiased and omega is not None and omega < self.noise_limit()

    def __str__(self) -> str:
        return f"{self.name}({'' if self.ranks is None else self.ranks})"


def metropolis(degree: int, other: int) -> float:
    """The weight of an edge between ranks of such degrees.

    >>> metropolis(2, 2) == 1 / 3
    True
    """
    return 1.0 / (1 + max(degree, other))


@functools.lru_cache(maxsize=64)
def _peers_of(topology: Topology, turn: int) -> tuple[tuple[int, ...], ...]:
    ranks = topology.size
    return tuple(tuple(sorted(set(topology._peers(rank, ranks, turn)) - {rank})) for rank in range(ranks))


@functools.lru_cache(maxsize=64)
def _matrix(topology: Topology, turn: int) -> Tensor:
    ranks = topology.size
    matrix = torch.zeros(ranks, ranks, dtype=torch.float64)
    for rank in range(ranks):
        for peer in topology.neighbours(rank, turn):
            matrix[rank, peer] = topology.weight(rank, peer, turn)
    matrix += torch.diag(1 - matrix.sum(1))
    return matrix


@functools.lru_cache(maxsize=64)
def _noise_limit(topology: Topology) -> float:
    """Kept, because a thousand ranks of one process ask for the same."""
    values = topology._eigenvalues()
    if topology.size == 1:
        return math.inf
    if topology.alike or topology.size > _MANY:
        return topology.size / float(((1 - values) / (1 + values)).sum())
    return _irregular_limit(topology.matrix())


def _irregular_limit(matrix: Tensor) -> float:
    values, vectors = torch.linalg.eigh(matrix)
    a, u = values[:-1], vectors[:, :-1]
    kernel = torch.outer(1 - a, 1 - a) / (1 - torch.outer(a, a))
    rows = []
    for i in range(len(matrix)):
        weighted = u * u[i]  # [j, a]: u_aj u_ai
        rows.append(torch.einsum("ja,ab,jb->j", weighted, kernel, weighted))
    return 1.0 / float(torch.linalg.eigvals(torch.stack(rows)).abs().max())


# ------------------------------------------------------------------------------------------------------- the graphs


@dataclasses.dataclass(frozen=True)
class Ring(Topology):
    """Everyone talks to the next and the one before.

    >>> ring(5).neighbours(4)
    (0, 3)
    """

    name: ClassVar[str] = "ring"
    alike: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        yield from ((rank + 1) % ranks, (rank - 1) % ranks)


@dataclasses.dataclass(frozen=True)
class Torus(Topology):
    """A grid as square as the number allows, closed in both directions; a ring for prime numbers.

    >>> torus(12).neighbours(0)
    (1, 3, 4, 8)
    """

    name: ClassVar[str] = "torus"
    alike: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        rows = next(side for side in range(math.isqrt(ranks), 0, -1) if ranks % side == 0)
        columns = ranks // rows
        row, column = divmod(rank, columns)
        for step in (1, -1):
            yield row * columns + (column + step) % columns
            yield (row + step) % rows * columns + column


@dataclasses.dataclass(frozen=True)
class Exponential(Topology):
    """Everyone talks to those 1, 2, 4, 8, ... places away, in both directions: 2 log2 n neighbours at most.

    >>> exponential(16).neighbours(0)
    (1, 2, 4, 8, 12, 14, 15)
    """

    name: ClassVar[str] = "exponential"
    alike: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        distance = 1
        while distance < ranks:
            yield from ((rank + distance) % ranks, (rank - distance) % ranks)
            distance *= 2


@dataclasses.dataclass(frozen=True)
class OnePeerExponential(Topology):
    """One neighbour in each round: in round t, the rank whose number differs in bit t mod log2 n.

    With a power of two, everyone has the exact average after log2 n rounds; otherwise some pause in some rounds. For
    `dpsgd` and `naive`: the other algorithms keep copies of fixed neighbours.
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
    """Everyone talks to everyone."""

    name: ClassVar[str] = "complete"
    alike: ClassVar[bool] = True

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        yield from range(ranks)


@dataclasses.dataclass(frozen=True)
class Star(Topology):
    """Everyone talks to rank 0 only."""

    name: ClassVar[str] = "star"

    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        yield from (range(ranks) if rank == 0 else (0,))


@dataclasses.dataclass(frozen=True)
class Graph(Topology):
    """Edges as given; made by `from_graph`."""

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
        raise OptionError("averages need edges in both directions: give graph.to_undirected()")
    made = Graph(len(nodes), weights=weights, edges=frozenset((min(e), max(e)) for e in graph.edges if e[0] != e[1]))
    if len(reachable(made, range(len(nodes)), 0)) < len(nodes):
        raise OptionError("this graph falls apart: parts that are not connected never agree")
    return made


def named_topology(text: str) -> Topology:
    """A topology by name, as commands take it.

    >>> named_topology("ring")
    Ring(ranks=None, weights='metropolis')
    """
    if text not in TOPOLOGIES:
        raise OptionError(f"there is no topology {text}: choose {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[text]()


def reachable(topology: Topology, alive: range | frozenset[int] | set[int], start: int) -> dict[int, int | None]:
    """The ranks that can be reached from `start` through ranks that are alive, nearest first, each with its way back.

    >>> reachable(ring(5), {0, 1, 2, 4}, 0)
    {0: None, 1: 0, 4: 0, 2: 1}
    """
    found: dict[int, int | None] = {start: None}
    queue = [start]
    while queue:
        rank = queue.pop(0)
        for peer in topology.ever(rank):
            if peer in alive and peer not in found:
                found[peer] = rank
                queue.append(peer)
    return found
