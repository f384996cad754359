"""A topology: a graph over the ranks, and the weight of each edge in the average.

A topology serves any number of ranks: `ring(8)`, or `ring()` and the number later (`of`). Its mixing matrix is
symmetric and doubly stochastic. So averaging keeps the mean, and repeated averaging converges to it.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ...errors import OptionError
from . import spectrum

if TYPE_CHECKING:
    from ...codecs.base import Codec  # for its declared properties only

Weights = Literal["metropolis", "uniform"]
WEIGHTS: tuple[Weights, ...] = ("metropolis", "uniform")


@dataclasses.dataclass(frozen=True)
class Topology(ABC):
    """A connected graph over `ranks` ranks; None leaves the number open.

    `weights`: the weight of an edge in the average. `metropolis` is 1 / (1 + the larger degree of its two ends),
    `uniform` is 1 / (1 + the largest degree in the graph). Both are the same where all degrees are equal.

    >>> from thinwire.gossip.topology import ring
    >>> ring(8).neighbours(0)
    (1, 7)
    >>> ring(8).matrix()[0, :3]
    tensor([0.3333, 0.3333, 0.0000], dtype=torch.float64)
    >>> round(ring(8).spectral_gap(), 3), round(ring(8).noise_limit(), 3)
    (0.195, 1.366)
    """

    name: ClassVar[str]
    static: ClassVar[bool] = True  # the same edges in every round
    vertex_transitive: ClassVar[bool] = False  # the graph looks the same from every rank
    ranks: int | None = None
    weights: Weights = dataclasses.field(default="metropolis", kw_only=True)

    def __post_init__(self) -> None:
        if self.ranks is not None and (not isinstance(self.ranks, int) or self.ranks < 1):
            raise OptionError(f"{self.name} needs 1 rank or more, not {self.ranks}")
        if self.weights not in WEIGHTS:
            raise OptionError(f"there are no weights {self.weights!r}: choose {' or '.join(WEIGHTS)}")

    @abstractmethod
    def _peers(self, rank: int, ranks: int, turn: int) -> Iterator[int]:
        """Neighbours of a rank in any order. The rank itself and repetitions are ignored."""

    # -------------------------------------------------------------------------------------------------- the graph

    def of(self, ranks: int) -> Topology:
        """This topology over `ranks` ranks; an error if it was built for another number.

        >>> from thinwire.gossip.topology import ring
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
        """Rounds after which the edges repeat; 1 for static graphs."""
        return 1

    def neighbours(self, rank: int, turn: int = 0) -> tuple[int, ...]:
        """The neighbours of `rank` in round `turn`, sorted."""
        return _all_peers(self, turn % self.period)[rank]

    def all_neighbours(self, rank: int) -> tuple[int, ...]:
        """The neighbours of `rank` in any round, sorted.

        >>> from thinwire.gossip.topology import one_peer_exponential
        >>> one_peer_exponential(8).all_neighbours(5)
        (1, 4, 7)
        """
        return tuple(sorted({peer for turn in range(self.period) for peer in self.neighbours(rank, turn)}))

    def degree(self, rank: int, turn: int = 0) -> int:
        return len(self.neighbours(rank, turn))

    def weight(self, rank: int, peer: int, turn: int = 0) -> float:
        """The weight of the model of `peer` in the average of `rank`."""
        if self.weights == "uniform":
            return 1.0 / (1 + max(len(peers) for peers in _all_peers(self, turn % self.period)))
        return metropolis(self.degree(rank, turn), self.degree(peer, turn))

    # -------------------------------------------------------------------------------------- the matrix and its limits

    def matrix(self, turn: int = 0) -> Tensor:
        """The mixing matrix of a round: float64, symmetric, rows that sum to 1."""
        return _matrix(self, turn % self.period).clone()

    def spectral_gap(self) -> float:
        """1 - the second largest magnitude of an eigenvalue: the contraction towards the mean in one round.

        For a time-varying graph, the contraction over one period.

        >>> from thinwire.gossip.topology import complete, one_peer_exponential
        >>> complete(5).spectral_gap()
        1.0
        >>> one_peer_exponential(8).spectral_gap()  # the exact average after three rounds
        1.0
        """
        return spectrum.spectral_gap([_matrix(self, turn) for turn in range(self.period)])

    def published_noise_limit(self) -> float:
        """Compression noise (alpha squared) below which DCD-PSGD is proven to converge: (1 - rho)^2 / (4 mu^2).

        Reference: Tang et al. 2018, arXiv 1803.06443, theorem 1. The bound is sufficient and far from necessary.
        """
        return spectrum.published_noise_limit(self._static_matrix())

    def noise_limit(self) -> float:
        """Compression noise (alpha squared) above which the ranks of DCD-PSGD drift apart in mean square.

        `thinwire.gossip.topology.spectrum` has the derivation.

        >>> from thinwire.gossip.topology import star, torus
        >>> round(torus(16).noise_limit(), 3), round(star(8).noise_limit(), 3)
        (1.067, 1.302)
        """
        return _noise_limit(self)

    def allows(self, codec: Codec, *, numel: int = 1 << 20) -> bool:
        """Whether the worst-case noise of an unbiased codec is below the limit of DCD-PSGD. False for biased codecs.

        The noise on a real model is often far below the worst case, so False does not mean that training fails.
        Training measures the noise.

        >>> from thinwire.codecs import min_max, qsgd
        >>> from thinwire.gossip.topology import ring
        >>> ring(8).allows(min_max(4, block=64)), ring(8).allows(qsgd(4))
        (True, False)
        """
        omega = codec.omega(numel)
        return codec.unbiased and omega is not None and omega < self.noise_limit()

    def _static_matrix(self) -> Tensor:
        if not self.static:
            raise OptionError(f"the edges of {self.name} change with the rounds: noise limits are for static graphs")
        return self.matrix()

    def __str__(self) -> str:
        return f"{self.name}({'' if self.ranks is None else self.ranks})"


def metropolis(degree: int, other: int) -> float:
    """The Metropolis-Hastings weight of an edge between ranks with these degrees.

    >>> metropolis(2, 2) == 1 / 3
    True
    """
    return 1.0 / (1 + max(degree, other))


def reachable(topology: Topology, alive: range | frozenset[int] | set[int], start: int) -> dict[int, int | None]:
    """The ranks that `start` reaches through live ranks, nearest first, each with its predecessor.

    >>> from thinwire.gossip.topology import ring
    >>> reachable(ring(5), {0, 1, 2, 4}, 0)
    {0: None, 1: 0, 4: 0, 2: 1}
    """
    found: dict[int, int | None] = {start: None}
    queue = [start]
    while queue:
        rank = queue.pop(0)
        for peer in topology.all_neighbours(rank):
            if peer in alive and peer not in found:
                found[peer] = rank
                queue.append(peer)
    return found


@functools.lru_cache(maxsize=64)
def _all_peers(topology: Topology, turn: int) -> tuple[tuple[int, ...], ...]:
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
    """Cached, because a simulation asks once for every worker."""
    return spectrum.noise_limit(topology._static_matrix(), vertex_transitive=topology.vertex_transitive)
