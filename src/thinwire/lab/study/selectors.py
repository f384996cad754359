"""Compares selectors of the largest elements: time, passes and energy, all on the same data and in turns.

Two experiments. One tensor: every selector chooses from it without a memory. Feedback: every selector has a memory of
its own and gets the same gradients for many steps, so that what one leaves out comes back to it alone; that is how they
are used, and the shape of what they choose from is then of their own making. Training does not follow the selectors:
recorded gradients are those of dense training.

Times are of one thread and of rounds in which all take turns; ratios compare within those rounds only.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from statistics import fmean, median
from typing import TypeVar

import torch
from torch import Tensor

from ... import kernels
from ...codecs import dgc_k, gaussian_k, random_k, threshold_k, top_k, trimmed_k
from ...codecs.base import State
from ...codecs.select import largest
from ...codecs.sparse import SparseCodec
from ...errors import OptionError
from ...kernels import Selection
from ...rng import Draw, Key
from .passes import Passes
from .selector_data import Source

EXACT = "top_k"  # what the others are compared with
_ADD = "e += g"
_LOOKS = 20  # at passes and at what the exact choice would keep, during a run with feedback
_SMALLEST = 1000
_BYTES = 60  # an element, for all that is held at a time
_T = TypeVar("_T")


class Selector(ABC):
    """One way to select, with its state from step to step."""

    name: str

    @abstractmethod
    def select(self, x: Tensor, *, step: int) -> Selection:
        """Select from `x`."""

    @abstractmethod
    def select_remembering(self, memory: Tensor, gradient: Tensor, *, step: int) -> Selection:
        """memory += gradient; select from that; subtract the selection."""

    @abstractmethod
    def passes(self, u: Tensor, *, step: int) -> float | None:
        """Passes over the memory in a step with error feedback; `u` is the input of the selection."""


class CodecSelector(Selector):
    """The selection of a codec, without writing a message."""

    def __init__(self, codec: SparseCodec, *, seed: int) -> None:
        self.name, self._codec, self._seed = codec.name, codec, seed
        self._state: State = codec.new_state()
        self._fused = False  # whether the addition is part of the selection's pass

    def select(self, x: Tensor, *, step: int) -> Selection:
        return self._codec._select(x, self._draw(step), self._codec.new_state())

    def select_remembering(self, memory: Tensor, gradient: Tensor, *, step: int) -> Selection:
        """As the codec does in training, without writing a message: the sum is symmetric, so memory holds the rest."""
        key = self._draw(step)
        found = self._codec._take_compensated(memory, gradient, key, self._state, 1.0)
        self._fused = found is not None
        if found is None:
            memory += gradient
        return self._codec._take(memory, key, self._state) if found is None or found.above < 0 else found

    def passes(self, u: Tensor, *, step: int) -> float | None:
        if "steps" in self._state:  # threshold_k counts its passes itself
            return float(self._state["passes"] / self._state["steps"])
        return count_passes(self, u, step=step) + (0 if self._fused else 1)

    def _draw(self, step: int) -> Key:
        return Draw(seed=self._seed, step=step, stream="selectors").key()


class TorchTopK(Selector):
    """Exact Top-k by torch, as most code writes it."""

    name = "torch.topk"

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def select(self, x: Tensor, *, step: int) -> Selection:
        indices = torch.topk(x.abs(), _k(x.numel(), self._ratio), sorted=False).indices
        return Selection(x[indices], indices, indices.numel())

    def select_remembering(self, memory: Tensor, gradient: Tensor, *, step: int) -> Selection:
        memory += gradient
        found = self.select(memory, step=step)
        memory[found.indices] = 0.0
        return found

    def passes(self, u: Tensor, *, step: int) -> float | None:
        return None  # torch's own affair


def _k(numel: int, ratio: float) -> int:
    return top_k(ratio).k(numel)


def all_selectors(ratio: float, *, seed: int = 0) -> list[Selector]:
    """Exact Top-k first, then the others.

    >>> [selector.name for selector in all_selectors(0.01)]
    ['top_k', 'torch.topk', 'gaussian_k', 'dgc_k', 'trimmed_k', 'threshold_k', 'random_k']
    """
    chosen = (gaussian_k(ratio), dgc_k(ratio), trimmed_k(ratio), threshold_k(ratio), random_k(ratio, scaled=False))
    others = [CodecSelector(codec, seed=seed) for codec in chosen]
    return [CodecSelector(top_k(ratio), seed=seed), TorchTopK(ratio), *others]


def count_passes(selector: Selector, x: Tensor, *, step: int = 0) -> float:
    """Passes over `x` of a selection without a memory.

    >>> _ = torch.manual_seed(0)
    >>> 1 < count_passes(all_selectors(0.01)[0], torch.randn(100_000)) < 1.1  # a sample, then one pass
    True
    """
    with Passes(x) as passes:
        selector.select(x, step=step)
    found: float = passes.count
    return found


# ------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One selector on one kind of data. Without feedback `steps` is 0 and the last four are those of the one choice.

    `seconds` is the best of the rounds (with feedback: of the steps), `median_seconds` the median; `x_top_k` and
    `x_add` compare the medians with exact Top-k and with `e += g`. `energy` is |chosen|^2 / |u|^2,
    `energy_over_top_k` the same over that of the exact choice from the same u: above 1 only where more than k are
    chosen. `selected_over_k`, `low` and `high`: mean, 5 % and 95 % quantile over the steps; `outside`: share of steps
    below 2/3, or 4/3 and more. `memory_over_top_k`: norm of the residual in the end, over that of exact Top-k.
    """

    data: str
    numel: int
    density: float
    selector: str
    k: int
    steps: int
    seconds: float
    median_seconds: float
    x_top_k: float
    x_add: float
    passes: float | None
    energy: float
    energy_over_top_k: float
    selected_over_k: float
    low: float
    high: float
    outside: float
    memory_over_top_k: float | None


