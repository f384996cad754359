"""What is claimed for Global-QSGD, each with a verdict that follows from the measured numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from thinwire import theory
from thinwire.predict.textbook import global_qsgd_pays

from ..page import HOLDS, IN_PART, NOT, NOT_TESTABLE, Claim, shown, spread
from .training import BLOCKS, EXPONENTIAL, LINEAR, POWERSGD, QSGD

_SURE = 3.5  # standard errors: beyond, a difference is taken as real
_SAME = 0.01  # of the dense loss: a smaller difference is none


def all_of(parts: dict[str, Any]) -> list[Claim]:
    return [
        _unbiased(parts["bias"]),
        _bounded(parts["variance"]),
        _without_root(parts["variance"]),
        _second_moment(parts["variance"]),
        _tree_variance(parts["variance"]),
        _fewer(parts["sparsity"]),
        _converges(parts["training"]),
        _beside_others(parts["training"]),
        _one_scale(parts["scales"], parts["training"]),
        _always_pays(parts["payoff"]),
        _model(parts["payoff"]),
        _predicted(parts["payoff"]),
        _speed(parts["payoff"]),
        Claim(
            "Exponential codes cost less than 2 % on NVLink; on an A100, adding a byte of them takes 79 times as long "
            "as a byte of float32.",
            NOT_TESTABLE,
            f"No GPU was used. On one core of this processor the factor is {_slowdown(parts['payoff']['adding']):.1f}.",
        ),
    ]


def graded(checks: Sequence[bool]) -> str:
    """All, some or none of the checks were met."""
    return HOLDS if all(checks) else IN_PART if any(checks) else NOT


# ------------------------------------------------------------------------------------------------- bias and variance


def _unbiased(rows: Sequence[dict[str, Any]]) -> Claim:
    checks, worst = [], 0.0
    for row in rows:
        pooled = math.sqrt(sum(error**2 for error in row["along_error"]))
        away = abs(sum(row["along"])) / pooled if pooled else math.inf
        squares = sum(row["squares"]) / len(row["squares"])
        room = _SURE * math.sqrt(2 / row["numel"] / len(row["squares"])) + 4 / row["draws"]
        checks.append(away < _SURE and abs(squares - 1) < room)
        worst = max(worst, away)
    errors = [100 * error / math.sqrt(len(row["along_error"])) for row in rows for error in row["along_error"]]
    return Claim(
        "Linear and exponential dithering are unbiased, with the L2 norm and with the largest element.",
        graded(checks),
        f"{sum(checks)} of {len(checks)} settings show no bias: along the gradient it is at most {worst:.1f} "
        f"standard errors, which are {min(errors):.3f} to {max(errors):.3f} % of the gradient.",
    )


def _bounded(rows: Sequence[dict[str, Any]]) -> Claim:
    own = [row for row in rows if row["dither"] != "qsgd" and not _is_tree(row)]
    ratios = [spread(row["theta"]).mean / row["bound"] for row in own]
    counts = sorted({row["workers"] for row in own})
    return Claim(
        "The mean's variance is at most θ/n Σ|xᵢ|² with θ = ω(nd) / n: n workers with one scale are one vector of nd "
        "elements (codes added without further rounding).",
        graded([ratio <= 1 for ratio in ratios]),
        f"{counts[0]} to {counts[-1]} workers, {len(own)} cells: θ is {min(ratios):.3f} to {max(ratios):.2f} of its "
        "bound.",
    )


def _without_root(rows: Sequence[dict[str, Any]]) -> Claim:
    own = [row for row in rows if row["dither"] == "linear" and row["norm"] == "l2"]
    ratios = {
        row["workers"]: spread(row["theta"]).mean / (math.sqrt(row["numel"]) / (row["workers"] * row["levels"]))
        for row in own
    }
    most = max(ratios, key=lambda n: ratios[n])
    return Claim(
        "For s levels and the L2 norm, θ = √d / (n s), as a summary of the paper has it, without the √n of the "
        "reduction to one vector (we could not read the paper itself).",
        graded([ratio <= 1 for ratio in ratios.values()]),
        f"Measured θ is up to {ratios[most]:.1f} times that ({most} workers); for √(nd) / (n s) see above.",
    )


def _is_tree(row: dict[str, Any]) -> bool:
    return bool(row["dither"] == "exponential" and row["addition"] == "network")


def _pairs(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The same codes, added in a tree and added exactly."""
    key = ("dither", "norm", "gradients", "workers")
    exact = {tuple(row[k] for k in key): row for row in rows if row["addition"] == "exact"}
    return [(row, exact[tuple(row[k] for k in key)]) for row in rows if _is_tree(row)]


