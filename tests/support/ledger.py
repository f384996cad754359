"""What went into a link and what came out, by parameter: with error feedback nothing may get lost on the way.

    sum of all ranks' local gradients  ==  number of ranks * sum of the means received  +  sum of all ranks' residuals

The local gradients come from a copy of the module that DDP never sees.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.forced_auto import attach
from thinwire.exchange.first_shot import pieces

Loss = Callable[[nn.Module], Any]  # what has a backward()
Bits = dict[str, Tensor]


class Ledger:
    """Attaches, keeps the books, and looks at every future that the hook returns."""

    def __init__(self, ddp: DistributedDataParallel, recipe: str, **options: Any) -> None:
        self.ddp = ddp
        self.module = getattr(ddp, "_orig_mod", ddp).module
        self.local = copy.deepcopy(self.module)
        self.link = attach(ddp, recipe, **options)
        self.given = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in _trained(self.module).items()}
        self.got = {name: torch.zeros_like(total) for name, total in self.given.items()}
        self.received = 0
        self.watch = Watch(self.link, {id(p): name for name, p in _trained(self.module).items()})

    def enter(self, *losses: Loss) -> None:
        """What this rank is about to give, with the weights of now."""
        with torch.no_grad():
            for mine, theirs in zip(self.local.parameters(), self.module.parameters(), strict=True):
                mine.copy_(theirs)
        self.local.zero_grad()
        for loss in losses:
            loss(self.local).backward()
        for name, parameter in _trained(self.local).items():
            if parameter.grad is not None:
                self.given[name] += parameter.grad.to_dense()

    def receive(self) -> None:
        """What backward brought."""
        for name, parameter in _trained(self.module).items():
            if parameter.grad is not None:
                self.got[name] += parameter.grad.to_dense()
        self.watch.look()
        self.received += 1

    def step(self, *losses: Loss) -> None:
        """One synchronised step of one loss, or of several with all but the last under no_sync."""
        self.enter(*losses)
        self.module.zero_grad()
        for place, loss in enumerate(losses):
            with self.ddp.no_sync() if place < len(losses) - 1 else contextlib.nullcontext():
                loss(self.ddp).backward()
        self.receive()

    def residuals(self) -> Bits:
        return owed(self.link)

    def books(self) -> dict[str, Any]:
        """For the parent."""
        return {
            "given": self.given,
            "got": self.got,
            "received": self.received,
            "residual": self.residuals(),
            "grads": {name: p.grad for name, p in _trained(self.module).items()},
            "buckets": self.watch.buckets,
            "layout": [sorted(group) for group in self.link.layout.groups],
            "returned_wrong": self.watch.wrong,
        }


class Watch:
    """Stands between DDP and a link. It must not know the model, which only C++ would then keep alive for ever."""

    def __init__(self, link: thinwire.Link, names: dict[int, str]) -> None:
        self.buckets: list[list[tuple[int, bool, list[str]]]] = []  # step -> bucket -> index, is_last, parameters
        self.wrong: list[str] = []  # what was returned that DDP would misread
        self._link, self._take, self._names = link, link.take, names
        self._futures: list[tuple[Any, int]] = []
        link.take = self.take  # type: ignore[method-assign]

    def take(self, bucket: Any) -> Any:
        if self._link.reducer._open is None:
            self.buckets.append([])
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        self.buckets[-1].append((bucket.index(), bucket.is_last(), names))
        future = self._take(bucket)
        self._futures.append((future, bucket.buffer().numel()))
        return future

    def look(self) -> None:
        futures, self._futures = self._futures, []
        for value, numel in ((future.value(), numel) for future, numel in futures):
            if value is None:
                self.wrong.append("nothing")
            elif not value.is_sparse and (value.storage_offset(), value.stride(), value.shape) != (0, (1,), (numel,)):
                self.wrong.append(f"{tuple(value.shape)} {value.stride()} from {value.storage_offset()}")


def owed(link: thinwire.Link) -> Bits:
    """What this rank adds to the sum that is still to be sent, by parameter; of its second shots too."""
    found: Bits = {}
    for bucket in link.layout.buckets:
        kept = torch.zeros(bucket.numel, dtype=torch.float64)
        back = link.reducer.residuals.backs.get(bucket.name)
        if back is not None:  # part of a mean, not of a sum
            kept[pieces(bucket.numel, link.world_size)[link.rank]] = back.double() * link.world_size
        for part in bucket.parts:
            found[part.name] = link.residual(part.name) + part.of(kept).view(part.shape)
    return found


def assert_nothing_lost(books: Sequence[dict[str, Any]], *, tolerance: float = 1e-5) -> None:
    """The sum holds, and all ranks that received as often received the same bits (others have joined early)."""
    longest = max(books, key=lambda book: book["received"])
    for name in longest["given"]:
        given = sum(book["given"][name] for book in books)
        owed = sum(book["residual"].get(name, torch.zeros(())).double() for book in books)
        difference = float((len(books) * longest["got"][name] + owed - given).abs().max())
        assert difference <= tolerance * max(float(given.abs().max()), 1e-12), (name, difference)
        for book in books:
            assert book["received"] < longest["received"] or torch.equal(book["got"][name], longest["got"][name]), name
    assert [book["returned_wrong"] for book in books] == [[]] * len(books)


def assert_same_on_all(values: Sequence[Any]) -> None:
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=0, atol=0)


def batch(rank: int, step: int, *shape: int) -> Tensor:
    """Data that differ by rank and step, and are the same for every model."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def copied(tensors: Any) -> Bits:
    return {name: tensor.detach().clone() for name, tensor in dict(tensors).items()}


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