def _is_outside(share: float) -> bool:
    """The range of counts that Gaussian-k accepts; a full message has left something out."""
    return not 2 / 3 <= share < 4 / 3


def _energy(values: Tensor) -> float:
    return float(values.double().square().sum())


def _timed(run: Callable[[], _T]) -> tuple[float, _T]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels.body_for("cpu")
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_tensor(x: Tensor, ratio: float, *, data: str = "", rounds: int = 5, seed: int = 0) -> list[Row]:
    """All selectors on one tensor, without a memory.

    >>> rows = one_tensor(torch.randn(2000), 0.01, rounds=1)
    >>> rows[0].selector, rows[0].selected_over_k, rows[0].energy_over_top_k
    ('top_k', 1.0, 1.0)
    """
    check(x.numel(), ratio, rounds=rounds)
    chosen, memory = all_selectors(ratio, seed=seed), torch.zeros_like(x)
    taken: dict[str, list[float]] = {name: [] for name in (_ADD, *(selector.name for selector in chosen))}
    found: dict[str, Selection] = {}
    with _one_thread():
        for turn in range(rounds + 1):
            seconds = {_ADD: _timed(partial(torch.add, memory, x, out=memory))[0]}
            for selector in chosen:
                seconds[selector.name], found[selector.name] = _timed(partial(selector.select, x, step=0))
            for name, took in seconds.items() if turn else ():  # round 0 compiles and warms up
                taken[name].append(took)
        exact, whole, k = _energy(found[EXACT].values), _energy(x), _k(x.numel(), ratio)
        rows = []
        for selector in chosen:
            kept, share = _energy(found[selector.name].values), found[selector.name].values.numel() / k
            rows.append(
                Row(
                    data=data, numel=x.numel(), density=ratio, selector=selector.name, k=k, steps=0,
                    **_times(taken, selector.name),
                    passes=None if isinstance(selector, TorchTopK) else count_passes(selector, x),
                    energy=kept / whole if whole else 1.0, energy_over_top_k=kept / exact if exact else 1.0,
                    selected_over_k=share, low=share, high=share, outside=float(_is_outside(share)),
                    memory_over_top_k=None,
                )
            )  # fmt: skip
    return rows


def _times(taken: dict[str, list[float]], name: str) -> dict[str, float]:
    mine = median(taken[name])
    return {
        "seconds": min(taken[name]),
        "median_seconds": mine,
        "x_top_k": mine / median(taken[EXACT]),
        "x_add": mine / median(taken[_ADD]),
    }