def _second_moment(rows: Sequence[dict[str, Any]]) -> Claim:
    found = []
    for tree, exact in _pairs(rows):
        alike = spread(tree["alike"]).mean
        growth = (alike + spread(tree["theta"]).mean) / (alike + spread(exact["theta"]).mean)
        found.append((growth / theory.exponential_tree_penalty(tree["workers"]), growth, tree["workers"]))
    _, growth, workers = max(found)
    return Claim(
        "Adding exponential codes in a tree multiplies the second moment by at most 9/8 a level, (9/8)^log₂n in total.",
        graded([share <= 1 for share, _, _ in found]),
        f"{sum(share <= 1 for share, _, _ in found)} of {len(found)} cells; nearest to the limit: {growth:.3f} at "
        f"{workers} workers, where {theory.exponential_tree_penalty(workers):.3f} is allowed.",
    )


def _tree_variance(rows: Sequence[dict[str, Any]]) -> Claim:
    pairs = _pairs(rows)
    ratios = [spread(tree["theta"]).mean / exact["bound"] for tree, exact in pairs]
    ours = [spread(tree["theta"]).mean / tree["bound"] for tree, _ in pairs]
    place = max(range(len(ratios)), key=lambda i: ratios[i])
    tree = pairs[place][0]
    return Claim(
        "Exponential dithering has θ of about 1 / (8n), falling with the number of workers (stated for codes that are "
        "added exactly; measured here in the tree that adds them).",
        graded([ratio <= 1 for ratio in ratios]),
        f"θ is up to {ratios[place]:.0f} times that bound ({tree['workers']} "
        f"workers, {tree['gradients']}: {spread(tree['theta']).mean:.4f}), because rounding a sum of gradients that "
        f"are alike does not average out. Our bound with the tree holds (at most {max(ours):.2f} of it)."
        if max(ratios) > 1
        else f"θ is at most {max(ratios):.2f} of it.",
    )


def _fewer(rows: Sequence[dict[str, Any]]) -> Claim:
    even = [row for row in rows if row["gradients"] == "noise"]
    uneven = [row for row in rows if row["gradients"] != "noise"]

    def shares(own: Sequence[dict[str, Any]], over: str, under: str) -> list[float]:
        return [spread(row[over]).mean / spread(row[under]).mean / math.sqrt(row["workers"]) for row in own]

    saved, cost = shares(even, "nonzero_qsgd", "nonzero"), shares(even, "theta", "theta_qsgd")
    other = shares(uneven, "nonzero_qsgd", "nonzero")
    return Claim(
        "With one level and the L2 norm, all workers together send √n times fewer non-zero elements than with QSGD.",
        graded([abs(share - 1) < 0.1 for share in saved]),
        f"{min(saved):.2f} to {max(saved):.2f} of √n if workers' gradients have equal norms, {min(other):.2f} to "
        f"{max(other):.2f} if not. The variance is {min(cost):.2f} to {max(cost):.2f} of √n times QSGD's: a trade, "
        "not a gain.",
    )


# --------------------------------------------------------------------------------------------------------- training


def endings(part: dict[str, Any], recipe: str) -> list[float | None]:
    """Held-out loss of every seed when training has ended."""
    return [curve[-1] for curve in next(row["held_out"] for row in part["rows"] if row["recipe"] == recipe)]


