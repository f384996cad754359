"""One rank's side: its steps are those of the published algorithms, written down plainly, and all or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.ranks import Ranks, Side, noise, same_bits
from thinwire import parse
from thinwire.comm.local import LocalNetwork, on_all_ranks
from thinwire.exchange.request import Part, Result
from thinwire.memory.base import RunningMemory
from thinwire.reduce.buckets import Bucket

NUMEL, K = 200, 20
BUCKET = Bucket.of("w", {"w": torch.empty(NUMEL)})


def alone(text: str) -> tuple[Side, LocalNetwork]:
    return Side(parse(text)), LocalNetwork.alone()


def memory_of(side: Side) -> RunningMemory:
    assert side.residuals.memory is not None
    return side.residuals.memory


def buffer_of(side: Side, bucket: Bucket = BUCKET) -> Tensor:
    buffer = side.residuals.buffer(bucket)
    assert buffer is not None
    return buffer


# ------------------------------------------------------------------------------------------- against references


def top_k_positions(u: Tensor) -> Tensor:
    return u.abs().topk(K).indices


class PlainFeedback:
    """u = g + decay e, send the largest of u, keep the rest: every tensor is new."""

    def __init__(self, decay: float) -> None:
        self.decay, self.residual = decay, torch.zeros(NUMEL)

    def send(self, g: Tensor) -> Tensor:
        u = g + self.decay * self.residual
        sent = torch.zeros(NUMEL)
        sent[top_k_positions(u)] = u[top_k_positions(u)]
        self.residual = u - sent
        return sent


class PlainMomentum:
    """Algorithm 1 of Deep Gradient Compression, with or without Nesterov's momentum and masking."""

    def __init__(self, *, nesterov: bool, masking: bool) -> None:
        self.nesterov, self.masking = nesterov, masking
        self.momentum, self.residual = torch.zeros(NUMEL), torch.zeros(NUMEL)

    def send(self, g: Tensor) -> Tensor:
        if self.nesterov:
            momentum = 0.9 * (self.momentum + g)
            velocity = self.residual + momentum + g
        else:
            momentum = 0.9 * self.momentum + g
            velocity = self.residual + momentum
        kept = torch.ones(NUMEL)
        kept[top_k_positions(velocity)] = 0.0
        self.residual = velocity * kept
        self.momentum = momentum * kept if self.masking else momentum
        return velocity - self.residual


REFERENCES: dict[str, Callable[[], PlainFeedback | PlainMomentum]] = {
    "ef": lambda: PlainFeedback(1.0),
    "ef:0.75": lambda: PlainFeedback(0.75),
    "dgc": lambda: PlainMomentum(nesterov=False, masking=True),
    "dgc:0.9,nesterov=true": lambda: PlainMomentum(nesterov=True, masking=True),
    "dgc:0.9,masking=false": lambda: PlainMomentum(nesterov=False, masking=False),
}


@pytest.mark.parametrize("memory", REFERENCES)
def test_twenty_steps_are_those_of_a_plain_implementation(memory: str) -> None:
    """With buffers used again as a training program does: every buffer is overwritten as soon as that is allowed."""
    n, text = 3, f"{memory}|top_k:0.1|all_gather"
    sides, networks = [Side(parse(text)) for _ in range(n)], LocalNetwork.of(n)
    plain, out = [REFERENCES[memory]() for _ in range(n)], [torch.empty(NUMEL) for _ in range(n)]
    reused, seen = 0, set[int]()
    for step in range(20):
        gradients = [noise(rank, step, numel=NUMEL) for rank in range(n)]
        us = [buffer_of(side) for side in sides]
        reused += sum(u.data_ptr() in seen for u in us)
        seen |= {u.data_ptr() for u in us}
        for u in us:
            u.fill_(math.nan)  # whoever still relies on it is caught

        def work(
            network: LocalNetwork, us: list[Tensor] = us, gradients: list[Tensor] = gradients, step: int = step
        ) -> Result:
            rank = network.rank
            u = us[rank].copy_(gradients[rank])
            return sides[rank].exchange("w", u, network=network, step=step, out=out[rank].fill_(math.nan))

        ill = step in (5, 6, 13)  # steps that some other tensor made void
        means = [result.mean.clone() for result in on_all_ranks(networks, work)]
        for side in sides:
            side.settle(finite=not ill)
        if ill:
            continue
        expected = sum(rank.send(g) for rank, g in zip(plain, gradients, strict=True)) / n
        torch.testing.assert_close(means[0], expected, rtol=1e-5, atol=1e-5)
        for side, reference in zip(sides, plain, strict=True):
            torch.testing.assert_close(memory_of(side).residual("w"), reference.residual, rtol=1e-5, atol=1e-5)
            assert torch.equal(memory_of(side).residual("w") == 0, reference.residual == 0)
    assert reused == n * 18  # two buffers a rank, which take turns


