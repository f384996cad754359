"""Data for selectors: tensors drawn by seed, gradients recorded while a model trains, or a user's file."""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import OptionError
from ..compare.workloads import Workload, workload

DRAWN = ("gaussian", "laplace", "student_t", "layers")
RECORDED = ("mlp", "gpt")
_DEGREES = 3  # of freedom: the heaviest tail of whole degrees that has a variance
_LAYERS = 8  # whose scales fall from 1 to 1/1000
_RECORD_AT = 50  # steps of training before a single gradient is recorded


class Source(ABC):
    """A source of gradients: one, or a stream of them."""

    name: str
    sizes_of_its_own = False  # a recorded gradient is as long as its model

    @abstractmethod
    def stream(self, numel: int, *, seed: int) -> Iterator[Tensor]:
        """An endless stream of flat float32 gradients, one for each step."""

    def one(self, numel: int, *, seed: int) -> Tensor:
        """A single gradient, as it is without error feedback."""
        return next(self.stream(numel, seed=seed))


class Drawn(Source):
    """Noise of one distribution, drawn anew at each step.

    `layers`: eight Gaussian parts whose scales fall from 1 to 1/1000, as layers of a network have scales of their own.

    >>> Drawn("layers").one(8000, seed=0).view(8, -1).std(1)[0].round()
    tensor(1.)
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def stream(self, numel: int, *, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        scales = torch.logspace(0, -3, _LAYERS).repeat_interleave(math.ceil(numel / _LAYERS))[:numel]
        while True:
            noise = torch.randn(numel, generator=generator)
            if self.name == "laplace":  # a Gaussian whose variance is exponential
                noise *= torch.empty(numel).exponential_(generator=generator).mul_(2).sqrt_()
            elif self.name == "student_t":
                squares = torch.zeros(numel)
                for _ in range(_DEGREES):
                    squares += torch.randn(numel, generator=generator).square_()
                noise /= squares.div_(_DEGREES).sqrt_()
            elif self.name == "layers":
                noise *= scales
            yield noise


class Recorded(Source):
    """Gradients of a workload of `thinwire compare`, trained by one worker without compression, step by step."""

    sizes_of_its_own = True

    def __init__(self, name: str, *, data: str | None = None) -> None:
        self.name, self._data = name, data

    def stream(self, numel: int, *, seed: int) -> Iterator[Tensor]:
        work = workload(self.name, data=self._data)
        model = work.model(seed=seed)
        optimizer = work.optimizer(model)
        rates = [group["lr"] for group in optimizer.param_groups]
        step = 0
        while True:
            yield _train_one(work, model, optimizer, rates, step=step, seed=seed)
            step += 1

    def one(self, numel: int, *, seed: int) -> Tensor:
        return next(islice(self.stream(numel, seed=seed), _RECORD_AT, None))


def _train_one(
    work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, rates: list[float], *, step: int, seed: int
) -> Tensor:
    """One step of training; its gradient."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * work.rate(step)
    optimizer.zero_grad()
    loss = model(*work.batch(step, seed=seed, rank=0, world_size=1))
    loss.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    if work.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), work.clip)
    optimizer.step()
    return gradient


class FromFile(Source):
    """A file of `torch.save`: a tensor or a dict of tensors, or a list of these, one for each step.

    Several steps are gone through again and again.
    """

    sizes_of_its_own = True

    def __init__(self, path: str) -> None:
        self.name = Path(path).name
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as problem:
            why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            raise OptionError(f"cannot read {path} ({why}): save tensors with torch.save(gradient, FILE)") from None
        self._steps = [_flat(path, step) for step in (content if isinstance(content, list) else [content])]
        if not self._steps or len({step.numel() for step in self._steps}) > 1:
            raise OptionError(f"{path} holds no steps of one length: save one gradient, or a list of equally long ones")

    def stream(self, numel: int, *, seed: int) -> Iterator[Tensor]:
        return cycle(self._steps)


def _flat(path: str, content: Any) -> Tensor:
    parts = list(content.values()) if isinstance(content, dict) else [content]
    if not parts or not all(isinstance(part, Tensor) and part.is_floating_point() for part in parts):
        raise OptionError(f"{path} holds something other than floating-point tensors: save one tensor or a dict")
    flat = torch.cat([part.detach().reshape(-1).to(torch.float32) for part in parts])
    if flat.numel() == 0 or not bool(flat.isfinite().all()):
        raise OptionError(f"{path} is empty or not finite: save a gradient without inf and NaN")
    return flat


def sources(names: list[str], *, file: str | None = None, data: str | None = None) -> list[Source]:
    """Sources by name; a file comes last.

    >>> [source.name for source in sources(["gaussian", "mlp"])]
    ['gaussian', 'mlp']
    >>> sources(["cauchy"])
    Traceback (most recent call last):
    thinwire.errors.OptionError: there is no data cauchy: choose gaussian, laplace, student_t, layers, mlp or gpt
    """
    known = (*DRAWN, *RECORDED)
    for name in names:
        if name not in known:
            raise OptionError(f"there is no data {name}: choose {', '.join(known[:-1])} or {known[-1]}")
    found: list[Source] = [Drawn(name) if name in DRAWN else Recorded(name, data=data) for name in names]
    return found if file is None else [*found, FromFile(file)]
