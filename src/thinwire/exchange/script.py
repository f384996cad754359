"""The script of an exchange, known before it runs: processor work, messages, and waiting for them.

A script has the sizes of a run and none of its tensors, so that a step can be priced on a network and a machine that
are not here. The tests run every exchange and compare what it sends with its script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..codecs.stages import RoundCost, Work
from ..comm.network import FEW_RANKS, SMALL_SUM

Collective = Literal["all_reduce", "small_sum", "all_gather", "all_to_all", "broadcast", "swap"]
EXACT_BYTES = 4  # of an element that is not compressed


@dataclass(frozen=True)
class Send:
    """A collective is started. `size` is the tensor it is given, in bytes; `Wait` for `tag` is its end."""

    collective: Collective
    size: int
    tag: str

    def sent(self, ranks: int) -> int:
        """What one rank sends, as a mean over the ranks where they differ.

        >>> Send("all_reduce", 1000, "sum").sent(4), Send("all_gather", 1000, "rows").sent(4)
        (1500, 3000)
        """
        if self.collective in ("all_reduce", "small_sum"):
            return 2 * self.size * (ranks - 1) // ranks
        if self.collective in ("all_gather", "swap"):
            return self.size * (ranks - 1 if self.collective == "all_gather" else 1)
        return self.size * (ranks - 1) // ranks


@dataclass(frozen=True)
class Wait:
    """Nothing goes on here until the message has arrived."""

    tag: str


Op: TypeAlias = Work | Send | Wait
Script: TypeAlias = Sequence[Op]


def awaited_sum(size: int, ranks: int, tag: str) -> list[Op]:
    """A sum that is waited for, which may take a shorter way: `all_reduce`, or `start_all_reduce(soon=True)`."""
    if not size:
        return []
    short = size <= SMALL_SUM and ranks <= FEW_RANKS
    return [Send("small_sum" if short else "all_reduce", size, tag), Wait(tag)]


def exact_beside(exact: int) -> list[Op]:
    """Exact elements are added while the rest is compressed; the end is a `Wait("exact")`."""
    return [Send("all_reduce", EXACT_BYTES * exact, "exact")] if exact else []


def of_rounds(costs: Sequence[Work | RoundCost], *, ranks: int, exact: int) -> list[Op]:
    """The script of a codec whose messages are added: exact elements travel in its first round, or beside it."""
    ops: list[Op] = []
    beside = EXACT_BYTES * exact
    for cost in costs:
        if isinstance(cost, Work):
            ops.append(cost)
            continue
        beside += cost.beside
        if cost.plain:
            ops += awaited_sum(cost.size + beside, ranks, cost.tag)
        else:
            ops += [Send("all_reduce", beside, "exact")] if beside else []
            ops += awaited_sum(cost.size, ranks, cost.tag) if cost.tree is None else _tree(cost, ranks)
            ops += [Wait("exact")] if beside else []
        beside = 0
    return ops + ([*exact_beside(exact), Wait("exact")] if beside else [])


def _tree(cost: RoundCost, ranks: int) -> list[Op]:
    """Codes that a network cannot add: pieces to their owners, sums back."""
    if ranks == 1:
        return []
    piece = -(-cost.size // ranks)
    return [
        *(Work("pass", cost.size), Send("all_to_all", ranks * piece, cost.tag), Wait(cost.tag)),
        Work("add", (ranks - 1) * piece, cost.tree, ranks - 1),
        *(Send("all_gather", piece, "sums"), Wait("sums"), Work("pass", cost.size)),
    ]


def sent_by(script: Script, ranks: int) -> int:
    """Bytes that one rank sends in all of a script."""
    return sum(op.sent(ranks) for op in script if isinstance(op, Send))