def differences(part: dict[str, Any], recipe: str, other: str = "dense") -> list[float | None]:
    """Held-out loss over that of another recipe, seed by seed."""
    pairs = zip(endings(part, recipe), endings(part, other), strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


def as_good(part: dict[str, Any], recipe: str, other: str = "dense") -> bool:
    """No worse than by chance, or by less than a hundredth of the loss; a run that diverged is worse."""
    found = differences(part, recipe, other)
    if any(one is None for one in found):
        return False
    base, difference = spread(endings(part, other)).mean, spread(found)
    return difference.mean <= _SAME * base or difference.low <= 0 < difference.n - 1


def _converges(part: dict[str, Any]) -> Claim:
    return Claim(
        "Training with linear and with exponential dithering ends about where it ends without compression (published: "
        "top-5 error 8.87 % for both against 7.06 %; perplexity 32.35 and 23.67 against 22.99).",
        graded([as_good(part, LINEAR), as_good(part, EXPONENTIAL)]),
        f"Held-out loss over dense after {part['steps']} steps: linear {shown(differences(part, LINEAR), digits=3)}, "
        f"exponential {shown(differences(part, EXPONENTIAL), digits=3)}; dense has "
        f"{shown(endings(part, 'dense'), digits=3)}. Model, data and optimizer differ from the published ones.",
    )


def _beside_others(part: dict[str, Any]) -> Claim:
    checks = [as_good(part, own, other) for own in (LINEAR, EXPONENTIAL) for other in (QSGD, POWERSGD)]
    told = ", ".join(
        f"{name} {shown(endings(part, recipe), digits=3)}"
        for name, recipe in (
            ("linear", LINEAR), ("exponential", EXPONENTIAL), ("QSGD", QSGD), ("PowerSGD", POWERSGD),
        )
    )  # fmt: skip
    return Claim(
        "It trains as well as QSGD by all-gather and as PowerSGD.",
        graded(checks),
        f"{sum(checks)} of {len(checks)} comparisons per seed; held-out loss: {told}.",
    )


def _one_scale(part: dict[str, Any], training: dict[str, Any]) -> Claim:
    means = {row["block"]: sum(one["nmse"] for one in row["nmse"]) / len(row["nmse"]) for row in part["rows"]}
    block = min(size for size in means if size)
    gain = means[0] / means[block]
    return Claim(
        "One scale for a whole bucket is enough at 8 bits.",
        graded([as_good(training, LINEAR, BLOCKS), gain < 10]),
        f"The error is {gain:,.0f} times that of one scale per {block} elements ({means[0]:.3f} and "
        f"{means[block]:.5f} of the mean gradient's square). Held-out loss over that of blocks of 128: "
        f"{shown(differences(training, LINEAR, BLOCKS), digits=3)}.",
    )


# ---------------------------------------------------------------------------------------------------------- pay-off


def speedups(network: dict[str, Any]) -> dict[str, list[float]]:
    """Of every recipe over plain DDP, repetition by repetition."""
    rows = {row["recipe"]: row["measured_ms"] for row in network["rows"]}
    return {name: [d / own for d, own in zip(rows["ddp"], values, strict=True)] for name, values in rows.items()}


def _slowdown(adding: dict[str, float]) -> float:
    return adding["float_bytes_per_second"] / adding["code_bytes_per_second"]


def pays_below(adding: dict[str, float]) -> float | None:
    """The paper's model for exponential codes: bytes a second of the network below which they pay; None for always."""
    slower = _slowdown(adding) - 4
    return 6 * adding["float_bytes_per_second"] / slower if slower > 0 else None


def _measured_gains(part: dict[str, Any], recipe: str) -> dict[str, float]:
    return {one["network"]: spread(speedups(one)[recipe]).mean for one in part["networks"]}


def _always_pays(part: dict[str, Any]) -> Claim:
    gains = _measured_gains(part, LINEAR)
    told = ", ".join(f"{gain:.2f} on `{network}`" for network, gain in gains.items())
    return Claim(
        "Linear dithering always pays, because adding its integers takes no longer than adding floats.",
        graded([gain > 1 for gain in gains.values()]),
        f"Speed over float32: {told}. Quantising and the second collective cost time.",
    )


def _model(part: dict[str, Any]) -> Claim:
    adding, checks, told = part["adding"], [], []
    gains = _measured_gains(part, EXPONENTIAL)
    for one in part["networks"]:
        link = one["mbit"] * 1e6 / 8
        floats = adding["float_bytes_per_second"]
        model = global_qsgd_pays(link=link, reduction=floats, slowdown=_slowdown(adding))
        gain = gains[one["network"]]
        checks.append(model == (gain > 1))
        told.append(f"`{one['network']}` {'pays' if model else 'does not pay'}, measured {gain:.2f}")
    return Claim(
        "Exponential codes pay if β < 6γ / (ω - 4), with link speed β, speed of addition γ and slow-down ω.",
        graded(checks),
        f"With γ and ω of this machine: {'; '.join(told)} times as fast.",
    )


def _predicted(part: dict[str, Any]) -> Claim:
    errors = [
        row["predicted_ms"] / spread(row["measured_ms"]).mean - 1
        for one in part["networks"]
        for row in one["rows"]
        if row["predicted_ms"] is not None
    ]
    within = [abs(error) <= 0.15 for error in errors]
    return Claim(
        "(ours) `thinwire plan` predicts the step time to within 15 %.",
        graded(within),
        f"{sum(within)} of {len(within)} cells; errors from {min(errors):+.0%} to {max(errors):+.0%}."
        if errors
        else "nothing was predicted",
    )


def _speed(part: dict[str, Any]) -> Claim:
    slowest = min(part["networks"], key=lambda one: float(one["mbit"]))
    gains = speedups(slowest)
    return Claim(
        "Training is up to 3.51 times as fast over PCIe (4 A100) and 3.17 times in a cloud of 64 servers at 0.2 to 1.5 "
        "Gbit/s.",
        NOT_TESTABLE,
        f"Other hardware. Here, {part['workers']} processes on two cores on `{slowest['network']}`: linear "
        f"{shown(gains[LINEAR])}, exponential {shown(gains[EXPONENTIAL])}, QSGD by all-gather {shown(gains[QSGD])} "
        "times as fast as float32, with an all-reduce in a ring instead of the published tree.",
    )
