"""The page top-k: "Understanding Top-k Sparsification in Distributed Deep Learning" measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

from thinwire.lab.study.result import WORDS, percent

from . import top_k_claims as claims
from . import top_k_costs as costs
from .chart import Line, lines
from .page import Page, shown, spread
from .run import Options
from .top_k_claims import NAMES, Found

PARTS = ("convergence", "shape", "selectors", "end_to_end")
_PAPER = (
    "Shi, Chu, Cheung and See, *Understanding Top-k Sparsification in Distributed Deep Learning*, 2019, "
    "[arXiv 1911.08772](https://arxiv.org/abs/1911.08772). It looks at what Top-k with error feedback chooses from, "
    "tightens the bound of what it leaves out, and proposes GaussianK, which guesses the threshold from mean and "
    "standard deviation. u is what a worker chooses from: its gradient and what it has not sent yet; d is the length "
    "of u, k how many elements are sent, k/d the density."
)


def measure(part: str, options: Options) -> Any:
    """One part, measured."""
    from . import top_k_runs

    return getattr(top_k_runs, part)(options)


def page(found: dict[str, Any]) -> Page:
    """The page of what was measured."""
    made = Page.for_run(found, title="Top-k understood", paper=_PAPER)
    parts: Mapping[str, Any] = found["parts"]
    _convergence(made, parts["convergence"])
    _shapes(made, parts["shape"])
    _bounds(made, parts["shape"])
    costs.one_tensor(made, parts["selectors"])
    costs.feedback(made, parts["selectors"])
    costs.steps(made, parts["end_to_end"])
    made.claims(claims.all_of(parts))
    return made


# ---------------------------------------------------------------------------------------------------------- convergence


def _convergence(made: Page, part: Found) -> None:
    runs, seeds = part["runs"], {run["seed"] for run in part["runs"]}
    accuracies, dense = claims.accuracies(part), claims.accuracies(part)["dense", None]
    made.heading("Does it train?")
    made.text(
        f"A network of {runs[0]['parameters']:,} parameters on {part['data']}, {part['workers']} simulated workers "
        f"with batches of {part['batch']}, {part['steps']} steps, {len(seeds)} runs of each. As in the paper, SGD with "
        "momentum 0.9 and weight decay 1e-4, a warm-up, and error feedback with every selector; biases travel exact. "
        f"The learning rate is {part['runs'][0]['rate']:g} for all and was tuned for none. Random-k diverged with it "
        "in a trial, so it also gets a fifth, and the better of its two results on held-out images counts. Gaussian-k "
        "did not get the smaller rate, which may have cost it something at the lower density. The paper trains for 70 "
        "to 140 epochs; in so few steps an element that is sent once in a thousand has hardly been sent."
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
            caption=f"Accuracy on a part of the held-out images, {percent(density)} of the elements sent at each step.",
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


def _shapes(made: Page, part: Found) -> None:
    made.heading("What shape has u?")
    made.text(
        "`thinwire study gradients` on u of one worker, the same network (images) and the byte-level transformer of "
        "`thinwire compare` (gpt, Adam). Excess kurtosis is 0 for a Gaussian and 3 for a Laplace density; out of place "
        "is the share of the mass that would have to move to leave one hump; KS is the largest distance between the "
        "fitted and the real distribution function; the best fit is by likelihood, with a penalty for parameters."
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
    heads = ["training", "step", "memory in u (% of energy)", "excess kurtosis", "out of place (%)"]
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
            title="u of the whole model at the last look, first seed",
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


def _bounds(made: Page, part: Found) -> None:
    made.heading("What does Top-k leave out?")
    made.text(
        "|u - TopK(u)|² / |u|² of the whole model, mean over seeds and looks after the first step, beside the "
        "classic bound 1 - k/d and the paper's (1 - k/d)². delta is what is not left out; the bounds promise k/d and "
        "1 - (1 - k/d)². In brackets, delta over k/d, of which the classic bound promises 1 and the paper's about 2."
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
