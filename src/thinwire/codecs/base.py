"""The base of all codecs: one tensor in, one body of bytes out, and declarations that hold before it runs.

A codec defines `body_bytes`, `write` and `add_body`, and declares what it can do in class attributes: exchanges,
memories and recipes ask for these and never for a class. Inside a collective bodies travel as they are; `encode` and
`decode` put a frame around them for gossip and files (`frames.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .. import kernels
from ..comm import streams
from ..errors import MessageError, OptionError
from ..recipe.stage import Stage
from ..rng import Draw, Key
from .frames import HEADER_BYTES, blank_frame, close_frame, open_frame, padded
from .several import SeveralMessages
from .stages import Round, RoundCost, Trials, Work

if TYPE_CHECKING:
    from ..exchange.request import Request

State = dict[str, Any]
Shape = tuple[int, ...]
# Yields what ranks add up, gets the sums, returns the mean and whether it is finite, if that is known without a pass.
Rounds: TypeAlias = Generator[Round, Tensor, tuple[Tensor, "bool | Tensor | None"]]
_Unpacker = Callable[[Tensor, Tensor, Key, Shape], None]


def flag(x: Tensor) -> bool | Tensor:
    """Whether all elements are finite: a bool, or a tensor where values must stay on the device within a step.

    >>> flag(torch.ones(3)), flag(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return kernels.finite(x) if streams.resident(x.device) else kernels.all_finite(x)


class Codec(SeveralMessages, Stage, ABC):
    """Makes one tensor smaller and back.

    Declared by class attributes: `unbiased` (E[C(x)] = x), `lossless`, `sparse` (sends some of the elements),
    `chooses` (a sparse codec whose positions depend on the data), `needs_shape`, `whole_tensors` (cannot code the few
    values of a sparsifier), `in_place` (reads and writes tensors that lie in pieces), `sum_dtype` (messages of several
    ranks may be added as tensors of this type).
    Known before running: `body_bytes(numel)`, and either `omega(numel)` (E|C(x) - x|^2 <= omega |x|^2, unbiased codecs)
    or `delta(numel)` (E|C(x) - x|^2 <= (1 - delta) |x|^2, the others).

    >>> import torch
    >>> from thinwire.codecs import bf16
    >>> message = bf16().encode(torch.tensor([1.0, 2.5]))
    >>> message.numel() == bf16().wire_bytes(2)
    True
    >>> bf16().decode(message)
    tensor([1.0000, 2.5000])
    """

    examples: ClassVar[
        tuple[str, ...]
    ] = ()  # recipe words that tests, `thinwire kernels` and docs try; () for the name
    unbiased: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    needs_shape: ClassVar[bool] = False
    whole_tensors: ClassVar[bool] = False
    sum_dtype: ClassVar[torch.dtype | None] = None
    in_place: ClassVar[bool] = False  # its calls for several messages take a `kernels.Spread`
    most_elements: ClassVar[int] = 1 << 40  # that a body can be of

    # ------------------------------------------------------------------------------------------------ facts

    @abstractmethod
    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        """Exact size of the body for `numel` elements (`shape` matters to codecs that need it)."""

    def message_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        """What a message takes inside a collective: the body, up to a multiple of four bytes."""
        return padded(self.body_bytes(numel, shape=shape))

    def wire_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        """Exact size of a framed message."""
        return HEADER_BYTES + self.message_bytes(numel, shape=shape)

    def omega(self, numel: int) -> float | None:
        """Variance bound of an unbiased codec, else None."""
        return None

    def delta(self, numel: int, *, shape: Shape | None = None) -> float | None:
        """Contraction bound of a biased codec, else None."""
        return None

    def omega_of_mean(self, numel: int, ranks: int) -> float | None:
        """Variance of the mean over the ranks, in terms of one rank's |x|^2; None for a biased codec."""
        omega = self.omega(numel)
        return None if omega is None else omega / ranks

    @property
    def density(self) -> float | None:
        """The share of the elements that is sent; None if all are."""
        return None

    def capacity(self, numel: int) -> int:
        """How many elements a message carries, at most."""
        return numel

    @classmethod
    def has_inner(cls) -> bool:
        """Whether a codec follows this one in a recipe: of its values, or of its factors (a field marked `inner`)."""
        return any(field.metadata.get("inner") for field in dataclasses.fields(cls))

    def accepts_inner(self, inner: Codec) -> str | None:
        """None if `inner` may code what this codec leaves (values, factors), else one sentence."""
        return f"{self.name} and {inner.name} do not go together: keep one of them"

    def milder(self) -> list[Codec]:
        """Variants with a smaller error, the mildest change first: for a memory that needs a contraction."""
        if not {"bits", "block"} <= set(self.option_names()):
            return []
        steps = itertools.product(range(vars(self)["bits"], 9), (1024, 512, 256, 128, 64))
        return [dataclasses.replace(self, bits=bits, block=block) for bits, block in steps]  # type: ignore[call-arg]

    # ---------------------------------------------------------------------------------------- what a codec defines

    @abstractmethod
    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        """Write the body of `x` (float32, in its own shape, at least one element); `body` has exactly its size."""

    @abstractmethod
    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        """out += what the body says; `out` is flat float32."""

    def put_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        """out = what the body says: for codecs that need not read what was there."""
        self.add_body(body, out.zero_(), key, shape)

    def write_taking(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        """Write the body of float32 `x`, which afterwards holds what the body does not carry."""
        self.write(x, body, key, state)
        sent = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        self.put_body(body, sent, key, tuple(x.shape))
        x -= sent.view(x.shape)

    def write_compensated(
        self, gradient: Tensor, residual: Tensor, body: Tensor, key: Key, state: State, *, decay: float = 1.0
    ) -> None:
        """Write the body of u = gradient + decay * residual; `gradient` is left with what the body does not carry.

        Selectors that follow a threshold do this in one pass. `residual` stays as it was.
        """
        torch.add(gradient, residual, alpha=decay, out=gradient)
        self.write_taking(gradient, body, key, state)

    def new_state(self) -> State:
        """What the codec carries from step to step for one parameter; plain numbers and tensors, checkpointable."""
        return {}

    def rescale_state(self, state: State, factor: float) -> None:
        """Follow a change of the gradient's scale (a new loss scale); most codecs carry nothing that depends on it."""

    # ------------------------------------------------------------------------------------------ sums over ranks

    def not_summable(self) -> str:
        """Why the network cannot add messages of this codec, and what to write instead."""
        return (
            f"{self.name} writes the values of every rank on a scale of its own, so its messages cannot be added: "
            "use global_qsgd, all_gather or two_shot"
        )

    def to_sum(self, x: Tensor) -> Tensor:
        """Flat tensor of `sum_dtype` to add over ranks, new memory. Define it with `sum_dtype`, or define `rounds`."""
        raise OptionError(f"{self.name} declares sum_dtype and defines no to_sum: define to_sum and from_sum")

    def from_sum(self, total: Tensor) -> Tensor:
        """What a sum of `to_sum` stands for, flat float32."""
        return total.to(torch.float32)

    def put_sum(self, total: Tensor, out: Tensor) -> Tensor:
        """out = from_sum(total); without the temporary where the codec can."""
        return out.copy_(self.from_sum(total))

    def rounds(self, request: Request, ranks: int) -> Rounds:
        """How ranks add up messages of a summable codec: a generator, see `Rounds`.

        Numbers are divided by the number of ranks before they are added, so that a sum leaves its type only if the mean
        does. With `request.remembers`, what was not sent is left in `request.u`.
        """
        shares = torch.mul(request.u, 1.0 / ranks, out=request.out)
        sent = shares if self.lossless else self.to_sum(shares)
        if request.remembers:
            request.u.sub_(self.from_sum(sent), alpha=ranks)
        total = yield Round(sent, elementwise=True)
        if request.shard is not None:
            return self.from_sum(total), None
        return total if total is shares else self.put_sum(total, shares), None

    def round_costs(self, numel: int, ranks: int, shapes: Sequence[Shape]) -> list[Work | RoundCost]:
        """What `rounds` does, as sizes; every RoundCost is waited for."""
        assert self.sum_dtype is not None
        passes = 1 if self.lossless else 2
        plain = self.sum_dtype == torch.float32
        summed = RoundCost(self.sum_dtype.itemsize * numel, "sum", plain=plain)
        return [Work("pass", passes * numel), summed, Work("pass", passes * numel)]  # and whether all is finite

    def refuses_ranks(self, ranks: int, *, remembers: bool) -> str | None:
        """One sentence if this many ranks cannot add its messages, else None."""
        return None

    # ------------------------------------------------------------------------ what sparse codecs define beside that

    @property
    def values_codec(self) -> Codec:
        """The codec of the values that a sparse codec sends."""
        raise OptionError(f"{self.name} sends all elements: it has no codec of values")

    def positions_and_values(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
        """Positions (int32, increasing) and float32 values of a body."""
        raise OptionError(f"{self.name} sends all elements: use add_body")

    def positions_bytes(self, numel: int) -> int:
        """Exact size of `pack_positions`, of a codec that `chooses`."""
        raise OptionError(f"{self.name} chooses no positions")

    def pack_positions(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        """The positions that this codec chooses in flat `x`, as bytes; their number may differ, their size does not."""
        raise OptionError(f"{self.name} chooses no positions")

    def unpack_positions(self, packed: Tensor, numel: int) -> Tensor:
        """What `pack_positions` chose: int32, increasing."""
        raise OptionError(f"{self.name} chooses no positions")

    def decode_sparse(self, message: Tensor, *, numel: int | None = None) -> tuple[Tensor, Tensor]:
        """Positions and values of a framed message."""
        raise OptionError(f"{self.name} sends all elements: use decode")

    # ------------------------------------------------------------------------------------------------- measuring

    def trials(self, given: Sequence[Tensor], draw: Draw) -> Trials:
        """What to time so that `plan` knows the cost of every stage: flat inputs of one length, which take turns."""
        numel, state, key = given[0].numel(), self.new_state(), draw.key()
        bodies = [torch.empty(self.body_bytes(numel), dtype=torch.uint8, device=x.device) for x in given]
        for x, body in zip(given, bodies, strict=True):
            self.write(x, body, key, state)
        out = torch.zeros_like(given[0])
        turns, read = itertools.cycle(zip(given, [b.clone() for b in bodies], strict=True)), itertools.cycle(bodies)
        write = self.write_taking if self.sparse else self.write  # sparse ones have a memory as a rule
        kept = self.capacity(numel)
        return {
            "encode": (lambda: write(*next(turns), key, state), numel),
            "add": (lambda: self.add_body(next(read), out, key, (numel,)), kept),
            "put": (lambda: self.put_body(next(read), out, key, (numel,)), kept),
        }

    # ---------------------------------------------------------------------------------------------------- frames

    def spec(self) -> str:
        """The codec and the codecs inside it as recipe text: `top_k:0.01|bf16`."""
        inner = [getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("inner")]
        return "|".join([self.text(), *(codec.spec() for codec in inner if not codec.lossless)])

    def fingerprint(self) -> int:
        """Identifies codec and options in a frame, so that ranks with different recipes notice."""
        return self._fingerprint

    @functools.cached_property  # every message needs it, and spec() walks through all options
    def _fingerprint(self) -> int:
        return zlib.crc32(self.spec().encode())

    def encode(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        """The framed message of `x`, any shape and float dtype: flat uint8, `wire_bytes(x.numel())` long.

        Give every step, tensor and rank a `draw` of its own: without one, every call rounds the same way.
        """
        if not x.is_floating_point():
            raise OptionError(f"{self.name} encodes floating-point tensors, this one is {x.dtype}: cast it first")
        return self._framed(self.write, x.detach().to(torch.float32), draw, state)

    def _framed(
        self,
        write: Callable[[Tensor, Tensor, Key, State], None],
        x: Tensor,
        draw: Draw | None,
        state: State | None,
    ) -> Tensor:
        key = self.own_draw(draw or Draw()).key()
        message, body = blank_frame(self, x.numel(), tuple(x.shape), x.device)
        if x.numel():
            write(x, body, key, self.new_state() if state is None else state)
        return close_frame(self, message, body, x.numel(), key)

    @property
    def shares_draw(self) -> bool:
        """Whether the messages of all ranks are drawn alike."""
        return False

    def own_draw(self, draw: Draw) -> Draw:
        """The draw that this codec uses."""
        return dataclasses.replace(draw, rank=0) if self.shares_draw else draw

    def decode(self, message: Tensor, *, shape: Shape | None = None, numel: int | None = None) -> Tensor:
        """The tensor a framed message stands for: float32, flat, or in `shape` if given.

        The receiver usually knows how long the tensor is; with `numel` or `shape` a message that claims another length
        is refused before anything of that length is allocated.
        """
        body, claimed, key = open_frame(self, message, shape, numel)
        out = torch.empty(claimed, dtype=torch.float32, device=message.device)
        if claimed:
            self.put_body(body, out, key, (claimed,) if shape is None else shape)
        return out if shape is None else out.view(shape)

    def add(self, message: Tensor, out: Tensor, *, shape: Shape | None = None) -> None:
        """out += decode(message), without the temporary where the codec can; `out` is flat float32."""
        self._unpack(self.add_body, message, out, shape)

    def put(self, message: Tensor, out: Tensor, *, shape: Shape | None = None) -> None:
        """out = decode(message), whatever was there; `out` is flat float32.

        >>> from thinwire.codecs import bf16
        >>> out = torch.full((2,), 7.0)
        >>> bf16().put(bf16().encode(torch.tensor([1.0, 2.5])), out)
        >>> out
        tensor([1.0000, 2.5000])
        """
        self._unpack(self.put_body, message, out, shape)

    def _unpack(self, how: _Unpacker, message: Tensor, out: Tensor, shape: Shape | None) -> None:
        body, numel, key = open_frame(self, message, shape, None)
        if out.numel() != numel or out.dtype != torch.float32 or out.dim() != 1:
            raise MessageError(f"the message holds {numel} elements, `out` must be flat float32 of that length")
        if numel:
            how(body, out, key, (numel,) if shape is None else shape)

    def encode_taking(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        """The framed message of float32 `x`, which afterwards holds what the message does not carry.

        If x was not finite, the message says so, and what is left in x means nothing.

        >>> from thinwire.codecs import top_k
        >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0])
        >>> message = top_k(0.5).encode_taking(x)
        >>> x
        tensor([1., 0., 0., 0.])
        """
        return self._framed(self.write_taking, x, draw, state)

    def encode_compensated(
        self,
        gradient: Tensor,
        residual: Tensor,
        *,
        decay: float = 1.0,
        draw: Draw | None = None,
        state: State | None = None,
    ) -> Tensor:
        """The framed message of u = gradient + decay * residual, both float32 of one shape.

        `gradient` is left with what the message does not carry, and `residual` as it was. Selectors that follow a
        threshold do this in one pass over the data.

        >>> from thinwire.codecs import top_k
        >>> gradient, residual = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 2.0])
        >>> top_k(0.5).decode(top_k(0.5).encode_compensated(gradient, residual))
        tensor([0., 2.])
        >>> gradient
        tensor([1.5000, 0.0000])
        """

        def write(x: Tensor, body: Tensor, key: Key, state: State) -> None:
            self.write_compensated(x, residual, body, key, state, decay=decay)

        return self._framed(write, gradient, draw, state)
