"""Collectives between threads of one process, added in rank order: for experiments and tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .network import Network, Op, Wait

_T = TypeVar("_T")
_N = TypeVar("_N", bound="LocalNetwork")


class Meeting:
    """Where the ranks meet: everybody brings something, everybody sees all of it."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.brought: list[Any] = [None] * world_size

    def exchange(self, rank: int, mine: object, use: Callable[[list[Any]], _T]) -> _T:
        self.brought[rank] = mine
        self.barrier.wait()
        seen = use(self.brought)
        self.barrier.wait()  # nobody changes what others still read
        return seen


class LocalNetwork(Network):
    """The collectives between threads of one process, added in rank order.

    >>> LocalNetwork.alone().all_reduce(torch.tensor([1.0]))
    tensor([1.])
    """

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.brought))
        self._meeting = meeting

    @classmethod
    def alone(cls) -> LocalNetwork:
        return cls.of(1)[0]

    @classmethod
    def of(cls, world_size: int) -> list[LocalNetwork]:
        """One for every rank."""
        meeting = Meeting(world_size)
        return [cls(rank, meeting) for rank in range(world_size)]

    def abort(self) -> None:
        """Let nobody wait for a rank that failed."""
        self._meeting.barrier.abort()

    def _all_reduce(self, tensor: Tensor, op: Op) -> Wait:
        def combined(all_ranks: list[Tensor]) -> Tensor:
            total = all_ranks[0].clone()
            for other in all_ranks[1:]:
                total = total + other if op == "sum" else torch.maximum(total, other)
            return total

        return lambda: tensor.copy_(self._meeting.exchange(self.rank, tensor, combined))

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Wait:
        return lambda: self._meeting.exchange(self.rank, tensor, lambda rows: torch.stack(rows, out=out))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> Wait:
        def mine(all_ranks: list[Tensor]) -> Tensor:
            return torch.stack([theirs[self.rank] for theirs in all_ranks], out=out)

        return lambda: self._meeting.exchange(self.rank, rows, mine)

    def _broadcast(self, tensor: Tensor, source: int) -> Wait:
        return lambda: tensor.copy_(self._meeting.exchange(self.rank, tensor, lambda all_: all_[source].clone()))

    def _swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Wait:
        def receive(all_ranks: list[Mapping[int, Tensor]]) -> None:
            for peer, tensor in incoming.items():
                tensor.copy_(all_ranks[peer][self.rank])

        return lambda: self._meeting.exchange(self.rank, outgoing, receive)


def on_all_ranks(networks: Sequence[_N], work: Callable[[_N], _T]) -> list[_T]:
    """The results of `work` for every rank, each run in a thread; the first error is raised here.

    >>> on_all_ranks(LocalNetwork.of(3), lambda network: network.all_reduce(torch.tensor([network.rank])).item())
    [3, 3, 3]
    """
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def run(network: _N) -> None:
        try:
            results[network.rank] = work(network)
        except threading.BrokenBarrierError:
            pass  # another rank failed and says why
        except BaseException as error:
            errors.append(error)
            network.abort()

    threads = [threading.Thread(target=run, args=(network,), daemon=True) for network in networks[1:]]
    for thread in threads:
        thread.start()
    run(networks[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[network.rank] for network in networks]
