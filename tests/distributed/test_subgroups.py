"""attach in a group of some ranks: whatever other groups they are in, and once more after it was closed."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.pool import run_fresh

LIMIT = timedelta(seconds=20)


def attached(rank: int, world_size: int, case: str, recipe: str) -> list[float]:
    mine = dist.new_group([0, 1], timeout=LIMIT)
    if case == "uneven":
        dist.new_group([0, 2], timeout=LIMIT)  # rank 0 is in one group more than rank 1
    sums: list[float] = []
    if rank < 2:
        for _ in range(4 if case == "again" else 1):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(64, 64), process_group=mine)
            if rank == 1:
                time.sleep(0.2)  # the other rank closes first, and begins first
            link = tw.attach(model, recipe)
            model(torch.full((2, 64), float(rank))).sum().backward()
            grad = model.module.weight.grad
            assert grad is not None
            sums.append(float(grad.sum()))
            link.close()
            del link, model
    dist.barrier()
    return sums


def all_cases(rank: int, world_size: int, recipe: str) -> dict[str, list[float]]:
    return {case: attached(rank, world_size, case, recipe) for case in ("even", "again", "uneven")}


@pytest.mark.parametrize("recipe", ["bf16", "auto"])
def test_ranks_of_a_subgroup_meet(recipe: str) -> None:
    *members, outsider = run_fresh(3, all_cases, recipe, timeout=20, deadline=150)
    assert outsider == ("returned", {"even": [], "again": [], "uneven": []})
    for member in members:
        assert member[0] == "returned", member
        assert member[1] == members[0][1]
        assert {case: len(sums) for case, sums in member[1].items()} == {"even": 1, "again": 4, "uneven": 1}
