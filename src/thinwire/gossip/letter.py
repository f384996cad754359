"""What neighbours send each other: one letter in each round, self-describing and check-summed.

    magic 4 | checksum 4 | kind 2 | flags 2 | degree 4 | life 4 | view checksum 4 | scale 8 | round 8 | tag 8 |
    sizes of the four parts, 8 each | message | buffers | snapshot | news                        (little-endian)

The message is what the algorithm's codec made; buffers (running statistics) travel as they are; a snapshot is the
sender's view of itself before the message, for a neighbour that lost track; news is who has died or come back.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import torch
from torch import Tensor

from .. import kernels
from ..errors import MessageError

_HEADER = struct.Struct("<4sIHHIIIdQQ4Q")
_NEWS = struct.Struct("<IIB3x")
_MAGIC = b"twg1"
_CHECKSUM_AT = 4
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Kind(IntEnum):
    ROUND = 0  # one round of gossip
    NEWS = 1  # only who is there, before an average
    UP = 2  # towards the root of an average
    DOWN = 3  # and back


class Flag(IntFlag):
    WANTS = 1  # a snapshot, with your next letter: I have lost track of you
    CHECKED = 2  # the view checksum is there
    SWITCHED = 4  # the sender has changed to CHOCO
    USED = 8  # the sender averaged with your letter of the round before


_NONE = Flag(0)


@dataclass(frozen=True)
class Standing:
    """What is known of a rank: in which life it was last heard of, and whether it is alive.

    >>> Standing(1, False).newer_than(Standing(1, True)), Standing(1, False).newer_than(Standing(2, True))
    (True, False)
    """

    life: int = 1
    alive: bool = True

    def newer_than(self, other: Standing) -> bool:
        return (self.life, not self.alive) > (other.life, not other.alive)


@dataclass
class Letter:
    """One letter.

    >>> letter = Letter(round=3, degree=2, message=torch.arange(4, dtype=torch.uint8), news={5: Standing(1, False)})
    >>> same = Letter.unpack(letter.pack())
    >>> same.round, same.message.tolist(), same.news
    (3, [0, 1, 2, 3], {5: Standing(life=1, alive=False)})
    """

    round: int
    kind: Kind = Kind.ROUND
    flags: Flag = _NONE
    degree: int = 0  # live neighbours of the sender, on which the weight of the edge depends
    life: int = 1
    view_checksum: int = 0
    scale: float = 1.0  # of what flows between the two, 1 but for CHOCO
    tag: int = 0  # which of several letters of a round, for averages
    message: Tensor = field(default_factory=lambda: _NOTHING)
    buffers: Tensor = field(default_factory=lambda: _NOTHING)
    snapshot: Tensor = field(default_factory=lambda: _NOTHING)
    news: Mapping[int, Standing] = field(default_factory=dict)

    def pack(self) -> Tensor:
        told = b"".join(_NEWS.pack(rank, one.life, one.alive) for rank, one in sorted(self.news.items()))
        news = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else _NOTHING
        parts = [
            part.contiguous().view(torch.uint8).cpu() for part in (self.message, self.buffers, self.snapshot, news)
        ]
        sizes = [part.numel() for part in parts]
        header = _HEADER.pack(
            _MAGIC, 0, self.kind, self.flags, self.degree, self.life, self.view_checksum, self.scale, self.round,
            self.tag, *sizes,
        )  # fmt: skip
        padded = [-(-size // 4) * 4 for size in sizes]
        letter = torch.zeros(_HEADER.size + sum(padded), dtype=torch.uint8)
        letter[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        at = _HEADER.size
        for part, room in zip(parts, padded, strict=True):
            letter[at : at + part.numel()] = part
            at += room
        letter.numpy()[_CHECKSUM_AT : _CHECKSUM_AT + 4] = list(kernels.checksum(letter).to_bytes(4, "little"))
        return letter

    @classmethod
    def unpack(cls, letter: Tensor) -> Letter:
        """MessageError if this is not what was sent."""
        if letter.dtype != torch.uint8 or letter.numel() < _HEADER.size or letter.numel() % 4:
            raise MessageError(f"{letter.numel()} bytes are no letter of a neighbour: it was cut short")
        letter = letter.clone() if letter.data_ptr() % 4 else letter
        magic, checksum, kind, flags, degree, life, view, scale, number, tag, *sizes = _HEADER.unpack_from(
            letter.numpy().data
        )
        if magic != _MAGIC or sum(-(-size // 4) * 4 for size in sizes) + _HEADER.size != letter.numel():
            raise MessageError("these bytes are not a letter of a neighbour, or not a whole one")
        place = _CHECKSUM_AT // 4
        own = kernels.checksum_term(checksum, place) - kernels.checksum_term(0, place)
        if (kernels.checksum(letter) - own) & 0xFFFFFFFF != checksum:
            raise MessageError("a letter was damaged on its way: its checksum does not match")
        parts, at = [], _HEADER.size
        for size in sizes:
            parts.append(letter[at : at + size])
            at += -(-size // 4) * 4
        message, buffers, snapshot, news = parts
        told = {rank: Standing(lived, bool(alive)) for rank, lived, alive in _NEWS.iter_unpack(news.numpy().tobytes())}
        return cls(
            number, Kind(kind), Flag(flags), degree, life, view, scale, tag, message,
            buffers.view(torch.float32), snapshot.view(torch.float32), told,
        )  # fmt: skip


def letter_bytes(message: int, *, buffers: int = 0) -> int:
    """The size of a letter with a message of so many bytes and so many numbers of running statistics, and no more.

    >>> letter_bytes(4) == Letter(1, message=torch.zeros(4, dtype=torch.uint8)).pack().numel()
    True
    """
    return _HEADER.size + -(-message // 4) * 4 + 4 * buffers
