"""The interface of a peer transport: send a message to one rank, receive the next one from it.

A collective of `comm` needs all ranks. A peer transport needs two: gossip goes on when other ranks fail. A message is a
flat uint8 tensor. Messages from one peer arrive in the order in which it sent them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from torch import Tensor

from ...errors import ExchangeError

_T = TypeVar("_T")


class PeerGoneError(ExchangeError):
    """A peer has left, or its connection broke."""


class PeerTransport(ABC):
    """Sends messages to peers and receives theirs.

    `incarnation` counts the processes that have run as this rank: 1 for the first, 2 after one restart.

    >>> from thinwire.comm.peers import LocalTransport
    >>> transport = LocalTransport.of(4)[2]
    >>> transport.rank, transport.world_size, transport.incarnation, transport.sent_bytes
    (2, 4, 1, 0)
    """

    same_start: ClassVar[bool] = False  # all ranks are built from one model: no broadcast at the start
    restartable: bool = False  # a rank that died may come back

    def __init__(self, rank: int, world_size: int, *, incarnation: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.incarnation = incarnation
        self.sent_bytes = 0

    def now(self) -> float:
        """The clock of all deadlines, in seconds."""
        return time.monotonic()

    def parse_once(self, parse: Callable[[Tensor], _T]) -> Callable[[Tensor], _T]:
        """`parse`, cached by transports that give one message to several ranks of one process."""
        return parse

    def limit(self, most_bytes: int) -> None:
        """No honest message is larger. Transports between processes call a peer gone that announces a larger one."""
        return

    @abstractmethod
    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        """Connect to these peers. Returns those that answered within `seconds`."""

    @abstractmethod
    def send(self, peer: int, message: Tensor) -> None:
        """Queue a message and return at once. The caller must not change the tensor afterwards."""

    @abstractmethod
    def receive(self, peer: int, *, until: float) -> Tensor | None:
        """The next message from a peer; None if none arrives before `now()` reaches `until`.

        Raises PeerGoneError if the peer has left.
        """

    @abstractmethod
    def disconnect(self, peer: int) -> None:
        """Close the connection to one peer."""

    @abstractmethod
    def rejoined(self) -> list[int]:
        """Peers that have connected again since the last call."""

    def note(self, name: str, text: str) -> str:
        """The text of the first rank that called with this name. Ranks compare their options with it.

        A transport between ranks of one program, which has one set of options, may return `text`.
        """
        return text

    def peek(self, name: str) -> str | None:
        """The note of this name, if there is one. A note named `conflict` also ends the wait of `connect`."""
        return None

    def watch_for(self, peers: Iterable[int]) -> None:
        """Accept new connections from these peers, which are absent now."""
        return

    def announce(self, peers: Iterable[int]) -> None:
        """Tell these peers that this rank has started again and wants a connection."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


def seconds_until(until: float) -> float:
    """Seconds from now until then; at least 0, and at most what a queue accepts as a timeout.

    >>> seconds_until(float("inf")), seconds_until(0.0)
    (1000000.0, 0.0)
    """
    return min(max(0.0, until - time.monotonic()), 1e6)