class _Follower:
    """One selector with its memory and its measurements."""

    def __init__(self, selector: Selector, like: Tensor, k: int) -> None:
        self.selector, self.memory, self._k = selector, torch.zeros_like(like), k
        self.shares: list[float] = []
        self.energies: list[float] = []
        self.over_exact: list[float] = []
        self.passes: list[float] = []

    def take(self, gradient: Tensor, *, step: int, look: bool) -> float:
        """One step; how long the selector took for it. A look is not part of that time."""
        u = self.memory + gradient if look else None
        took, found = _timed(partial(self.selector.select_remembering, self.memory, gradient, step=step))
        self.shares.append(found.values.numel() / self._k)
        if u is not None:
            kept, exact, whole = _energy(found.values), _energy(largest(u, self._k).values), _energy(u)
            self.energies.append(kept / whole if whole else 1.0)
            self.over_exact.append(kept / exact if exact else 1.0)
            passes = self.selector.passes(u, step=step)
            self.passes += [] if passes is None else [passes]
        return took


def with_feedback(
    source: Source,
    numel: int,
    ratio: float,
    *,
    steps: int = 200,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> list[Row]:
    """All selectors with error feedback, over `steps` gradients of a source; the first tenth of them is not counted.

    >>> from thinwire.lab.study.selector_data import Drawn
    >>> rows = with_feedback(Drawn("gaussian"), 2000, 0.01, steps=20)
    >>> rows[0].selected_over_k, rows[0].memory_over_top_k
    (1.0, 1.0)
    """
    check_feedback(steps)
    gradients = source.stream(numel, seed=seed)
    first, began = next(gradients), steps // 10
    check(first.numel(), ratio)
    k, chosen = _k(first.numel(), ratio), all_selectors(ratio, seed=seed)
    followers = [_Follower(selector, first, k) for selector in chosen]
    taken: dict[str, list[float]] = {name: [] for name in (_ADD, *(selector.name for selector in chosen))}
    added = torch.zeros_like(first)
    every = max(1, (steps - began) // _LOOKS)
    with _one_thread():
        for step, gradient in enumerate(chain([first], islice(gradients, steps - 1))):
            counts = step >= began
            seconds = {_ADD: _timed(partial(torch.add, added, gradient, out=added))[0]}
            for follower in followers:
                look = counts and (step - began) % every == 0
                seconds[follower.selector.name] = follower.take(gradient, step=step, look=look)
            for name, took in seconds.items() if counts else ():
                taken[name].append(took)
            on_step()
    residual = _energy(followers[0].memory) ** 0.5
    return [
        Row(
            data=source.name, numel=first.numel(), density=ratio, selector=follower.selector.name, k=k, steps=steps,
            **_times(taken, follower.selector.name),
            passes=fmean(follower.passes) if follower.passes else None,
            energy=fmean(follower.energies), energy_over_top_k=fmean(follower.over_exact),
            **_spread(follower.shares[began:]),
            memory_over_top_k=_energy(follower.memory) ** 0.5 / residual if residual else 1.0,
        )
        for follower in followers
    ]  # fmt: skip


def _spread(shares: Sequence[float]) -> dict[str, float]:
    ordered, last = sorted(shares), len(shares) - 1
    return {
        "selected_over_k": fmean(shares),
        "low": ordered[round(0.05 * last)],
        "high": ordered[round(0.95 * last)],
        "outside": fmean(_is_outside(share) for share in shares),
    }


# ----------------------------------------------------------------------------------------------------------- checks


def check(numel: int, ratio: float, *, rounds: int = 1) -> None:
    """Refuse what cannot be measured, before anything is allocated."""
    if rounds < 1:
        raise OptionError("--rounds starts at 1")
    if not 0 < ratio < 1:
        raise OptionError(f"a density lies between 0 and 1, not {ratio:g}: use 0.01")
    if numel < _SMALLEST:
        raise OptionError(f"{numel} elements are too few to time: use at least {_SMALLEST}")
    needed, there = _BYTES * numel, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise OptionError(f"{numel} elements need about {needed / 1e9:.0f} GB, here are {there / 1e9:.0f}: use fewer")


def check_feedback(steps: int) -> None:
    if steps < 10:
        raise OptionError(f"--feedback-steps is 0 or at least 10, not {steps}: a memory must fill first")
