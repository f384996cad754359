"""The request that a rank brings to an exchange, and the result that it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape, State, flag
from ..kernels import Spread
from ..rng import Draw, Key, Keys

Flag = bool | Tensor  # whether something is finite; a tensor where values must stay on the device


@dataclasses.dataclass(frozen=True)
class Part:
    """Where in a flat tensor one parameter lies."""

    name: str
    shape: Shape
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a request: the elements it carries, and by which draw, state and shape."""

    place: slice
    draw: Draw
    state: State
    shape: Shape | None

    @property
    def numel(self) -> int:
        length: int = self.place.stop - self.place.start
        return length

    def size(self, codec: Codec) -> int:
        return codec.message_bytes(self.numel, shape=self.shape)

    def key(self, codec: Codec, *, rank: int | None = None) -> Key:
        """Of the message as a rank drew it; this rank's own by default."""
        draw = self.draw if rank is None else dataclasses.replace(self.draw, rank=rank)
        return codec.own_draw(draw).key()

    def shaped(self) -> Shape:
        return (self.numel,) if self.shape is None else self.shape


@dataclasses.dataclass
class Request:
    """What one rank brings to one exchange.

    `gradient` holds the elements to compress (flat float32) and is used up. It is `flat`, into which it is copied when
    it is asked for if `source` tells where its elements lie. u = gradient + decay * residual is what is
    sent. With `remembers`, the exchange leaves in `gradient` what it did not send; without, what is left in it means
    nothing. `exact` holds elements that travel uncompressed beside it.
    """

    flat: Tensor
    exact: Tensor
    parts: Sequence[Part]
    draw: Draw
    state: State
    residual: Tensor | None = None
    decay: float = 1.0
    remembers: bool = False
    source: Spread | None = None
    sink: Spread | None = None  # where an exchange may write the mean instead
    out: Tensor | None = None  # where the mean may be written; may not overlap the gradient
    back: Tensor | None = None  # what the second shot of two_shot did not send, of the piece this rank adds up
    back_start: int = 0  # where in the gradient that piece begins, set by the exchange
    shards: Sequence[slice] | None = None  # one for each rank: the only elements of the mean that it asks for
    may_be_unused: bool = False  # where the gradients of all ranks are zero, the mean may be thrown away
    positions: Tensor | None = None  # set by exchanges of sparse codecs: what was sent
    _base: Key | None = None

    @property
    def numel(self) -> int:
        return self.flat.numel()

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def gradient(self) -> Tensor:
        """In one place."""
        source, self.source = self.source, None
        return self.flat if source is None else source.gather(self.flat)

    def given(self, codec: Codec) -> Tensor | Spread:
        """What is sent, where it lies, if the codec can read it there."""
        in_place = codec.in_place and not self.remembers and self.residual is None
        return self.source if in_place and self.source is not None else self.u

    def place_of_mean(self, codec: Codec) -> Tensor | Spread:
        """Where the mean goes, if the codec can write it there; else room for it. Holds anything."""
        return self.sink if codec.in_place and self.sink is not None else self.room()

    @property
    def u(self) -> Tensor:
        """The gradient with the residual added, in place."""
        residual, self.residual = self.residual, None
        if residual is not None:
            gradient = self.gradient
            torch.add(gradient, residual, alpha=self.decay, out=gradient)
        return self.gradient

    @property
    def shard(self) -> slice | None:
        """The elements of the mean that this rank asks for; None for all."""
        return None if self.shards is None else self.shards[self.draw.rank]

    def room(self) -> Tensor:
        """For the mean: the given place if there is one. Holds anything."""
        return torch.empty_like(self.flat) if self.out is None else self.out

    def blank(self) -> Tensor:
        """The same, with zeros in it."""
        return self.room().zero_()

    def drawn(self, purpose: str, *, rank: int | None = None) -> Draw:
        """A draw of its own for one message of several."""
        draw = self.draw
        return Draw(draw.seed, draw.step, f"{draw.stream}/{purpose}", draw.rank if rank is None else rank)

    def keys(self, purposes: tuple[int, ...]) -> Keys:
        """Of several messages of one exchange; every rank knows those of all ranks. See `purpose`."""
        if self._base is None:
            self._base = dataclasses.replace(self.draw, rank=0).key()
        return Keys(self._base, purposes)

    def messages(self, codec: Codec) -> Iterator[Message]:
        """What becomes one message each: all elements, or every matrix if the codec needs to know its shape."""
        if not codec.needs_shape:
            if self.numel:
                yield Message(slice(0, self.numel), self.draw, self.state, None)
            return
        for part in self.parts:
            draw = dataclasses.replace(self.draw, stream=part.name)
            yield Message(slice(part.start, part.stop), draw, self.state.setdefault(part.name, {}), part.shape)

    def write(self, codec: Codec, message: Message, body: Tensor) -> None:
        """Write a message's body; with `remembers`, the gradient is left with what the body does not carry."""
        place, key = message.place, message.key(codec)
        if not self.remembers:
            codec.write(self.u[place].view(message.shaped()), body, key, message.state)
        elif self.residual is not None and message.numel == self.numel and message.shape is None:
            residual, self.residual = self.residual, None
            codec.write_compensated(self.gradient, residual, body, key, message.state, decay=self.decay)
        else:
            codec.write_taking(self.u[place].view(message.shaped()), body, key, message.state)


@dataclasses.dataclass(frozen=True)
class Result:
    """The mean of the compressed and of the exact elements, flat float32, and whether both are finite.

    `place` holds the mean; it is the sink of the request if the exchange has written it there.

    All three are the same on every rank, except that a request for a shard gets the mean of its shard only.
    """

    place: Tensor | Spread
    exact: Tensor
    finite: Flag

    @property
    def mean(self) -> Tensor:
        """In one place."""
        if isinstance(self.place, Tensor):
            return self.place
        return self.place.gather(torch.empty(self.place.numel(), dtype=torch.float32, device=self.place.device))


def result(mean: Tensor | Spread, exact: Tensor, *, known: Flag | None = None) -> Result:
    """A result; where the exchange does not know whether the mean is finite, one more pass over it tells."""
    finite = known
    if finite is None:
        assert isinstance(mean, Tensor)
        finite = flag(mean)
    return Result(mean, exact, finite & flag(exact) if exact.numel() else finite)
