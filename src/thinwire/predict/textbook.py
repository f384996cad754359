"""What collectives cost by the book: a latency and a time per byte, closed formulas, and where they cross.

Real libraries do not follow one line (see `network.py`, which fits them by collective and size). These formulas say
which way a decision leans and why, and are what published tables of winners were computed from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A network as one line: seconds before the first byte, then seconds for each byte.

    >>> Line.of(milliseconds=1, gigabits=1).byte_seconds
    8e-09
    """

    latency: float
    byte_seconds: float

    @classmethod
    def of(cls, *, milliseconds: float, gigabits: float) -> Line:
        return cls(milliseconds / 1e3, 8e-9 / gigabits)

    @property
    def in_flight(self) -> float:
        """The bandwidth-delay product: bytes that are sent while the first of them travels."""
        return self.latency / self.byte_seconds


def ring_all_reduce(line: Line, size: float, ranks: int) -> float:
    """2 (n - 1) latencies, 2 (n - 1) / n of the bytes.

    >>> round(ring_all_reduce(Line.of(milliseconds=1, gigabits=1), 100e6, 8), 3)
    1.414
    """
    return 2 * (ranks - 1) * (line.latency + size / ranks * line.byte_seconds)


def tree_all_reduce(line: Line, size: float, ranks: int) -> float:
    """Up and down a binary tree, the whole message at every level."""
    return 2 * _levels(ranks) * (line.latency + size * line.byte_seconds)


def broadcast(line: Line, size: float, ranks: int) -> float:
    return _levels(ranks) * (line.latency + size * line.byte_seconds)


def all_gather(line: Line, size: float, ranks: int) -> float:
    """`size` is what every rank contributes."""
    return _levels(ranks) * line.latency + (ranks - 1) * size * line.byte_seconds


def two_shot(line: Line, there: float, back: float, ranks: int) -> float:
    """Pieces to their owners and sums back, both to all at once: two latencies, (n - 1) / n of each message."""
    if ranks == 1:
        return 0.0
    return 2 * line.latency + (ranks - 1) / ranks * (there + back) * line.byte_seconds


def gathered_top_k(line: Line, dense: float, ratio: float, ranks: int) -> float:
    """Every rank's values and positions, as many bytes each, to everyone."""
    return all_gather(line, 2 * dense * ratio, ranks)


def shared_top_k_ring(line: Line, dense: float, ratio: float, ranks: int) -> float:
    """One rank's positions to all by a tree, the values of all added in a ring."""
    return broadcast(line, dense * ratio, ranks) + ring_all_reduce(line, dense * ratio, ranks)


def shared_top_k_tree(line: Line, dense: float, ratio: float, ranks: int) -> float:
    """The same with the values added in a tree."""
    return broadcast(line, dense * ratio, ranks) + tree_all_reduce(line, dense * ratio, ranks)


def top_k_winner(line: Line, dense: float, ratio: float, ranks: int) -> str:
    """The quickest of the three: `gather`, `ring` or `tree`.

    >>> resnet50 = 4 * 25_557_032
    >>> top_k_winner(Line.of(milliseconds=1, gigabits=1), resnet50, 0.1, 8)
    'ring'
    """
    ways = {"gather": gathered_top_k, "ring": shared_top_k_ring, "tree": shared_top_k_tree}
    return min(ways, key=lambda name: ways[name](line, dense, ratio, ranks))


# Where two of them cost the same: as bytes in flight (`Line.in_flight`) for each byte of `dense * ratio`. Below it, the
# first of the two wins.


def ring_beats_tree_below(ranks: int) -> float:
    """
    >>> [round(ring_beats_tree_below(n), 3) for n in (4, 8, 16)]
    [1.25, 0.531, 0.278]
    """
    more_latencies = ranks - 1 - _levels(ranks)
    return (_levels(ranks) - (ranks - 1) / ranks) / more_latencies if more_latencies > 0 else math.inf


def ring_beats_gather_below(ranks: int) -> float:
    """
    >>> [round(ring_beats_gather_below(n), 3) for n in (2, 4, 8)]
    [0.0, 0.417, 0.661]
    """
    return 1 - 1 / ranks - _levels(ranks) / (2 * (ranks - 1))


def tree_beats_gather_below(ranks: int) -> float:
    """
    >>> [round(tree_beats_gather_below(n), 3) for n in (4, 8, 16)]
    [0.0, 0.833, 2.25]
    """
    return max(0.0, (ranks - 1) / _levels(ranks) - 1.5)


def global_qsgd_pays(*, link: float, reduction: float, slowdown: float, ratio: float = 4.0) -> bool:
    """Whether a tree all-reduce of quantised values beats its own float32 one, quantising being free.

    `link` and `reduction` in bytes a second: the network, and adding two float32 messages. Adding codes takes
    `slowdown` times as long for each byte: 1 for integers, 79 measured for exponential codes on a GPU by their authors.

    >>> global_qsgd_pays(link=5.4e9, reduction=2e12, slowdown=79)
    True
    >>> global_qsgd_pays(link=200e9, reduction=2e12, slowdown=79)
    False
    """
    saved_on_the_wire = 2 / link * (1 - 1 / ratio)
    lost_in_adding = (slowdown / ratio - 1) / reduction
    return saved_on_the_wire > lost_in_adding


def break_even_throughput(dense_seconds: float, compressed_seconds: float, dense_bytes: float) -> float:
    """Bytes of gradient a second that encoding and decoding together must manage to gain anything; inf if nothing can.

    >>> round(break_even_throughput(1.6, 0.1, 13e6) / 1e6, 1)
    8.7
    """
    saved = dense_seconds - compressed_seconds
    return dense_bytes / saved if saved > 0 else math.inf


def _levels(ranks: int) -> float:
    return math.log2(ranks)
