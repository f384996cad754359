"""Where a process of a proof stands: its rank and device, and what it asks of the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """One rank of a default process group.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> place = Place(0, 1, torch.device("cpu"))
    >>> place.same_on_all([torch.ones(3)]), place.largest(2.0)
    (True, 2.0)
    >>> dist.destroy_process_group()
    """

    rank: int
    world_size: int
    device: torch.device

    def same_on_all(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these tensors have the same bits on every rank."""
        mine = torch.cat([bits_of(tensor).reshape(-1) for tensor in tensors])
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return all(torch.equal(row, mine) for row in rows)

    def mean_of(self, tensor: Tensor) -> Tensor:
        """The exact mean over ranks, in float64."""
        total = tensor.detach().to(torch.float64)
        dist.all_reduce(total)
        return total / self.world_size

    def largest(self, value: float) -> float:
        """The largest of a number over ranks."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def synchronize(self) -> None:
        """Wait until all work of this rank's device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait until every rank is here with its device at rest."""
        self.synchronize()
        self.largest(0.0)
        self.synchronize()


def bits_of(tensor: Tensor) -> Tensor:
    """To compare float32: NaN equals the same NaN, and 0 does not equal -0.

    >>> torch.equal(bits_of(torch.tensor(0.0)), bits_of(torch.tensor(-0.0)))
    False
    """
    return tensor.detach().contiguous().view(torch.int32)


def same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists of float32 tensors are equal bit for bit.

    >>> same_bits([torch.ones(2)], [torch.ones(2)])
    True
    """
    return len(some) == len(others) and all(
        torch.equal(bits_of(a), bits_of(b)) for a, b in zip(some, others, strict=True)
    )
