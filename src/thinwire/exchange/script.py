"""What an exchange does, written down before it runs: processor work, messages, and waiting for them.

A script has the sizes of a run and none of its tensors, so that a step can be priced on a network and a machine that
are not here. The tests run every exchange and compare what it sends with its script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..codecs.base import Codec
from ..comm.network import FEW_RANKS, SMALL_SUM

Collective = Literal["all_reduce", "small_sum", "all_gather", "all_to_all", "broadcast", "swap"]
Stage = Literal["hook", "pass", "encode", "add", "put", "select", "left", "right"]


@dataclass(frozen=True)
class Work:
    """A loop over so many elements. `codec` says whose; a `pass` reads and writes every element once.

    `hook` is what a step takes beside all loops. `leads`: one rank does it while the others wait.
    """

    stage: Stage
    elements: int
    codec: Codec | None = None
    messages: int = 1
    leads: bool = False


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


def sent_by(script: Script, ranks: int) -> int:
    """Bytes that one rank sends in all of a script."""
    return sum(op.sent(ranks) for op in script if isinstance(op, Send))
