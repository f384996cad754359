"""What pays by closed formulas: ways to share Top-k and where they cross, Global-QSGD, break-even throughput.

Real libraries do not follow one formula (see `network.py`, which fits them by collective and size). These formulas say
which way a decision leans and why. Published tables of winners were computed from them. They are built from the
schedules of `collectives.py`.
"""

from __future__ import annotations

import math

from .collectives import Link, Name, levels, schedule


def _seconds(name: Name, link: Link, size: float, ranks: int) -> float:
    return schedule(name, ranks).cost(link, size).seconds


def ring_all_reduce(link: Link, size: float, ranks: int) -> float:
    """2 (n - 1) latencies, 2 (n - 1) / n of the bytes.

    >>> round(ring_all_reduce(Link.of(milliseconds=1, gigabits=1), 100e6, 8), 3)
    1.414
    """
    return _seconds("ring_all_reduce", link, size, ranks)


def tree_all_reduce(link: Link, size: float, ranks: int) -> float:
    """Up and down a binary tree, the whole message at every level."""
    return _seconds("tree_all_reduce", link, size, ranks)


def broadcast(link: Link, size: float, ranks: int) -> float:
    """Down a binary tree, the whole message at every level."""
    return _seconds("tree_broadcast", link, size, ranks)


def all_gather(link: Link, size: float, ranks: int) -> float:
    """By recursive doubling. `size` is what every rank contributes."""
    return _seconds("doubling_all_gather", link, size, ranks)


def two_shot(link: Link, there: float, back: float, ranks: int) -> float:
    """Pieces to their owners, then sums back, both directly: two latencies, (n - 1) / n of each message."""
    return sum(_seconds("direct_all_to_all", link, size, ranks) for size in (there, back))


def gathered_top_k(link: Link, dense: float, ratio: float, ranks: int) -> float:
    """Top-k by all-gather: values and positions, equally many bytes of each, to everyone."""
    return all_gather(link, 2 * dense * ratio, ranks)


def shared_top_k_ring(link: Link, dense: float, ratio: float, ranks: int) -> float:
    """Shared Top-k: one rank's positions by a tree, the values of all ranks added in a ring."""
    return broadcast(link, dense * ratio, ranks) + ring_all_reduce(link, dense * ratio, ranks)


def shared_top_k_tree(link: Link, dense: float, ratio: float, ranks: int) -> float:
    """Shared Top-k with the values added in a tree."""
    return broadcast(link, dense * ratio, ranks) + tree_all_reduce(link, dense * ratio, ranks)


def top_k_winner(link: Link, dense: float, ratio: float, ranks: int) -> str:
    """The quickest of the three: `gather`, `ring` or `tree`.

    >>> resnet50 = 4 * 25_557_032
    >>> top_k_winner(Link.of(milliseconds=1, gigabits=1), resnet50, 0.1, 8)
    'ring'
    """
    ways = {"gather": gathered_top_k, "ring": shared_top_k_ring, "tree": shared_top_k_tree}
    return min(ways, key=lambda name: ways[name](link, dense, ratio, ranks))


# Where two of them cost the same, in bytes in flight (`Link.in_flight`) for each byte of `dense * ratio`. Below that
# number the first of the two is faster.


def ring_beats_tree_below(ranks: int) -> float:
    """
    >>> [round(ring_beats_tree_below(n), 3) for n in (4, 8, 16)]
    [1.25, 0.531, 0.278]
    """
    more_latencies = ranks - 1 - levels(ranks)
    return (levels(ranks) - (ranks - 1) / ranks) / more_latencies if more_latencies > 0 else math.inf


def ring_beats_gather_below(ranks: int) -> float:
    """
    >>> [round(ring_beats_gather_below(n), 3) for n in (2, 4, 8)]
    [0.0, 0.417, 0.661]
    """
    return 1 - 1 / ranks - levels(ranks) / (2 * (ranks - 1))


def tree_beats_gather_below(ranks: int) -> float:
    """
    >>> [round(tree_beats_gather_below(n), 3) for n in (4, 8, 16)]
    [0.0, 0.833, 2.25]
    """
    return max(0.0, (ranks - 1) / levels(ranks) - 1.5)


def global_qsgd_pays(*, link: float, reduction: float, slowdown: float, ratio: float = 4.0) -> bool:
    """Whether a tree all-reduce of quantised values beats its float32 one, if quantising costs nothing.

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
    """Bytes of gradient a second that encoding and decoding together need to gain anything; inf if nothing can.

    >>> round(break_even_throughput(1.6, 0.1, 13e6) / 1e6, 1)
    8.7
    """
    saved = dense_seconds - compressed_seconds
    return dense_bytes / saved if saved > 0 else math.inf
