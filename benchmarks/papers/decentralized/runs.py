"""What the page on decentralised training simulates: eight to 64 workers in one process, with the optimizers of gossip.

`trained` is learning on images, `drifting` is consensus without any gradient, `logistic` is the noise-dominated problem
on which a speed-up in the number of workers is looked for.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.codecs.base import Codec
from thinwire.gossip import decentralize
from thinwire.gossip.absolute import gossip_codec
from thinwire.gossip.tensors import Flat
from thinwire.gossip.topology import Topology
from thinwire.lab.compare.models import Mlp
from thinwire.lab.compare.workloads import Batch, CnnOnImages, MlpOnDigits
from thinwire.lab.simulate.learners import Batched
from thinwire.lab.simulate.links import Links
from thinwire.lab.simulate.transport import SimTransport

LOST = 1e3  # a training loss beyond which a run counts as diverged
RATE = 0.05  # learning rate of all runs on images
_FLOOR, _CEILING = 1e-9, 1e12  # of the energy of disagreement, beyond which float32 is in the way
_CURVATURE = 1.6  # learning rates of the noise-dominated problem: this times sqrt(n / T)
_FEATURES, _POOL, _LOOKS = 64, 2048, 64


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings that ranks drift apart: that they do is what is measured."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class Workers:
    """All workers of one algorithm, driven step by step; messages arrive in the step after the one that sent them."""

    def __init__(
        self,
        nets: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        topology: Topology,
        algorithm: str,
        codec: str | Codec,
        consensus_step: float | None = None,
        seed: int = 0,
    ) -> None:
        self._transport = SimTransport(Links.named("unshaped", workers=len(nets)))
        self.members: list[Any] = [
            decentralize(
                net, optimizer, algorithm=algorithm, codec=codec, topology=topology.of(len(nets)), deadline=None,
                transport=self._transport.endpoint(rank), consensus_step=consensus_step, seed=seed,
            )
            for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True))
        ]  # fmt: skip

    def step(self) -> None:
        for member in self.members:
            member.step()
        self._transport.dispatch()

    def noise(self) -> float | None:
        """|C(z) - z|^2 / |z|^2 of the last messages, mean of the workers."""
        found = [member.stats().get("gossip/noise") for member in self.members]
        return None if found[0] is None else sum(found) / len(found)


# ------------------------------------------------------------------------------------------------ learning on images


class _Small:
    """A perceptron small enough for hundreds of runs, and the optimizer that all of them have."""

    optimizer_text = f"SGD, lr {RATE}, momentum 0.9"
    batch_per_worker = 16
    width = 64
    images: Any

    def model(self, *, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Mlp(self.images.train[0].numel(), width=self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


class OnFashion(_Small, CnnOnImages):
    """Fashion-MNIST, from its folder."""

    about = "Fashion-MNIST"


class OnDigits(_Small, MlpOnDigits):
    """Digits that are drawn here, where there is no folder."""

    about = "digits of 8 x 8 pixels that are drawn here"


def images(data: str | None, *, skew: float = 0.0) -> OnFashion | OnDigits:
    found = OnDigits() if data is None else OnFashion(data)
    found.skew = skew
    return found


def trained(
    work: OnFashion | OnDigits,
    topology: Topology,
    *,
    algorithm: str,
    codec: str = "fp32",
    consensus_step: float | None = None,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """One run: what the average model and local ones are worth, how far apart they are, the noise of the messages."""
    workers = topology.size
    learner = Batched(work, workers=workers, seed=seed)
    group = Workers(
        learner.nets, learner.optimizers,
        topology=topology, algorithm=algorithm, codec=codec, consensus_step=consensus_step, seed=seed,
    )  # fmt: skip
    noises: list[float] = []
    done, everyone = 0, range(workers)
    while done < steps:
        learner.set_rates(done, group.members)
        losses = learner.gradients(done, everyone)
        if not sum(losses) / workers < LOST:
            break
        group.step()
        noise = group.noise()
        noises += [] if noise is None else [noise]
        done += 1
    return _judged(work, learner) | {
        "diverged_at": done if done < steps else None,
        "noise": sum(noises) / len(noises) if noises else None,
        "consensus_step": group.members[0].stats()["gossip/consensus_step"],
    }


def _judged(work: OnFashion | OnDigits, learner: Batched) -> dict[str, Any]:
    rows = learner.matrix
    mean = rows.mean(0)
    apart = (rows - mean).square().sum(1).mean().sqrt() / mean.norm()
    batch = (work.images.held_out, work.images.held_out_classes)
    loss, accuracy = _held_out(learner.model, mean, batch)
    local = [_held_out(learner.model, row, batch)[1] for row in rows[:: max(1, len(rows) // 4)]]
    return {
        "loss": loss,
        "accuracy": 100 * accuracy,
        "local_accuracy": 100 * sum(local) / len(local),
        "apart": float(apart),
    }


def _held_out(model: nn.Module, flat: Tensor, batch: Batch) -> tuple[float, float]:
    Flat(list(model.parameters())).write(flat)
    with torch.no_grad():
        logits: Tensor = model.logits(batch[0])  # type: ignore[operator]
    return float(F.cross_entropy(logits, batch[1])), float((logits.argmax(1) == batch[1]).float().mean())


# ------------------------------------------------------------------------------------------------- consensus alone


class _Row(nn.Module):
    """One worker's model: a vector."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(numel))


