"""DDP's buckets, built anew by `attach`: how many there are, that training is the same, and when they stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.pool import Pool
from thinwire.errors import OptionError

Pools = Callable[[int], Pool]
LAYERS, WIDTH = 12, 256  # 3 MB
WHOLE = "fp32|all_reduce"


class Deep(nn.Module):
    """A layer of it may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, *, skip: int = -1) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == skip else torch.tanh(layer(x))
        return x.square().mean()


def model(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Deep(), **options)


def trained(
    rank: int, world_size: int, recipe: str, options: dict[str, Any], cap: float | None, begun: bool
) -> dict[str, Any]:
    """Three steps of SGD; with `begun`, one forward and backward pass before `attach`."""
    ddp = model(**options)
    if begun:
        ddp(torch.ones(2, WIDTH)).backward()
        ddp.zero_grad()
    link = tw.attach(ddp, recipe, bucket_cap_mb=cap, exempt=(), check_every=1)
    weights = steps(ddp, rank)
    sent, buckets = link.stats()["comm/bytes_per_step"], [bucket.names for bucket in link.layout.buckets]
    link.close()
    return {"buckets": buckets, "weights": weights, "sent": sent}


def plain(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    return steps(model(**options), rank)


def steps(ddp: DistributedDataParallel, rank: int) -> list[Tensor]:
    """Three of SGD. If DDP finds unused parameters, one rank leaves a layer out."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    skips = ddp.find_unused_parameters
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x, skip=5 if skips and rank == 0 else -1).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


@pytest.mark.parametrize("option", ["", "static_graph", "gradient_as_bucket_view", "find_unused_parameters"])
def test_many_buckets_train_as_ddp_does(pools: Pools, option: str) -> None:
    """With a codec that loses nothing; every parameter is in one bucket."""
    options = {option: True} if option else {}
    expected = pools(2).run(plain, options)
    found = pools(2).run(trained, "fp32|two_shot", options, None, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours["buckets"]) >= 3
        assert sorted(name for names in ours["buckets"] for name in names) == sorted(
            f"layers.{layer}.{kind}" for layer in range(LAYERS) for kind in ("weight", "bias")
        )
        for mine, other in zip(ours["weights"], theirs, strict=True):
            assert torch.allclose(mine, other, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(found[0]["weights"], found[1]["weights"], strict=True))


@pytest.mark.parametrize("recipe", ["two-shot-2", "two-shot-1-2", "threshold-k", "global-qsgd-8"])
def test_replicas_are_equal_and_little_is_sent_more(pools: Pools, recipe: str) -> None:
    """Compared with DDP's own buckets; `check_every` would raise if means or weights differed."""
    many, one = (pools(2).run(trained, recipe, {}, cap, False) for cap in (0.3, 25.0))
    assert len(many[0]["buckets"]) >= 6 > len(one[0]["buckets"])
    assert many[0]["sent"] <= 1.02 * one[0]["sent"]


def test_buckets_stay_where_a_forward_pass_has_run(pools: Pools) -> None:
    """Its backward pass would find the hooks of another reducer."""
    assert len(pools(2).run(trained, "two-shot-2", {}, None, True)[0]["buckets"]) <= 2


def test_dense_keeps_the_buckets_of_ddp(pools: Pools) -> None:
    assert len(pools(2).run(trained, "dense", {}, None, False)[0]["buckets"]) <= 2


def caps(rank: int, world_size: int) -> None:
    with pytest.raises(OptionError, match="bucket_cap_mb is a size in MiB, more than 0, not -1"):
        tw.attach(model(), "two-shot-2", bucket_cap_mb=-1)


def test_a_size_that_makes_no_sense_is_refused(pools: Pools) -> None:
    pools(2).run(caps)
