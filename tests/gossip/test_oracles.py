"""Every algorithm against the whole network as one matrix with a row for each rank: the same bits, 50 steps long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.gossip_threads import goals, on_threads, train, trainer
from thinwire.codecs.base import Codec
from thinwire.comm.peers import LocalTransport
from thinwire.gossip.absolute import gaussian_noise, gossip_codec
from thinwire.gossip.choco import default_consensus_step
from thinwire.gossip.topology import Topology, complete, exponential, one_peer_exponential, ring, star, torus
from thinwire.rng import Draw

STEPS, NUMEL = 50, 1000


def mix(w: Tensor, y: Tensor, own: Tensor | None = None) -> Tensor:
    """W y, row by row in the order of ranks; the diagonal may take other rows than those of y."""
    rows = []
    for i in range(len(w)):
        total = None
        for j in w[i].nonzero().flatten().tolist():
            row = own[i] if own is not None and i == j else y[j]
            total = row * w[i, j].item() if total is None else total.add(row, alpha=w[i, j].item())
        rows.append(total)
    return torch.stack(rows)  # type: ignore[arg-type]


class Local:
    """The optimizers of all ranks."""

    def __init__(self, targets: list[Tensor]) -> None:
        self.rows = [torch.zeros(NUMEL, requires_grad=True) for _ in targets]
        self.targets = targets
        self.optimizers = [torch.optim.SGD([row], lr=0.1, momentum=0.9) for row in self.rows]

    def update(self, x: Tensor) -> Tensor:
        moved = []
        for row, target, optimizer, now in zip(self.rows, self.targets, self.optimizers, x, strict=True):
            row.data.copy_(now)
            row.grad = now - target
            optimizer.step()
            moved.append(row.detach() - now)
        return torch.stack(moved)


def coded(codec: Codec, rows: Tensor, k: int) -> Tensor:
    draws = [Draw(seed=3, step=k + 1, stream="gossip", rank=i) for i in range(len(rows))]
    return torch.stack([codec.decode(codec.encode(row, draw=draw)) for row, draw in zip(rows, draws, strict=True)])


def dpsgd(x: Tensor, w: Callable[[int], Tensor], codec: Codec, local: Local) -> Tensor:
    for k in range(STEPS):
        x = (mix(w(k), x) if k else x) + local.update(x)
    return x


def naive(x: Tensor, w: Callable[[int], Tensor], codec: Codec, local: Local) -> Tensor:
    y = x
    for k in range(STEPS):
        x = (mix(w(k), y, own=x) if k else x) + local.update(x)
        y = coded(codec, x, k)
    return x


def dcd(x: Tensor, w: Callable[[int], Tensor], codec: Codec, local: Local) -> Tensor:
    for k in range(STEPS):
        z = (mix(w(k), x) if k else x) + local.update(x) - x
        x = x + coded(codec, z, k)
    return x


def ecd(x: Tensor, w: Callable[[int], Tensor], codec: Codec, local: Local) -> Tensor:
    estimate = x
    for k in range(STEPS):
        t = k + 1
        new = (mix(w(k), estimate) if k else estimate) + local.update(x)
        z = new.add(new - x, alpha=t / 2 - 1)
        estimate = torch.stack(
            [e.mul(1 - 2 / t).add(c, alpha=2 / t) for e, c in zip(estimate, coded(codec, z, k), strict=True)]
        )
        x = new
    return x


def choco(x: Tensor, w: Callable[[int], Tensor], codec: Codec, local: Local) -> Tensor:
    told, gamma = x, default_consensus_step(codec, NUMEL)
    shrink = 1 / (1 + gaussian_noise(codec, NUMEL)) if codec.unbiased else 1.0
    for k in range(STEPS):
        partly = gamma * w(k)
        partly -= torch.diag(partly.diagonal())
        partly += torch.diag(1 - partly.sum(1))
        x = x + local.update(x)
        x = x + ((mix(partly, told) if k else told) - told)
        told = told + coded(codec, (x - told) * shrink, k)
    return x


ORACLES: dict[str, Any] = {"dpsgd": dpsgd, "naive": naive, "dcd": dcd, "ecd": ecd, "choco": choco}
CASES = [
    ("dpsgd", "fp32", ring(5)), ("dpsgd", "fp32", one_peer_exponential(4)), ("dpsgd", "fp32", star(4)),
    ("naive", "min_max:8,block=64", ring(4)), ("naive", "min_max:4,block=64", one_peer_exponential(6)),
    ("dcd", "min_max:4,block=64", ring(8)), ("dcd", "min_max:8,block=512", torus(6)), ("dcd", "top_k:0.3", ring(3)),
    ("dcd", "min_max:4,block=64", complete(4)), ("dcd", "fp16", ring(2)),
    ("ecd", "absolute:8,step=0.05", ring(5)), ("ecd", "min_max:8,block=64", exponential(6)),
    ("choco", "sign:64", ring(8)), ("choco", "min_max:4,block=64", exponential(5)), ("choco", "top_k:0.1", star(5)),
]  # fmt: skip


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "wait"])
@pytest.mark.parametrize(("algorithm", "codec", "topology"), CASES, ids=lambda value: str(value))
def test_every_rank_has_the_bits_of_the_matrix(algorithm: str, codec: str, topology: Topology, overlap: bool) -> None:
    ranks = topology.size
    targets = goals(ranks, NUMEL)

    def one(transport: LocalTransport) -> Tensor:
        model, optimizer = trainer(
            transport,
            targets[transport.rank],
            algorithm=algorithm,
            topology=topology,
            codec=codec,
            overlap=overlap,
            seed=3,
        )
        train(model, optimizer, STEPS)
        return model.x.detach()

    found = torch.stack(on_threads(LocalTransport.of(ranks), one))
    wanted = ORACLES[algorithm](torch.zeros(ranks, NUMEL), topology.matrix, gossip_codec(codec), Local(targets))
    assert torch.equal(found, wanted)
    assert found.norm() > 0.1  # something was learnt


@pytest.mark.parametrize(("algorithm", "codec"), [
    ("dcd", "min_max:4,block=64"), ("ecd", "absolute:8,step=0.05"), ("choco", "sign:64"), ("dpsgd", "fp32"),
])  # fmt: skip
def test_one_sum_for_all_neighbours_gives_what_copies_of_each_give(algorithm: str, codec: str) -> None:
    targets = goals(4, NUMEL)

    def run(deadline: float | None) -> Tensor:
        def one(transport: LocalTransport) -> Tensor:
            options = {"algorithm": algorithm, "codec": codec, "deadline": deadline, "topology": ring()}
            model, optimizer = trainer(transport, targets[transport.rank], lr=0.02, momentum=0.0, **options)
            train(model, optimizer, 30)
            assert optimizer._node.views.per_peer == (deadline is not None)
            return model.x.detach()

        return torch.stack(on_threads(LocalTransport.of(4), one))

    each, together = run(30.0), run(None)
    if algorithm == "dpsgd":
        assert torch.allclose(each, together, atol=1e-5)
    else:  # sums differ in their last bits, and those decide how a few elements are rounded
        assert (each - together).norm() < 0.05 * each.norm()


@pytest.mark.parametrize(
    ("algorithm", "codec"), [("dpsgd", "fp32"), ("dcd", "min_max:8,block=64"), ("choco", "sign:64")]
)
def test_the_mean_moves_by_the_mean_of_the_updates_only(algorithm: str, codec: str) -> None:
    """Without gradients the mean stays where it is: exactly for dpsgd and choco, in expectation for dcd."""
    ranks = 6
    targets = goals(ranks, NUMEL)

    def one(transport: LocalTransport) -> tuple[Tensor, Tensor]:
        model, optimizer = trainer(
            transport, targets[transport.rank], algorithm=algorithm, codec=codec, topology=ring()
        )
        train(model, optimizer, 3)
        before = model.value()
        for _ in range(25):
            model.x.grad = torch.zeros_like(model.x)
            optimizer.base.param_groups[0]["momentum"] = 0.0
            optimizer.step()
        return before, model.x.detach()

    pairs = on_threads(LocalTransport.of(ranks), one)
    before = torch.stack([pair[0] for pair in pairs])
    after = torch.stack([pair[1] for pair in pairs])
    apart = (before - before.mean(0)).norm()
    tolerance = 0.1 * apart if algorithm == "dcd" else 1e-4 * before.norm()
    assert (after.mean(0) - before.mean(0)).norm() * ranks**0.5 < tolerance
    assert (after - after.mean(0)).norm() < 0.3 * apart  # and they have come closer