def _rows(workers: int, numel: int, *, rate: float) -> tuple[list[_Row], list[torch.optim.Optimizer]]:
    nets = [_Row(numel) for _ in range(workers)]
    return nets, [torch.optim.SGD(net.parameters(), lr=rate) for net in nets]


def drifting(topology: Topology, *, codec: str, numel: int, steps: int, seed: int) -> dict[str, float]:
    """Workers that differ at random, and then only talk: by which factor the energy of their disagreement grows a step.

    The first fifth of the steps, in which the modes of the graph settle, does not count.
    """
    generator = torch.Generator().manual_seed(seed)
    nets, optimizers = _rows(topology.size, numel, rate=1.0)
    group = Workers(nets, optimizers, topology=topology, algorithm="dcd", codec=codec, seed=seed)
    for net in nets:
        net.row.grad = torch.randn(numel, generator=generator)
    group.step()  # an update of 1 x the gradient, sent like any other: everyone starts elsewhere
    for net in nets:
        net.row.grad = None
    energies, noises = [_disagreement(nets)], []
    for _ in range(steps):
        group.step()
        energies.append(_disagreement(nets))
        noises.append(group.noise() or 0.0)
        if not _FLOOR < energies[-1] / energies[0] < _CEILING:
            break
    settled = min(steps // 5, len(noises) - 1)
    growth = (energies[-1] / energies[settled]) ** (1 / (len(noises) - settled))
    return {"noise": sum(noises[settled:]) / len(noises[settled:]), "growth": growth}


def _disagreement(nets: Sequence[_Row]) -> float:
    rows = torch.stack([net.row.detach() for net in nets]).double()
    return float((rows - rows.mean(0)).square().sum())


def predicted_growth(topology: Topology, noise: float, *, rounds: int = 400) -> float:
    """What the theory of `noise_limit` says that `drifting` finds in the mean, with independent noise on every worker.

    The second moments M of the disagreement follow M' = W M W + noise diag((W - I) M (W - I)); its largest eigenvalue
    by repetition, which finds it because M stays positive.
    """
    matrix = topology.matrix()
    apart, step = torch.eye(len(matrix)).double() - 1 / len(matrix), matrix - torch.eye(len(matrix)).double()
    moments, growth = apart / apart.trace(), 0.0
    for _ in range(rounds):
        fresh = torch.diag((step @ moments @ step).diagonal() * noise)
        moments = apart @ (matrix @ moments @ matrix + fresh) @ apart
        growth = float(moments.trace())
        moments = moments / growth
    return growth


# -------------------------------------------------------------------------------------- a noise-dominated problem


def logistic(
    topology: Topology, *, algorithm: str, codec: str = "fp32", steps: int, repetitions: int, seed: int
) -> list[float]:
    """Mean over the steps of |gradient of f|^2 at the average model, for each of some independent repetitions.

    Logistic regression with 64 features whose variances fall as 1/j, labels of which a fifth are wrong; every worker
    takes one example a step from the same pool. The learning rate is 1.6 sqrt(n / T), as the theory asks for up to a
    constant. Repetitions, with data of their own, lie side by side in one model: each in a block of 64, so that a
    codec with blocks of 64 treats each as if it were alone.
    """
    n, draw = topology.size, torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, _FEATURES + 1).float().rsqrt()
    pool = torch.randn(repetitions, _POOL, _FEATURES, generator=draw) * spectrum
    teacher = torch.randn(repetitions, _FEATURES, 1, generator=draw)
    labels = (pool @ teacher).squeeze(-1).sign()
    labels *= torch.where(torch.rand(repetitions, _POOL, generator=draw) < 0.2, -1.0, 1.0)
    nets, optimizers = _rows(n, repetitions * _FEATURES, rate=_CURVATURE * math.sqrt(n / steps))
    group = Workers(nets, optimizers, topology=topology, algorithm=algorithm, codec=codec, seed=seed)
    which, found = torch.arange(repetitions), []
    for step in range(steps):
        models = torch.stack([net.row.detach() for net in nets]).view(n, repetitions, _FEATURES)
        if step % max(1, steps // _LOOKS) == 0:
            found.append(_slope(models.mean(0), pool, labels))
        chosen = torch.randint(_POOL, (n, repetitions), generator=draw)
        x, y = pool[which, chosen], labels[which, chosen]
        pull = -y * torch.sigmoid(-y * (models * x).sum(-1))
        for net, gradient in zip(nets, (pull.unsqueeze(-1) * x).flatten(1), strict=True):
            net.row.grad = gradient
        group.step()
    squared: list[float] = torch.stack(found).mean(0).tolist()
    return squared


def _slope(model: Tensor, pool: Tensor, labels: Tensor) -> Tensor:
    """|gradient of f|^2 of each repetition, over its whole pool."""
    margins = labels * torch.einsum("rnf,rf->rn", pool, model)
    gradient = torch.einsum("rn,rnf->rf", -labels * torch.sigmoid(-margins), pool) / pool.shape[1]
    return gradient.square().sum(-1)


def bytes_of(codec: str, numel: int) -> int:
    """Of one message."""
    return gossip_codec(codec).wire_bytes(numel)
