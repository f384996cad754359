"""Ranks of decentralised training as threads of one process, and mail that loses, repeats, swaps, damages letters."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.comm.peers import LocalMail, Mail
from thinwire.gossip import decentralize

T = TypeVar("T")


class Quadratic(nn.Module):
    """0.5 |x - goal|^2, where every rank has a goal of its own: the mean of the goals is best for all together."""

    def __init__(self, numel: int, goal: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(numel))
        self.goal = goal

    def forward(self) -> Tensor:
        return 0.5 * (self.x - self.goal).square().sum()


def goals(ranks: int, numel: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(ranks)]


def on_threads(mails: list[Mail] | list[LocalMail], work: Callable[[Mail], T]) -> list[T]:
    """`work` for every rank, in a thread each; the first error is raised here."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(mail: Mail) -> None:
        try:
            results[mail.rank] = work(mail)
        except BaseException as error:
            errors.append(error)
            mail.close()

    threads = [threading.Thread(target=run, args=(mail,), daemon=True) for mail in mails]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert len(results) == len(mails), "a rank hangs"
    return [results[mail.rank] for mail in mails]


def trainer(mail: Mail, goal: Tensor, *, lr: float = 0.1, momentum: float = 0.9, **options: Any) -> tuple[Any, Any]:
    model = Quadratic(goal.numel(), goal)
    base = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, decentralize(model, base, mail=mail, **options)


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


class Faulty(LocalMail):
    """Does to some letters what networks do. Which ones depends on the seed, not on the timing of threads."""

    def __init__(self, rank: int, boxes: Any, *, seed: int = 0, **chances: float) -> None:
        super().__init__(rank, boxes)
        self._chances = chances
        self._random = {peer: random.Random(f"{seed}/{rank}/{peer}") for peer in range(len(boxes))}
        self._kept: dict[int, Tensor] = {}
        self.begun = False
        self.done = 0

    @classmethod
    def crew(cls, ranks: int, **options: Any) -> list[Faulty]:
        plain = LocalMail.of(ranks)
        return [cls(mail.rank, mail._boxes, **options) for mail in plain]

    def send(self, peer: int, letter: Tensor) -> None:
        what = self._random[peer].random() if self.begun else 1.0
        for kind in ("lose", "repeat", "damage", "swap"):
            if what < self._chances.get(kind, 0.0):
                self.done += 1
                getattr(self, f"_{kind}")(peer, letter)
                return
            what -= self._chances.get(kind, 0.0)
        super().send(peer, letter)
        if peer in self._kept:
            super().send(peer, self._kept.pop(peer))

    def _lose(self, peer: int, letter: Tensor) -> None:
        pass

    def _repeat(self, peer: int, letter: Tensor) -> None:
        super().send(peer, letter)
        super().send(peer, letter.clone())

    def _damage(self, peer: int, letter: Tensor) -> None:
        broken = letter.clone()
        broken[self._random[peer].randrange(len(broken))] ^= 0x10
        super().send(peer, broken)

    def _swap(self, peer: int, letter: Tensor) -> None:
        if peer in self._kept:
            super().send(peer, letter)
        else:
            self._kept[peer] = letter
