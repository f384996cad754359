"""What `auto` chooses from, and what each candidate is worth: the share of a dense step's progress that its step makes.

Unbiased codecs lose little: their noise averages out over steps, as the noise of small batches does. `NOISE` is how
much of a variance is felt: one bit there and back (variance 0.71 of the mean) cost 2.9 % more steps in
benchmarks/2026-11-16-compare-100mbit.json and 0.2 % of the loss in benchmarks/losses_quantized.json. Sparse ones are
worth the energy of the mean gradient that they keep, times `LATE`: the rest is sent too, but later, and under Adam it
then counts for less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ..codecs.sparse import SparseCodec
from ..errors import OptionError, RecipeError
from ..recipe.compose import Recipe, parse
from ..recipe.presets import PRESETS

DENSITIES = (0.1, 0.033, 0.011, 0.004, 0.001)
NOISE = 0.04
LATE = 0.6  # as in `plan/advise.py`
Objective = Literal["time_to_quality", "step_time"]


@dataclass(frozen=True)
class Candidate:
    """A recipe that `auto` may choose, and the family whose messages travel the same way."""

    name: str
    recipe: Recipe

    @property
    def family(self) -> str:
        """Those who tell of each other: by two-shot, messages of 1 % say nothing of what those of all elements take."""
        name = self.recipe.exchange.name
        return f"sparse {name}" if name == "two_shot" and self.density is not None else name

    @property
    def density(self) -> float | None:
        """The share of the elements that is sent; None if all are."""
        codec = self.recipe.codec
        return codec.ratio if isinstance(codec, SparseCodec) else None

    @property
    def unbiased(self) -> bool:
        return self.recipe.dense or self.recipe.unbiased or self.recipe.codec.name in ("bf16", "fp16")

    def worth(self, numel: int, *, workers: int, curve: Sequence[float]) -> float:
        """Its share of a dense step's progress. `curve`: energy of the mean kept at each of `DENSITIES`.

        >>> round(candidate("two-shot-1").worth(1 << 20, workers=4, curve=(0.5, 0.4, 0.3, 0.2, 0.1)), 2)
        0.97
        """
        from ..predict.variance import variance_of_mean  # not for every import of thinwire

        if self.density is not None:
            return LATE * energy_at(self.density, curve)
        variance = variance_of_mean(self.recipe, max(1, numel), workers) if not self.recipe.dense else 0.0
        return 1 / (1 + NOISE * (variance or 0.0))


def candidate(text: str) -> Candidate:
    """A preset by its name, or a recipe as it is written.

    >>> candidate("dense").family, candidate("threshold-k").density
    ('all_reduce', 0.01)
    """
    return Candidate(text, parse(text))


def energy_at(density: float, curve: Sequence[float]) -> float:
    """Between the measured densities: straight in the logarithms of both.

    >>> energy_at(0.1, (0.5, 0.4, 0.3, 0.2, 0.1)), energy_at(1.0, (0.5, 0.4, 0.3, 0.2, 0.1))
    (0.5, 1.0)
    """
    points = [(1.0, 1.0), *zip(DENSITIES, curve, strict=True)]
    for (above, more), (below, less) in itertools.pairwise(points):
        if density >= below:
            share = math.log(density / below) / math.log(above / below)
            return math.exp((1 - share) * math.log(max(less, 1e-9)) + share * math.log(max(more, 1e-9)))
    return curve[-1] * density / DENSITIES[-1]


def _sparse(text: str, name: str) -> list[Candidate]:
    return [Candidate(f"{name} {100 * density:.2g} %", parse(text.format(density))) for density in DENSITIES]


def all_candidates() -> list[Candidate]:
    """Dense first: it is what runs when nothing else pays."""
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
    """What `auto` may do. Build it with `auto(...)`."""

    allow: tuple[Candidate, ...]
    max_error: float
    objective: Objective = "time_to_quality"

    def for_ranks(self, world_size: int) -> list[Candidate]:
        """Those that so many ranks can run; dense is always first."""
        return [one for one in self.allow if one.recipe.refusal(world_size) is None]

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
        allow: the only recipes to choose from, beside dense: presets (`two-shot-4`), families (`two-shot`,
            `threshold-k`) or recipes as text.
        max_error: the largest share of a step's progress that may be given up; 0.95 leaves at least 5 %.
        objective: `time_to_quality` divides the step time by what the step is worth; `step_time` does not.
        unbiased: leave out everything that errs on one side, as sparse recipes do.

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
    return Auto(tuple(known), max_error, objective)


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
