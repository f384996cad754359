"""The recipes that `auto` chooses from, and how much progress a step of each makes relative to a dense step.

An unbiased codec adds noise that averages out over steps, as the noise of small batches does. `NOISE_COST` is the
progress that a unit of added variance costs: one bit in both directions (variance 0.71 of the mean) needed 2.9 % more
steps in benchmarks/results/2026-11-16-compare-100mbit.json and ended 0.2 % above the dense loss in
benchmarks/results/losses_quantized.json.

A sparse codec makes progress in proportion to the energy of the mean gradient that it keeps. It sends the rest later,
and a late update counts for less under Adam: hence the factor `DELAYED`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import OptionError, RecipeError
from ..predict.variance import variance_of_mean
from ..recipe.compose import Recipe, parse
from ..recipe.presets import PRESETS

if TYPE_CHECKING:
    from ..reduce.reducer import Reducer
    from .tuner import AutoTuner

DENSITIES = (0.1, 0.033, 0.011, 0.004, 0.001)
NOISE_COST = 0.04
DELAYED = 0.6
_SAMPLED = 1 << 14  # elements of a gradient that `energy_curve` reads
Objective = Literal["time_to_quality", "step_time"]


@dataclass(frozen=True)
class Candidate:
    """A recipe that `auto` may choose.

    >>> Candidate("half precision", parse("bf16|all_reduce")).family
    'all_reduce'
    """

    name: str
    recipe: Recipe

    @property
    def family(self) -> str:
        """Candidates whose timings are comparable: one exchange, but sparse and full messages by two-shot differ."""
        name = self.recipe.exchange.name
        return f"sparse {name}" if name == "two_shot" and self.density is not None else name

    @property
    def density(self) -> float | None:
        """The share of elements that is sent; None if all are."""
        return self.recipe.codec.density

    @property
    def unbiased(self) -> bool:
        return self.recipe.dense or self.recipe.unbiased or self.recipe.codec.name in ("bf16", "fp16")

    def progress_per_step(self, numel: int, *, workers: int, curve: Sequence[float]) -> float:
        """Progress of a step relative to a dense step. `curve`: energy of the mean kept at each of `DENSITIES`.

        >>> round(candidate("two-shot-1").progress_per_step(1 << 20, workers=4, curve=(0.5, 0.4, 0.3, 0.2, 0.1)), 2)
        0.97
        """
        if self.density is not None:
            return DELAYED * energy_at(self.density, curve)
        variance = variance_of_mean(self.recipe, max(1, numel), workers) if not self.recipe.dense else 0.0
        return 1 / (1 + NOISE_COST * (variance or 0.0))


def candidate(text: str) -> Candidate:
    """A candidate from the name of a preset or the text of a recipe.

    >>> candidate("dense").family, candidate("threshold-k").density
    ('all_reduce', 0.01)
    """
    return Candidate(text, parse(text))


def energy_at(density: float, curve: Sequence[float]) -> float:
    """The energy kept at any density: linear between measured ones, on logarithmic axes.

    >>> energy_at(0.1, (0.5, 0.4, 0.3, 0.2, 0.1)), energy_at(1.0, (0.5, 0.4, 0.3, 0.2, 0.1))
    (0.5, 1.0)
    """
    points = [(1.0, 1.0), *zip(DENSITIES, curve, strict=True)]
    for (above, more), (below, less) in itertools.pairwise(points):
        if density >= below:
            share = math.log(density / below) / math.log(above / below)
            return math.exp((1 - share) * math.log(max(less, 1e-9)) + share * math.log(max(more, 1e-9)))
    return curve[-1] * density / DENSITIES[-1]


def energy_curve(gradient: torch.Tensor | None) -> list[float]:
    """The share of energy in the largest elements at each of `DENSITIES`, from a sample; empty if it has none.

    >>> [round(share, 2) for share in energy_curve(torch.tensor([3.0, 1.0, -1.0, 1.0, 2.0]))]
    [0.56, 0.56, 0.56, 0.56, 0.56]
    """
    if gradient is None or gradient.numel() < len(DENSITIES):
        return []
    stride = max(1, gradient.numel() // _SAMPLED)
    squares = gradient.detach().reshape(-1)[::stride].float().square().sort(descending=True).values.cumsum(0)
    total = float(squares[-1])
    if not 0 < total < math.inf:
        return []
    places = [max(1, round(density * squares.numel())) - 1 for density in DENSITIES]
    return [float(squares[place]) / total for place in places]


def _sparse(text: str, name: str) -> list[Candidate]:
    return [Candidate(f"{name} {100 * density:.2g} %", parse(text.format(density))) for density in DENSITIES]


def all_candidates() -> list[Candidate]:
    """All candidates. Dense is the first: it runs when nothing else pays."""
    quantized = ["dense", "bf16", "global-qsgd-8", "two-shot-8", "two-shot-4", "two-shot-3", "two-shot-2", "two-shot-1"]
    return [
        *map(candidate, quantized),
        Candidate("global-qsgd-4", parse("global_qsgd:4,block=128|all_reduce")),
        *_sparse("ef|threshold_k:{}|bf16|all_gather", "threshold-k"),
        *_sparse("ef|top_k:{}|shared_top_k", "ar-top-k"),
        *_sparse("ef|top_k:{}|bf16|two_shot:feedback=true", "two-shot-top-k"),
    ]


@dataclass(frozen=True)
class Auto:
    """The options of `auto`. Build them with `auto(...)`.

    >>> str(auto(allow=["bf16"]))
    'auto(dense,bf16;max_error=0.95;time_to_quality)'
    """

    allow: tuple[Candidate, ...]
    max_error: float
    objective: Objective = "time_to_quality"

    def for_ranks(self, world_size: int) -> list[Candidate]:
        """The candidates that `world_size` ranks can run; dense is always first."""
        return [one for one in self.allow if one.recipe.refusal(world_size) is None]

    def bind(self, reducer: Reducer) -> AutoTuner:
        """The policy of a reducer; called on all ranks together."""
        from .tuner import AutoTuner  # loads all predictions, which `import thinwire` should not

        return AutoTuner(self, reducer)

    def __str__(self) -> str:
        names = ",".join(one.name for one in self.allow)
        return f"auto({names};max_error={self.max_error:g};{self.objective})"


def auto(
    *,
    allow: Collection[str] | None = None,
    max_error: float = 0.95,
    objective: Objective = "time_to_quality",
    unbiased: bool = False,
) -> Auto:
    """Choose the recipe while training: `attach(model, auto(...))`, or `attach(model, "auto")` for all defaults.

    Args:
        allow: the recipes to choose from, besides dense: presets (`two-shot-4`), families (`two-shot`, `threshold-k`)
            or recipes as text.
        max_error: the largest share of a step's progress that may be lost; 0.95 keeps at least 5 %.
        objective: `time_to_quality` minimises step time divided by progress per step; `step_time` ignores progress.
        unbiased: exclude biased recipes, such as the sparse ones.

    >>> [one.name for one in auto(allow=["two-shot-4", "bf16"]).allow]
    ['dense', 'bf16', 'two-shot-4']
    >>> auto(allow=["two-shot-five"])
    Traceback (most recent call last):
    thinwire.errors.OptionError: auto does not know two-shot-five: allow dense, bf16, global-qsgd-8, ...
    """
    if not 0 <= max_error < 1:
        raise OptionError(f"max_error is a share from 0 up to 1, not {max_error}")
    if objective not in ("time_to_quality", "step_time"):
        raise OptionError(f"there is no objective {objective}: choose time_to_quality or step_time")
    known = all_candidates()
    if allow is not None:
        known = _allowed([allow] if isinstance(allow, str) else allow, known)
    if unbiased:
        known = [one for one in known if one.unbiased]
    _check_one_memory(known)
    return Auto(tuple(known), max_error, objective)


def _check_one_memory(known: Sequence[Candidate]) -> None:
    """Buckets that travel by different candidates share one memory; it cannot be of two kinds."""
    found = {one.recipe.memory: one for one in known if one.recipe.memory is not None}
    if len(found) > 1:
        (first, one), (second, other), *_ = found.items()
        raise OptionError(
            f"auto keeps residuals in one memory, but {one.name} needs {first} and {other.name} {second}: "
            "allow recipes with the same memory"
        )


def _allowed(words: Collection[str], known: list[Candidate]) -> list[Candidate]:
    wanted, own = {"dense"}, list[Candidate]()
    for word in words:
        found = {one.name for one in known if word in (one.name, one.name.split(" ")[0], one.name.rpartition("-")[0])}
        if not found and ("|" in word or word in PRESETS):
            try:
                own.append(candidate(word))
            except RecipeError as problem:
                raise OptionError(f"auto cannot allow {word}: {problem}") from None
        elif not found:
            names = dict.fromkeys(one.name.split(" ")[0] for one in known)
            raise OptionError(f"auto does not know {word}: allow {', '.join(names)}, or a recipe as text")
        wanted |= found
    return [one for one in known if one.name in wanted] + own
