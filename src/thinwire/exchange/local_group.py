"""A network in one process: n ranks, each in a thread of its own. For trying out and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from ..comm import Network, Op, Wait
from ..errors import OptionError
from ..memory import RunningMemory
from .base import Part
from .carrier import Carrier

if TYPE_CHECKING:
    from ..recipe import Recipe  # recipes know exchanges, not the other way round

_ONLY = "gradient"  # the name of tensors that come without one
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


class LocalGroup:
    """All ranks of a recipe in this process, each with its own memory, codec state and random draws.

    It runs the same exchanges as real processes do, over a network of threads. If the gradient of any rank is not
    finite, neither is the mean, and no memory changes: GradScaler will skip the step.

    >>> import torch
    >>> from thinwire import parse
    >>> group = LocalGroup(parse("ef|top_k:0.5|local"), 2)
    >>> group.mean([torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])], step=0)
    tensor([2., 1.])
    >>> group.memories[0].residual("gradient")
    tensor([0., 1.])
    """

    def __init__(self, recipe: Recipe, world_size: int, *, seed: int = 0) -> None:
        if world_size < 1:
            raise OptionError(f"a group has at least 1 rank, got world_size {world_size}")
        self.recipe = recipe
        self.world_size = world_size
        self.seed = seed
        self._carriers = [Carrier(recipe, seed=seed) for _ in range(world_size)]
        self._networks = LocalNetwork.of(world_size)

    @property
    def memories(self) -> list[RunningMemory]:
        """What every rank remembers, if the recipe has a memory."""
        return [carrier.memory for carrier in self._carriers if carrier.memory is not None]

    @property
    def networks(self) -> list[LocalNetwork]:
        """The rank's sides of the network, which count what would have been sent."""
        return self._networks

    @overload
    def mean(self, tensors: Sequence[Tensor], step: int) -> Tensor: ...

    @overload
    def mean(self, tensors: Sequence[Mapping[str, Tensor]], step: int) -> dict[str, Tensor]: ...

    def mean(self, tensors: Sequence[Tensor] | Sequence[Mapping[str, Tensor]], step: int) -> Tensor | dict[str, Tensor]:
        """The mean over the ranks as the recipe delivers it: of one tensor a rank, or of named tensors."""
        first: Tensor | dict[str, Tensor] = self.means(tensors, step)[0]
        return first

    def means(self, tensors: Sequence[Tensor] | Sequence[Mapping[str, Tensor]], step: int) -> list[Any]:
        """What every rank gets: the same bits."""
        if len(tensors) != self.world_size:
            raise OptionError(f"this group has {self.world_size} ranks, {len(tensors)} gave tensors: give one each")
        plain: list[Mapping[str, Tensor]] = [{_ONLY: given} for given in tensors if isinstance(given, Tensor)]
        named = plain or [gradients for gradients in tensors if not isinstance(gradients, Tensor)]
        self._check(named)

        def work(network: LocalNetwork) -> dict[str, Tensor]:
            return self._rank(self._carriers[network.rank], named[network.rank], network, step)

        results = on_all_ranks(self._networks, work)
        return [rank[_ONLY] for rank in results] if plain else results

    def _check(self, named: Sequence[Mapping[str, Tensor]]) -> None:
        if len(named) != self.world_size or any(gradients.keys() != named[0].keys() for gradients in named):
            raise OptionError("the ranks name different tensors: give the same parameters on every rank")
        for name, first in named[0].items():
            if any(gradients[name].shape != first.shape for gradients in named):
                raise OptionError(
                    f"the shapes of {name} differ between the ranks: give the same parameter on every rank"
                )

    @staticmethod
    def _rank(carrier: Carrier, gradients: Mapping[str, Tensor], network: LocalNetwork, step: int) -> dict[str, Tensor]:
        means, finite = {}, True
        for name, gradient in gradients.items():
            shape = tuple(gradient.shape)
            parts = [Part(name, shape, 0, gradient.numel())]
            flat = gradient.detach().reshape(-1).to(torch.float32, copy=True)
            delivery = carrier.carry(name, flat, network=network, step=step, parts=parts)
            means[name] = delivery.mean.view(shape).to(gradient.dtype)
            finite &= delivery.finite
        carrier.settle(finite=finite)
        return means
