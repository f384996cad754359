"""Gossip messages as an attacker makes them: any header field, valid checksums, and mutations of valid messages."""

from __future__ import annotations

import random
import struct
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec
from thinwire.codecs.frames import HEADER_BYTES
from thinwire.comm.peers import LocalTransport
from thinwire.gossip.dcd import Dcd
from thinwire.gossip.dpsgd import Dpsgd
from thinwire.gossip.edge import Edge
from thinwire.gossip.node import Node
from thinwire.gossip.rounds import Rounds
from thinwire.gossip.topology import ring

HEADER = struct.Struct("<4sIHHIIIdQQ4Q")  # written out again here: a change of the format must be noticed
FIELDS = ("magic", "checksum", "kind", "flags", "degree", "incarnation", "view", "scale", "round", "tag",
          "payload", "buffers", "snapshot", "updates")  # fmt: skip
FORMATS = dict(zip(FIELDS, ("4s", *"IHHIIIdQQQQQQ"), strict=True))
OFFSETS = {name: struct.calcsize("<" + "".join(list(FORMATS.values())[:place])) for place, name in enumerate(FORMATS)}
_FRAME_CHECKSUM = 24
_MESSAGE_CHECKSUM = 4


def signed(message: Tensor, at: int = _MESSAGE_CHECKSUM) -> Tensor:
    """The same bytes with a valid checksum: the checksum is public arithmetic."""
    message = message.clone()
    message[at : at + 4] = 0
    message.numpy()[at : at + 4] = list(kernels.checksum(message).to_bytes(4, "little"))
    return message


