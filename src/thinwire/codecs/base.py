"""What every codec is: one tensor in, one self-describing message out, and the facts known before running.

A message is a flat uint8 tensor: a header of 32 bytes, then the body, zero-padded to a multiple of four bytes.

    magic 4 | codec fingerprint 4 | numel 8 | key 8 | checksum 4 | body length before padding 4     (little-endian)

The size depends on the codec and the number of elements only, so that gathers need no size exchange, and every
decoder checks size, fingerprint and checksum first: cut or damaged bytes end in `MessageError`, never in a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..errors import MessageError, OptionError
from ..recipe.stage import Stage
from ..rng import Draw, Key

HEADER = struct.Struct("<4sIQQII")
HEADER_BYTES = HEADER.size
_MAGIC = b"tw01"
_CHECKSUM_AT = 24  # byte in the header
State = dict[str, Any]
Shape = tuple[int, ...]
_Unpacker = Callable[[Tensor, Tensor, Key, Shape], None]


def _write(message: Tensor, at: int, content: bytes) -> None:
    if message.device.type == "cpu":  # several times quicker than through torch
        message.numpy().data[at : at + len(content)] = content
    else:
        message[at : at + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _header(message: Tensor) -> tuple[Any, ...]:
    on_cpu = message if message.device.type == "cpu" else message[:HEADER_BYTES].cpu()
    return HEADER.unpack_from(on_cpu.numpy().data)


def padded(body_bytes: int) -> int:
    return -(-body_bytes // 4) * 4


@dataclasses.dataclass(frozen=True, repr=False)
class Codec(Stage, ABC):
    """Makes one tensor smaller and back.

    Facts, all known before running: `unbiased` (E[decode(encode(x))] = x), `linear` (messages of different ranks may be
    added), `wire_bytes(numel)`, and either `omega(numel)` (E|C(x) - x|^2 <= omega |x|^2, unbiased codecs) or
    `delta(numel)` (E|C(x) - x|^2 <= (1 - delta) |x|^2, the others).

    >>> import torch
    >>> from thinwire.codecs import bf16
    >>> message = bf16().encode(torch.tensor([1.0, 2.5]))
    >>> message.numel() == bf16().wire_bytes(2)
    True
    >>> bf16().decode(message)
    tensor([1.0000, 2.5000])
    """

    unbiased: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    needs_shape: ClassVar[bool] = False  # to decode what was a matrix
    most_elements: ClassVar[int] = 1 << 40  # that a message can be of

    # ------------------------------------------------------------------------------------------------ facts

    @abstractmethod
    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        """Exact size of the body for `numel` elements (`shape` matters to `low_rank` only)."""

    def wire_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        """Exact size of the whole message."""
        return HEADER_BYTES + padded(self.body_bytes(numel, shape=shape))

    def omega(self, numel: int) -> float | None:
        """Variance bound of an unbiased codec, else None."""
        return None

    def delta(self, numel: int) -> float | None:
        """Contraction bound of a biased codec, else None."""
        return None

    # --------------------------------------------------------------------------------------------- messages

    @abstractmethod
    def _pack(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        """Write the body of `x` (float32, in its own shape, at least one element); `body` has exactly its size."""

    @abstractmethod
    def _add(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        """out += what the body says; `out` is flat float32."""

    def _put(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        """out = what the body says: for codecs that need not read what was there."""
        self._add(body, out.zero_(), key, shape)

    def spec(self) -> str:
        """The codec and the codecs inside it as recipe text: `top_k:0.01|bf16`."""
        inner = [getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("inner")]
        return "|".join([self.text(), *(codec.spec() for codec in inner if codec.spec() != "fp32")])

    def fingerprint(self) -> int:
        """Identifies codec and options in a message, so that ranks with different recipes notice."""
        return self._fingerprint

    @functools.cached_property  # every message needs it, and spec() walks through all options
    def _fingerprint(self) -> int:
        return zlib.crc32(self.spec().encode())

    def new_state(self) -> State:
        """What the codec carries from step to step for one parameter; plain numbers and tensors, checkpointable."""
        return {}

    def rescale_state(self, state: State, factor: float) -> None:
        """Follow a change of the gradient's scale (a new loss scale); most codecs carry nothing that depends on it."""

    def encode(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        """The message of `x`, any shape and float dtype, as a flat uint8 tensor of `wire_bytes(x.numel())` bytes.

        Give every step, tensor and rank a `draw` of its own: without one, every call rounds the same way.
        """
        if not x.is_floating_point():
            raise OptionError(f"{self.name} encodes floating-point tensors, this one is {x.dtype}: cast it first")
        key = (draw or Draw()).key()
        message, body = self._blank(x.numel(), tuple(x.shape), x.device)
        if x.numel():
            self._pack(x.detach().to(torch.float32), body, key, self.new_state() if state is None else state)
        return self._sign(message, body, x.numel(), key)

    def _blank(self, numel: int, shape: Shape | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """A message to be filled and the part of it that is the body, so that codecs write where it is sent from."""
        body_bytes = self.body_bytes(numel, shape=shape)
        if body_bytes >= 1 << 32:
            raise OptionError(f"{self.spec()} makes {body_bytes} bytes of {numel} elements: split tensors beyond 4 GiB")
        message = torch.empty(HEADER_BYTES + padded(body_bytes), dtype=torch.uint8, device=device)
        if padded(body_bytes) > body_bytes:
            message[HEADER_BYTES + body_bytes :] = 0
        return message, message[HEADER_BYTES : HEADER_BYTES + body_bytes]

    def _sign(self, message: Tensor, body: Tensor, numel: int, key: Key) -> Tensor:
        """Write the header of a filled message, checksum last."""
        body_bytes = body.numel()
        unsigned = (_MAGIC, self._fingerprint, numel, key.packed, 0, body_bytes)
        _write(message, 0, HEADER.pack(*unsigned))
        _write(message, _CHECKSUM_AT, kernels.checksum(message).to_bytes(4, "little"))
        return message

    def _open(self, message: Tensor, shape: Shape | None, expected: int | None = None) -> tuple[Tensor, int, Key]:
        """Check a message from outside, whose length may be known; return body, numel and key."""
        size = message.numel()
        if message.dtype != torch.uint8 or message.dim() != 1:
            raise MessageError(f"a message is a flat uint8 tensor, got {message.dtype} of shape {tuple(message.shape)}")
        if size < HEADER_BYTES or size % 4:
            raise MessageError(f"{size} bytes are no message of {self.spec()}: it was cut short")
        if message.data_ptr() % 4 or message.storage_offset() % 4 or not message.is_contiguous():
            message = message.clone()  # words can be read only where they are aligned
        magic, fingerprint, numel, key, checksum, body_bytes = _header(message)
        if magic != _MAGIC:
            raise MessageError("these bytes are not a thinwire message")
        if fingerprint != self._fingerprint:
            raise MessageError(f"the message was not made by {self.spec()}: use the same recipe on every rank")
        if shape is not None and math.prod(shape) != numel:
            raise MessageError(f"the message holds {numel} elements, which do not have the shape {shape}")
        if expected is not None and numel != expected:
            raise MessageError(f"the message holds {numel} elements, not the {expected} that were expected")
        right = self.body_bytes(numel, shape=shape) if numel <= self.most_elements else -1
        if body_bytes != right or size != HEADER_BYTES + padded(body_bytes):
            why = "it was cut short, or of a matrix, then give its shape" if self.needs_shape else "it was cut short"
            raise MessageError(f"{size} bytes do not hold {numel} elements of {self.spec()}: {why}")
        # The checksum was taken with zero in its own place; exchanging that term saves a copy of the message.
        place = _CHECKSUM_AT // 4
        own = kernels.checksum_term(checksum, place) - kernels.checksum_term(0, place)
        if (kernels.checksum(message) - own) & 0xFFFFFFFF != checksum:
            raise MessageError(f"the message of {self.spec()} was damaged on its way: its checksum does not match")
        return message[HEADER_BYTES : HEADER_BYTES + body_bytes], numel, Key.unpack(key)

    def decode(self, message: Tensor, *, shape: Shape | None = None, numel: int | None = None) -> Tensor:
        """The tensor a message stands for: float32, flat, or in `shape` if given.

        The receiver usually knows how long the tensor is; with `numel` or `shape` a message that claims another length
        is refused before anything of that length is allocated.
        """
        body, claimed, key = self._open(message, shape, numel)
        out = torch.empty(claimed, dtype=torch.float32, device=message.device)
        if claimed:
            self._put(body, out, key, (claimed,) if shape is None else shape)
        return out if shape is None else out.view(shape)

    def add(self, message: Tensor, out: Tensor, *, shape: Shape | None = None) -> None:
        """out += decode(message), without the temporary where the codec can; `out` is flat float32."""
        self._unpack(self._add, message, out, shape)

    def put(self, message: Tensor, out: Tensor, *, shape: Shape | None = None) -> None:
        """out = decode(message), whatever was there; `out` is flat float32.

        >>> from thinwire.codecs import bf16
        >>> out = torch.full((2,), 7.0)
        >>> bf16().put(bf16().encode(torch.tensor([1.0, 2.5])), out)
        >>> out
        tensor([1.0000, 2.5000])
        """
        self._unpack(self._put, message, out, shape)

    def _unpack(self, how: _Unpacker, message: Tensor, out: Tensor, shape: Shape | None) -> None:
        body, numel, key = self._open(message, shape)
        if out.numel() != numel or out.dtype != torch.float32 or out.dim() != 1:
            raise MessageError(f"the message holds {numel} elements, `out` must be flat float32 of that length")
        if numel:
            how(body, out, key, (numel,) if shape is None else shape)

    def encode_taking(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        """The message of float32 `x`, which afterwards holds what the message does not carry.

        If x was not finite, the message says so, and what is left in x means nothing.

        >>> from thinwire.codecs import top_k
        >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0])
        >>> message = top_k(0.5).encode_taking(x)
        >>> x
        tensor([1., 0., 0., 0.])
        """
        shape = tuple(x.shape)
        message = self.encode(x, draw=draw, state=state)
        if x.numel():
            sent = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
            body = message[HEADER_BYTES : HEADER_BYTES + self.body_bytes(x.numel(), shape=shape)]
            self._put(body, sent, (draw or Draw()).key(), shape)
            x -= sent.view(shape)
        return message

    def encode_remembering(
        self, memory: Tensor, gradient: Tensor, *, draw: Draw | None = None, state: State | None = None
    ) -> Tensor:
        """memory += gradient, encode it, and leave in memory what the message does not carry.

        `memory` is float32 in the gradient's shape. Sparsifiers do this in one pass over the data. What is not finite
        is in the message, as news, and never stays in memory.
        """
        memory += gradient.detach()
        message = self.encode_taking(memory, draw=draw, state=state)
        if not kernels.all_finite(memory):
            memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return message
