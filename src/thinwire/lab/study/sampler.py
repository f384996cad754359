"""`study`: samples the gradients of a training loop without changing it.

What is looked at is a parameter's `.grad` as the last backward pass before an optimizer step has left it: before DDP
averages, before clipping. A step is a step of an optimizer that holds parameters of the model. So gradients that
accumulate over several passes count once, under `no_sync` or not, and a step that a GradScaler skips does not count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...codecs.sparsify import random_positions
from ...errors import OptionError
from ...recipe.compose import Recipe, parse
from ...rng import Draw
from .bounds import DENSITIES
from .memories import NoMemory, OfLink, OwnMemory, Source, unwrapped
from .portrait import Lens, look
from .result import result_of, summary


def study(
    model: nn.Module,
    *,
    every: int = 100,
    at: Sequence[int] | None = None,
    steps: int | None = None,
    recipe: Recipe | str | None = None,
    densities: Sequence[float] = DENSITIES,
    elements: int = 20_000,
    least: int = 1024,
    most: int = 50_000_000,
    seed: int = 0,
) -> Study:
    """Describe u = g + e of every parameter and of the whole model while it trains. Training keeps the same bits.

    Use it as `with study(model) as found:` around the training loop, then `found.write("study.html")`. e is the
    residual of the attached recipe on this rank. Without one it is zero, or the residual that `recipe` would keep.

    Args:
        model: any module; a DDP model, with thinwire attached or not; or one from torch.compile.
        every: steps from one sample to the next; the first step is sampled.
        at: the steps to sample instead, counted from 0.
        steps: the study ends after this number of steps and costs no time any more.
        recipe: if none is attached, a recipe with a memory, such as `"ef|top_k:0.01|all_gather"`, whose residual is
            added to the gradients. It compresses every step, for the study alone.
        densities: the shares of the elements that Top-k keeps.
        elements: the number of elements of a tensor that densities are fitted to; least, most: see `Lens`.
        seed: the seed of all draws.

    >>> model = nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with study(model, every=2) as found:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(8, 64)).square().mean().backward()
    ...         optimizer.step()
    >>> [sample["step"] for sample in found.samples], list(found.samples[0]["layers"])
    ([0, 2], ['weight'])
    """
    chosen = None if at is None else frozenset(at)
    if every < 1 or (steps is not None and steps < 1) or (chosen is not None and any(step < 0 for step in chosen)):
        raise OptionError("every and steps are numbers of steps, 1 or more, and those in at are 0 or more")
    lens = Lens(elements=elements, densities=tuple(densities), least=least, most=most, seed=seed)
    return Study(model, every=every, at=chosen, steps=steps, recipe=recipe, lens=lens)


class Study:
    """What `study` returns: `samples` so far, `result()`, `write(page)`, `json(file)`; printing it gives a summary."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        at: frozenset[int] | None,
        steps: int | None,
        recipe: Recipe | str | None,
        lens: Lens,
    ) -> None:
        self.samples: list[dict[str, Any]] = []
        self.steps_seen = 0
        self._every, self._at, self._steps, self._lens = every, at, steps, lens
        inner, link = unwrapped(model)
        self._named = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        if not self._named:
            raise OptionError(
                "this model trains no parameter: give study a model with parameters that require gradients"
            )
        if recipe is not None and link is not None:
            raise OptionError("thinwire is attached to this model and remembers: leave recipe out")
        self._ids = {id(parameter) for parameter in self._named.values()}
        self._numel = sum(parameter.numel() for parameter in self._named.values())
        self._source: Source = NoMemory()
        if link is not None:
            self._source = OfLink(link)
        elif recipe is not None:
            whole = recipe if isinstance(recipe, Recipe) else parse(recipe)
            self._source = OwnMemory(whole, self._named, seed=lens.seed)
        self._about = type(inner).__name__
        self._share = min(1.0, lens.most / self._numel)
        self._taken: dict[str, tuple[Tensor, Tensor | None]] = {}  # the gradient, and u where that is another
        self._left_out: set[str] = set()
        self._handles: list[Any] = []

    # ------------------------------------------------------------------------------------------------- while training

    def __enter__(self) -> Study:
        if self._handles:
            raise OptionError("this study has begun already: make another one for another loop")
        for name, parameter in self._named.items():
            handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        self._handles.append(register_optimizer_step_pre_hook(self._optimizer_steps))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop sampling; the samples stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._taken.clear()

    def step(self) -> None:
        """End a step by hand, after its last backward pass: for loops without an optimizer of torch."""
        if not self._taken:
            return
        with torch.no_grad():
            if self._wanted():
                self._look()
            self._source.end_step({name: gradient for name, (gradient, _) in self._taken.items()})
        self._taken.clear()
        self.steps_seen += 1
        if self._steps is not None and self.steps_seen >= self._steps:
            self.close()

    def _hook(self, name: str) -> Any:
        def arrived(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                self._left_out.add(name)
            elif self._wanted() or isinstance(self._source, OwnMemory):
                self._take(name, gradient.detach())
            else:
                self._taken[name] = (gradient.new_empty(0), None)  # that there was one is all a step needs to know

        return arrived

    def _take(self, name: str, gradient: Tensor) -> None:
        """Copy a gradient, because DDP will average it; of a large model, copy some elements only."""
        flat = gradient.reshape(-1).to(torch.float32, copy=True)
        u = self._source.offered(name, flat) if self._wanted() else None
        if self._share < 1.0 and not isinstance(self._source, OwnMemory):
            flat, u = self._some(name, flat), None if u is None else self._some(name, u)
        self._taken[name] = (flat, u)

    def _some(self, name: str, flat: Tensor) -> Tensor:
        """The same elements at every step."""
        count = max(1, round(self._share * flat.numel()))
        key = Draw(seed=self._lens.seed, stream=name).key()
        return flat[random_positions(flat.numel(), count, key, device=flat.device).long()]

    def _wanted(self) -> bool:
        return self.steps_seen in self._at if self._at is not None else self.steps_seen % self._every == 0

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Two optimizers of one model end the same step: the second has no new gradients."""
        ours = any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
        if ours:
            self.step()

    def _look(self) -> None:
        tensors = []
        for name in self._named:
            if name in self._taken:
                gradient, u = self._taken[name]
                tensors.append((name, gradient if u is None else u, None if u is None else gradient))
        share = 1.0 if isinstance(self._source, OwnMemory) else self._share
        self.samples.append(look(tensors, step=self.steps_seen, lens=self._lens, share=share))

    # ---------------------------------------------------------------------------------------------------- afterwards

    def result(self) -> dict[str, Any]:
        """All samples, as `json` writes them: `schema` 1, `kind` "study"."""
        if not self.samples:
            raise OptionError(
                "nothing was sampled: no optimizer with parameters of this model made a step that was to be looked at; "
                "where the loop has none, call step() of the study after each step"
            )
        settings = {
            "model": self._about,
            "parameters": self._numel,
            "every": self._every if self._at is None else None,
            "at": None if self._at is None else sorted(self._at),
            "steps": self.steps_seen,
            "left_out": sorted(self._left_out),
            **self._lens.told(),
        }
        row = {"recipe": self._source.recipe, "samples": self.samples}
        return result_of([row], settings={key: value for key, value in settings.items() if value is not None})

    def write(self, path: str | Path) -> Path:
        """Write the page, one self-contained HTML file."""
        from .page import write_page

        return write_page(self.result(), path)

    def json(self, path: str | Path) -> Path:
        """Write the result as JSON."""
        place = Path(path)
        place.write_text(json.dumps(self.result(), indent=1) + "\n")
        return place

    def __repr__(self) -> str:
        if not self.samples:
            return f"Study({self._about}, {self.steps_seen} steps, nothing sampled yet)"
        return summary(self.result())
