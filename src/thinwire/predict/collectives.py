"""The cost model of collectives: rounds and message sizes of rings, trees and direct exchanges, priced on a link.

All of thinwire counts rounds and bytes here: `plan` and `auto` price them, the paced emulation waits for them, the
simulator follows them hop by hop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..comm.network import FEW_RANKS, SMALL_SUM
from ..exchange.script import Collective

Algorithm = Literal["ring", "tree", "direct", "doubling"]
Name = Literal[
    "ring_all_reduce",
    "tree_all_reduce",
    "direct_all_reduce",
    "ring_all_gather",
    "direct_all_gather",
    "doubling_all_gather",
    "ring_reduce_scatter",
    "direct_all_to_all",
    "tree_broadcast",
    "direct_gather",
    "tree_barrier",
    "neighbour",
]


@dataclass(frozen=True)
class Link:
    """A network link: seconds before the first byte arrives, then seconds for each byte.

    >>> Link.of(milliseconds=1, gigabits=1).byte_seconds
    8e-09
    """

    latency: float
    byte_seconds: float

    @classmethod
    def of(cls, *, milliseconds: float, gigabits: float) -> Link:
        return cls(milliseconds / 1e3, 8e-9 / gigabits)

    @property
    def in_flight(self) -> float:
        """The bandwidth-delay product: bytes that are sent while the first of them travels."""
        return self.latency / self.byte_seconds


@dataclass(frozen=True)
class Cost:
    """Seconds of one collective: its latency, during which others may send, and the transfer of its bytes."""

    latency: float
    transfer: float

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


@dataclass(frozen=True)
class Schedule:
    """How a collective of `ranks` ranks runs: rounds one after the other, and the share of the payload in one message.

    The payload is the tensor that every rank gives to the collective.

    >>> ring = schedule("ring_all_reduce", 4)
    >>> ring.rounds, ring.message, ring.volume
    (6, 0.25, 1.5)
    """

    algorithm: Algorithm
    rounds: int
    message: float
    ranks: int

    @property
    def volume(self) -> float:
        """How many times the payload crosses the busiest link.

        In a direct round a link carries a message for each of the other ranks. Doubling begins with one message and
        ends when it has passed on those of all other ranks.
        """
        if self.algorithm == "direct":
            return self.rounds * (self.ranks - 1) * self.message
        if self.algorithm == "doubling":
            return (self.ranks - 1) * self.message
        return self.rounds * self.message

    def cost(self, link: Link, size: float) -> Cost:
        """On hosts with equal links, for a payload of `size` bytes.

        >>> round(schedule("ring_all_reduce", 8).cost(Link.of(milliseconds=1, gigabits=1), 100e6).seconds, 3)
        1.414
        """
        return Cost(self.rounds * link.latency, self.volume * size * link.byte_seconds)


def levels(ranks: int) -> int:
    """Levels of a binary tree over the ranks.

    >>> [levels(n) for n in (1, 2, 5, 8)]
    [0, 1, 3, 3]
    """
    return math.ceil(math.log2(ranks))


# Of n ranks: the algorithm, its rounds, and the share of the payload in one message.
_SCHEDULES: Mapping[Name, Callable[[int], tuple[Algorithm, int, float]]] = MappingProxyType(
    {
        "ring_all_reduce": lambda n: ("ring", 2 * (n - 1), 1 / n),
        "tree_all_reduce": lambda n: ("tree", 2 * levels(n), 1.0),
        "direct_all_reduce": lambda n: ("direct", 2, 1 / n),  # pieces to their owners, and sums back
        "ring_all_gather": lambda n: ("ring", n - 1, 1.0),
        "direct_all_gather": lambda n: ("direct", 1, 1.0),
        "doubling_all_gather": lambda n: ("doubling", levels(n), 1.0),
        "ring_reduce_scatter": lambda n: ("ring", n - 1, 1 / n),
        "direct_all_to_all": lambda n: ("direct", 1, 1 / n),
        "tree_broadcast": lambda n: ("tree", levels(n), 1.0),
        "direct_gather": lambda n: ("direct", 1, 1.0),  # the link of the root carries all of it
        "tree_barrier": lambda n: ("tree", 2 * levels(n), 0.0),
        "neighbour": lambda n: ("ring", 1, 1.0),
    }
)


@functools.lru_cache(maxsize=1024)
def schedule(name: Name, ranks: int) -> Schedule:
    """A collective by the name of its algorithm; a single rank has nothing to wait for."""
    algorithm, rounds, message = _SCHEDULES[name](ranks)
    return Schedule(algorithm, rounds if ranks > 1 else 0, message, ranks)


def takes_direct_way(size: float, ranks: int) -> bool:
    """Whether `comm` sends an awaited sum or an all-gather of this size directly instead of in a ring."""
    return size <= SMALL_SUM and ranks <= FEW_RANKS


# What `comm` and gloo do for the collectives of an exchange; small all-gathers go the direct way.
_OF_COLLECTIVE: Mapping[Collective, Name] = MappingProxyType(
    {
        "all_reduce": "ring_all_reduce",
        "small_sum": "direct_all_reduce",
        "all_gather": "ring_all_gather",
        "all_to_all": "direct_all_to_all",
        "broadcast": "tree_broadcast",
        "swap": "neighbour",
    }
)


def schedule_of(collective: Collective, size: float, ranks: int) -> Schedule:
    """The schedule that `comm` and gloo follow for a collective of an exchange.

    >>> schedule_of("all_gather", 1e3, 4).algorithm, schedule_of("all_gather", 1e6, 4).algorithm
    ('direct', 'ring')
    """
    if collective == "all_gather" and takes_direct_way(size, ranks):
        return schedule("direct_all_gather", ranks)
    return schedule(_OF_COLLECTIVE[collective], ranks)


def hops(collective: Collective, size: float, ranks: int) -> tuple[int, float]:
    """Latencies, and times the payload, on the path that decides when a collective ends.

    >>> hops("all_reduce", 1e6, 4), hops("all_gather", 1e6, 4), hops("all_to_all", 1e6, 4)
    ((6, 1.5), (3, 3.0), (1, 0.75))
    """
    found = schedule_of(collective, size, ranks)
    return found.rounds, found.volume
