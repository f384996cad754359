"""What users of `decentralize` meet: other optimizers, batch norm, schedulers, saving, mistakes."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import nn

from support.gossip_threads import Quadratic, decentralized, goals, on_threads, train, trainer
from thinwire.comm.peers import LocalTransport
from thinwire.errors import OptionError, StateError
from thinwire.gossip import decentralize
from thinwire.gossip.absolute import gossip_codec
from thinwire.gossip.choco import Choco
from thinwire.gossip.topology import exponential, one_peer_exponential, ring

ALGORITHMS = [
    ("dpsgd", "fp32"), ("naive", "min_max:8,block=64"), ("dcd", "min_max:4,block=64"), ("ecd", "absolute:8,step=0.05"),
    ("choco", "sign:64"), ("choco", "threshold_k:0.1"), ("auto", "min_max:4,block=64"),
]  # fmt: skip


@pytest.mark.parametrize("deadline", [30.0, None])
@pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS)
def test_resuming_in_the_middle_gives_the_bits_of_a_run_that_was_not_interrupted(
    algorithm: str, codec: str, deadline: float | None
) -> None:
    targets = goals(4, 300)
    options: dict[str, Any] = {
        "algorithm": algorithm,
        "codec": codec,
        "topology": ring(),
        "deadline": deadline,
        "seed": 5,
    }

    def whole(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = trainer(transport, targets[transport.rank], **options)
        train(model, optimizer, 24)
        return model.value()

    def first(transport: LocalTransport) -> bytes:
        model, optimizer = trainer(transport, targets[transport.rank], **options)
        train(model, optimizer, 11)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        return file.getvalue()

    def second(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = trainer(transport, targets[transport.rank], **options)
        optimizer.load_state_dict(torch.load(io.BytesIO(saved[transport.rank]), weights_only=True))
        train(model, optimizer, 13)
        return model.value()

    wanted = torch.stack(on_threads(LocalTransport.of(4), whole))
    saved = on_threads(LocalTransport.of(4), first)
    assert torch.equal(torch.stack(on_threads(LocalTransport.of(4), second)), wanted)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_any_optimizer_and_a_scheduler(kind: Any) -> None:
    [goal] = goals(1, 200)  # the same for all: adaptive rates weigh different ones differently

    def one(transport: LocalTransport) -> tuple[float, float, float]:
        model = Quadratic(200, goal)
        optimizer = decentralize(
            model, kind(model.parameters(), lr=0.05), algorithm="dcd", codec="min_max:8,block=64", transport=transport
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.1)
        before = model().item()
        for _ in range(80):
            train(model, optimizer, 1)
            schedule.step()
        with optimizer.averaged():
            distance = (model.x.detach() - goal).norm() / goal.norm()
        return before, float(distance), optimizer.param_groups[0]["lr"]

    for before, distance, rate in on_threads(LocalTransport.of(3), one):
        assert before > 10
        assert distance < 0.2
        assert rate == pytest.approx(0.05 * 0.01)


def test_running_statistics_travel_and_are_averaged() -> None:
    def one(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.manual_seed(transport.rank)  # other weights on every rank, until decentralize makes them the same
        norm = nn.BatchNorm1d(8)
        net = nn.Sequential(nn.Linear(4, 8), norm)
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        optimizer = decentralize(net, torch.optim.SGD(net.parameters(), lr=0.0), algorithm="dcd", transport=transport)
        start = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        for _ in range(60):
            optimizer.zero_grad()
            net(torch.randn(16, 4) + transport.rank).sum().backward()
            optimizer.step()
        with optimizer.averaged():
            mean = norm.running_mean.clone()
        return start, torch.stack([norm.running_mean.clone(), mean]), int(norm.num_batches_tracked)

    found = on_threads(LocalTransport.of(4), one)
    for start, statistics, seen in found:
        assert torch.equal(start, found[0][0])
        assert torch.equal(statistics[1], found[0][1][1])
        assert seen == 60
    own = torch.stack([statistics[0] for _, statistics, _ in found])
    weight = found[0][0][:32].view(8, 4)
    alone = (weight.sum(1)[None] * torch.arange(4.0)[:, None]).std(0)  # how far they would be apart
    assert (own.std(0) < 0.6 * alone + 0.1).all()


def test_a_gradient_that_is_not_finite_does_not_spread() -> None:
    targets = goals(3, 100)

    def one(transport: LocalTransport) -> Any:
        model, optimizer = trainer(
            transport, targets[transport.rank], algorithm="dcd", codec="min_max:8,block=64", topology=ring()
        )
        for step in range(30):
            optimizer.zero_grad()
            model().backward()
            if transport.rank == 1 and step == 10:
                assert model.x.grad is not None
                model.x.grad[3] = float("nan")
            optimizer.step()
        return model.value(), optimizer.stats()["gossip/skipped_updates"]

    found = on_threads(LocalTransport.of(3), one)
    assert [skipped for _, skipped in found] == [0.0, 1.0, 0.0]
    assert all(torch.isfinite(x).all() for x, _ in found)


def test_too_much_noise_is_told_once_and_auto_changes_to_choco(caplog: pytest.LogCaptureFixture) -> None:
    targets = goals(4, 2000)

    def run(algorithm: str, steps: int) -> list[Any]:
        def one(transport: LocalTransport) -> Any:
            model, optimizer = trainer(
                transport,
                targets[transport.rank],
                lr=0.05,
                momentum=0.0,
                algorithm=algorithm,
                codec="random_k:0.1",
                topology=ring(),
            )
            train(model, optimizer, steps)
            return float((model.x.detach() - torch.stack(targets).mean(0)).norm()), optimizer

        return on_threads(LocalTransport.of(4), one)

    with caplog.at_level(logging.WARNING, logger="thinwire.gossip.noise_monitor"):
        alone = run("dcd", 40)
    assert len([record for record in caplog.records if "drift apart" in record.message]) == 4  # once a rank
    changed = run("auto", 120)
    assert all(isinstance(optimizer._node, Choco) for _, optimizer in changed)
    assert 0 < alone[0][1].stats()["gossip/noise_limit"] < 2
    # The goals of the ranks are 38 from their mean; those that drift apart know no bound.
    assert max(distance for distance, _ in changed) < 50 < max(distance for distance, _ in alone) / 10


def test_one_rank_changes_to_choco_and_the_others_follow() -> None:
    targets = goals(5, 300)

    def one(transport: LocalTransport) -> Any:
        model, optimizer = trainer(
            transport, targets[transport.rank], algorithm="auto", codec="min_max:4,block=64", topology=ring()
        )
        train(model, optimizer, 5)
        if transport.rank == 0:
            optimizer._switch()
        train(model, optimizer, 10)
        optimizer._receive()
        return optimizer

    optimizers = on_threads(LocalTransport.of(5), one)
    assert [optimizer._node.name for optimizer in optimizers] == ["choco"] * 5
    for rank, optimizer in enumerate(optimizers):
        for peer in ring(5).neighbours(rank):
            assert torch.equal(optimizer._node.views.of(peer), optimizers[peer]._node.own)


def test_alone_it_is_the_optimizer_itself() -> None:
    target = goals(1, 50)[0]
    model, optimizer = trainer(LocalTransport.of(1)[0], target, algorithm="dpsgd")
    train(model, optimizer, 20)
    other = Quadratic(50, target)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), 20)
    assert torch.allclose(model.x, other.x, atol=1e-6)
    assert optimizer.consensus_distance() == 0.0


def test_models_of_half_precision_are_trained_in_full() -> None:
    targets = goals(2, 100)

    def one(transport: LocalTransport) -> torch.Tensor:
        model = Quadratic(100, targets[transport.rank]).to(torch.bfloat16)
        optimizer = decentralize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            algorithm="dcd",
            codec="min_max:8,block=64",
            transport=transport,
        )
        train(model, optimizer, 80)
        return model.x.detach().float()

    found = torch.stack(on_threads(LocalTransport.of(2), one))
    goal = torch.stack(targets).mean(0)
    assert (found.mean(0) - goal).norm() < 0.25 * goal.norm()


def test_mistakes_are_errors_at_construction() -> None:
    net = nn.Linear(3, 1)
    base = torch.optim.SGD(net.parameters(), lr=0.1)

    def build(**options: Any) -> Any:
        return decentralize(net, base, transport=LocalTransport.of(2)[0], start_seconds=0.1, **options)

    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"algorithm": "gossip"}, "there is no algorithm gossip"),
        ({"deadline": 0}, "deadline must be a number of seconds"),
        ({"resync_every": 0}, "resync_every"),
        ({"consensus_step": 2.0}, "consensus_step"),
        ({"topology": ring(3)}, "made for 3 ranks, there are 2"),
        ({"algorithm": "dcd", "topology": one_peer_exponential()}, "use exponential"),
        ({"codec": "low_rank:2"}, "needs matrices"),
        ({"codec": "ef|top_k:0.1"}, "leave the first word out"),
        ({"codec": "absolute:x"}, "absolute:8,step=0.01"),
    ]
    for options, sentence in mistakes:
        with pytest.raises(OptionError, match=sentence):
            build(**options)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"make it from model\.parameters"):
        decentralize(net, other, transport=LocalTransport.of(1)[0])
    made = decentralize(net, base, algorithm="dcd", transport=LocalTransport.of(1)[0], topology=exponential())
    with pytest.raises(OptionError, match="cannot be added"):
        made.add_param_group({"params": []})
    state = copy.deepcopy(made.state_dict())
    state["codec"] = "fp32"
    with pytest.raises(StateError, match="codec fp32"):
        made.load_state_dict(state)


def test_the_absolute_grid_has_noise_that_does_not_grow() -> None:
    codec = gossip_codec("absolute:8,step=0.1")
    small, large = torch.full((20_000,), 0.03), torch.full((20_000,), 5.03)
    for x in (small, large):
        decoded = codec.decode(codec.encode(x))
        assert (decoded - x).abs().max() <= 0.1001
        assert decoded.mean() == pytest.approx(float(x[0]), abs=0.002)


def test_half_precision_does_not_round_the_model_away() -> None:
    """Updates far below the spacing of bfloat16 add up, because the model itself has float32."""
    model = Quadratic(64, torch.full((64,), 2.0)).to(torch.bfloat16)
    with torch.no_grad():
        model.x.fill_(1.0)
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = decentralized(model, base, algorithm="dpsgd", transport=LocalTransport.of(1)[0])
    kept = optimizer._node.x.clone()
    for _ in range(5):
        train(model, optimizer, 1)
        assert torch.equal(model.x.detach(), optimizer._node.x.to(torch.bfloat16))
    assert torch.equal(optimizer._node.x, kept)  # SGD itself cannot move bfloat16 by so little, and nothing else did