@pytest.mark.parametrize(
    "text", ["ef|top_k:0.1|all_gather", "ef|abs_max:4|two_shot:8,feedback=true", "ef|bf16|all_reduce"]
)
def test_spare_buffers_and_means_are_not_what_is_remembered(text: str) -> None:
    side, network = alone(text)
    for step in range(3):
        mean = side.exchange("w", noise(step, numel=NUMEL), network=network, step=step).mean
        side.settle(finite=True)
        kept = memory_of(side).state_dict()
        mean.fill_(math.nan)
        first, second = buffer_of(side), buffer_of(side)
        for spare in (first, second):
            spare.fill_(math.nan)
        assert first.data_ptr() != second.data_ptr()  # a buffer is given away once
        assert same_bits(memory_of(side).state_dict(), kept)


def test_a_buffer_of_another_length_is_not_given() -> None:
    side, network = alone("ef|top_k:0.1|all_gather")
    for step in range(2):
        side.exchange("w", noise(step, numel=NUMEL), network=network, step=step)
        side.settle(finite=True)
    assert buffer_of(side, Bucket.of("w", {"w": torch.empty(NUMEL + 1)})).numel() == NUMEL + 1
    assert Side(parse("bf16|all_reduce")).residuals.buffer(BUCKET) is None  # nothing is remembered: scratch will do


# ------------------------------------------------------------------------------------------------ unused parameters


@pytest.mark.parametrize(
    "text",
    [
        "ef|top_k:0.5|all_gather",
        "ef|top_k:0.5|shared_top_k",
        "ef|threshold_k:0.5|bf16|shared_top_k:norm",
        "ef|random_k:0.5,scaled=false|all_reduce",
        "ef|bf16|all_reduce",
        "ef|abs_max:4,block=64|two_shot:4",
    ],
)
def test_an_unused_parameter_keeps_its_debt_and_sends_nothing(text: str) -> None:
    parts = [Part("a", (8, 8), 0, 64), Part("b", (64,), 64, 128)]
    ranks = Ranks(text, 2)
    ranks.step([noise(rank, numel=128) for rank in range(2)], 0, parts=parts)
    owed = [memory_of(side).residual("w")[64:].clone() for side in ranks.sides]
    assert any(debt.any() for debt in owed)  # two_shot: a rank owes nothing of the piece it adds up itself
    for step in (1, 2):
        gradients = [noise(rank, step, numel=128) for rank in range(2)]
        for x in gradients:
            x[64:] = 0.0
        mean = ranks.step(gradients, step, parts=parts, may_be_unused=True)
        assert mean[:64].any()
        assert not mean[64:].any()
        for side, debt in zip(ranks.sides, owed, strict=True):
            assert torch.equal(memory_of(side).residual("w")[64:], debt)
    # A rank that uses the parameter sends its own debt (it leads in this step); the other one still waits.
    gradients = [noise(rank, 4, numel=128) for rank in range(2)]
    gradients[0] *= 2
    gradients[1][64:] = 0.0
    assert ranks.step(gradients, 4, parts=parts, may_be_unused=True)[64:].any()
    assert torch.equal(memory_of(ranks.sides[1]).residual("w")[64:], owed[1])


