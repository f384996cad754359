"""Training with Top-k on all ranks of one process, where the ratio and its way may change from step to step."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from thinwire import LocalGroup, Recipe, parse
from thinwire.lab.compare.workloads import Workload, workload
from thinwire.lab.simulate.learners import set_rates

from ..page import finite
from .published import SCHEDULES, WORKERS, phase_at
from .rules import RULES, Choice, curve_of, dense_step, step_of

_NAME = "gradient"  # of the one tensor of a LocalGroup
BATCH = 16
RATE, CNN_RATE, MOMENTUM = 0.1, 0.03, 0.9  # with 0.1 even dense training of the convolutional network jumps about
_LOOKED_AT = 2000  # held-out examples of a look on the way; at the end all are looked at
WAYS = {
    "AG": "ef|top_k:{:g}|all_gather",
    "STAR": "ef|top_k:{:g}|shared_top_k",
    "VAR": "ef|top_k:{:g}|shared_top_k:norm",
}
_ROUTES = {"gather": "AG", "ring": "STAR", "tree": "STAR"}


@dataclass(frozen=True)
class Job:
    """One training run. `schedule` and `policy` are those of a replay: a rule, a fixed ratio as text, or dense."""

    seed: int
    steps: int
    look: int
    recipe: str = "dense"
    skew: float = 0.0
    schedule: str | None = None
    policy: str = "dense"
    data: str | None = None
    small: bool = False


class Ranks:
    """All ranks of a recipe, whose residuals stay when the recipe changes; measures what was delivered."""

    def __init__(self, recipe: Recipe, world_size: int, *, seed: int) -> None:
        self._group = LocalGroup(recipe, world_size, seed=seed)

    def set_recipe(self, recipe: Recipe) -> None:
        for reducer in self._group.reducers:
            reducer.set_recipe(recipe)

    def residual(self, rank: int) -> Tensor | None:
        memory = self._group.reducers[rank].residuals.memory
        return None if memory is None or _NAME not in memory.names() else memory.residual(_NAME)

    def offered(self, gradients: list[Tensor]) -> list[Tensor]:
        """What each rank has to send: gradient plus residual."""
        residuals = [self.residual(rank) for rank in range(len(gradients))]
        return [g.clone() if e is None else g + e for g, e in zip(gradients, residuals, strict=True)]

    def mean(self, gradients: list[Tensor], *, step: int) -> Tensor:
        return self._group.mean(gradients, step=step)

    def gains(self, offered: list[Tensor], delivered: Tensor, leader: int | None) -> dict[str, float]:
        """`told`: the share of the energy sent, as the leader sees its own, or the mean of all ranks where none leads.

        `true`: the share of the energy of the mean over the ranks that was delivered.
        """
        ranks = range(len(offered)) if leader is None else (leader,)
        told = [1.0 - _energy(_known(self.residual(rank))) / _energy(offered[rank]) for rank in ranks]
        mean = torch.stack(offered).mean(0)
        return {"told": sum(told) / len(told), "true": 1.0 - _energy(mean - delivered) / _energy(mean)}


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _energy(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


# ------------------------------------------------------------------------------------------------------- training


@lru_cache(maxsize=4)
def work_for(data: str | None, skew: float, small: bool) -> Workload:
    """The network on Fashion-MNIST, or the perceptron on generated digits if there is no data folder; small batches."""
    work = workload("mlp-100k" if small else "mlp" if data is None else "cnn", data=data, skew=skew)
    work.batch_per_worker = BATCH
    return work


def rate_of(work: Workload) -> float:
    return CNN_RATE if work.name == "cnn" else RATE


def train(job: Job) -> dict[str, Any]:
    """One run: losses on the way, accuracy at the end, gains, and for a replay what was chosen and the seconds."""
    torch.set_num_threads(1)
    work = work_for(job.data, job.skew, job.small)
    model = work.model(seed=job.seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=rate_of(work), momentum=MOMENTUM)
    rates = [group["lr"] for group in optimizer.param_groups]
    recipe = parse(job.recipe)
    ranks = Ranks(recipe, WORKERS, seed=job.seed)
    curve, gains, choices, seconds = list[dict[str, float]](), list[dict[str, float]](), list[dict[str, Any]](), 0.0
    phase, choice = -1, Choice(1.0, "ring", 0.0)
    for step in range(job.steps):
        gradients = list(_gradients(work, model, parameters, step=step, seed=job.seed))
        if job.schedule is not None:
            now = phase_at(job.schedule, step / job.steps)
            if now != phase:
                leads = curve_of(ranks.offered(gradients)[step % WORKERS].square())
                phase, choice = now, _choice(job, now, leads)
                if choice.way != "dense":
                    ranks.set_recipe(parse(WAYS[_ROUTES[choice.way]].format(choice.ratio)))
                gain = {"curve": [round(value, 5) for value in leads]} if job.policy in RULES else {}
                choices.append({"phase": phase, "ratio": round(choice.ratio, 6), "way": choice.way, **gain})
            seconds += choice.seconds
        looks = (step + 1) % job.look == 0 or step + 1 == job.steps
        offered = ranks.offered(gradients) if looks and recipe.memory is not None else []
        mean = ranks.mean(gradients, step=step)
        if offered:
            gains.append(ranks.gains(offered, mean, _leader(job.recipe, offered, step)))
        _apply(parameters, mean)
        set_rates(optimizer, rates, work.rate(step))
        optimizer.step()
        if looks:
            loss, accuracy = look(work, model, _LOOKED_AT if step + 1 < job.steps else None)
            at = {"step": step + 1} if job.schedule is None else {"step": step + 1, "seconds": seconds}
            curve.append({**at, "held_out": loss, "accuracy": accuracy})
    if job.schedule is None:
        return {"recipe": job.recipe, "skew": job.skew, "seed": job.seed, "curve": curve, "gains": _mean_gains(gains)}
    told = {"schedule": job.schedule, "policy": job.policy, "seed": job.seed, "seconds": seconds}
    return {**told, "curve": curve, "choices": choices}


def _mean_gains(gains: list[dict[str, float]]) -> dict[str, Any]:
    """The mean over the looks of a run at which it was finite; None for a recipe without a memory."""
    known = {key: finite([one[key] for one in gains]) for key in ("told", "true")}
    return {**{key: fmean(values) if values else None for key, values in known.items()}, "looks": len(gains)}


def _choice(job: Job, phase: int, curve: list[float]) -> Choice:
    """What the policy says at the beginning of a phase, from the gains of the rank whose turn it is to lead."""
    assert job.schedule is not None
    network = SCHEDULES[job.schedule][phase]
    if job.policy in RULES:
        return RULES[job.policy](network, curve)
    if job.policy == "dense":
        return Choice(1.0, "dense", dense_step(network))
    return step_of(float(job.policy), network)


def _leader(recipe: str, offered: list[Tensor], step: int) -> int | None:
    if "shared_top_k" not in recipe:
        return None
    if "norm" in recipe:
        return max(range(len(offered)), key=lambda rank: _energy(offered[rank]))
    return step % len(offered)


def _gradients(
    work: Workload, model: Any, parameters: list[torch.nn.Parameter], *, step: int, seed: int
) -> Iterator[Tensor]:
    for rank in range(WORKERS):
        model.zero_grad()
        model(*work.batch(step, seed=seed, rank=rank, world_size=WORKERS)).backward()
        yield torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters])


def _apply(parameters: list[torch.nn.Parameter], mean: Tensor) -> None:
    for parameter, part in zip(parameters, torch.split(mean, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


def look(work: Workload, model: Any, examples: int | None) -> tuple[float, float]:
    """Loss and accuracy on examples that are never trained on."""
    count = work.count(held_out=True)
    loss, right = 0.0, 0
    with torch.no_grad():
        chosen = torch.arange(count if examples is None else min(examples, count))
        for part in torch.split(chosen, 1000):
            batch = work.examples(part, held_out=True)
            loss += float(model(*batch)) * len(part)
            right += work.correct(model, batch) or 0
    return loss / len(chosen), right / len(chosen)


def train_all(jobs: list[Job], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every run, as many at a time as there are processors, two at most."""
    processes = min(2, os.cpu_count() or 1, len(jobs))
    found = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for one in pool.imap(train, jobs):
            found.append(one)
            last = one["curve"][-1]
            where = one.get("recipe") or f"{one['schedule']} {one['policy']}"
            skew = f", skew {one['skew']:g}" if one.get("skew") else ""
            say(f"{where}{skew}, seed {one['seed']}: loss {last['held_out']:.3f}, accuracy {last['accuracy']:.3f}")
    return found
