"""Gradients of many workers in one process: one model after the other, or many in one batch.

`Each` computes the same bits as a process of its own. `Batched` stacks the models and maps over them with torch.func:
the same up to rounding, and many times faster for small models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ...errors import OptionError
from ...gossip.tensors import Flat, statistics
from ..compare.workloads import Workload

_AT_ONCE = 64  # models in one batch: more need more memory and are not faster


class Learner(ABC):
    """Models of `workers` workers that start alike, each with its own optimizer and data."""

    def __init__(self, workload: Workload, *, workers: int, seed: int) -> None:
        self.workload, self.workers, self.seed = workload, workers, seed
        self.model = workload.model(seed=seed)  # the start of all; later the model that is evaluated
        self._whole = Flat(list(self.model.parameters()))
        self.start = self._whole.read()
        self.nets: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._rates: list[float] = []

    @property
    def numel(self) -> int:
        return self._whole.numel

    def renew(self, worker: int) -> None:
        """A worker returns: its optimizer has no state."""
        self.optimizers[worker] = self.workload.optimizer(self.nets[worker])

    @abstractmethod
    def gradients(self, step: int, workers: Sequence[int]) -> list[float]:
        """Set the gradients of these workers; their losses."""

    @abstractmethod
    def flat(self, worker: int) -> Tensor:
        """The parameters of a worker as one tensor."""

    def set_rates(self, step: int, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            set_rates(optimizer, self._rates, self.workload.rate(step))

    def look(self, flat: Tensor) -> tuple[float, float | None]:
        """Loss and accuracy of a model on held-out data."""
        self._whole.write(flat)
        return held_out(self.workload, self.model)

    def _batch(self, step: int, worker: int) -> tuple[Tensor, Tensor]:
        return self.workload.batch(step, seed=self.seed, rank=worker, world_size=self.workers)


class Each(Learner):
    """A model and an optimizer for each worker, one after the other.

    >>> from thinwire.lab.compare.workloads import workload
    >>> learner = Each(workload("mlp-100k"), workers=2, seed=0)
    >>> len(learner.gradients(0, [0, 1])), learner.nets[0].layers[0].weight.grad.shape
    (2, torch.Size([280, 64]))
    """

    def __init__(self, workload: Workload, *, workers: int, seed: int) -> None:
        super().__init__(workload, workers=workers, seed=seed)
        self.nets = [workload.model(seed=seed) for _ in range(workers)]
        self.optimizers = [workload.optimizer(net) for net in self.nets]
        self._rates = [group["lr"] for group in self.optimizers[0].param_groups]

    def flat(self, worker: int) -> Tensor:
        return Flat(list(self.nets[worker].parameters())).read()

    def gradients(self, step: int, workers: Sequence[int]) -> list[float]:
        losses = []
        for worker in workers:
            net = self.nets[worker]
            self.optimizers[worker].zero_grad()
            loss = net(*self._batch(step, worker))
            loss.backward()
            if self.workload.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), self.workload.clip)
            losses.append(float(loss.detach()))
        return losses


class _Row(nn.Module):
    """One worker's parameters: a row of the matrix of all."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.row = nn.Parameter(row)


class Batched(Learner):
    """All parameters in one matrix, a row for each worker; gradients of many rows at once.

    >>> from thinwire.lab.compare.workloads import workload
    >>> learner = Batched(workload("mlp-100k"), workers=3, seed=0)
    >>> each = Each(workload("mlp-100k"), workers=3, seed=0)
    >>> torch.allclose(torch.tensor(learner.gradients(0, [0, 2])), torch.tensor(each.gradients(0, [0, 2])))
    True
    """

    def __init__(self, workload: Workload, *, workers: int, seed: int) -> None:
        super().__init__(workload, workers=workers, seed=seed)
        self.matrix = self.start.expand(workers, -1).clone()
        self._grads = torch.zeros_like(self.matrix)
        self.nets = [_Row(row) for row in self.matrix]
        for net, grad in zip(self.nets, self._grads, strict=True):
            net.row.grad = grad
        self.optimizers = [workload.optimizer(net) for net in self.nets]
        self._rates = [group["lr"] for group in self.optimizers[0].param_groups]
        self._places: dict[str, tuple[int, int, torch.Size]] = {}
        at = 0
        for name, parameter in self.model.named_parameters():
            self._places[name] = (at, at + parameter.numel(), parameter.shape)
            at += parameter.numel()

        self._both = mapped_gradients(self.model, same_model=False)

    def flat(self, worker: int) -> Tensor:
        return self.matrix[worker]

    def gradients(self, step: int, workers: Sequence[int]) -> list[float]:
        losses: list[float] = []
        for first in range(0, len(workers), _AT_ONCE):
            some = torch.tensor(workers[first : first + _AT_ONCE])
            batches = [self._batch(step, int(worker)) for worker in some]
            inputs, targets = (torch.stack(column) for column in zip(*batches, strict=True))
            rows = self.matrix[some]
            parameters = {
                name: rows[:, start:stop].reshape(-1, *shape) for name, (start, stop, shape) in self._places.items()
            }
            gradients, found = self._both(parameters, inputs, targets)
            flat = torch.cat([gradients[name].flatten(1) for name in self._places], dim=1)
            if self.workload.clip is not None:
                flat *= (self.workload.clip / (flat.norm(dim=1, keepdim=True) + 1e-6)).clamp_max(1.0)
            self._grads[some] = flat
            losses += found.tolist()
        return losses


def held_out(workload: Workload, model: nn.Module) -> tuple[float, float | None]:
    """Loss and accuracy of a model on held-out data."""
    total, right, count, known = 0.0, 0, 0, True
    with torch.no_grad():
        for inputs, targets in workload.held_out(rank=0, world_size=1, batches=16):
            total += float(model(inputs, targets)) * len(targets)
            count += len(targets)
            found = workload.correct(model, (inputs, targets))
            known, right = known and found is not None, right + (found or 0)
    return total / count, right / count if known else None


def set_rates(optimizer: Any, rates: Sequence[float], factor: float) -> None:
    """Set the learning rates to the initial ones times a factor."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


def mapped_gradients(model: nn.Module, *, same_model: bool) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """Gradients and losses of many workers at once: stacked batches, and one model or stacked models."""

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = functional_call(model, parameters, (inputs, targets))
        return found

    both: Callable[..., tuple[dict[str, Tensor], Tensor]]
    both = vmap(grad_and_value(loss), in_dims=(None if same_model else 0, 0, 0))
    return both


def batches(compute: str, model: nn.Module, *, workers: int) -> bool:
    """Whether gradients are computed in batches: on request, or by `auto` from 17 workers on if possible."""
    if compute not in ("auto", "each", "batched"):
        raise OptionError(f"--compute is auto, each or batched, not {compute}")
    if compute == "batched" and statistics(model):
        raise OptionError("a model with running statistics cannot be batched over workers: use --compute each")
    return compute == "batched" or (compute == "auto" and workers > 16 and not statistics(model))


def learner(workload: Workload, *, workers: int, seed: int, compute: str = "auto") -> Learner:
    """The learner that `compute` names: `each`, `batched` or `auto`."""
    kind = Batched if batches(compute, workload.model(seed=seed), workers=workers) else Each
    return kind(workload, workers=workers, seed=seed)
