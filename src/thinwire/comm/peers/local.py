"""A peer transport between threads of one process, for experiments and tests."""

from __future__ import annotations

import queue
from collections.abc import Iterable

from torch import Tensor

from .transport import PeerGoneError, PeerTransport, seconds_until


class LocalTransport(PeerTransport):
    """Messages between threads of one process.

    >>> import time, torch
    >>> a, b = LocalTransport.of(2)
    >>> a.send(1, torch.tensor([7], dtype=torch.uint8))
    >>> b.receive(0, until=time.monotonic() + 1)
    tensor([7], dtype=torch.uint8)
    """

    def __init__(
        self, rank: int, queues: list[list[queue.Queue[Tensor | None]]], *, notes: dict[str, str] | None = None
    ) -> None:
        super().__init__(rank, len(queues))
        self._notes = {} if notes is None else notes  # shared by all ranks
        self._queues = queues  # [receiver][sender]; None says that the sender has left

    @classmethod
    def of(cls, world_size: int) -> list[LocalTransport]:
        """Connected transports, one for each rank."""
        queues: list[list[queue.Queue[Tensor | None]]] = [
            [queue.Queue() for _ in range(world_size)] for _ in range(world_size)
        ]
        notes: dict[str, str] = {}
        return [cls(rank, queues, notes=notes) for rank in range(world_size)]

    def connect(self, peers: Iterable[int], *, seconds: float) -> list[int]:
        return list(peers)

    def send(self, peer: int, message: Tensor) -> None:
        self.sent_bytes += message.numel()
        self._queues[peer][self.rank].put(message)

    def receive(self, peer: int, *, until: float) -> Tensor | None:
        try:
            message = self._queues[self.rank][peer].get(timeout=seconds_until(until))
        except queue.Empty:
            return None
        if message is None:
            raise PeerGoneError(f"rank {peer} has left")
        return message

    def note(self, name: str, text: str) -> str:
        return self._notes.setdefault(name, text)  # atomic

    def peek(self, name: str) -> str | None:
        return self._notes.get(name)

    def disconnect(self, peer: int) -> None:
        pass

    def rejoined(self) -> list[int]:
        return []

    def close(self) -> None:
        for queues in self._queues:
            queues[self.rank].put(None)
