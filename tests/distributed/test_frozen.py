"""Parameters that are frozen, unfrozen or ignored around DDP and attach: it works, or one sentence says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.pool import Pool

Pools = Callable[[int], Pool]
SECONDS = 60  # it takes less than one; a hang would take for ever


class Net(nn.Module):
    """Has a parameter of its own beside those of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, 64))
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x @ self.scale))
        return out


def attempt(rank: int, world_size: int, case: str, recipe: str) -> str:
    net = Net()
    unused = case in ("frozen late", "swapped")
    if case == "unfrozen late":
        net.first.requires_grad_(False)
    if case == "swapped":
        net.first.requires_grad_(False)
    if case == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["scale"])
    if case == "ignored layer":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["first.weight"])
    model = DistributedDataParallel(net, find_unused_parameters=unused)
    if case == "unfrozen late":
        net.first.requires_grad_(True)
    if case == "frozen late":
        net.first.requires_grad_(False)
    if case == "swapped":  # as many parameters as before, and as many bytes
        net.first.requires_grad_(True)
        net.second.requires_grad_(False)
    try:
        link = tw.attach(model, recipe)
        for _ in range(3):
            model(torch.randn(2, 64)).sum().backward()
        link.close()
    except tw.AttachError as refusal:
        return str(refusal)
    means = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    same = [torch.empty_like(torch.cat([mean.view(-1) for mean in means])) for _ in range(world_size)]
    dist.all_gather(same, torch.cat([mean.view(-1) for mean in means]))
    return "trained" if case == "ignored layer" or torch.equal(same[0], same[1]) else "different"


@pytest.mark.parametrize("recipe", ["threshold-k", "dense"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("plain", "trained"),
        ("ignored", "trained"),  # torch ignores no parameter of the root under this name
        ("ignored layer", "trained"),
        ("unfrozen late", "DDP reduces 3 parameters, and 5 require a gradient now: some were frozen or unfrozen"),
        ("frozen late", "DDP reduces 5 parameters, and 3 require a gradient now: some were frozen or unfrozen"),
        ("swapped", "DDP reduces other parameters than require a gradient: some were frozen or unfrozen"),
    ],
)
def test_no_hang_and_no_key_error(pools: Pools, case: str, expected: str, recipe: str) -> None:
    for outcome in pools(2).run(attempt, case, recipe, deadline=SECONDS):
        assert outcome.startswith(expected), outcome
