"""Letters that are lost, come twice, in another order or damaged; neighbours that leave. Copies and means stay."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from support.crew import Faulty, goals, on_threads, train, trainer
from thinwire.comm.peers import LocalMail
from thinwire.errors import ExchangeError, MessageError
from thinwire.gossip.letter import Kind, Letter
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


def _run(mails: list[Any], work_steps: int, *, quiet: int = 0, deadline: float = 0.5, **options: Any) -> list[Any]:
    """Train with faults, then without any for `quiet` steps; models, optimizers and what others know of them."""
    targets = goals(len(mails), NUMEL)

    def one(mail: Any) -> Any:
        model, optimizer = trainer(
            mail, targets[mail.rank], lr=0.02, momentum=0.0, topology=ring(), deadline=deadline, **options
        )
        mail.begun = True
        train(model, optimizer, work_steps)
        mail.begun = False
        train(model, optimizer, quiet)
        optimizer._arrive()
        return model.x.detach().clone(), optimizer

    return on_threads(mails, one)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS)
def test_copies_are_true_again_after_every_kind_of_fault(algorithm: str, codec: str, fault: dict[str, float]) -> None:
    mails = Faulty.crew(4, seed=1, **fault)
    results = _run(mails, 60, quiet=6, algorithm=algorithm, codec=codec)
    assert sum(mail.done for mail in mails) > 5
    for rank, (_, optimizer) in enumerate(results):
        assert set(optimizer._rounds.edges) == set(ring(4).neighbours(rank))
        for peer in ring(4).neighbours(rank):
            theirs = results[peer][1]._node
            known = theirs.own if algorithm != "naive" else None
            if known is not None:
                assert torch.equal(optimizer._node.views.of(peer), known)
            assert optimizer._rounds.edges[peer].valid


@pytest.mark.parametrize(("algorithm", "codec"), [("dpsgd", "fp32"), ("choco", "sign:64")])
def test_lost_letters_do_not_move_the_mean(algorithm: str, codec: str) -> None:
    """What flows one way only is taken back: with all gradients zero, the mean of the models stays."""
    ranks = 5
    targets = goals(ranks, NUMEL)
    mails = Faulty.crew(ranks, seed=2, lose=0.1)

    def one(mail: Any) -> tuple[Tensor, Tensor, Any]:
        model, optimizer = trainer(
            mail,
            targets[mail.rank],
            lr=0.5,
            momentum=0.0,
            topology=ring(),
            deadline=0.5,
            algorithm=algorithm,
            codec=codec,
        )
        train(model, optimizer, 2)
        before = model.x.detach().clone()
        mail.begun = True
        for step in range(40):
            mail.begun = step < 37  # the last letters arrive, so that all is told
            model.x.grad = torch.zeros_like(model.x)
            optimizer.step()
        return before, model.x.detach().clone(), optimizer

    found = on_threads(mails, one)
    before, after = (torch.stack([row[i] for row in found]) for i in (0, 1))
    undone = sum(row[2].stats()["gossip/undone"] for row in found)
    assert undone > 3
    missing = sum(row[2].stats()["gossip/lost"] for row in found)
    assert missing > 3
    # A letter and the next one on the same edge lost together: then nobody can tell what to take back.
    moved = (after.mean(0) - before.mean(0)).norm() / (before - before.mean(0)).norm()
    assert moved < 0.02


class LosesOne(LocalMail):
    """Loses the tenth letter from rank 0 to rank 1."""

    begun, letters = False, 0

    def send(self, peer: int, letter: Tensor) -> None:
        self.letters += self.begun and (self.rank, peer) == (0, 1)
        if self.letters != 10 or (self.rank, peer) != (0, 1):
            super().send(peer, letter)


@pytest.mark.parametrize(("algorithm", "codec", "rounds"), [("dpsgd", "fp32", 1), ("dcd", "min_max:4,block=64", 2)])
def test_a_lost_letter_costs_its_round_and_one_more_where_copies_are_kept(
    algorithm: str, codec: str, rounds: int
) -> None:
    """The round that brings the snapshot counts again, for both ends; the end that got its letter takes one back."""
    mails = [LosesOne(mail.rank, mail._boxes) for mail in LocalMail.of(4)]
    results = _run(mails, 30, deadline=20.0, algorithm=algorithm, codec=codec)
    counts = [optimizer._rounds.counts for _, optimizer in results]
    assert [one.lost for one in counts] == [0, 1, 0, 0]
    assert [one.skipped for one in counts] == [rounds - 1, rounds, 0, 0]
    assert [one.undone for one in counts] == [1, 0, 0, 0]
    assert [one.resyncs for one in counts] == [rounds - 1, 0, 0, 0]


def test_training_reaches_its_goal_with_lost_letters() -> None:
    """2 % lost: as near to the best model as without any loss."""
    targets = torch.stack(goals(4, NUMEL))

    def distance(**faults: float) -> float:
        results = _run(Faulty.crew(4, seed=3, **faults), 150, algorithm="dcd", codec="min_max:4,block=64")
        mean = torch.stack([x for x, _ in results]).mean(0)
        return float((mean - targets.mean(0)).norm() / targets.mean(0).norm())

    assert distance(lose=0.02) < distance() + 0.05


def test_a_lost_letter_costs_no_deadline_because_the_next_one_tells() -> None:
    begin = time.monotonic()
    _run(Faulty.crew(3, seed=4, lose=0.05), 60, deadline=20.0, algorithm="dpsgd", codec="fp32")
    assert time.monotonic() - begin < 40  # 9 letters or so are lost


def test_a_copy_that_went_wrong_is_noticed_and_replaced() -> None:
    targets = goals(3, NUMEL)
    meeting = threading.Barrier(3)

    def one(mail: Any) -> Any:
        model, optimizer = trainer(
            mail, targets[mail.rank], algorithm="dcd", codec="min_max:4,block=64", topology=ring(), deadline=5.0
        )
        train(model, optimizer, 5)
        if mail.rank == 0:
            optimizer._node.views.of(1)[7] += 0.5
        train(model, optimizer, 30)
        optimizer._arrive()
        meeting.wait(30)
        return optimizer

    optimizers = on_threads(LocalMail.of(3), one)
    assert optimizers[0].stats()["gossip/mismatches"] == 1
    assert optimizers[1].stats()["gossip/resyncs"] == 1
    for rank, optimizer in enumerate(optimizers):
        for peer in ring(3).neighbours(rank):
            assert torch.equal(optimizer._node.views.of(peer), optimizers[peer]._node.own)


@pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS)
def test_the_others_go_on_when_one_leaves(algorithm: str, codec: str) -> None:
    ranks, leaver = 5, 2
    targets = goals(ranks, NUMEL)

    def one(mail: Any) -> Any:
        model, optimizer = trainer(
            mail,
            targets[mail.rank],
            lr=0.02,
            momentum=0.0,
            algorithm=algorithm,
            codec=codec,
            topology=ring(),
            deadline=10.0,
        )
        train(model, optimizer, 10)
        if mail.rank == leaver:
            optimizer.close()
            return None
        train(model, optimizer, 20)
        with optimizer.averaged():
            mean = model.x.detach().clone()
        return optimizer, mean, model.x.detach().clone(), optimizer.consensus_distance()

    found = on_threads(LocalMail.of(ranks), one)
    left = [row for row in found if row is not None]
    for optimizer, mean, _, distance in left:
        assert optimizer.stats()["gossip/alive"] == 4
        assert torch.equal(mean, left[0][1])
        assert torch.allclose(mean, torch.stack([row[2] for row in left]).mean(0), atol=1e-6)
        assert distance == left[0][3]
    weights = torch.zeros(ranks, ranks, dtype=torch.float64)
    for optimizer, *_ in left:
        for peer, weight in optimizer._rounds.coefficients.items():
            weights[optimizer._mail.rank, peer] = weight / optimizer._node.scale
    assert torch.equal(weights, weights.T)
    assert weights[1, 0] == pytest.approx(1 / 3)
    assert weights[1, 2] == 0


def test_a_neighbour_that_is_too_late_is_left_out_by_both_ends() -> None:
    targets = goals(3, NUMEL)

    def one(mail: Any) -> Any:
        model, optimizer = trainer(
            mail, targets[mail.rank], algorithm="dcd", codec="min_max:8,block=64", topology=ring(), deadline=0.4
        )
        train(model, optimizer, 3)
        if mail.rank == 1:
            time.sleep(1.0)
        train(model, optimizer, 12)
        optimizer._arrive()
        return model.x.detach().clone(), optimizer

    found = on_threads(LocalMail.of(3), one)
    assert sum(optimizer.stats()["gossip/skipped"] for _, optimizer in found) >= 2
    for rank, (_, optimizer) in enumerate(found):
        assert len(optimizer._rounds.edges) == 2
        for peer in ring(3).neighbours(rank):
            assert optimizer._rounds.edges[peer].valid


def test_without_a_deadline_a_neighbour_that_leaves_ends_training_with_a_sentence() -> None:
    targets = goals(3, NUMEL)

    def one(mail: Any) -> None:
        model, optimizer = trainer(
            mail, targets[mail.rank], algorithm="dcd", topology=ring(), codec="min_max:4,block=64", deadline=None
        )
        train(model, optimizer, 3)
        if mail.rank == 1:
            optimizer.close()
        else:
            train(model, optimizer, 10)

    with pytest.raises(ExchangeError, match="give a deadline"):
        on_threads(LocalMail.of(3), one)


@pytest.mark.parametrize("topology", [star(), complete()], ids=str)
def test_news_of_a_death_reach_everyone(topology: Any) -> None:
    targets = goals(5, NUMEL)

    def one(mail: Any) -> Any:
        model, optimizer = trainer(
            mail, targets[mail.rank], algorithm="dpsgd", topology=topology, codec="fp32", deadline=5.0
        )
        train(model, optimizer, 3)
        if mail.rank == 4:
            optimizer.close()
            return 4.0
        train(model, optimizer, 6)
        return optimizer.stats()["gossip/alive"]

    assert on_threads(LocalMail.of(5), one) == [4.0] * 5


def test_letters_say_what_they_were_told_and_damage_is_noticed() -> None:
    letter = Letter(
        7, Kind.ROUND, degree=3, message=torch.arange(50, dtype=torch.uint8), buffers=torch.ones(3), scale=0.4
    )
    packed = letter.pack()
    same = Letter.unpack(packed)
    assert (same.round, same.degree, same.scale, same.buffers.tolist()) == (7, 3, 0.4, [1.0, 1.0, 1.0])
    for place in range(0, packed.numel()):
        broken = packed.clone()
        broken[place] ^= 0x40
        with pytest.raises(MessageError):
            Letter.unpack(broken)
    for size in (0, 3, 40, packed.numel() - 4):
        with pytest.raises(MessageError):
            Letter.unpack(packed[:size])


def test_an_average_right_after_a_lost_letter_does_not_lose_its_own() -> None:
    targets = goals(3, NUMEL)

    def one(mail: Any) -> Any:
        model, optimizer = trainer(
            mail, targets[mail.rank], algorithm="dcd", codec="min_max:4,block=64", topology=ring(), deadline=20.0
        )
        train(model, optimizer, 4)
        optimizer.finish()
        mail.begun = mail.rank == 1  # all its letters of one round are lost
        train(model, optimizer, 1)
        mail.begun = False
        with optimizer.averaged():
            mean = model.x.detach().clone()
        train(model, optimizer, 4)
        optimizer.finish()
        return mean, optimizer

    begin = time.monotonic()
    found = on_threads(Faulty.crew(3, lose=1.0), one)
    assert time.monotonic() - begin < 15  # nobody waits for a deadline
    assert all(torch.equal(mean, found[0][0]) for mean, _ in found)
    assert sum(optimizer.stats()["gossip/lost"] for _, optimizer in found) == 2
    assert all(edge.valid for _, optimizer in found for edge in optimizer._rounds.edges.values())


def test_regular_snapshots_go_to_every_neighbour_and_change_nothing() -> None:
    targets = goals(3, NUMEL)

    def run(resync_every: int | None) -> list[Any]:
        def one(mail: Any) -> Any:
            options = {"algorithm": "dcd", "codec": "min_max:4,block=64", "topology": ring()}
            model, optimizer = trainer(mail, targets[mail.rank], resync_every=resync_every, **options)
            train(model, optimizer, 20)
            return model.x.detach().clone(), optimizer.stats()["gossip/resyncs"]

        return on_threads(LocalMail.of(3), one)

    plain, regular = run(None), run(5)
    assert [resyncs for _, resyncs in plain] == [0.0] * 3
    assert [resyncs for _, resyncs in regular] == [8.0] * 3  # two neighbours, rounds 5, 10, 15 and 20
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, regular, strict=True))