@pytest.mark.parametrize("text", ["ef|sign|all_gather", "ef|rotated:4|two_shot", "ef|min_max:8,block=1024|all_gather"])
def test_codecs_that_do_not_write_zero_as_zero_leave_the_debt_of_an_unused_parameter_alone(text: str) -> None:
    """In a block with other parameters zeros decode to something else. DDP throws that away with the mean, so it was
    not sent, and a debt for it would grow with every step: with sign, to a hundred times in a hundred steps."""
    parts = [Part("a", (8, 8), 0, 64), Part("b", (64,), 64, 128)]
    ranks = Ranks(text, 2)
    ranks.step([noise(rank, numel=128) for rank in range(2)], 0, parts=parts)
    owed = ranks.unsent("w", 128)[64:]
    for step in range(1, 21):
        gradients = [torch.cat((noise(rank, step, numel=64), torch.zeros(64))) for rank in range(2)]
        ranks.step(gradients, step, parts=parts, may_be_unused=True)
    torch.testing.assert_close(ranks.unsent("w", 128)[64:], owed)


def test_what_a_second_shot_owes_an_unused_parameter_is_not_sent_either() -> None:
    """DDP throws the mean of a parameter away that no rank used, and what was sent of it would be lost."""
    parts = [Part("a", (8, 8), 0, 64), Part("b", (64,), 64, 128)]
    ranks = Ranks("ef|abs_max:4,block=64|two_shot:4,feedback=true", 2)
    ranks.step([noise(rank, numel=128) for rank in range(2)], 0, parts=parts)
    owed = ranks.unsent("w", 128)[64:]
    gradients = [torch.cat((noise(rank, 1, numel=64), torch.zeros(64))) for rank in range(2)]
    assert not ranks.step(gradients, 1, parts=parts, may_be_unused=True)[64:].any()
    torch.testing.assert_close(ranks.unsent("w", 128)[64:], owed)


def test_without_the_promise_a_gradient_of_zeros_sends_the_debt() -> None:
    ranks = Ranks("ef|top_k:0.5|all_gather", 1)
    ranks.step([torch.tensor([3.0, 1.0])], 0)
    assert torch.equal(ranks.step([torch.zeros(2)], 1), torch.tensor([0.0, 1.0]))


# --------------------------------------------------------------------------------------------------- whole steps


def test_one_tensor_that_is_not_finite_voids_the_step_of_all_tensors() -> None:
    side, network = alone("ef|threshold_k:0.1|all_gather")
    for step in range(2):
        for name in ("a", "b"):
            side.exchange(name, noise(step, len(name), numel=NUMEL), network=network, step=step)
        side.settle(finite=True)
    memory, states = (
        memory_of(side).state_dict(),
        {name: dict(state) for name, state in side.residuals.states.items()},
    )
    assert side.exchange("a", noise(9, numel=NUMEL), network=network, step=2).finite
    assert not side.exchange("b", torch.full((NUMEL,), math.nan), network=network, step=2).finite
    side.settle(finite=False)
    assert same_bits(memory_of(side).state_dict(), memory)
    assert same_bits(side.residuals.states, states)
    assert memory_of(side).names() == list(side.residuals.states) == ["a", "b"]


def test_settling_twice_changes_nothing() -> None:
    ranks = Ranks("dgc|top_k:0.1|all_gather", 2)
    ranks.step([noise(rank, numel=NUMEL) for rank in range(2)], 0)
    before = ranks.snapshot()
    ranks.settle(finite=True)
    ranks.settle(finite=False)
    assert same_bits(ranks.snapshot(), before)


def test_what_is_remembered_has_the_shape_of_a_single_parameter() -> None:
    side, network = alone("ef|top_k:0.1|all_gather")
    one, two = [Part("w", (10, 20), 0, 200)], [Part("a", (10, 10), 0, 100), Part("b", (100,), 100, 200)]
    side.exchange("w", noise(0, numel=200), network=network, step=0, parts=one)
    side.exchange("several", noise(0, numel=200), network=network, step=0, parts=two)
    side.settle(finite=True)
    assert memory_of(side).residual("w").shape == (10, 20)
    assert memory_of(side).residual("several").shape == (200,)


