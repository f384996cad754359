"""The cost of a codec and the rounds in which ranks add it up, as data for exchanges and `plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from .base import Codec

StageName = Literal["hook", "pass", "encode", "add", "put", "select", "left", "right"]
Combination = Literal["sum", "max"]
Trials: TypeAlias = "dict[str, tuple[Callable[[], object], int]]"  # stage -> what to time, and its elements


@dataclass(frozen=True)
class Work:
    """A loop over `elements`. `codec` says whose; a `pass` reads and writes every element once.

    `hook` is what a step takes beside all loops. `leads`: one rank does it while the others wait.
    """

    stage: StageName
    elements: int
    codec: Codec | None = None
    messages: int = 1
    leads: bool = False


@dataclass
class Round:
    """One round of a codec whose messages can be added: ranks combine this tensor, in place.

    Where a network cannot add the type, `add(a, b, number)` combines two of them and ranks add their pieces in a tree;
    `number` counts the additions. `elementwise`: element i belongs to element i of the tensor, so that a rank may ask
    for the sum of a shard only. `beside`: float32 elements that are added at the same time; holds their sum afterwards.
    """

    tensor: Tensor
    op: Combination = "sum"
    add: Callable[[Tensor, Tensor, int], Tensor] | None = None
    elementwise: bool = False
    beside: Tensor | None = None


@dataclass(frozen=True)
class RoundCost:
    """A `Round` as sizes. `plain`: a float32 sum, in which exact elements may travel along."""

    size: int  # bytes of the tensor
    tag: str
    plain: bool = False
    tree: Codec | None = None  # whose codes are added in a tree
    beside: int = 0  # bytes that are added at the same time
