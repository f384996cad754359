"""A shared secret: every message carries an authentication code, and messages without a valid one are refused.

    message | HMAC-SHA256(key, sender 8 | receiver 8 | message), its first 16 bytes

The message has its round, its incarnation and its kind in its header, so the code covers them. The secret proves that a
member of the run sent a message to this rank. It does not hide the content.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from ..comm.peers import PeerTransport
from ..errors import MessageError, OptionError
from .message import MAC_BYTES, RefusedMessageError, is_intact

_T = TypeVar("_T")
_ENDS = struct.Struct("<QQ")
_LEAST_BYTES = 16
_PURPOSE = b"thinwire gossip messages 1"


class SecretTransport(PeerTransport):
    """A transport that appends an authentication code to every message, and refuses messages without a valid one.

    >>> import time
    >>> from thinwire.comm.peers import LocalTransport
    >>> from thinwire.gossip.message import GossipMessage
    >>> a, b = (SecretTransport(one, "a secret of 16 bytes or more") for one in LocalTransport.of(2))
    >>> a.send(1, GossipMessage(7).pack())
    >>> GossipMessage.unpack(b.receive(0, until=time.monotonic() + 1)).round
    7
    """

    def __init__(self, transport: PeerTransport, secret: str | bytes) -> None:
        given = secret.encode() if isinstance(secret, str) else secret
        if not isinstance(given, bytes) or len(given) < _LEAST_BYTES:
            raise OptionError(
                f"secret must be text or bytes, at least {_LEAST_BYTES} bytes long, the same on all ranks: make one "
                "with secrets.token_hex(16)"
            )
        self._transport = transport
        # A key of its own: the same secret may serve other purposes.
        self._key = hmac.digest(given, _PURPOSE, hashlib.sha256)
        super().__init__(transport.rank, transport.world_size, incarnation=transport.incarnation)
        self._proven: set[int] = set()  # peers whose last message had a valid code
        self.restartable = transport.restartable
        self.same_start = transport.same_start  # type: ignore[misc]  # of the class there, and a copy here

    def _code(self, sender: int, receiver: int, message: Tensor) -> bytes:
        mac = hmac.new(self._key, _ENDS.pack(sender, receiver), hashlib.sha256)
        mac.update(message.contiguous().numpy().data)
        return mac.digest()[:MAC_BYTES]

    def send(self, peer: int, message: Tensor) -> None:
        code = bytearray(self._code(self.rank, peer, message.cpu()))
        self._transport.send(peer, torch.cat([message.cpu(), torch.frombuffer(code, dtype=torch.uint8)]))
        self.sent_bytes = self._transport.sent_bytes

    def receive(self, peer: int, *, until: float) -> Tensor | None:
        found = self._transport.receive(peer, until=until)
        return None if found is None else self._open(peer, found)

    def _open(self, peer: int, sealed: Tensor) -> Tensor:
        """The message without its code; MessageError if the code is not that of a member of the run."""
        if sealed.dtype != torch.uint8 or sealed.dim() != 1 or sealed.numel() < MAC_BYTES:
            raise MessageError(f"{sealed.numel()} bytes are not a message with a secret: it was cut short")
        message, code = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:].numpy().tobytes()
        if hmac.compare_digest(code, self._code(peer, self.rank, message)):
            self._proven.add(peer)
            return message
        # Damage in transit costs a message only. An intact message comes from a sender without the secret, unless the
        # damage is in the code itself: a peer that had the secret before may send one such message.
        proven = peer in self._proven
        self._proven.discard(peer)
        if is_intact(sealed) or (is_intact(message) and not proven):
            raise RefusedMessageError("its message lacks the secret, or has another one: give all ranks the same")
        raise MessageError("a gossip message was damaged in transit: its authentication code does not match")

    # What has nothing to do with messages is left to the transport.

    def now(self) -> float:
        return self._transport.now()

    def parse_once(self, parse: Callable[[Tensor], _T]) -> Callable[[Tensor], _T]:
        return self._transport.parse_once(parse)

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        return self._transport.connect(peers, seconds=seconds)

    def disconnect(self, peer: int) -> None:
        self._proven.discard(peer)
        self._transport.disconnect(peer)

    def rejoined(self) -> list[int]:
        return self._transport.rejoined()

    def watch_for(self, peers: Iterable[int]) -> None:
        self._transport.watch_for(peers)

    def announce(self, peers: Iterable[int]) -> None:
        self._transport.announce(peers)

    def limit(self, most_bytes: int) -> None:
        self._transport.limit(most_bytes)

    def note(self, name: str, text: str) -> str:
        return self._transport.note(name, text)

    def peek(self, name: str) -> str | None:
        return self._transport.peek(name)

    def close(self) -> None:
        self._transport.close()
