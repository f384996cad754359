"""The first half of the page top-k: whether it trains, which shape u has, what the bounds promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist

from thinwire.lab.draw import Line, lines
from thinwire.lab.study.result import WORDS, percent

from ..page import Page, shown, spread
from . import claims
from .claims import NAMES
from .looks import Found

# ---------------------------------------------------------------------------------------------------------- convergence


def convergence(made: Page, part: Found) -> None:
    runs, seeds = part["runs"], {run["seed"] for run in part["runs"]}
    accuracies, dense = claims.accuracies(part), claims.accuracies(part)["dense", None]
    made.heading("Does it train?")
    made.text(
        f"A network of {runs[0]['parameters']:,} parameters on {part['data']}, {part['workers']} simulated workers "
        f"with batches of {part['batch']}, {part['steps']} steps, {len(seeds)} runs of each. As in the paper: SGD with "
        "momentum 0.9 and weight decay 1e-4, a warm-up, error feedback with every selector. Biases are not compressed. "
        f"The learning rate is {part['runs'][0]['rate']:g} for all and was not tuned. Random-k diverged with it in a "
        "trial, so it also runs with a fifth of it, and its better result counts. Gaussian-k did not get the smaller "
        "rate, which may have cost it accuracy at the lower density. The paper trains for 70 to 140 epochs. In this "
        "number of steps, an element with a density of 0.1 % has hardly been sent."
    )
    made.table(
        ["selector", "density", "accuracy, all held-out images (%)", "less than dense (points)", "loss at the end"],
        [
            [
                NAMES[name],
                "-" if density is None else percent(density),
                shown([100 * one for one in found], digits=1),
                "-" if name == "dense" else shown([100 * (a - b) for a, b in zip(dense, found, strict=True)], digits=1),
                shown([run["curve"][-1][1] for run in claims.runs_of(part, name, density)], digits=2),
            ]
            for (name, density), found in accuracies.items()
        ],
    )
    for density in sorted({run["density"] for run in runs if run["density"] is not None}):
        series = [_curve(part, name, None if name == "dense" else density) for name in NAMES if name in claims.TRAINED]
        made.chart(
            f"accuracy-{density:g}".replace(".", ""),
            lines(
                series, title=f"Accuracy while training, density {percent(density)}", across="step", down="accuracy (%)"
            ),
            caption=f"Accuracy on part of the held-out images, with {percent(density)} of the elements sent per step.",
        )


def _curve(part: Found, name: str, density: float | None) -> Line:
    runs = claims.runs_of(part, name, density)
    steps = [point[0] for point in runs[0]["curve"]]
    over = [spread([100 * run["curve"][place][2] for run in runs]) for place in range(len(steps))]
    return Line(NAMES[name], steps, [s.mean for s in over], [s.low for s in over], [s.high for s in over])


# --------------------------------------------------------------------------------------------------------------- shapes


def _kinds(part: Found) -> Iterator[tuple[str, list[Found]]]:
    """The runs of all seeds, by what was trained how."""
    grouped: dict[str, list[Found]] = {}
    for run in part["runs"]:
        how = "dense" if run["density"] is None else f"Top-k {percent(run['density'])} with feedback"
        grouped.setdefault(f"{run['workload']}, {how}", []).append(run)
    yield from grouped.items()


def _wholes(runs: Sequence[Found], place: int) -> list[Found]:
    return [run["samples"][place]["whole"] for run in runs if run["samples"][place]["whole"]["finite"]]


def shapes(made: Page, part: Found) -> None:
    made.heading("Which shape does u have?")
    made.text(
        "`thinwire study gradients` on u of one worker: the network above (images), and the byte-level transformer of "
        "`thinwire compare` with Adam (gpt). Excess kurtosis is 0 for a Gaussian and 3 for a Laplace density. *Out of "
        "place* is the share of the mass that has to move to leave one mode. KS is the largest distance between "
        "the fitted and the empirical distribution function. The best fit is by likelihood, with a penalty for "
        "parameters."
    )
    rows = []
    for how, runs in _kinds(part):
        for place, sample in enumerate(runs[0]["samples"]):
            wholes = _wholes(runs, place)
            best = Counter(WORDS[one["best"]] for one in wholes)
            rows.append(
                [
                    how,
                    str(sample["step"]),
                    shown([100 * one["memory_share"] for one in wholes], digits=0),
                    shown([one["kurtosis"] for one in wholes], digits=1),
                    claims.fixed([100 * one["out_of_place"] for one in wholes], digits=3),
                    ", ".join(f"{name} {count}" for name, count in best.most_common()),
                    shown([one["fits"]["gaussian"]["ks"] for one in wholes if one["fits"]], digits=3),
                    shown([one["fits"][one["best"]]["ks"] for one in wholes if one["fits"]], digits=3),
                ]
            )
    heads = ["training", "step", "residual in u (% of energy)", "excess kurtosis", "out of place (%)"]
    made.table([*heads, "best fit (seeds)", "KS of the Gaussian", "KS of the best"], rows)
    made.chart(
        "kurtosis",
        lines(
            [
                Line(
                    how,
                    [sample["step"] for sample in runs[0]["samples"]],
                    [
                        spread([one["kurtosis"] for one in _wholes(runs, i)]).mean
                        for i in range(len(runs[0]["samples"]))
                    ],
                    dashed="feedback" in how,
                )
                for how, runs in _kinds(part)
            ],
            title="Excess kurtosis of u during training",
            across="step",
            down="excess kurtosis",
            log_y=True,
        ),
        caption="Means over the seeds; dashed: with error feedback.",
    )
    made.chart(
        "shape",
        lines(
            [*_histograms(part), _bell()],
            title="u of the whole model at the last sample, first seed",
            across="u over its standard deviation",
            down="density",
            log_y=True,
        ),
        caption="Histograms of 99 % of the elements, in units of the standard deviation; dashed: a Gaussian.",
    )


def _histograms(part: Found) -> Iterator[Line]:
    for how, runs in _kinds(part):
        whole = runs[0]["samples"][-1]["whole"]
        if whole["finite"] and whole["std"]:
            found, std = whole["histogram"], whole["std"]
            width = (found["high"] - found["low"]) / len(found["counts"])
            total = sum(found["counts"]) + found["outside"]
            centres = [(found["low"] + (i + 0.5) * width) / std for i in range(len(found["counts"]))]
            yield Line(how, centres, [count * std / (total * width) or None for count in found["counts"]])


def _bell() -> Line:
    places = [place / 10 for place in range(-35, 36)]
    return Line("Gaussian", places, [NormalDist().pdf(place) for place in places], dashed=True)


# --------------------------------------------------------------------------------------------------------------- bounds


def bounds(made: Page, part: Found) -> None:
    made.heading("How much does Top-k drop?")
    made.text(
        "The energy that Top-k drops, |u - TopK(u)|² / |u|², for the whole model: mean over seeds and over all samples "
        "after the first step. Two bounds: the classic 1 - k/d, and the paper's (1 - k/d)². delta is the share that is "
        "sent; the bounds guarantee k/d and 1 - (1 - k/d)². In brackets: delta over k/d, which is 1 by the classic "
        "bound and about 2 by the paper's."
    )
    tables = {how: table for how, runs in _kinds(part) if (table := claims.contraction(runs))}
    first = next(iter(tables.values()))
    rows = []
    for density, bounds in first.items():
        cells = [_left(table[density]["top_k"], density) for table in tables.values()]
        rows.append([percent(density), f"{_mean(bounds['classic']):.3f}", f"{_mean(bounds['bell']):.3f}", *cells])
    made.table(["k/d", "1 - k/d", "(1 - k/d)²", *tables], rows)
    made.chart(
        "delta",
        lines(
            [
                *(_delta(table, "top_k", how, dashed="feedback" in how) for how, table in tables.items()),
                _delta(first, "bell", "the paper's bound"),
                _delta(first, "classic", "the classic bound"),
                _delta(first, "random_k", "Random-k", dashed=True),
            ],
            title="Share of the energy that is sent",
            across="density k/d",
            down="delta",
            log_x=True,
            log_y=True,
        ),
        caption="Measured deltas of Top-k (dashed: with error feedback) and Random-k, and the two bounds.",
    )


def _left(values: Sequence[float], density: float) -> str:
    return f"{_mean(values):.3f} ({(1 - _mean(values)) / density:.1f})"


def _delta(table: Mapping[float, Mapping[str, Sequence[float]]], key: str, name: str, *, dashed: bool = False) -> Line:
    return Line(name, list(table), [1 - _mean(found[key]) for found in table.values()], dashed=dashed)


def _mean(values: Sequence[float]) -> float:
    return spread(values).mean
