"""What every exchange is: one rank's tensors in, their mean over all ranks out, with the same bits on every rank."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, Shape, State
from ..codecs.cast import Bf16, Fp16, Fp32
from ..comm.network import Network
from ..recipe.stage import Stage
from ..rng import Draw
from .script import Op, Script, Send, sent_by

FLOATS = (Fp32, Fp16, Bf16)  # what networks can add
EXACT_BYTES = 4  # of an element that is not compressed


@dataclasses.dataclass(frozen=True)
class Part:
    """Where in a flat tensor one parameter lies."""

    name: str
    shape: Shape
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]


@dataclasses.dataclass
class Cargo:
    """What one rank brings to one exchange.

    `u` holds the elements to compress (flat float32). With `remembers`, the exchange leaves in it what it did not send;
    without, what is left in it means nothing. `exact` holds elements that travel uncompressed in the same messages.
    """

    u: Tensor
    exact: Tensor
    parts: Sequence[Part]
    draw: Draw
    state: State
    remembers: bool = False
    out: Tensor | None = None  # where the mean may be written; may not overlap u
    back: Tensor | None = None  # what the second shot of two_shot did not send, of the piece this rank adds up
    may_be_unused: bool = False  # where the gradients of all ranks are zero, the mean may be thrown away
    positions: Tensor | None = None  # set by exchanges of sparse codecs: what was sent

    def room(self) -> Tensor:
        """For the mean: the given place if there is one. Holds anything."""
        return torch.empty_like(self.u) if self.out is None else self.out

    def blank(self) -> Tensor:
        """The same, with zeros in it."""
        return self.room().zero_()

    def drawn(self, purpose: str, *, rank: int | None = None) -> Draw:
        """A draw of its own for one message of several."""
        draw = self.draw
        return Draw(draw.seed, draw.step, f"{draw.stream}/{purpose}", draw.rank if rank is None else rank)

    def messages(self, codec: Codec) -> Iterator[tuple[Tensor, Draw, State, Shape | None]]:
        """The tensors that become one message each: all of u, or every matrix if the codec needs to know its shape."""
        if not codec.needs_shape:
            if self.u.numel():
                yield self.u, self.draw, self.state, None
            return
        for part in self.parts:
            draw = dataclasses.replace(self.draw, stream=part.name)
            yield part.of(self.u).view(part.shape), draw, self.state.setdefault(part.name, {}), part.shape


@dataclasses.dataclass(frozen=True)
class Delivery:
    """The mean of the compressed and of the exact elements, flat float32, and whether both are finite.

    All three are the same on every rank.
    """

    mean: Tensor
    exact: Tensor
    finite: bool


def delivered(mean: Tensor, exact: Tensor, *, finite: bool | None = None) -> Delivery:
    """A delivery; where the exchange does not know whether the mean is finite, one more pass over it tells."""
    if finite is None:
        finite = kernels.all_finite(mean)
    return Delivery(mean, exact, finite and kernels.all_finite(exact))


def start_mean(exact: Tensor, network: Network) -> Callable[[], Tensor]:
    """Begin to average what travels exact; what is returned waits for it. It is under way while the rest is compressed.

    As a sum and not as rows that everyone gathers: with n ranks these are n / 2 times as many bytes.
    """
    shares = exact * (1.0 / network.world_size)
    return network.start_all_reduce(shares).wait if shares.numel() else lambda: shares


def sum_rows(rows: Tensor, scale: float) -> Tensor:
    """Rows of float32 written as bytes, times `scale`, added in rank order because the order decides the last bit."""
    if rows.shape[1] == 0:
        return rows.new_empty(0, dtype=torch.float32)
    rows = rows.view(torch.float32)
    total = rows[0] * scale
    for row in rows[1:]:
        total.add_(row, alpha=scale)
    return total


@dataclasses.dataclass(frozen=True, repr=False)
class Exchange(Stage, ABC):
    """Combines the tensors of all ranks into their mean, with the same bits on every rank."""

    @abstractmethod
    def accepts(self, codec: Codec) -> str | None:
        """None if messages of this codec can travel this way, else one sentence that says what to write instead."""

    def refuses(self, codec: Codec, *, world_size: int, remembers: bool) -> str | None:
        """One sentence if so many ranks cannot run this codec, which `accepts` cannot know; else None."""
        return None

    @abstractmethod
    def mean(self, codec: Codec, cargo: Cargo, network: Network) -> Delivery:
        """The mean over all ranks. Every rank calls it with a cargo of the same sizes."""

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


def exact_beside(exact: int) -> list[Op]:
    """The script of `start_mean`; its end is a `Wait("exact")`."""
    return [Send("all_reduce", EXACT_BYTES * exact, "exact")] if exact else []


def ring_bytes(size: int, world_size: int) -> int:
    """What a rank sends in a ring all-reduce of `size` bytes."""
    return 2 * size * (world_size - 1) // world_size


def message_bytes(codec: Codec, numel: int, shapes: Sequence[Shape]) -> int:
    """The messages of one rank."""
    if codec.needs_shape:
        return sum(codec.wire_bytes(_product(shape), shape=shape) for shape in shapes)
    return codec.wire_bytes(numel) if numel else 0


def _product(shape: Shape) -> int:
    product = 1
    for side in shape:
        product *= side
    return product
