"""Measurements of the page top-k: training with simulated workers, shapes of u, selectors, steps on slow networks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.scripts.results import only
from thinwire.lab.compare.runner import Settings as CompareSettings
from thinwire.lab.compare.runner import compare
from thinwire.lab.compare.workloads import CnnOnImages, GptOnSources, MlpOnDigits, SmallMlpOnDigits, Workload
from thinwire.lab.simulate.learners import held_out
from thinwire.lab.study.gradients import Settings, Training
from thinwire.lab.study.portrait import Lens
from thinwire.lab.study.selector_data import DRAWN, Drawn, Recorded
from thinwire.lab.study.selectors import one_tensor, with_feedback

from ..run import Options
from .looks import sample_of

WORKERS = 4
DENSITIES = (0.001, 0.01)
RATE, SMALL_RATE = 0.05, 0.01
_SPELLED = {
    "dense": "dense",
    "top_k": "ef|top_k:{density}|all_gather",
    "gaussian_k": "ef|gaussian_k:{density}|all_gather",
    "threshold_k": "ef|threshold_k:{density}|all_gather",
    "random_k": "ef|random_k:{density},scaled=false|all_reduce",
}
_LOOKED_AT = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # densities of the bound
# The figures of a selector that the page shows: of one tensor, and of steps with error feedback.
_SHOWN = ("data", "numel", "density", "selector", "steps", "x_add", "passes", "selected_over_k", "outside")
_OF_ONE, _FED = (*_SHOWN, "median_seconds", "x_top_k"), (*_SHOWN, "energy_over_top_k", "memory_over_top_k")
NETWORKS = ("100mbit,1ms", "1gbit,0.1ms")
CONTENDERS = {
    "dense": "ddp",
    **{name: f"ef|{name}:0.001|all_gather" for name in ("top_k", "gaussian_k", "dgc_k", "threshold_k")},
}


# ------------------------------------------------------------------------------------------------------ what is trained


class _AsPublished(Workload):
    """SGD with momentum 0.9 and weight decay 1e-4, a warm-up, a decay at the end; batches of 32."""

    batch_per_worker = 32
    steps, full_rate = 400, RATE

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.full_rate, momentum=0.9, weight_decay=1e-4)

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / (0.1 * self.steps), (self.steps - step) / (0.4 * self.steps))


class CnnAsPublished(_AsPublished, CnnOnImages):
    pass


class MlpAsPublished(_AsPublished, MlpOnDigits):
    pass


class SmallAsPublished(_AsPublished, SmallMlpOnDigits):
    pass


@dataclass(frozen=True)
class Job:
    """One training run."""

    selector: str
    density: float | None
    seed: int
    steps: int
    data: str | None
    rate: float = RATE
    workload: str = "images"
    at: tuple[int, ...] = (0,)
    judged: int = 1000  # batches of held-out examples at most: all that there are
    histogram: bool = False
    lens: Lens = field(default_factory=lambda: Lens(elements=100, densities=(0.01,), draws=1, least=1 << 30))  # hardly

    @property
    def recipe(self) -> str:
        return _SPELLED[self.selector].format(density=self.density)

    def training(self) -> tuple[Training, Workload]:
        torch.set_num_threads(1)
        work = _work(self)
        settings = Settings(
            (self.recipe,), workers=WORKERS, steps=self.steps, at=self.at, seed=self.seed, lens=self.lens
        )
        return Training(settings, self.recipe, work), work


def _work(job: Job) -> Workload:
    """Fashion-MNIST, generated digits if there is no data folder, or text."""
    if job.workload == "gpt":
        return GptOnSources()
    work: CnnAsPublished | MlpAsPublished | SmallAsPublished
    if job.workload == "small":
        work = SmallAsPublished()
    else:
        work = MlpAsPublished() if job.data is None else CnnAsPublished(job.data)
    work.steps, work.full_rate = job.steps, job.rate
    return work


def _in_processes(work: Callable[[Job], dict[str, Any]], jobs: Sequence[Job], *, quick: bool) -> list[dict[str, Any]]:
    """Two runs at a time, each in one thread; one run at a time if OMP_NUM_THREADS is 1."""
    if quick:
        return [work(job) for job in jobs]
    found = []
    with multiprocessing.get_context("spawn").Pool(min(2, torch.get_num_threads())) as pool:
        for one in pool.imap(work, jobs):
            found.append(one)
            print(f"  {len(found)} of {len(jobs)} runs", flush=True)
    return found


# ---------------------------------------------------------------------------------------------------------- convergence


def converge(job: Job) -> dict[str, Any]:
    """Losses and accuracies during training, and the accuracy on all held-out images at the end."""
    training, work = job.training()
    every = max(1, job.steps // 10)
    losses, seen = [], []
    for step in range(job.steps):
        losses.append(training.step())
        if (step + 1) % every == 0:
            seen.append([step + 1, sum(losses[-every:]) / every, held_out(work, training.model)[1]])
    return {
        "selector": job.selector,
        "density": job.density,
        "rate": job.rate,
        "seed": job.seed,
        "curve": seen,
        "accuracy": _accuracy(work, training.model, batches=job.judged),
        "parameters": sum(p.numel() for p in training.model.parameters()),
    }


def _accuracy(work: Workload, model: nn.Module, *, batches: int) -> float:
    right = count = 0
    with torch.no_grad():
        for batch in work.held_out(rank=0, world_size=1, batches=batches):
            right, count = right + (work.correct(model, batch) or 0), count + len(batch[1])
    return right / count


def convergence(options: Options) -> dict[str, Any]:
    """Dense, Top-k, Gaussian-k, threshold-k, and Random-k at two learning rates."""
    steps = 4 if options.quick else 400
    tiny: dict[str, Any] = {"workload": "small", "judged": 4} if options.quick else {}
    of = partial(Job, steps=steps, data=options.data, **tiny)
    kinds: list[tuple[str, float | None, float]] = [("dense", None, RATE)]
    kinds += [(name, density, RATE) for name in ("top_k", "gaussian_k", "threshold_k") for density in DENSITIES]
    kinds += [("random_k", density, rate) for density in DENSITIES for rate in (RATE, SMALL_RATE)]
    jobs = [
        of(selector=name, density=density, rate=rate, seed=seed)
        for seed in options.all_seeds
        for name, density, rate in kinds
    ]
    images = "generated digits" if options.data is None else "Fashion-MNIST"
    return {
        "steps": steps,
        "workers": WORKERS,
        "batch": 32,
        "data": images,
        "runs": _in_processes(converge, jobs, quick=options.quick),
    }


# ---------------------------------------------------------------------------------------------------- shapes and bounds


def look_at(job: Job) -> dict[str, Any]:
    """Samples of u at some steps; the last one with a histogram if the job asks for it."""
    training, _ = job.training()
    for _step in range(max(job.at) + 1):
        training.step()
    about = {"workload": job.workload, "selector": job.selector, "density": job.density, "seed": job.seed}
    last = len(training.samples) - 1
    samples = [sample_of(one, histogram=job.histogram and i == last) for i, one in enumerate(training.samples)]
    return about | {"samples": samples}


def shape(options: Options) -> dict[str, Any]:
    """u during training, dense and with error feedback, on images and on text."""
    lens = Lens(elements=1000 if options.quick else 10_000, densities=_LOOKED_AT, draws=2)
    of_images: tuple[int, ...] = (0, 20, 60, 120, 199)
    of_text: tuple[int, ...] = (0, 20, 59)
    if options.quick:
        of_images, of_text = (0, 3), ()
    images = "small" if options.quick else "images"
    jobs = []
    for seed in options.all_seeds:
        of = partial(Job, seed=seed, data=options.data, lens=lens, histogram=seed == options.first_seed)
        for name, density in (("dense", None), ("top_k", 0.001), ("top_k", 0.01)):
            jobs.append(of(name, density, steps=max(of_images) + 1, at=of_images, workload=images))
        for name, density in (("dense", None), ("top_k", 0.01)) if of_text else ():
            jobs.append(of(name, density, steps=max(of_text) + 1, at=of_text, workload="gpt"))
    return {"workers": WORKERS, "runs": _in_processes(look_at, jobs, quick=options.quick)}


# ------------------------------------------------------------------------------------------------------------ selectors


def selectors(options: Options) -> dict[str, Any]:
    """`thinwire study selectors`: one tensor, and many steps with error feedback."""
    sizes = (2000, 4000) if options.quick else (100_000, 1_000_000, 10_000_000)
    huge = 8000 if options.quick else 100_000_000  # of one kind, with one seed
    rounds, steps, steady = (1, 10, 4000) if options.quick else (5, 200, 500_000)
    rows: list[dict[str, Any]] = []

    def choose(kind: str, size: int, seed: int, *, rounds: int = rounds) -> None:
        x = Drawn(kind).one(size, seed=seed)
        for density in DENSITIES:
            found = one_tensor(x, density, data=kind, rounds=rounds, seed=seed)
            rows.extend({"seed": seed} | only(asdict(row), *_OF_ONE) for row in found)

    choose("gaussian", huge, options.first_seed, rounds=min(3, rounds))
    for seed in options.all_seeds:
        print(f"  seed {seed}", flush=True)
        for kind in DRAWN:
            for size in sizes:
                choose(kind, size, seed)
        for source in (Drawn("gaussian"), Drawn("layers"), Recorded("mlp-100k" if options.quick else "mlp")):
            for density in DENSITIES:
                found = with_feedback(source, steady, density, steps=steps, seed=seed)
                rows += [{"seed": seed} | only(asdict(row), *_FED) for row in found]
    return {"sizes": list(sizes), "rounds": rounds, "feedback_steps": steps, "feedback_size": steady, "rows": rows}


# ----------------------------------------------------------------------------------------------------------- end to end


def end_to_end(options: Options) -> dict[str, Any]:
    """`thinwire compare` on two networks: step times."""
    networks = []
    for network in ("unshaped",) if options.quick else NETWORKS:
        print(f"  {network}", flush=True)
        settings = CompareSettings(
            tuple(CONTENDERS.values()),
            workload="mlp-100k" if options.quick else "gpt",
            workers=2 if options.quick else WORKERS,
            network=network,
            steps=2 if options.quick else 12,
            lap=1 if options.quick else 4,
            seed=options.first_seed,
            repeats=options.seeds,
            extra=0.0,
            probe_seconds=0.0,
        )
        results: list[dict[str, Any]] = []
        compare(settings, keep=results.append)
        networks.append(_steps(network, results[0]))
    return {"density": 0.001, "networks": networks}


def _steps(network: str, result: dict[str, Any]) -> dict[str, Any]:
    by_recipe = {row["recipe"]: row for row in result["rows"]}
    rows = []
    for name, recipe in CONTENDERS.items():
        row = by_recipe[recipe]
        rows.append(
            {
                "name": name,
                "recipe": recipe,
                "step_ms": [one["step_ms"] for one in row["repeats"]],
                "bytes_per_step": row["bytes_per_step"],
                "breakdown": row["breakdown"],
                "problem": row["problem"],
            }
        )
    alone = [one["step_ms"] for one in result["no_communication"]["repeats"]]
    settings = {key: result["settings"][key] for key in ("workload", "workers", "steps", "seeds", "parameters")}
    return {"network": network, "measured": result["network"], "settings": settings, "alone_ms": alone, "rows": rows}
