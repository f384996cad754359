"""The base of all exchanges: one rank's tensors in, their mean out, with the same bits on every rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape, flag
from ..comm import streams
from ..comm.network import Network
from ..recipe.stage import Stage
from .request import Request, Result, result
from .script import Script, sent_by


class Exchange(Stage, ABC):
    """Combines the tensors of all ranks into their mean, with the same bits on every rank.

    Declared: `sums` (the network adds messages), `feedback` (the exchange keeps a residual of its own), `measures`
    (a rank can tell how much of its own tensor was sent).

    >>> from thinwire.codecs import top_k
    >>> from thinwire.exchange import all_gather
    >>> all_gather().sent_bytes(top_k(0.01), 1_000_000, world_size=2) == top_k(0.01).message_bytes(1_000_000)
    True
    """

    sums: ClassVar[bool] = False
    measures: ClassVar[bool] = True
    feedback: bool = False

    @abstractmethod
    def accepts(self, codec: Codec) -> str | None:
        """None if messages of this codec can travel this way, else one sentence that says what to write instead."""

    def refuses(self, codec: Codec, *, world_size: int, remembers: bool) -> str | None:
        """One sentence if this many ranks cannot run this codec, which `accepts` cannot know; else None."""
        return None

    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        """Every codec that runs: of what is sent, and of what is sent back."""
        return (codec,)

    @abstractmethod
    def mean(self, codec: Codec, request: Request, network: Network) -> Result:
        """The mean over all ranks. Every rank calls it with a request of the same sizes.

        With `request.shards`, every rank gets the mean of its shard; no exact elements travel then.
        """

    @abstractmethod
    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        """What `mean` does on one rank, with its sizes: `numel` elements compressed, `exact` ones as they are."""

    def sent_bytes(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> int:
        """What one rank sends, before running; a selector that finds fewer than fit makes it less."""
        return sent_by(self.script(codec, numel, world_size=world_size, exact=exact, shapes=shapes), world_size)


def start_mean(exact: Tensor, network: Network) -> Callable[[], Tensor]:
    """Begin to average exact elements; the returned function waits. They are under way while the rest is compressed.

    As a sum and not as rows that everyone gathers: with n ranks these are n / 2 times as many bytes.
    """
    shares = exact * (1.0 / network.world_size)
    return network.start_all_reduce(shares).wait if shares.numel() else lambda: shares


def shard_result(mean: Tensor, request: Request, network: Network) -> Result:
    """The mean of this rank's shard, and whether those of all ranks are finite, which no rank sees alone."""
    spoiled = torch.as_tensor(flag(mean), device=mean.device).logical_not().to(torch.float32).view(1)
    finite = network.all_reduce(spoiled, op="max") == 0
    return result(mean, request.exact, known=finite.view(()) if streams.resident(mean.device) else bool(finite))


def sum_rows(rows: Tensor, scale: float) -> Tensor:
    """Rows of float32 written as bytes, times `scale`, added in rank order because the order decides the last bit."""
    if rows.shape[1] == 0:
        return rows.new_empty(0, dtype=torch.float32)
    rows = rows.view(torch.float32)
    total = rows[0] * scale
    for row in rows[1:]:
        total.add_(row, alpha=scale)
    return total


def ring_bytes(size: int, world_size: int) -> int:
    """What a rank sends in a ring all-reduce of `size` bytes."""
    return 2 * size * (world_size - 1) // world_size


def message_bytes(codec: Codec, numel: int, shapes: Sequence[Shape]) -> int:
    """The messages of one rank."""
    if codec.needs_shape:
        return sum(codec.message_bytes(math.prod(shape), shape=shape) for shape in shapes)
    return codec.message_bytes(numel) if numel else 0
