"""Small messages take a shorter way than gloo's rings: the same result on every rank, whatever the size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.pool import Pool
from thinwire.comm.communicator import Communicator
from thinwire.comm.network import SMALL_SUM

Pools = Callable[[int], Pool]
SIZES = (1, 2, 7, 1000, SMALL_SUM // 4, SMALL_SUM // 4 + 1)  # of float32: the last goes in a ring
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)


def brought(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (100 * torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + numel % 97))).to(dtype)


def reduced(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    communicator = Communicator()
    found = []
    for numel in SIZES:
        for dtype in TYPES:
            x = brought(rank, numel, dtype)
            pending = communicator.start_all_reduce(x.clone())  # under way beside the others
            soon = communicator.start_all_reduce(x.clone(), soon=True)
            largest = communicator.all_reduce(x.clone(), op="max")
            found.append((soon.wait(), pending.wait(), largest, communicator.all_gather(x)))
    before = communicator.traffic
    communicator.all_reduce(torch.ones(world_size, 3))
    sent = communicator.traffic - before
    assert (sent.calls, sent.bytes) == (1, 2 * 4 * 3 * (world_size - 1))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_in_rank_order_and_the_same_everywhere(pools: Pools, world_size: int) -> None:
    ranks = pools(world_size).run(reduced)
    cases = [(numel, dtype) for numel in SIZES for dtype in TYPES]
    for place, (numel, dtype) in enumerate(cases):
        rows = torch.stack([brought(rank, numel, dtype) for rank in range(world_size)])
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        soon, ring, largest, gathered = ranks[0][place]
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(ranks[0][place], other[place], strict=True))
        assert torch.equal(largest, rows.amax(0))
        assert torch.equal(gathered, rows)
        if numel * dtype.itemsize <= SMALL_SUM:
            assert torch.equal(soon, total)
        # A ring adds in another order for each piece: another last bit of every partial sum.
        last_bit = torch.finfo(dtype).eps if dtype.is_floating_point else 0
        room = world_size * last_bit * rows.double().abs().sum(0)
        assert ((ring.double() - total.double()).abs() <= room).all()
        assert ((soon.double() - total.double()).abs() <= room).all()
