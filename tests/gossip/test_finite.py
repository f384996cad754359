"""Values that are not finite: the round takes place, they stay on their rank, and GradScaler skips no round."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from support.gossip_threads import decentralized, errors_of, goals, on_threads, trainer
from thinwire.comm.local import LocalNetwork
from thinwire.comm.peers import LocalTransport
from thinwire.errors import ExchangeError
from thinwire.gossip import decentralize
from thinwire.gossip.absolute import gossip_codec
from thinwire.gossip.dcd import Dcd
from thinwire.gossip.topology import ring

STEPS, BAD = 8, 2


def _scaled(net: nn.Module, optimizer: Any, rank: int, *, unscale: bool) -> Any:
    """Steps with a GradScaler; one loss of rank 1 overflows."""
    generator = torch.Generator().manual_seed(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 16, generator=generator)).square().mean()
        if rank == 1 and step == BAD:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1e3)
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize(("algorithm", "deadline"), [("dcd", 30.0), ("dcd", None), ("dpsgd", 30.0), ("choco", 30.0)])
def test_a_step_that_gradscaler_skips_is_still_a_round(algorithm: str, deadline: float | None, unscale: bool) -> None:
    def one(transport: LocalTransport) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(16, 16)
        base = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = decentralized(net, base, algorithm=algorithm, transport=transport, deadline=deadline)
        scaler = _scaled(net, optimizer, transport.rank, unscale=unscale)
        return optimizer.stats(), scaler.get_scale(), optimizer.consensus_distance()

    begin = time.monotonic()
    found = on_threads(LocalTransport.of(3), one)
    assert time.monotonic() - begin < 20  # nobody waited for a deadline
    assert [stats["gossip/round"] for stats, _, _ in found] == [STEPS] * 3
    assert [stats["gossip/skipped_updates"] for stats, _, _ in found] == [0, 1, 0]
    assert [scale for _, scale, _ in found] == [1024.0, 512.0, 1024.0]
    assert all(apart < 0.5 for _, _, apart in found)


def test_gradscaler_changes_no_bits_when_nothing_overflows() -> None:
    def run(scale: bool) -> list[torch.Tensor]:
        def one(transport: LocalTransport) -> torch.Tensor:
            model, optimizer = trainer(transport, goals(3, 64)[transport.rank], algorithm="dcd", topology=ring())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scale)
            for _ in range(10):
                optimizer.zero_grad()
                scaler.scale(model()).backward()
                scaler.step(optimizer)
                scaler.update()
            return model.value()

        return on_threads(LocalTransport.of(3), one)

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("unscale", [False, True])
def test_allreduce_skips_a_step_on_all_ranks_or_on_none(unscale: bool) -> None:
    results: dict[int, Any] = {}

    def one(network: LocalNetwork) -> None:
        torch.manual_seed(0)
        net = nn.Linear(16, 16)
        base = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = decentralize(net, base, algorithm="allreduce", network=network)
        _scaled(net, optimizer, network.rank, unscale=unscale)
        results[network.rank] = net.weight.detach().clone(), optimizer.stats()

    assert errors_of(LocalNetwork.of(2), one) == [None, None]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.isfinite(results[0][0]).all()
    for _, stats in results.values():
        assert (stats["gossip/round"], stats["gossip/skipped_updates"]) == (STEPS, 1)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_bad_sample_leaves_no_trace_in_running_statistics(value: float) -> None:
    def one(transport: LocalTransport) -> Any:
        generator = torch.Generator().manual_seed(transport.rank)
        norm = nn.BatchNorm1d(8)
        net = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 1))
        base = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = decentralized(net, base, algorithm="dcd", transport=transport, deadline=5.0)
        for step in range(STEPS):
            x = torch.randn(16, 8, generator=generator)
            if transport.rank == 1 and step == BAD:
                x[0, 0] = value
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        tensors = [tensor for tensor in net.state_dict().values() if tensor.is_floating_point()]
        with optimizer.averaged():
            tensors += [tensor.clone() for tensor in net.state_dict().values() if tensor.is_floating_point()]
        return all(bool(tensor.isfinite().all()) for tensor in tensors), optimizer.stats()

    found = on_threads(LocalTransport.of(3), one)
    assert all(finite for finite, _ in found)
    assert [stats["gossip/skipped_updates"] for _, stats in found] == [0, 1, 0]
    assert [stats["gossip/restored_buffers"] > 0 for _, stats in found] == [False, True, False]
    assert [stats["gossip/neighbours"] for _, stats in found] == [2, 2, 2]


def test_a_mask_of_minus_infinity_is_a_buffer_like_others() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.mask: torch.Tensor
            self.register_buffer("mask", torch.full((4,), float("-inf")).index_fill_(0, torch.tensor([0]), 0.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.inner(x) + self.mask, -1)

    def one(transport: LocalTransport) -> Any:
        net = Masked()
        base = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = decentralized(net, base, algorithm="dcd", transport=transport, deadline=5.0)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
        with optimizer.averaged():
            averaged = net.mask.clone()
        return net.mask.clone(), averaged, optimizer.stats()

    wanted = torch.tensor([0.0] + [float("-inf")] * 3)
    for mask, averaged, stats in on_threads(LocalTransport.of(3), one):
        assert torch.equal(mask, wanted)
        assert torch.equal(averaged, wanted)
        assert stats["gossip/restored_buffers"] == 0
        assert stats["gossip/neighbours"] == 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("algorithm", ["dcd", "dpsgd", "choco", "ecd"])
def test_an_update_that_is_not_finite_is_skipped_although_the_gradient_is(algorithm: str, momentum: float) -> None:
    def one(transport: LocalTransport) -> Any:
        torch.manual_seed(transport.rank)
        net = nn.Linear(16, 16)
        base = torch.optim.SGD(net.parameters(), lr=0.01, momentum=momentum)
        optimizer = decentralized(net, base, algorithm=algorithm, transport=transport, deadline=5.0)
        for step in range(STEPS):
            bad = transport.rank == 1 and step == BAD
            base.param_groups[0]["lr"] = 1e30 if bad else 0.01
            optimizer.zero_grad()
            (net(torch.randn(4, 16)).square().mean() * (1e20 if bad else 1.0)).backward()
            assert net.weight.grad is not None
            assert net.weight.grad.isfinite().all()
            optimizer.step()
            if bad:  # a gradient of 1e20 is not what this test is about
                base.state.clear()
        finite = all(bool(p.isfinite().all()) for p in net.parameters())
        return finite, optimizer.stats()

    found = on_threads(LocalTransport.of(3), one)
    assert all(finite for finite, _ in found)
    assert [stats["gossip/skipped_updates"] for _, stats in found] == [0, 1, 0]
    assert [stats["gossip/neighbours"] for _, stats in found] == [2, 2, 2]


def test_training_goes_on_after_the_optimizer_state_overflowed() -> None:
    def one(transport: LocalTransport) -> Any:
        model, optimizer = trainer(transport, goals(2, 32)[transport.rank], algorithm="dpsgd", lr=0.05)
        for step in range(40):
            optimizer.zero_grad()
            model().backward()
            if transport.rank == 1 and step in (BAD, BAD + 1):
                assert model.x.grad is not None
                model.x.grad.fill_(3e38)  # finite; momentum adds two of them to infinity
            optimizer.step()
        return model.value(), optimizer.stats()

    found = on_threads(LocalTransport.of(2), one)
    assert found[0][1]["gossip/skipped_updates"] == 0
    assert 2 <= found[1][1]["gossip/skipped_updates"] < 40
    assert all(torch.isfinite(x).all() for x, _ in found)


def test_a_change_whose_error_is_not_finite_is_not_sent() -> None:
    node = Dcd(torch.zeros(64), rank=0, peers=[1], codec=gossip_codec("min_max:4,block=64"))
    with pytest.raises(ExchangeError, match="cannot encode the change"):
        node.step(torch.linspace(-3e38, 3e38, 64), {1: 0.5}, 0)
    assert torch.equal(node.x, torch.zeros(64))
