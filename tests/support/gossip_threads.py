"""Ranks of decentralised training as threads of one process, and a transport that loses or damages messages."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.comm.peers import LocalTransport, PeerTransport
from thinwire.gossip import Decentralized, decentralize

T = TypeVar("T")
P = TypeVar("P", bound=PeerTransport)


class Quadratic(nn.Module):
    """0.5 |x - goal|^2. Every rank has its own goal; the mean of the goals minimises the sum over the ranks."""

    def __init__(self, numel: int, goal: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(numel))
        self.goal = goal

    def forward(self) -> Tensor:
        return 0.5 * (self.x - self.goal).square().sum()

    def value(self) -> Tensor:
        """A copy of the parameter."""
        return self.x.detach().clone()


def goals(ranks: int, numel: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(ranks)]


def on_threads(transports: Sequence[P], work: Callable[[P], T]) -> list[T]:
    """`work` for every rank, in a thread each; raises the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(transport: P) -> None:
        try:
            results[transport.rank] = work(transport)
        except BaseException as error:
            errors.append(error)
            transport.close()

    threads = [threading.Thread(target=run, args=(transport,), daemon=True) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert len(results) == len(transports), "a rank hangs"
    return [results[transport.rank] for transport in transports]


def errors_of(ends: Sequence[Any], work: Callable[[Any], object], *, seconds: float = 20) -> list[BaseException | None]:
    """What `work` raises for every rank's transport or network, in a thread each. A rank that raises leaves."""
    found: list[BaseException | None] = [AssertionError("it hangs")] * len(ends)

    def run(end: Any) -> None:
        try:
            work(end)
            found[end.rank] = None
        except BaseException as error:
            found[end.rank] = error
            if isinstance(end, PeerTransport):
                end.close()

    threads = [threading.Thread(target=run, args=(end,), daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    return found


def decentralized(model: nn.Module, base: torch.optim.Optimizer, **options: Any) -> Decentralized:
    """`decentralize` with an algorithm that has neighbours."""
    found = decentralize(model, base, **options)
    assert isinstance(found, Decentralized)
    return found


def trainer(
    transport: PeerTransport, goal: Tensor, *, lr: float = 0.1, momentum: float = 0.9, **options: Any
) -> tuple[Quadratic, Decentralized]:
    model = Quadratic(goal.numel(), goal)
    base = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, decentralized(model, base, transport=transport, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


class FaultyTransport(LocalTransport):
    """Loses, repeats, damages or reorders messages while `active`. Which ones depends on the seed, not on timing."""

    def __init__(self, rank: int, queues: list[list[Queue[Tensor | None]]], *, seed: int = 0, **chances: float) -> None:
        super().__init__(rank, queues)
        self._chances = chances
        self._random = {peer: random.Random(f"{seed}/{rank}/{peer}") for peer in range(len(queues))}
        self._delayed: dict[int, Tensor] = {}
        self.active = False
        self.faults = 0

    @classmethod
    def group(cls, ranks: int, *, seed: int = 0, **chances: float) -> list[FaultyTransport]:
        """One for each rank; a chance for each of `lose`, `repeat`, `damage`, `swap`."""
        return [cls(plain.rank, plain._queues, seed=seed, **chances) for plain in LocalTransport.of(ranks)]

    def send(self, peer: int, message: Tensor) -> None:
        drawn = self._random[peer].random() if self.active else 1.0
        for kind in ("lose", "repeat", "damage", "swap"):
            if drawn < self._chances.get(kind, 0.0):
                self.faults += 1
                getattr(self, f"_{kind}")(peer, message)
                return
            drawn -= self._chances.get(kind, 0.0)
        super().send(peer, message)
        if peer in self._delayed:
            super().send(peer, self._delayed.pop(peer))

    def _lose(self, peer: int, message: Tensor) -> None:
        pass

    def _repeat(self, peer: int, message: Tensor) -> None:
        super().send(peer, message)
        super().send(peer, message.clone())

    def _damage(self, peer: int, message: Tensor) -> None:
        broken = message.clone()
        broken[self._random[peer].randrange(len(broken))] ^= 0x10
        super().send(peer, broken)

    def _swap(self, peer: int, message: Tensor) -> None:
        if peer in self._delayed:
            super().send(peer, message)
        else:
            self._delayed[peer] = message
