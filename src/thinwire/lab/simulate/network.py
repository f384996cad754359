"""Collectives between simulated workers of one process, timed by a virtual clock."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from torch import Tensor

from ...comm.local import LocalNetwork, Meeting
from ...comm.network import Op, Wait
from ...exchange.script import Collective
from ...predict.collectives import takes_direct_way
from .collectives import ends
from .links import Floats, Links


class Clocks:
    """The virtual time of every worker, and the collectives under way."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.now: Floats = np.zeros(links.workers)
        self.waited: dict[Collective, float] = {}  # seconds of the last worker, by collective
        self._begun: dict[int, dict[int, float]] = {}
        self._ended: dict[int, Floats] = {}
        self._lock = threading.Lock()

    def begin(self, number: int, rank: int) -> None:
        with self._lock:
            self._begun.setdefault(number, {})[rank] = float(self.now[rank])

    def end(self, number: int, rank: int, collective: Collective, size: int) -> None:
        """A worker has its result; by then all have begun."""
        with self._lock:
            if number not in self._ended:
                begun = self._begun.pop(number)
                begins = np.array([begun[rank] for rank in range(self.links.workers)])
                done = self._ended[number] = ends(self.links, collective, size, begins)
                last = float(done.max() - begins.max())
                self.waited[collective] = self.waited.get(collective, 0.0) + last
                self._ended.pop(number - 64, None)
            self.now[rank] = max(float(self.now[rank]), float(self._ended[number][rank]))


class SimNetwork(LocalNetwork):
    """One worker's side: the results of `LocalNetwork`, and the virtual time at which they are there.

    >>> import torch
    >>> from thinwire.comm.local import on_all_ranks
    >>> networks = SimNetwork.on(Links.named("8mbit,10ms", workers=4))
    >>> on_all_ranks(networks, lambda network: float(network.all_reduce(torch.ones(30_000))[0]))
    [4.0, 4.0, 4.0, 4.0]
    >>> networks[0].clocks.now.round(3).tolist()  # two trips of 10 ms, each with three quarters of 120 kB
    [0.2, 0.2, 0.2, 0.2]
    """

    def __init__(self, rank: int, meeting: Meeting, clocks: Clocks) -> None:
        super().__init__(rank, meeting)
        self.clocks = clocks
        self._calls = 0

    @classmethod
    def on(cls, links: Links) -> list[SimNetwork]:
        meeting, clocks = Meeting(links.workers), Clocks(links)
        return [cls(rank, meeting, clocks) for rank in range(links.workers)]

    def _timed(self, collective: Collective, size: int, wait: Wait) -> Wait:
        number, self._calls = self._calls, self._calls + 1
        self.clocks.begin(number, self.rank)

        def until_the_end() -> object:
            found = wait()
            self.clocks.end(number, self.rank, collective, size)
            return found

        return until_the_end

    def _all_reduce(self, tensor: Tensor, op: Op) -> Wait:
        return self._timed("all_reduce", _bytes(tensor), super()._all_reduce(tensor, op))

    def _all_reduce_soon(self, tensor: Tensor, op: Op) -> Wait:
        direct = takes_direct_way(_bytes(tensor), self.world_size)
        return self._timed("small_sum" if direct else "all_reduce", _bytes(tensor), super()._all_reduce(tensor, op))

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Wait:
        return self._timed("all_gather", _bytes(tensor), super()._all_gather(out, tensor))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> Wait:
        return self._timed("all_to_all", _bytes(rows), super()._all_to_all(out, rows))

    def _broadcast(self, tensor: Tensor, source: int) -> Wait:
        return self._timed("broadcast", _bytes(tensor), super()._broadcast(tensor, source))

    def _swap(self, outgoing: Any, incoming: Any) -> Wait:
        return self._timed("swap", sum(map(_bytes, outgoing.values())), super()._swap(outgoing, incoming))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
