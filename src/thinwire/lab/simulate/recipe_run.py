"""Training by a recipe with many simulated workers in one process: real exchanges, a virtual clock.

All workers have the same model, so there is only one. Each worker has its own gradient, memory, draws and time. Buckets
are those of `attach`. A bucket is sent when backward has made it and the one before it is done: there is one lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...comm.local import on_all_ranks
from ...errors import OptionError
from ...predict.workload import BACKWARD_SHARE, FORWARD_SHARE
from ...recipe.compose import Recipe
from ...reduce import Reducer
from ...reduce.buckets import FIRST_BUCKET, Exempt, Layout, Parameter, one_dimensional_or_tiny
from ..compare.workloads import Workload
from .learners import batches, mapped_gradients, set_rates
from .network import SimNetwork
from .pace import Pace

FORWARD = FORWARD_SHARE / (FORWARD_SHARE + BACKWARD_SHARE)  # of the time that a worker computes
_AT_ONCE = 16


def layout_of(model: nn.Module, *, bucket_mb: float = 25.0, exempt: Exempt = one_dimensional_or_tiny) -> Layout:
    """The buckets that `attach` has, if gradients become ready in reverse order."""
    known = [Parameter.of(name, parameter, exempt) for name, parameter in model.named_parameters()]
    cap = int(bucket_mb * (1 << 20))
    return Layout.planned(known, first=min(FIRST_BUCKET, cap), cap=cap)


def ready_shares(layout: Layout) -> list[float]:
    """The share of a worker's computing after which each bucket is ready."""
    sizes = np.cumsum([bucket.numel + bucket.exact_numel for bucket in layout.buckets])
    return [FORWARD + (1 - FORWARD) * float(done) / float(sizes[-1]) for done in sizes]


class RecipeRun:
    """All workers of one recipe; `step()` is a step of everyone."""

    def __init__(
        self,
        workload: Workload,
        networks: Sequence[SimNetwork],
        pace: Pace,
        recipe: Recipe,
        *,
        coding: Sequence[float],
        bucket_mb: float = 25.0,
        exempt: Exempt = one_dimensional_or_tiny,
        compute: str = "auto",
        seed: int = 0,
    ) -> None:
        self.workload, self.networks, self.pace, self.seed = workload, networks, pace, seed
        self.clocks, self.workers = networks[0].clocks, len(networks)
        if refusal := recipe.refusal(self.workers):
            raise OptionError(refusal)
        self.model = workload.model(seed=seed)
        self.optimizer = workload.optimizer(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.layout = layout_of(self.model, bucket_mb=bucket_mb, exempt=exempt)
        self._ready = ready_shares(self.layout)
        self._coding = coding  # seconds of each bucket
        self._reducers = on_all_ranks(
            networks, lambda network: Reducer(recipe, group=network, seed=seed, check_every=0, layout=self.layout)
        )
        self.computed = np.zeros(self.workers)
        self.steps_done = 0
        self.phases = {"compute": 0.0, "coding": 0.0, "straggling": 0.0}
        self._batched = batches(compute, self.model, workers=self.workers)

    def step(self) -> float:
        work, step = self.workload, self.steps_done
        set_rates(self.optimizer, self._rates, work.rate(step))
        losses, gradients = self._gradients(step)
        seconds = self.pace.seconds(step, workers=self.workers)
        begin = self.clocks.now.copy()
        self.computed += seconds
        means = on_all_ranks(self.networks, lambda network: self._exchange(network, gradients, begin, seconds))
        slowest = float((begin + seconds).max())
        self.clocks.now = np.maximum(self.clocks.now, begin + seconds)
        self.phases["compute"] += float(np.median(seconds))
        self.phases["straggling"] += slowest - float(begin.max()) - float(np.median(seconds))
        self.phases["coding"] += sum(self._coding)
        for name, parameter in self.model.named_parameters():
            parameter.grad = means[0][name]
        if work.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), work.clip)
        self.optimizer.step()
        self.steps_done += 1
        return sum(losses) / len(losses)

    def _exchange(
        self, network: SimNetwork, gradients: Sequence[dict[str, Tensor]], begin: Any, seconds: Any
    ) -> dict[str, Tensor]:
        """One worker's buckets, one after the other."""
        rank, views = network.rank, gradients[network.rank]
        reducer, now = self._reducers[rank], self.clocks.now
        for bucket, ready, coding in zip(self.layout.buckets, self._ready, self._coding, strict=True):
            now[rank] = max(now[rank], begin[rank] + ready * seconds[rank]) + coding
            named = {name: views[name] for name in bucket.names}
            reducer.start_bucket(bucket, named, named).wait()
        reducer.commit()
        return views

    # -------------------------------------------------------------------------------------------------------- gradients

    def _gradients(self, step: int) -> tuple[list[float], list[dict[str, Tensor]]]:
        dealt = [
            self.workload.batch(step, seed=self.seed, rank=rank, world_size=self.workers)
            for rank in range(self.workers)
        ]
        return self._at_once(dealt) if self._batched else self._one_by_one(dealt)

    def _one_by_one(self, dealt: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[float], list[dict[str, Tensor]]]:
        losses, found = [], []
        for inputs, targets in dealt:
            self.optimizer.zero_grad()
            loss = self.model(inputs, targets)
            loss.backward()
            losses.append(float(loss.detach()))
            named = self.model.named_parameters()
            found.append({name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named})
        return losses, found

    def _at_once(self, dealt: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[float], list[dict[str, Tensor]]]:
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}

        both = mapped_gradients(self.model, same_model=True)
        losses: list[float] = []
        found: list[dict[str, Tensor]] = []
        for first in range(0, len(dealt), _AT_ONCE):
            inputs, targets = (torch.stack(column) for column in zip(*dealt[first : first + _AT_ONCE], strict=True))
            gradients, told = both(parameters, inputs, targets)
            losses += told.tolist()
            found += [{name: rows[place] for name, rows in gradients.items()} for place in range(len(told))]
        return losses, found

    # ------------------------------------------------------------------------------------------------------- looking

    @property
    def virtual_seconds(self) -> float:
        return float(self.clocks.now.max())
