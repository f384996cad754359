"""Messages that are lost, repeated, reordered or damaged; neighbours that leave. Copies and means stay right."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.gossip_threads import FaultyTransport, goals, on_threads, train, trainer
from thinwire.comm.peers import LocalTransport
from thinwire.errors import ExchangeError, MessageError
from thinwire.gossip.message import GossipMessage, Kind
from thinwire.gossip.topology import complete, ring, star

NUMEL = 256
ALGORITHMS = [
    ("dpsgd", "fp32"), ("naive", "min_max:8,block=64"), ("dcd", "min_max:4,block=64"),
    ("ecd", "absolute:8,step=0.05"), ("choco", "sign:64"),
]  # fmt: skip
FAULTS = [
    {"lose": 0.05},
    {"repeat": 0.2},
    {"damage": 0.05},
    {"swap": 0.05},
    {"lose": 0.02, "repeat": 0.02, "swap": 0.02},
]


def _run(
    transports: Sequence[FaultyTransport], steps: int, *, quiet: int = 0, deadline: float = 0.5, **options: Any
) -> list[Any]:
    """Train with faults, then `quiet` steps without any. Returns the models and optimizers."""
    targets = goals(len(transports), NUMEL)

    def one(transport: FaultyTransport) -> Any:
        model, optimizer = trainer(
            transport, targets[transport.rank], lr=0.02, momentum=0.0, topology=ring(), deadline=deadline, **options
        )
        transport.active = True
        train(model, optimizer, steps)
        transport.active = False
        train(model, optimizer, quiet)
        optimizer._receive()
        return model.value(), optimizer

    return on_threads(transports, one)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS)
def test_copies_are_true_again_after_every_kind_of_fault(algorithm: str, codec: str, fault: dict[str, float]) -> None:
    transports = FaultyTransport.group(4, seed=1, **fault)
    results = _run(transports, 60, quiet=6, algorithm=algorithm, codec=codec)
    assert sum(transport.faults for transport in transports) > 5
    for rank, (_, optimizer) in enumerate(results):
        assert set(optimizer._rounds.edges) == set(ring(4).neighbours(rank))
        for peer in ring(4).neighbours(rank):
            theirs = results[peer][1]._node
            known = theirs.own if algorithm != "naive" else None
            if known is not None:
                assert torch.equal(optimizer._node.views.of(peer), known)
            assert optimizer._rounds.edges[peer].valid


@pytest.mark.parametrize(("algorithm", "codec"), [("dpsgd", "fp32"), ("choco", "sign:64")])
def test_lost_messages_do_not_move_the_mean(algorithm: str, codec: str) -> None:
    """A flow in one direction only is undone: with zero gradients the mean of the models stays."""
    ranks = 5
    targets = goals(ranks, NUMEL)
    transports = FaultyTransport.group(ranks, seed=2, lose=0.1)

    def one(transport: FaultyTransport) -> tuple[Tensor, Tensor, Any]:
        model, optimizer = trainer(
            transport,
            targets[transport.rank],
            lr=0.5,
            momentum=0.0,
            topology=ring(),
            deadline=0.5,
            algorithm=algorithm,
            codec=codec,
        )
        train(model, optimizer, 2)
        before = model.value()
        transport.active = True
        for step in range(40):
            transport.active = step < 37  # the last messages arrive, so that every flow is confirmed
            model.x.grad = torch.zeros_like(model.x)
            optimizer.step()
        return before, model.value(), optimizer

    found = on_threads(transports, one)
    before, after = (torch.stack([row[i] for row in found]) for i in (0, 1))
    undone = sum(row[2].stats()["gossip/undone"] for row in found)
    assert undone > 3
    missing = sum(row[2].stats()["gossip/lost"] for row in found)
    assert missing > 3
    # Two messages in a row lost on one edge: then no rank knows which flow to undo.
    moved = (after.mean(0) - before.mean(0)).norm() / (before - before.mean(0)).norm()
    assert moved < 0.02


class LosesOne(FaultyTransport):
    """Loses the tenth message from rank 0 to rank 1."""

    count = 0

    def send(self, peer: int, message: Tensor) -> None:
        self.count += self.active and (self.rank, peer) == (0, 1)
        if self.count != 10 or (self.rank, peer) != (0, 1):
            super().send(peer, message)


@pytest.mark.parametrize(("algorithm", "codec", "rounds"), [("dpsgd", "fp32", 1), ("dcd", "min_max:4,block=64", 2)])
def test_a_lost_message_costs_its_round_and_one_more_where_copies_are_kept(
    algorithm: str, codec: str, rounds: int
) -> None:
    """The round that brings the snapshot counts again, for both ends; the end that got its message undoes one flow."""
    transports = [LosesOne(plain.rank, plain._queues) for plain in LocalTransport.of(4)]
    results = _run(transports, 30, deadline=20.0, algorithm=algorithm, codec=codec)
    counts = [optimizer._rounds.counts for _, optimizer in results]
    assert [one.lost for one in counts] == [0, 1, 0, 0]
    assert [one.skipped for one in counts] == [rounds - 1, rounds, 0, 0]
    assert [one.undone for one in counts] == [1, 0, 0, 0]
    assert [one.resyncs for one in counts] == [rounds - 1, 0, 0, 0]


def test_training_reaches_its_goal_with_lost_messages() -> None:
    """2 % lost: as near to the best model as without any loss."""
    targets = torch.stack(goals(4, NUMEL))

    def distance(**faults: float) -> float:
        results = _run(FaultyTransport.group(4, seed=3, **faults), 150, algorithm="dcd", codec="min_max:4,block=64")
        mean = torch.stack([x for x, _ in results]).mean(0)
        return float((mean - targets.mean(0)).norm() / targets.mean(0).norm())

    assert distance(lose=0.02) < distance() + 0.05


def test_a_lost_message_costs_no_deadline_because_the_next_one_tells() -> None:
    begin = time.monotonic()
    _run(FaultyTransport.group(3, seed=4, lose=0.05), 60, deadline=20.0, algorithm="dpsgd", codec="fp32")
    assert time.monotonic() - begin < 40  # about 9 messages are lost


def test_a_copy_that_went_wrong_is_noticed_and_replaced() -> None:
    targets = goals(3, NUMEL)
    meeting = threading.Barrier(3)

    def one(transport: LocalTransport) -> Any:
        model, optimizer = trainer(
            transport,
            targets[transport.rank],
            algorithm="dcd",
            codec="min_max:4,block=64",
            topology=ring(),
            deadline=5.0,
        )
        train(model, optimizer, 5)
        if transport.rank == 0:
            optimizer._node.views.of(1)[7] += 0.5
        train(model, optimizer, 30)
        optimizer._receive()
        meeting.wait(30)
        return optimizer

    optimizers = on_threads(LocalTransport.of(3), one)
    assert optimizers[0].stats()["gossip/mismatches"] == 1
    assert optimizers[1].stats()["gossip/resyncs"] == 1
    for rank, optimizer in enumerate(optimizers):
        for peer in ring(3).neighbours(rank):
            assert torch.equal(optimizer._node.views.of(peer), optimizers[peer]._node.own)


@pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS)
def test_the_others_go_on_when_one_leaves(algorithm: str, codec: str) -> None:
    ranks, leaver = 5, 2
    targets = goals(ranks, NUMEL)

    def one(transport: LocalTransport) -> Any:
        model, optimizer = trainer(
            transport,
            targets[transport.rank],
            lr=0.02,
            momentum=0.0,
            algorithm=algorithm,
            codec=codec,
            topology=ring(),
            deadline=10.0,
        )
        train(model, optimizer, 10)
        if transport.rank == leaver:
            optimizer.close()
            return None
        train(model, optimizer, 20)
        with optimizer.averaged():
            mean = model.value()
        return optimizer, mean, model.value(), optimizer.consensus_distance()

    found = on_threads(LocalTransport.of(ranks), one)
    left = [row for row in found if row is not None]
    for optimizer, mean, _, distance in left:
        assert optimizer.stats()["gossip/alive"] == 4
        assert torch.equal(mean, left[0][1])
        assert torch.allclose(mean, torch.stack([row[2] for row in left]).mean(0), atol=1e-6)
        assert distance == left[0][3]
    weights = torch.zeros(ranks, ranks, dtype=torch.float64)
    for optimizer, *_ in left:
        for peer, weight in optimizer._rounds.coefficients.items():
            weights[optimizer._transport.rank, peer] = weight / optimizer._node.scale
    assert torch.equal(weights, weights.T)
    assert weights[1, 0] == pytest.approx(1 / 3)
    assert weights[1, 2] == 0


def test_a_neighbour_that_is_too_late_is_left_out_by_both_ends() -> None:
    targets = goals(3, NUMEL)

    def one(transport: LocalTransport) -> Any:
        model, optimizer = trainer(
            transport,
            targets[transport.rank],
            algorithm="dcd",
            codec="min_max:8,block=64",
            topology=ring(),
            deadline=0.4,
        )
        train(model, optimizer, 3)
        if transport.rank == 1:
            time.sleep(1.0)
        train(model, optimizer, 12)
        optimizer._receive()
        return model.value(), optimizer

    found = on_threads(LocalTransport.of(3), one)
    assert sum(optimizer.stats()["gossip/skipped"] for _, optimizer in found) >= 2
    for rank, (_, optimizer) in enumerate(found):
        assert len(optimizer._rounds.edges) == 2
        for peer in ring(3).neighbours(rank):
            assert optimizer._rounds.edges[peer].valid


def test_without_a_deadline_a_neighbour_that_leaves_ends_training_with_a_sentence() -> None:
    targets = goals(3, NUMEL)

    def one(transport: LocalTransport) -> None:
        model, optimizer = trainer(
            transport,
            targets[transport.rank],
            algorithm="dcd",
            topology=ring(),
            codec="min_max:4,block=64",
            deadline=None,
        )
        train(model, optimizer, 3)
        if transport.rank == 1:
            optimizer.close()
        else:
            train(model, optimizer, 10)

    with pytest.raises(ExchangeError, match="give a deadline"):
        on_threads(LocalTransport.of(3), one)


@pytest.mark.parametrize("topology", [star(), complete()], ids=str)
def test_a_membership_update_reaches_every_rank(topology: Any) -> None:
    targets = goals(5, NUMEL)

    def one(transport: LocalTransport) -> Any:
        model, optimizer = trainer(
            transport, targets[transport.rank], algorithm="dpsgd", topology=topology, codec="fp32", deadline=5.0
        )
        train(model, optimizer, 3)
        if transport.rank == 4:
            optimizer.close()
            return 4.0
        train(model, optimizer, 6)
        return optimizer.stats()["gossip/alive"]

    assert on_threads(LocalTransport.of(5), one) == [4.0] * 5


def test_messages_survive_packing_and_damage_is_noticed() -> None:
    message = GossipMessage(
        7, Kind.ROUND, degree=3, payload=torch.arange(50, dtype=torch.uint8), buffers=torch.ones(3), scale=0.4
    )
    packed = message.pack()
    same = GossipMessage.unpack(packed)
    assert (same.round, same.degree, same.scale, same.buffers.tolist()) == (7, 3, 0.4, [1.0, 1.0, 1.0])
    for place in range(0, packed.numel()):
        broken = packed.clone()
        broken[place] ^= 0x40
        with pytest.raises(MessageError):
            GossipMessage.unpack(broken)
    for size in (0, 3, 40, packed.numel() - 4):
        with pytest.raises(MessageError):
            GossipMessage.unpack(packed[:size])


def test_an_average_right_after_a_lost_message_does_not_lose_its_own() -> None:
    targets = goals(3, NUMEL)

    def one(transport: FaultyTransport) -> Any:
        model, optimizer = trainer(
            transport,
            targets[transport.rank],
            algorithm="dcd",
            codec="min_max:4,block=64",
            topology=ring(),
            deadline=20.0,
        )
        train(model, optimizer, 4)
        optimizer.finish()
        transport.active = transport.rank == 1  # all its messages of one round are lost
        train(model, optimizer, 1)
        transport.active = False
        with optimizer.averaged():
            mean = model.value()
        train(model, optimizer, 4)
        optimizer.finish()
        return mean, optimizer

    begin = time.monotonic()
    found = on_threads(FaultyTransport.group(3, lose=1.0), one)
    assert time.monotonic() - begin < 15  # nobody waits for a deadline
    assert all(torch.equal(mean, found[0][0]) for mean, _ in found)
    assert sum(optimizer.stats()["gossip/lost"] for _, optimizer in found) == 2
    assert all(edge.valid for _, optimizer in found for edge in optimizer._rounds.edges.values())


def test_regular_snapshots_go_to_every_neighbour_and_change_nothing() -> None:
    targets = goals(3, NUMEL)

    def run(resync_every: int | None) -> list[Any]:
        def one(transport: LocalTransport) -> Any:
            options: dict[str, Any] = {"algorithm": "dcd", "codec": "min_max:4,block=64", "topology": ring()}
            model, optimizer = trainer(transport, targets[transport.rank], resync_every=resync_every, **options)
            train(model, optimizer, 20)
            return model.value(), optimizer.stats()["gossip/resyncs"]

        return on_threads(LocalTransport.of(3), one)

    plain, regular = run(None), run(5)
    assert [resyncs for _, resyncs in plain] == [0.0] * 3
    assert [resyncs for _, resyncs in regular] == [8.0] * 3  # two neighbours, rounds 5, 10, 15 and 20
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, regular, strict=True))
