"""The message that neighbours send each other in every round: self-describing, with a checksum.

    magic 4 | checksum 4 | kind 2 | flags 2 | degree 4 | incarnation 4 | view checksum 4 | scale 8 | round 8 | tag 8 |
    sizes of the four parts, 8 each | payload | buffers | snapshot | membership updates           (little-endian)

The payload is an encoded tensor of the algorithm. Buffers (running statistics) travel uncompressed. A snapshot is the
sender's view of itself before this payload, for a neighbour whose copy of it is not valid. A membership update says
that a rank has died or rejoined.

`unpack` is total: for any bytes it returns a message or raises MessageError. It copies no part of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..errors import MessageError

_HEADER = struct.Struct("<4sIHHIIIdQQ4Q")
_UPDATE = struct.Struct("<IIB3x")
_MAGIC = b"twg1"
_CHECKSUM_AT = 4
_EMPTY = torch.empty(0, dtype=torch.uint8)
MAC_BYTES = 16  # of the authentication code that follows a message if the ranks share a secret (secret.py)


class RefusedMessageError(MessageError):
    """An intact message that no rank of this run sends: made by another program, another version, or an attacker.

    Damage in transit costs a message. A refused message costs its sender the edge.

    >>> issubclass(RefusedMessageError, MessageError)
    True
    """


class Kind(IntEnum):
    ROUND = 0  # one round of gossip
    MEMBERSHIP = 1  # membership updates only, before an average
    UP = 2  # a sum, towards the root of the tree
    DOWN = 3  # the mean, from the root


class Flag(IntFlag):
    NEEDS_SNAPSHOT = 1  # send a snapshot with your next message: my copy of your model is not valid
    HAS_CHECKSUM = 2  # the view checksum is set
    SWITCHED = 4  # the sender has switched to CHOCO
    USED_LAST = 8  # the sender averaged with your message of the previous round


_NO_FLAGS = Flag(0)
_KINDS = frozenset(int(kind) for kind in Kind)
_ALL_FLAGS = sum(int(flag) for flag in Flag)


@dataclass(frozen=True)
class MemberStatus:
    """What is known of a rank: its last known incarnation, and whether that one is alive.

    >>> MemberStatus(1, False).newer_than(MemberStatus(1, True)), MemberStatus(1, False).newer_than(MemberStatus(2))
    (True, False)
    """

    incarnation: int = 1
    alive: bool = True

    def newer_than(self, other: MemberStatus) -> bool:
        return (self.incarnation, not self.alive) > (other.incarnation, not other.alive)


@dataclass
class GossipMessage:
    """One message between two neighbours.

    >>> message = GossipMessage(
    ...     round=3, payload=torch.arange(4, dtype=torch.uint8), updates={5: MemberStatus(1, alive=False)}
    ... )
    >>> same = GossipMessage.unpack(message.pack())
    >>> same.round, same.payload.tolist(), same.updates
    (3, [0, 1, 2, 3], {5: MemberStatus(incarnation=1, alive=False)})
    """

    round: int
    kind: Kind = Kind.ROUND
    flags: Flag = _NO_FLAGS
    degree: int = 0  # live neighbours of the sender; the weight of the edge depends on it
    incarnation: int = 1
    view_checksum: int = 0
    scale: float = 1.0  # of the flow between the two ranks; below 1 for CHOCO only
    tag: int = 0  # separates the messages of several averages after one round
    payload: Tensor = field(default_factory=lambda: _EMPTY)
    buffers: Tensor = field(default_factory=lambda: _EMPTY)
    snapshot: Tensor = field(default_factory=lambda: _EMPTY)
    updates: Mapping[int, MemberStatus] = field(default_factory=dict)

    def pack(self) -> Tensor:
        records = b"".join(_UPDATE.pack(rank, one.incarnation, one.alive) for rank, one in sorted(self.updates.items()))
        updates = torch.frombuffer(bytearray(records), dtype=torch.uint8) if records else _EMPTY
        parts = [
            part.contiguous().view(torch.uint8).cpu() for part in (self.payload, self.buffers, self.snapshot, updates)
        ]
        sizes = [part.numel() for part in parts]
        header = _HEADER.pack(
            _MAGIC, 0, self.kind, self.flags, self.degree, self.incarnation, self.view_checksum, self.scale, self.round,
            self.tag, *sizes,
        )  # fmt: skip
        padded = [-(-size // 4) * 4 for size in sizes]
        packed = torch.zeros(_HEADER.size + sum(padded), dtype=torch.uint8)
        packed[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        at = _HEADER.size
        for part, room in zip(parts, padded, strict=True):
            packed[at : at + part.numel()] = part
            at += room
        packed.numpy()[_CHECKSUM_AT : _CHECKSUM_AT + 4] = list(kernels.checksum(packed).to_bytes(4, "little"))
        return packed

    @classmethod
    def unpack(cls, packed: Tensor) -> GossipMessage:
        """The message of these bytes; MessageError if they are not what was sent."""
        packed, fields = _intact(packed)
        _, _, kind, flags, degree, incarnation, view, scale, number, tag, *sizes = fields
        if kind not in _KINDS or flags & ~_ALL_FLAGS:
            raise RefusedMessageError(f"kind {kind} or flags {flags:#x} of a gossip message do not exist")
        parts, at = [], _HEADER.size
        for size in sizes:
            parts.append(packed[at : at + size])
            at += -(-size // 4) * 4
        payload, buffers, snapshot, records = parts
        if buffers.numel() % 4 or snapshot.numel() % 4:
            raise RefusedMessageError("buffers or snapshot of a gossip message are not float32 numbers")
        return cls(
            number, Kind(kind), Flag(flags), degree, incarnation, view, scale, tag, payload,
            buffers.view(torch.float32), snapshot.view(torch.float32), _unpack_updates(records),
        )  # fmt: skip


def _intact(packed: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """The bytes, aligned to words, and the fields of their header; MessageError if magic, size or checksum differ."""
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() < _HEADER.size or packed.numel() % 4:
        raise MessageError(f"{packed.numel()} bytes are not a whole gossip message: it was cut short")
    if packed.data_ptr() % 4 or packed.storage_offset() % 4 or not packed.is_contiguous():
        packed = packed.clone(memory_format=torch.contiguous_format)
    fields = _HEADER.unpack_from(packed.numpy().data)
    checksum, sizes = fields[1], fields[-4:]
    excess = packed.numel() - _HEADER.size - sum(-(-size // 4) * 4 for size in sizes)
    if fields[0] == _MAGIC and excess == MAC_BYTES and is_intact(packed[:-MAC_BYTES]):
        raise RefusedMessageError("its messages have a secret, and this rank has none: give all ranks the same secret=")
    if fields[0] != _MAGIC or excess:
        raise MessageError("these bytes are not a gossip message, or not a whole one")
    place = _CHECKSUM_AT // 4
    own = kernels.checksum_term(checksum, place) - kernels.checksum_term(0, place)
    if (kernels.checksum(packed) - own) & 0xFFFFFFFF != checksum:
        raise MessageError("a gossip message was damaged in transit: its checksum does not match")
    return packed, fields


def is_intact(packed: Tensor) -> bool:
    """Whether magic, size and checksum are those of a gossip message.

    >>> packed = GossipMessage(1).pack()
    >>> is_intact(packed), is_intact(packed[:-4])
    (True, False)
    """
    try:
        _intact(packed)
    except MessageError:
        return False
    return True


def _unpack_updates(records: Tensor) -> dict[int, MemberStatus]:
    if records.numel() % _UPDATE.size:
        raise RefusedMessageError(f"{records.numel()} bytes are not membership updates of {_UPDATE.size} bytes each")
    updates: dict[int, MemberStatus] = {}
    for rank, incarnation, alive in _UPDATE.iter_unpack(records.numpy().data):
        if alive > 1 or rank in updates:
            raise RefusedMessageError(f"a membership update about rank {rank} is repeated, or neither alive nor dead")
        updates[rank] = MemberStatus(incarnation, bool(alive))
    return updates


def gossip_message_bytes(payload_bytes: int, *, buffers: int = 0) -> int:
    """The size of a message with a payload of `payload_bytes` and `buffers` numbers of running statistics.

    >>> gossip_message_bytes(4) == GossipMessage(1, payload=torch.zeros(4, dtype=torch.uint8)).pack().numel()
    True
    """
    return _HEADER.size + -(-payload_bytes // 4) * 4 + 4 * buffers
