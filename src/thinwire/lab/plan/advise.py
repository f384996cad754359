"""Advice before training: whether compression pays, with which recipe, by how much, how sure, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...codecs.base import Shape
from ...errors import ThinwireError
from ...predict.cost import TORCHS_OWN, Prediction, predict
from ...predict.devices import Device
from ...predict.network import NetworkModel
from ...predict.variance import variance_of_mean
from ...predict.workload import Profile
from ...recipe.compose import Recipe, parse
from ...recipe.presets import PRESETS

WORTH = 1.05  # a recipe is advised from this predicted speed-up over plain DDP on
CLOSE = 1.05  # of recipes within this factor of the fastest, the most exact one is advised
_BEST = 3
_PAYS_IN_STEPS = 0.6  # progress of a step that is assumed of a biased recipe
RECIPES = ("ddp", "torch-fp16", *(name for name in PRESETS if name != "dense"))


@dataclass(frozen=True)
class Row:
    """One recipe of a plan."""

    recipe: str
    prediction: Prediction
    price: str  # its cost in progress, by theory
    exactness: float  # 1 for what DDP does, less the coarser it is: 1 / (1 + omega), or delta
    biased: bool
    speedup: float  # over plain DDP, per step

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "predicted_ms": 1e3 * self.prediction.step,
            "speedup_over_ddp": self.speedup,
            "sent_bytes": self.prediction.sent_bytes,
            "compute_ms": 1e3 * self.prediction.compute,
            "coding_ms": 1e3 * self.prediction.coding,
            "exchange_ms": 1e3 * self.prediction.exchange,
            "exposed_ms": 1e3 * self.prediction.exposed,
            "price": self.price,
        }


@dataclass(frozen=True)
class Plan:
    """All recipes, fastest first; the advised one, and the reasons in words."""

    rows: tuple[Row, ...]
    advised: Row
    verdict: str
    why: str
    sure: str
    refused: dict[str, str]

    @property
    def quickest(self) -> Row:
        return self.rows[0]

    @property
    def marked(self) -> tuple[str, ...]:
        """The best three, the advised one first."""
        others = [row.recipe for row in self.rows if row.recipe != self.advised.recipe]
        return (self.advised.recipe, *others[: _BEST - 1])

    def as_dict(self) -> dict[str, Any]:
        return {
            "advised": self.advised.recipe,
            "quickest": self.quickest.recipe,
            "verdict": self.verdict,
            "why": self.why,
            "sure": self.sure,
            "marked": list(self.marked),
            "rows": [row.as_dict() for row in self.rows],
            "refused": self.refused,
        }


def make_plan(
    profile: Profile,
    network: NetworkModel,
    device: Device,
    *,
    workers: int,
    recipes: Sequence[str] = RECIPES,
) -> Plan:
    """Predict every recipe and advise one. Plain DDP is always among them.

    >>> from thinwire.predict.workload import of_size
    >>> slow = make_plan(of_size(25_600_000, 0.12), NetworkModel.named("1gbe"), Device.named("a100"), workers=8)
    >>> slow.verdict
    'Compression pays: 10.8x faster steps than plain DDP with two-shot-1-2.'
    >>> fast = make_plan(of_size(1_000_000, 0.5), NetworkModel.named("100gbe"), Device.named("a100"), workers=2)
    >>> fast.verdict
    'Stay with plain DDP: nothing is predicted to be 5 % faster.'
    """
    predicted, refused = dict[str, Prediction](), dict[str, str]()
    for name in dict.fromkeys(("ddp", *recipes)):
        try:
            predicted[name] = predict(name, profile, network, device, workers=workers)
        except ThinwireError as problem:
            refused[name] = str(problem)
    rows = [_row(name, one, predicted["ddp"], profile, workers) for name, one in predicted.items()]
    rows.sort(key=lambda row: row.prediction.step)
    plain = next(row for row in rows if row.recipe == "ddp")
    advised = _advised(rows, plain)
    verdict = (
        f"Compression pays: {advised.speedup:.1f}x faster steps than plain DDP with {advised.recipe}."
        if advised is not plain
        else "Stay with plain DDP: nothing is predicted to be 5 % faster."
    )
    return Plan(tuple(rows), advised, verdict, _why(advised, plain, workers), _sure(profile, network, device), refused)


def _advised(rows: Sequence[Row], plain: Row) -> Row:
    """The least time to the same progress: unbiased rows by step time, biased ones only if they are far faster."""
    worth = [row for row in rows if row.speedup >= WORTH and not row.biased]
    if worth:
        quickest = worth[0].prediction.step
        return max((row for row in worth if row.prediction.step <= CLOSE * quickest), key=lambda row: row.exactness)
    biased = [row for row in rows if row.speedup * _PAYS_IN_STEPS >= WORTH]
    return biased[0] if biased else plain


def _row(name: str, prediction: Prediction, dense: Prediction, profile: Profile, workers: int) -> Row:
    largest = max(profile.buckets, key=lambda bucket: bucket.numel)
    shape = max(largest.shapes, key=math.prod, default=None)
    price, exactness, biased = statistical_price(name, max(1, largest.numel), workers=workers, shape=shape)
    return Row(name, prediction, price, exactness, biased, dense.step / prediction.step)


def statistical_price(
    name: str, numel: int, *, workers: int = 4, shape: Shape | None = None
) -> tuple[str, float, bool]:
    """The cost of a recipe in progress by theory, in words and as a number, and whether it is biased.

    >>> statistical_price("two-shot-4", 1 << 20)[0]
    'unbiased, variance 0.013 |g|^2 in the mean'
    >>> statistical_price("top-k", 1 << 20)[0]
    'biased, keeps at least 1.00 % of |u|^2 a step; the rest is sent later'
    """
    if name in TORCHS_OWN:
        return ("none" if name == "ddp" else "rounded to half precision"), 1.0, False
    recipe = parse(name)
    if recipe.dense:
        return "none", 1.0, False
    if _is_rounding(recipe):
        return "rounded to half precision", 1.0, False
    later = "; the rest is sent later" if recipe.memory is not None else "; the rest is lost"
    variance = variance_of_mean(recipe, numel, workers)
    if variance is not None:
        kept = later if recipe.memory is not None else ""
        word = "unbiased, " if recipe.memory is None else ""
        return f"{word}variance {variance:.3f} |g|^2 in the mean{kept}", 1 / (1 + variance), False
    delta = recipe.codec.delta(numel, shape=shape)
    if delta:
        return f"biased, keeps at least {100 * delta:.2f} % of |u|^2 a step{later}", delta, True
    return f"biased, without a bound for one step{later}", 0.0, True


def _is_rounding(recipe: Recipe) -> bool:
    return recipe.codec.name in ("bf16", "fp16")


def _why(advised: Row, plain: Row, workers: int) -> str:
    """The reason in words, with the numbers that decide."""
    dense, best = plain.prediction, advised.prediction
    first = (
        f"With {workers} workers, plain DDP takes {_time(dense.step)} a step: {_time(dense.compute)} of computing and "
        f"{_time(dense.exposed)} of exposed communication (its messages take {_time(dense.exchange)})."
    )
    if advised is plain:
        return f"{first} Compression would save less than it costs."
    return (
        f"{first} {advised.recipe} sends {_bytes(best.sent_bytes)} instead of {_bytes(dense.sent_bytes)}: its messages "
        f"take {_time(best.exchange)}, compression takes {_time(best.coding)}, a step takes {_time(best.step)}."
    )


def _sure(profile: Profile, network: NetworkModel, device: Device) -> str:
    """How far to trust the numbers, by their source."""
    said = []
    if network.measured:
        worst = max(fit.error for fit in network.fits.values())
        said.append(f"the network was measured between {network.ranks} ranks (fitted within {worst:.0%})")
    else:
        said.append("the network is priced by the book: probe it to know what gloo or NCCL really take")
    said.append("the step was measured here" if profile.measured else "the step time was given")
    said.append(
        f"the speed of {device.name} is from its data sheet, not measured"
        if device.stated
        else "compression was timed on this machine"
    )
    return f"How sure: {'; '.join(said)}."


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
