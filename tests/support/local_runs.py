"""A small problem for local steps, and ways to run it: threads of one process, or one rank of a real group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.comm.local import LocalNetwork, on_all_ranks
from thinwire.comm.network import Network

Weights = dict[str, Tensor]


class Net(nn.Module):
    """Three blocks in a list, an embedding before and a head behind; a buffer that counts what it has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 40)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(3)])
        self.head = nn.Linear(40, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        h = self.embed(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        out: Tensor = self.head(h)
        return out


def net(seed: int = 0) -> Net:
    """With the weights of a seed; threads do not share torch's generator with others that draw."""
    numbers = torch.Generator().manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.2)
    return model


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(7919 * step + rank)
    x = torch.randn(6, 8, generator=numbers)
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1], x.square().mean(1)], dim=1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"sgd": sgd, "adam": adam}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    x, y = batch(step, rank)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def weights(model: nn.Module) -> Weights:
    inside = getattr(model, "module", model)
    return {name: tensor.detach().clone() for name, tensor in inside.state_dict().items()}


def train(
    rank: int,
    network: Network | None,
    steps: int,
    *,
    inner: str = "adam",
    finish: bool = True,
    **options: Any,
) -> tuple[Weights, dict[str, float]]:
    """One rank, from the start to `finish`."""
    model = net()
    optimizer = OPTIMIZERS[inner](model)
    local = tw.local_steps(model, optimizer, group=network, **options)
    for step in range(steps):
        one_step(model, optimizer, step, rank)
    if finish:
        local.finish()
    stats = local.stats()
    local.close()
    return weights(model), stats


def in_threads(world_size: int, work: Callable[[LocalNetwork], Any]) -> list[Any]:
    """`work` on every rank of a group of threads."""
    return on_all_ranks(LocalNetwork.of(world_size), work)


def same(one: Weights, other: Weights) -> bool:
    """To the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
