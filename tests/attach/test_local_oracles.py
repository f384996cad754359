"""Every preset against the equations of its paper, written out for one matrix and all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from support.local_runs import batch, in_threads, net, one_step, same, sgd, train, weights

RANKS, STEPS, EVERY, SHAPE = 3, 10, 4, (100, 50)
Mean = Callable[[list[Tensor]], Tensor]  # of the pseudo-gradients of all ranks


def gradient(w: Tensor, step: int, rank: int) -> Tensor:
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SHAPE, generator=numbers) + 0.1 * w


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def through_local_steps(preset: str, **options: Any) -> list[Tensor]:
    def work(network: Any) -> Tensor:
        w = nn.Parameter(start())
        module = nn.ParameterDict({"w": w})
        muon = preset == "muloco"
        optimizer: Any = torch.optim.Muon([w], lr=0.1) if muon else torch.optim.SGD([w], lr=0.1)
        with tw.local_steps(module, optimizer, preset, every=EVERY, group=network, **options):
            for step in range(STEPS):
                w.grad = gradient(w.detach(), step, network.rank)
                optimizer.step()
        return w.detach()

    return in_threads(RANKS, work)


def written_out(mean: Mean, outer: Callable[[Tensor, Tensor], Tensor], *, muon: bool = False) -> Tensor:
    theta, done = start(), 0
    ends = [nn.Parameter(theta.clone()) for _ in range(RANKS)]
    inner: list[Any] = [torch.optim.Muon([end], lr=0.1) if muon else torch.optim.SGD([end], lr=0.1) for end in ends]
    for length in (EVERY, EVERY, STEPS - 2 * EVERY):  # the last round is shorter
        for rank, (end, optimizer) in enumerate(zip(ends, inner, strict=True)):
            with torch.no_grad():
                end.copy_(theta)
            for step in range(done, done + length):
                end.grad = gradient(end.detach(), step, rank)
                optimizer.step()
        done += length
        theta = outer(theta, mean([theta - end.detach() for end in ends]))
    return theta


def plain_mean(deltas: list[Tensor]) -> Tensor:
    total = deltas[0] * (1 / RANKS)
    for delta in deltas[1:]:
        total = total + delta * (1 / RANKS)
    return total


def nesterov(lr: float, momentum: float) -> Callable[[Tensor, Tensor], Tensor]:
    buffers: list[Tensor] = []

    def step(theta: Tensor, mean: Tensor) -> Tensor:
        buffers.append(momentum * buffers[-1] + mean if buffers else mean)
        return theta.add(mean.add(buffers[-1], alpha=momentum), alpha=-lr)

    return step


def subtract(theta: Tensor, mean: Tensor) -> Tensor:
    return theta - mean


def test_average_is_the_mean_of_the_parameters_to_the_bit() -> None:
    for end in through_local_steps("average"):
        assert torch.equal(end, written_out(plain_mean, subtract))


@pytest.mark.parametrize("keep", ["device", "cpu"])
def test_diloco_is_nesterov_over_the_mean_to_the_bit(keep: str) -> None:
    for end in through_local_steps("diloco", keep=keep):
        assert torch.equal(end, written_out(plain_mean, nesterov(0.7, 0.9)))


def test_the_outer_optimizer_may_be_any_of_torch() -> None:
    ends = through_local_steps("diloco", outer=lambda tensors: torch.optim.SGD(tensors, lr=0.7, momentum=0.9))
    plain = through_local_steps("diloco", outer="sgd:0.7,0.9")
    assert torch.equal(ends[0], plain[0])
    assert not torch.equal(ends[0], through_local_steps("diloco")[0])


def test_diloco_1_sends_one_bit_of_the_same_pseudo_gradient() -> None:
    """The codec has tests of its own; here it must get the right tensor, in the right round."""
    group, rounds = tw.LocalGroup(tw.parse("two-shot-1"), RANKS), iter(range(10))

    def mean(deltas: list[Tensor]) -> Tensor:
        named = [{"bucket0": delta} for delta in deltas]  # draws follow the name
        return group.mean(named, next(rounds))["bucket0"]

    expected = written_out(mean, nesterov(0.7, 0.9))
    assert all(torch.equal(end, expected) for end in through_local_steps("diloco-1"))


def bins(values: Tensor) -> Tensor:
    """2 bits: bins of 1.5 standard deviations around the mean, and the mean of each."""
    wide = values.double()
    place = ((wide - wide.mean()) / (1.5 * wide.std(correction=0)) + 2).round().clamp(0, 3)
    out = torch.zeros_like(wide)
    for number in range(4):
        if (place == number).any():
            out[place == number] = wide[place == number].mean()
    return out.float()


def blocks(flat: Tensor) -> Tensor:
    return torch.cat([bins(block) for block in torch.split(flat, 1024)])


def test_sparseloco_is_chunked_top_k_with_decayed_feedback_and_the_median_norm() -> None:
    residuals = [torch.zeros(SHAPE).view(-1) for _ in range(RANKS)]

    def mean(deltas: list[Tensor]) -> Tensor:
        sent = []
        for rank, delta in enumerate(deltas):
            e = 0.95 * residuals[rank] + delta.reshape(-1)
            kept = torch.zeros_like(e, dtype=torch.bool)
            for first in range(0, len(e), 4096):
                chunk = e[first : first + 4096]
                kept[first + chunk.abs().topk(max(1, round(len(chunk) * 64 / 4096))).indices] = True
            message = torch.zeros_like(e)
            message[kept] = blocks(e[kept])
            residuals[rank] = e - message
            sent.append(message)
        norms = torch.stack([message.double().norm() for message in sent])
        clipped = [m * min(1.0, float(norms.median() / norm)) for m, norm in zip(sent, norms, strict=True)]
        return torch.stack(clipped).mean(0).view(SHAPE)

    expected = written_out(mean, subtract)
    for end in through_local_steps("sparseloco"):
        torch.testing.assert_close(end, expected, rtol=1e-5, atol=1e-5)


def test_muloco_is_muon_inside_and_two_bits_with_feedback() -> None:
    """Against two shots written out: pieces of 2048, 2048 and 904 elements, each added by one rank."""
    residuals = [torch.zeros(SHAPE).view(-1) for _ in range(RANKS)]
    held = torch.zeros(SHAPE).view(-1)
    pieces = [slice(0, 2048), slice(2048, 4096), slice(4096, 5000)]

    def mean(deltas: list[Tensor]) -> Tensor:
        sent = []
        for rank, delta in enumerate(deltas):
            e = 0.9 * residuals[rank] + delta.reshape(-1)
            message = torch.cat([e[p] if owner == rank else blocks(e[p]) for owner, p in enumerate(pieces)])
            residuals[rank] = e - message
            sent.append(message)
        total = torch.stack(sent).mean(0) + held
        back = torch.cat([blocks(total[p]) for p in pieces])
        held.copy_(total - back)
        return back.view(SHAPE)

    expected = written_out(mean, nesterov(0.7, 0.9), muon=True)
    for end in through_local_steps("muloco"):
        torch.testing.assert_close(end, expected, rtol=1e-4, atol=1e-4)


def test_muloco_asks_for_muon() -> None:
    model = net()
    with pytest.raises(tw.AttachError, match=r"give \[torch.optim.Muon"):
        tw.local_steps(model, sgd(model), "muloco", group=None)


# ------------------------------------------------------------------------------------------------ fragments and delay


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.0), (1, 0.0), (2, 0.5)])
def test_streaming_diloco_is_its_algorithm(delay: int, mixing: float) -> None:
    """Algorithm 2 of the paper, with fragments named by hand; to the bit."""
    every, steps = 9, 20
    shares = [["embed", "layers.2"], ["layers.0", "head"], ["layers.1"]]
    options: dict[str, Any] = {"every": every, "recipe": "dense", "fragments": shares, "delay": delay, "mixing": mixing}

    def work(network: Any) -> Any:
        model = net()
        optimizer = sgd(model)
        tw.local_steps(model, optimizer, "streaming-diloco", group=network, **options)
        for step in range(steps):
            one_step(model, optimizer, step, network.rank)
        return weights(model)

    found = in_threads(RANKS, work)
    models = [net() for _ in range(RANKS)]
    optimizers = [sgd(model) for model in models]
    theta = {name: tensor.detach().clone() for name, tensor in models[0].named_parameters()}
    steppers = {name: nesterov(0.4, 0.9) for name in theta}
    flying: dict[int, dict[str, Tensor]] = {}
    for t in range(1, steps + 1):
        for rank in range(RANKS):
            one_step(models[rank], optimizers[rank], t - 1, rank)
        named = [dict(model.named_parameters()) for model in models]
        for place, share in enumerate(shares):
            names = [name for name in theta if name.rpartition(".")[0] in share]
            if t - (place + 1) * 3 >= 0 and (t - (place + 1) * 3) % every == 0:
                flying[place] = {n: plain_mean([theta[n] - one[n].detach() for one in named]) for n in names}
            if place in flying and (t - (place + 1) * 3 - delay) % every == 0:
                for name, mean in flying.pop(place).items():
                    theta[name] = steppers[name](theta[name], mean)
                    for one in named:
                        mixed = one[name].detach().mul(mixing).add(theta[name], alpha=1 - mixing)
                        one[name].data.copy_(mixed)
    for rank in range(RANKS):
        for name, parameter in models[rank].named_parameters():
            assert torch.equal(found[rank][name], parameter.detach()), name


def test_without_a_delay_one_fragment_is_the_whole_model() -> None:
    whole = in_threads(2, lambda network: train(network.rank, network, 13, preset="diloco", every=4))
    listed = [["embed", "layers", "head"]]
    one = in_threads(
        2, lambda n: train(n.rank, n, 13, preset="streaming-diloco", every=4, recipe="dense", outer="nesterov:0.7,0.9",
                           fragments=listed, delay=0)
    )  # fmt: skip
    assert same(whole[0][0], one[0][0])


# -------------------------------------------------------------------------------------------------------------- H = 1


def test_a_round_of_one_step_with_averaging_and_sgd_is_data_parallel() -> None:
    found = in_threads(RANKS, lambda network: train(network.rank, network, 8, inner="sgd", every=1))[0][0]
    model = net()
    optimizer = sgd(model)
    for step in range(8):
        optimizer.zero_grad()
        for rank in range(RANKS):
            x, y = batch(step, rank)
            ((model(x) - y).square().mean() / RANKS).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)
