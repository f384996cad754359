"""`thinwire study gradients`: trains a workload by one recipe after the other and describes its gradients.

All workers have the same model, so there is one. Buckets, and which parameters travel exact, are as in `attach`. The u
that is looked at is that of the first worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import OptionError
from ...recipe.compose import Recipe, parse
from ...reduce.buckets import Layout, gather, scatter
from ...reduce.local_group import LocalGroup
from ..compare.workloads import Workload, workload
from ..simulate.learners import held_out, set_rates
from ..simulate.recipe_run import layout_of
from .memories import compensated
from .portrait import Lens, look
from .result import result_of

Event = Callable[[dict[str, Any]], None]
_MOST_WORKERS = 64


@dataclass(frozen=True)
class Settings:
    """The settings of a study, checked before anything runs.

    >>> Settings(at=(500,), steps=200)
    Traceback (most recent call last):
    thinwire.errors.OptionError: --at names step 500, and steps 0 to 199 are trained: raise --steps or look earlier
    """

    recipes: tuple[str, ...] = ("dense", "ef|top_k:0.01|all_gather")
    workload: str = "mlp"
    workers: int = 4
    steps: int = 200
    at: tuple[int, ...] = (0, 20, 100)
    seed: int = 0
    data: str | None = None
    skew: float = 0.0
    bucket_mb: float = 25.0
    lens: Lens = field(default_factory=Lens)

    def __post_init__(self) -> None:
        if not self.recipes:
            raise OptionError("there is nothing to study: give --recipe dense, or several with commas")
        if len(set(self.recipes)) < len(self.recipes):
            raise OptionError("a recipe is named twice in --recipe: name each once")
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise OptionError(f"--workers is from 1 to {_MOST_WORKERS}, not {self.workers}")
        if self.steps < 1:
            raise OptionError(f"--steps is 1 or more, not {self.steps}")
        if not self.bucket_mb > 0:
            raise OptionError(f"--bucket-mb is above 0, not {self.bucket_mb}")
        if not self.at:
            raise OptionError("--at names no step: give some, such as 0,20,100")
        for step in self.at:
            if not 0 <= step < self.steps:
                raise OptionError(
                    f"--at names step {step}, and steps 0 to {self.steps - 1} are trained: "
                    "raise --steps or look earlier"
                )
        for name in self.recipes:
            if refusal := self.recipe(name).refusal(self.workers):
                raise OptionError(refusal)

    def recipe(self, name: str) -> Recipe:
        return parse("dense" if name == "ddp" else name)

    def told(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if key != "lens" and value is not None}
        return found | {"recipes": list(self.recipes), "at": sorted(set(self.at))} | self.lens.told()


class Training:
    """One recipe in training. `step()` trains one step and samples u if one is due."""

    def __init__(self, settings: Settings, name: str, work: Workload) -> None:
        self.settings, self.work = settings, work
        self.model = work.model(seed=settings.seed)
        self.optimizer = work.optimizer(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.layout: Layout = layout_of(self.model, bucket_mb=settings.bucket_mb)
        self.recipe = settings.recipe(name)
        self._group = LocalGroup(self.recipe, settings.workers, seed=settings.seed)
        self.steps_done = 0
        self.samples: list[dict[str, Any]] = []

    def step(self) -> float:
        step, settings = self.steps_done, self.settings
        set_rates(self.optimizer, self._rates, self.work.rate(step))
        losses, gradients = [], []
        for rank in range(settings.workers):
            self.optimizer.zero_grad()
            loss = self.model(*self.work.batch(step, seed=settings.seed, rank=rank, world_size=settings.workers))
            loss.backward()
            losses.append(float(loss.detach()))
            named = self.model.named_parameters()
            gradients.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named})
        if step in settings.at:
            self.samples.append(self._look(gradients[0]))
        mean = self._mean(gradients)
        for name, parameter in self.model.named_parameters():
            parameter.grad = mean[name]
        if self.work.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.work.clip)
        self.optimizer.step()
        self.steps_done += 1
        return sum(losses) / len(losses)

    def _mean(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The mean by the recipe, bucket by bucket; exact parameters are averaged without compression."""
        buckets = [bucket for bucket in self.layout.buckets if bucket.numel]
        flats = [
            {bucket.name: gather(bucket.parts, of_rank, torch.empty(bucket.numel)) for bucket in buckets}
            for of_rank in gradients
        ]
        means = self._group.mean(flats, step=self.steps_done)
        found = {name: torch.empty_like(gradient) for name, gradient in gradients[0].items()}
        for bucket in self.layout.buckets:
            if bucket.numel:
                scatter(bucket.parts, means[bucket.name], found)
            for part in bucket.exact:
                found[part.name] = torch.stack([of_rank[part.name] for of_rank in gradients]).mean(0)
        return found

    def _look(self, gradients: Mapping[str, Tensor]) -> dict[str, Any]:
        tensors = []
        for name, gradient in gradients.items():
            flat = gradient.detach().reshape(-1)
            u = self._u(name, flat)
            tensors.append((name, flat if u is None else u, None if u is None else flat))
        return look(tensors, step=self.steps_done, lens=self.settings.lens)

    def _u(self, name: str, flat: Tensor) -> Tensor | None:
        """u of a parameter on the first worker, or None if it is the gradient itself."""
        bucket = self.layout.of[name]
        part = next((part for part in bucket.parts if part.name == name), None)
        if self.recipe.memory is None or part is None:
            return None
        kept = self._group.memories[0].tensors(bucket.name)
        if not kept:
            return None
        return compensated(flat, {key: part.of(tensor.view(-1)) for key, tensor in kept.items()}, self.recipe.memory)


def study_gradients(settings: Settings, *, on_event: Event = lambda event: None, command: str = "") -> dict[str, Any]:
    """Train every recipe and describe its u, as `thinwire study gradients --json` writes it.

    >>> few = Settings(("dense",), workload="mlp-100k", workers=1, steps=1, at=(0,), lens=Lens(densities=(0.01,)))
    >>> found = study_gradients(few)
    >>> found["rows"][0]["samples"][0]["whole"]["numel"], found["findings"]["bell_of"]
    (99690, 4)
    """
    work = workload(settings.workload, data=settings.data, skew=settings.skew)
    rows = [_row(settings, name, work, on_event) for name in settings.recipes]
    parameters = sum(parameter.numel() for parameter in work.model(seed=0).parameters())
    told = settings.told() | {"parameters": parameters, "optimizer": work.optimizer_text}
    return result_of(rows, settings=told, command=command, workload=work.about)


def _row(settings: Settings, name: str, work: Workload, on_event: Event) -> dict[str, Any]:
    training = Training(settings, name, work)
    curve = []
    for step in range(settings.steps):
        loss = training.step()
        curve.append(loss)
        on_event({"event": "step", "recipe": name, "step": step, "loss": loss})
    loss_there, accuracy = held_out(work, training.model)
    return {
        "recipe": name,
        "spelled": str(training.recipe),
        "memory": None if training.recipe.memory is None else str(training.recipe.memory),
        "loss": curve,
        "held_out": loss_there,
        "accuracy": accuracy,
        "samples": training.samples,
    }
