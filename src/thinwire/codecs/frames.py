"""Frames: a codec's body with a header and a checksum, for bytes that come from outside a group: gossip and files.

A framed message is a flat uint8 tensor: a header of 32 bytes, then the body, zero-padded to a multiple of four bytes.

    magic 4 | codec fingerprint 4 | numel 8 | key 8 | checksum 4 | body length before padding 4     (little-endian)

Its size depends on the codec and the number of elements only. `open_frame` checks size, fingerprint and checksum:
cut or damaged bytes end in `MessageError`, never in a gradient. Inside a collective bodies travel without a frame.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import kernels
from ..errors import MessageError, OptionError
from ..rng import Key

if TYPE_CHECKING:
    from .base import Codec, Shape

HEADER = struct.Struct("<4sIQQII")
HEADER_BYTES = HEADER.size
_MAGIC = b"tw01"
_CHECKSUM_AT = 24  # byte in the header


def padded(body_bytes: int) -> int:
    """Bytes up to the next multiple of four."""
    return -(-body_bytes // 4) * 4


def _write(message: Tensor, at: int, content: bytes) -> None:
    if message.device.type == "cpu":  # several times quicker than through torch
        message.numpy().data[at : at + len(content)] = content
    else:
        message[at : at + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _header(message: Tensor) -> tuple[Any, ...]:
    on_cpu = message if message.device.type == "cpu" else message[:HEADER_BYTES].cpu()
    return HEADER.unpack_from(on_cpu.numpy().data)


def blank_frame(codec: Codec, numel: int, shape: Shape | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """A message to be filled, and the part of it that is the body."""
    body_bytes = codec.body_bytes(numel, shape=shape)
    if body_bytes >= 1 << 32:
        raise OptionError(f"{codec.spec()} makes {body_bytes} bytes of {numel} elements: split tensors beyond 4 GiB")
    message = torch.empty(HEADER_BYTES + padded(body_bytes), dtype=torch.uint8, device=device)
    if padded(body_bytes) > body_bytes:
        message[HEADER_BYTES + body_bytes :] = 0
    return message, message[HEADER_BYTES : HEADER_BYTES + body_bytes]


def close_frame(codec: Codec, message: Tensor, body: Tensor, numel: int, key: Key) -> Tensor:
    """Write the header of a filled message, checksum last."""
    _write(message, 0, HEADER.pack(_MAGIC, codec.fingerprint(), numel, key.packed, 0, body.numel()))
    _write(message, _CHECKSUM_AT, kernels.checksum(message).to_bytes(4, "little"))
    return message


def open_frame(codec: Codec, message: Tensor, shape: Shape | None, expected: int | None) -> tuple[Tensor, int, Key]:
    """Check a message from outside, whose length may be known; return body, numel and key."""
    size = message.numel()
    if message.dtype != torch.uint8 or message.dim() != 1:
        raise MessageError(f"a message is a flat uint8 tensor, got {message.dtype} of shape {tuple(message.shape)}")
    if size < HEADER_BYTES or size % 4:
        raise MessageError(f"{size} bytes are no message of {codec.spec()}: it was cut short")
    if message.data_ptr() % 4 or message.storage_offset() % 4 or not message.is_contiguous():
        message = message.clone()  # words can be read only where they are aligned
    magic, fingerprint, numel, key, checksum, body_bytes = _header(message)
    if magic != _MAGIC:
        raise MessageError("these bytes are not a thinwire message")
    if fingerprint != codec.fingerprint():
        raise MessageError(f"the message was not made by {codec.spec()}: use the same recipe on every rank")
    if shape is not None and math.prod(shape) != numel:
        raise MessageError(f"the message holds {numel} elements, which do not have the shape {shape}")
    if expected is not None and numel != expected:
        raise MessageError(f"the message holds {numel} elements, not the {expected} that were expected")
    right = codec.body_bytes(numel, shape=shape) if numel <= codec.most_elements else -1
    if body_bytes != right or size != HEADER_BYTES + padded(body_bytes):
        why = "it was cut short, or of a matrix, then give its shape" if codec.needs_shape else "it was cut short"
        raise MessageError(f"{size} bytes do not hold {numel} elements of {codec.spec()}: {why}")
    # The checksum was taken with zero in its own place; exchanging that term saves a copy of the message.
    place = _CHECKSUM_AT // 4
    own = kernels.checksum_term(checksum, place) - kernels.checksum_term(0, place)
    if (kernels.checksum(message) - own) & 0xFFFFFFFF != checksum:
        raise MessageError(f"the message of {codec.spec()} was damaged on its way: its checksum does not match")
    return message[HEADER_BYTES : HEADER_BYTES + body_bytes], numel, Key.unpack(key)