def test_a_flushed_debt_is_paid_once() -> None:
    """A dense recipe takes over the memory of a sparse one: all that is owed goes with the next step."""
    sparse, network = alone("ef|top_k:0.5|all_gather")
    sparse.exchange("w", torch.tensor([3.0, 1.0]), network=network, step=0)
    sparse.settle(finite=True)
    dense, zeros = Side(parse("all_reduce")), torch.zeros(2)
    dense.residuals.memory = sparse.residuals.memory
    paid = []
    for step in (1, 2):
        paid.append(dense.exchange("w", zeros.clone(), network=network, step=step).mean)
        dense.settle(finite=True)
    assert torch.equal(paid[0], torch.tensor([0.0, 1.0]))
    assert not paid[1].any()


def test_a_flush_pays_also_for_a_rank_that_did_not_use_the_parameter() -> None:
    """Other ranks did, so its mean is applied; and after a flush there is no later step that could pay."""
    ranks = Ranks("ef|top_k:0.25|all_gather", 2)
    ranks.step([torch.tensor([3.0, 1.0, 2.0, 1.0])] * 2, 0)
    owed = ranks.unsent("w", 4)
    for side in ranks.sides:
        side.residuals.recipe = parse("all_reduce")
    gradients = [torch.ones(4), torch.zeros(4)]
    mean = ranks.step(gradients, 1, may_be_unused=True)
    torch.testing.assert_close(2 * mean.double(), owed + 1.0)


def test_a_flush_that_was_not_finite_leaves_the_debt() -> None:
    ranks = Ranks("ef|top_k:0.5|all_gather", 1)
    ranks.step([torch.tensor([3.0, 1.0])], 0)
    before = ranks.snapshot()
    for side in ranks.sides:
        side.residuals.recipe = parse("all_reduce")
    ranks.exchange("w", [torch.tensor([math.inf, 0.0])], 1)
    ranks.settle(finite=False)
    assert same_bits(ranks.snapshot(), before)


def test_measures_are_of_what_was_offered_and_what_is_owed() -> None:
    side, network = alone("ef|top_k:0.1|all_gather")
    plain = PlainFeedback(1.0)
    for step in range(3):
        g = noise(step, numel=NUMEL)
        offered = float((g + plain.residual).double().square().sum())
        side.exchange("w", g.clone(), network=network, step=step, measure=True)
        plain.send(g)
        rest = float(plain.residual.double().square().sum())
        measured = side.residuals.sent["w"].measured
        assert measured is not None
        assert measured.gain == pytest.approx(1 - rest / offered, rel=1e-6)
        assert measured.memory_norm == pytest.approx(math.sqrt(rest), rel=1e-6)
        side.settle(finite=True)
    side.exchange("w", noise(5, numel=NUMEL), network=network, step=3)
    assert side.residuals.sent["w"].measured is None


@pytest.mark.parametrize("text", ["dgc|threshold_k:0.1|bf16|all_gather", "ef|abs_max:4|two_shot:8,feedback=true"])
def test_threads_may_carry_different_tensors_at_the_same_time(text: str) -> None:
    """Two lanes a rank, each with its own network, give what one lane gives."""
    together, apart = Ranks(text, 2), Ranks(text, 2)
    lanes = {"a": LocalNetwork.of(2), "b": LocalNetwork.of(2)}
    for step in range(3):
        given = {name: [noise(rank, step, ord(name), numel=NUMEL) for rank in range(2)] for name in lanes}
        expected = {name: apart.exchange(name, given[name], step).mean for name in lanes}

        def lane(alone: LocalNetwork, given: dict[str, list[Tensor]] = given, step: int = step) -> list[Tensor]:
            name = "ab"[alone.rank]

            def work(network: LocalNetwork) -> Tensor:
                x, side = given[name][network.rank].clone(), together.sides[network.rank]
                return side.exchange(name, x, network=network, step=step).mean

            return on_all_ranks(lanes[name], work)

        for name, means in zip("ab", on_all_ranks(LocalNetwork.of(2), lane), strict=True):
            assert all(torch.equal(mean, expected[name]) for mean in means)
        for ranks in (together, apart):
            ranks.settle()
    for ours, theirs in zip(together.snapshot(), apart.snapshot(), strict=True):
        assert same_bits(ours["memory"]["kept"], theirs["memory"]["kept"])
        assert same_bits(ours["states"], theirs["states"])
        assert same_bits(ours["backs"], theirs["backs"])
