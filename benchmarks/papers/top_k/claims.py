"""The claims of the page top-k, each with a verdict that is computed from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.lab.study.result import percent

from ..page import HOLDS, IN_PART, NOT, NOT_TESTABLE, Claim, Spread, shown, spread
from . import looks
from .looks import Found

NAMES = {
    "dense": "dense",
    "top_k": "Top-k",
    "gaussian_k": "Gaussian-k",
    "threshold_k": "threshold-k",
    "dgc_k": "DGC-k",
    "random_k": "Random-k",
}
TRAINED = ("dense", "top_k", "gaussian_k", "threshold_k", "random_k")
PUBLISHED = {"dense": (1.19, 2.33), "top_k": (1.36, 3.63), "dgc_k": (1.11, 1.51)}  # factors, as recalled
_POINTS = 0.01  # of accuracy that count as the same
_FAR = 0.05  # and that count as far behind
_SELDOM = 0.1  # of tensors or steps


def _verdict(each: Sequence[bool]) -> str:
    """Of one claim tried in several settings."""
    return HOLDS if all(each) else IN_PART if any(each) else NOT


# --------------------------------------------------------------------------------------------------- reading the parts


def runs_of(part: Found, name: str, density: float | None) -> list[Found]:
    """The runs of all seeds; of several learning rates those of the best mean accuracy."""
    mine = [run for run in part["runs"] if (run["selector"], run["density"]) == (name, density)]
    rates = dict.fromkeys(run["rate"] for run in mine)
    by_rate = [[run for run in mine if run["rate"] == rate] for rate in rates]
    return max(by_rate, key=lambda runs: spread([run["accuracy"] for run in runs]).mean)


def accuracies(part: Found) -> dict[tuple[str, float | None], list[float]]:
    keys = dict.fromkeys((run["selector"], run["density"]) for run in part["runs"])
    return {key: [run["accuracy"] for run in runs_of(part, *key)] for key in keys}


def _behind(part: Found, name: str, than: str, density: float) -> Spread:
    """How much accuracy a selector lacks against another, by seed."""
    found = accuracies(part)
    other = found[than, None if than == "dense" else density]
    return spread([a - b for a, b in zip(other, found[name, density], strict=True)])


def _densities(part: Found) -> list[float]:
    return sorted({run["density"] for run in part["runs"] if run["density"] is not None})


def _told(behind: Spread) -> str:
    open_ = " (not significant)" if behind.n > 1 and behind.low <= 0 <= behind.high else ""
    return f"{100 * behind.mean:.1f} ± {100 * behind.half:.1f} points{open_}"


def contraction(runs: Sequence[Found]) -> dict[float, dict[str, list[float]]]:
    """By density, what Top-k and Random-k leave out of the whole model, the classic bound and the paper's.

    At every look but that at the first step, when no memory holds anything yet.
    """
    found: dict[float, dict[str, list[float]]] = {}
    for run in runs:
        for sample in run["samples"]:
            for row in sample["whole"]["contraction"] if sample["step"] and sample["whole"]["finite"] else ():
                kept = found.setdefault(row["density"], {})
                for key in ("top_k", "random_k", "classic", "bell"):
                    kept.setdefault(key, []).append(row[key])
    return found


def by_seed(rows: Sequence[Found], key: str, *, times: float = 1.0) -> list[float]:
    """The mean over rows of each seed."""
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [times * spread([row[key] for row in rows if row["seed"] == seed]).mean for seed in seeds]


def faster(network: Found, than: str) -> list[float]:
    """Step time of another selector over that of Gaussian-k, per seed."""
    steps = {row["name"]: row["step_ms"] for row in network["rows"]}
    return [theirs / mine for theirs, mine in zip(steps[than], steps["gaussian_k"], strict=True)]


def fixed(values: Sequence[float], *, digits: int = 2) -> str:
    """`0.98 ± 0.01`, also where the interval is nothing: for shares, of which more digits mean nothing."""
    found = spread(values)
    if found.n < 2:
        return shown(values, digits=digits)
    return f"{found.mean:.{digits}f} ± {found.half:.{digits}f}"


# -------------------------------------------------------------------------------------------------------------- claims


def all_of(parts: Found) -> list[Claim]:
    """In the order of the page."""
    trained, shape, chosen = parts["convergence"], parts["shape"], parts["selectors"]
    return [
        _like_dense(trained),
        _random_is_worse(trained),
        _one_hump(shape),
        _gaussian(shape),
        _bound(shape),
        _bound_explains(shape),
        _gaussian_finds_k(chosen),
        _gaussian_is_quick(chosen),
        _gaussian_trains(trained),
        *(_speed(parts["end_to_end"], than) for than in PUBLISHED),
        Claim(
            "Accuracy within a fraction of a point after 140 epochs of CIFAR-10 and 70 of ImageNet, on 16 GPUs.",
            NOT_TESTABLE,
            f"No GPU and none of these data sets here; the runs above have {trained['steps']} steps.",
        ),
    ]


def _like_dense(part: Found) -> Claim:
    behind = {density: _behind(part, "top_k", "dense", density) for density in _densities(part)}
    same = [one.mean <= _POINTS for one in behind.values()]
    why = ", ".join(f"{_told(one)} behind dense at {percent(density)}" for density, one in behind.items())
    why += f", after {part['steps']} steps; up to {100 * _POINTS:.0f} point counts as equal."
    return Claim("TopK-SGD with error feedback converges about as well as dense SGD.", _verdict(same), why)


def _random_is_worse(part: Found) -> Claim:
    behind = {density: _behind(part, "random_k", "top_k", density) for density in _densities(part)}
    worse = [one.low > _FAR for one in behind.values()]
    why = ", ".join(f"{_told(one)} behind Top-k at {percent(density)}" for density, one in behind.items())
    said = "RandomK-SGD at the same density is far behind TopK-SGD, though both have the same classic bound."
    return Claim(said, _verdict(worse), f"{why}, at the better of its two learning rates.")


def _one_hump(part: Found) -> Claim:
    counts = looks.all_counts(part)
    share = min(counts["one_hump"], counts["falls"]) / counts["looks"]
    verdict = HOLDS if share >= 0.95 else IN_PART if share >= 0.5 else NOT
    why = (
        f"One hump in {counts['one_hump']} of {counts['looks']} samples (whole models and layers); the density of |u| "
        f"falls from 0 on in {counts['falls']}."
    )
    return Claim("u is bell-shaped during training: one hump, around 0.", verdict, why)


def _gaussian(part: Found) -> Claim:
    fits = looks.all_counts(part)["best"]
    best, fitted = fits.get("gaussian", 0), sum(fits.values())
    share = best / fitted if fitted else 0.0
    wholes = [s["whole"] for run in part["runs"] for s in run["samples"] if s["whole"]["finite"]]
    kurtosis = sorted(whole["kurtosis"] for whole in wholes)
    why = (
        f"Of Gaussian, Laplace and Student t, the Gaussian fits best in {best} of {fitted} samples; excess kurtosis "
        f"of whole models is {kurtosis[0]:.1f} to {kurtosis[-1]:.1f}."
    )
    verdict = HOLDS if share >= 0.9 else IN_PART if share >= 0.5 else NOT
    return Claim("A Gaussian describes u well enough to place the threshold by its quantile.", verdict, why)


def _bound(part: Found) -> Claim:
    counts = looks.all_counts(part)
    tests, holds = counts["tests"], counts["bell_holds"]
    verdict = HOLDS if holds == tests else IN_PART if holds >= 0.9 * tests else NOT
    why = f"Held in {holds} of {tests} tests (samples times densities); 1 - k/d in {counts['classic_holds']}."
    return Claim("Top-k leaves out at most (1 - k/d)² of the energy of a bell-shaped u.", verdict, why)


def _bound_explains(part: Found) -> Claim:
    found = contraction(part["runs"])
    density = min(found)
    pairs = zip(found[density]["top_k"], found[density]["bell"], strict=True)
    over = [(1 - left) / (1 - bound) for left, bound in pairs]
    verdict = NOT if min(over) < 1 else HOLDS if max(over) < 2 else IN_PART
    why = (
        f"At {percent(density)}, the measured delta is {min(over):.0f} to {max(over):.0f} times what (1 - k/d)² "
        "guarantees; that is about twice the classic guarantee."
    )
    return Claim("The tighter bound explains why Top-k works so well.", verdict, why)


def _gaussian_finds_k(part: Found) -> Claim:
    rows = [row for row in part["rows"] if row["selector"] == "gaussian_k"]
    plain = [row for row in rows if row["steps"] == 0]
    fed = [row for row in rows if row["steps"]]
    near = [spread([row["outside"] for row in some]).mean < _SELDOM for some in (plain, fed)]
    once = sum(row["outside"] < 0.5 for row in plain)
    sent = sorted(row["selected_over_k"] for row in fed)
    why = (
        f"Without a residual it chose 2/3 k to 4/3 k in {once} of {len(plain)} tensors; with error feedback "
        f"{percent(spread([row['outside'] for row in fed]).mean)} of the steps were outside, by data "
        f"{sent[0]:.2f} to {sent[-1]:.2f} k on average."
    )
    return Claim("GaussianK's threshold chooses about k elements.", _verdict(near), why)


def _gaussian_is_quick(part: Found) -> Claim:
    size = max(part["sizes"])
    rows = [row for row in part["rows"] if row["steps"] == 0 and row["numel"] == size]
    taken = {
        name: by_seed([r for r in rows if r["selector"] == name], "x_top_k") for name in ("torch.topk", "gaussian_k")
    }
    against = {
        "torch.topk": spread([a / b for a, b in zip(taken["torch.topk"], taken["gaussian_k"], strict=True)]),
        "our exact Top-k": spread([1 / b for b in taken["gaussian_k"]]),
    }
    why = ", ".join(f"{one.mean:.2f} ± {one.half:.2f} times as fast as {name}" for name, one in against.items())
    said = "GaussianK, of linear cost, chooses much quicker than exact Top-k."
    return Claim(said, _verdict([one.low > 1 for one in against.values()]), f"{why}, at {size:,} elements on a CPU.")


def _gaussian_trains(part: Found) -> Claim:
    behind = {density: _behind(part, "gaussian_k", "top_k", density) for density in _densities(part)}
    same = [one.mean <= _POINTS for one in behind.values()]
    why = ", ".join(f"{_told(one)} behind Top-k at {percent(density)}" for density, one in behind.items())
    return Claim("GaussianK-SGD converges about as well as TopK-SGD.", _verdict(same), f"{why}.")


def _speed(part: Found, than: str) -> Claim:
    low, high = PUBLISHED[than]
    found = {network["network"]: faster(network, than) for network in part["networks"]}
    reached = [spread(ratios).low >= low for ratios in found.values()]
    why = ", ".join(f"{shown(ratios, digits=2)} on {network}" for network, ratios in found.items())
    other = {"dense": "Dense-SGD", "top_k": "TopK-SGD", "dgc_k": "DGC-SGD"}[than]
    said = f"GaussianK-SGD is {low} to {high} times as quick as {other} end to end (as recalled; 16 V100, 10 Gbit/s)."
    return Claim(said, _verdict(reached), f"Factors here: {why}; other hardware, other models.")