def forged(*, parts: tuple[bytes, bytes, bytes, bytes] = (b"", b"", b"", b""), **fields: Any) -> Tensor:
    """A message with these fields and a valid checksum."""
    given = {"magic": b"twg1", "checksum": 0, "kind": 0, "flags": 0, "degree": 1, "incarnation": 1, "view": 0,
             "scale": 1.0, "round": 1, "tag": 0}  # fmt: skip
    sizes = dict(zip(FIELDS[-4:], map(len, parts), strict=True))
    body = b"".join(part.ljust(-(-len(part) // 4) * 4, b"\0") for part in parts)
    values = {**given, **sizes, **fields}
    head = HEADER.pack(*(values[name] for name in FIELDS))
    return signed(torch.frombuffer(bytearray(head + body), dtype=torch.uint8))


class Mutator:
    """Mutations of valid messages: bit flips, cuts, extensions, field edits, foreign payloads, random bytes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutate(self, message: Tensor) -> Tensor:
        """One to three mutations. Often sizes and checksums are made valid again, so that deeper checks are reached."""
        data = bytearray(message.numpy().tobytes())
        kinds = (self._flip, self._edit, self._body, self._scramble, self._cut, self._extend)
        for kind in self.random.choices(kinds, weights=(2, 4, 4, 4, 1, 1), k=self.random.randint(1, 3)):
            kind(data)
        if self.random.random() < 0.02:
            data = bytearray(self.random.randbytes(self.random.randrange(400)))
        if len(data) >= HEADER.size and self.random.random() < 0.8:
            self._resize(data)
            if len(data) % 4 == 0:
                return self._sign_all(torch.frombuffer(data, dtype=torch.uint8))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def _resize(self, data: bytearray) -> None:
        """As many bytes as the header says, if that is not too many."""
        sizes = struct.unpack_from("<4Q", data, OFFSETS["payload"])
        total = HEADER.size + sum(-(-size // 4) * 4 for size in sizes)
        if total < 4096:
            del data[total:]
            data += self.random.randbytes(total - len(data))

    def _sign_all(self, message: Tensor) -> Tensor:
        size = struct.unpack_from("<Q", message.numpy().data, OFFSETS["payload"])[0]
        if HEADER_BYTES <= size <= message.numel() - HEADER.size and size % 4 == 0 and self.random.random() < 0.9:
            end = HEADER.size + size
            inner = signed(message[HEADER.size : end], _FRAME_CHECKSUM)
            message = torch.cat([message[: HEADER.size], inner, message[end:]])
        return signed(message)

    def _number(self, bits: int) -> int:
        near = self.random.choice((0, 1, 2, 3, 4, 7, 8, 13, 255, 1 << 15, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1))
        return (near if self.random.random() < 0.8 else self.random.getrandbits(bits)) & ((1 << bits) - 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)

    def _cut(self, data: bytearray) -> None:
        end = self.random.randrange(len(data) + 1)
        del data[end - end % 4 if self.random.random() < 0.5 else end :]

    def _extend(self, data: bytearray) -> None:
        data += self.random.randbytes(self.random.choice((1, 4, 16, 64, 64)))

    def _edit(self, data: bytearray) -> None:
        """A field of the header gets another value, often an extreme one."""
        if len(data) < HEADER.size:
            return
        name = self.random.choice(FIELDS[2:])
        shape = "<" + FORMATS[name]
        if name == "scale":
            value: float = self.random.choice((0.0, -1e30, 1e308, float("nan"), float("inf"), -0.5, 1e-300))
        else:
            old = struct.unpack_from(shape, data, OFFSETS[name])[0]
            near = max(0, old + self.random.choice((-4, -1, 1, 4, 12)))
            bits = 8 * struct.calcsize(shape)
            value = (near if self.random.random() < 0.5 else self._number(bits)) & ((1 << bits) - 1)
        struct.pack_into(shape, data, OFFSETS[name], value)

    def _body(self, data: bytearray) -> None:
        """Some words behind the header become extreme numbers: scales of blocks, counts, positions, parameters."""
        words = (len(data) - HEADER.size) // 4
        for _ in range(self.random.randint(1, 4) if words > 0 else 0):
            at = HEADER.size + 4 * self.random.randrange(words)
            value = self.random.choice((float("nan"), float("inf"), -1e38, 1e30, 1e7, 0.0))
            word = struct.pack("<f", value) if self.random.random() < 0.7 else struct.pack("<I", self._number(32))
            data[at : at + 4] = word

    def _scramble(self, data: bytearray) -> None:
        if len(data) > HEADER.size:
            at = self.random.randrange(HEADER.size, len(data))
            end = min(len(data), at + self.random.randint(1, 64))
            data[at:end] = self.random.randbytes(end - at)


class Receiver:
    """Rank 0 of two, which trains with zero gradients; what rank 1 sends is the test's."""

    def __init__(self, codec: Codec, *, numel: int = 96, buffers: int = 3, tracks: bool = True) -> None:
        self._me, self._other = LocalTransport.of(2)
        kind: type[Node] = Dcd if tracks else Dpsgd
        self.node = kind(torch.linspace(-1, 1, numel), rank=0, peers=[1], codec=codec)
        self.buffers = torch.ones(buffers)
        self.rounds = Rounds(self.node, self._me, ring(2), deadline=1e-9, buffers=self.buffers)
        self._start = self.node.own.clone()

    def meet(self, *messages: Tensor) -> None:
        """One step of training and one round in which these messages arrive."""
        for message in messages:
            self._other.send(0, message)
        rounds = self.rounds
        payload = self.node.step(torch.zeros_like(self.node.x), rounds.coefficients, rounds.round)
        rounds.send(payload, self.buffers)
        rounds.receive()
        change = rounds.take_buffers()
        self.buffers = self.buffers if change is None else self.buffers + change

    def restore(self) -> None:
        """The neighbour is back, and all is as at the start."""
        for queue in (self._me._queues[0][1], self._me._queues[1][0]):
            while not queue.empty():
                queue.get()
        self.node.views.put(1, self._start)
        self.node.reset_own(self._start)
        self.buffers = torch.ones_like(self.buffers)
        last = self.rounds.round
        self.rounds.edges[1] = Edge(1, last=last)
        self.rounds.membership.mark_alive(1, 1)
        self.rounds.correction = None
        self.rounds.coefficients = {}

    @property
    def waiting(self) -> int:
        """Messages that are kept for later."""
        return sum(len(edge.early) for edge in self.rounds.edges.values())
