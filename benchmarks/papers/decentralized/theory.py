"""Two sections of the page on decentralised training: where DCD breaks, the speed-up in the number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from thinwire.lab.draw import Line, lines

from ..page import Page, shown, spread
from . import facts
from .facts import mean
from .sections import NAMES, told

# ------------------------------------------------------------------------------------------------ where DCD breaks


def noise(page: Page, part: dict[str, Any]) -> None:
    page.heading("Where DCD breaks, and what predicts it")
    page.text(
        "Noise is |C(z) - z|² / |z|² of a sent message, measured in every step. `noise_limit()` is where, by our "
        "theory, the workers of DCD begin to drift apart in mean square, if each draws its noise independently. "
        "`published_noise_limit()` is (1 - ρ)² / 4μ², below which the paper proves convergence."
    )
    page.text(
        "**Without gradients.** Workers start at random and only average. The table shows the factor by which the "
        "energy of their disagreement grows per step, and in brackets what the theory predicts from the measured "
        "noise. The density of `random_k` is set to give the limit times a factor."
    )
    talking = part["talking"]
    graphs = list(dict.fromkeys(row["topology"] for row in talking))
    limits = {row["topology"]: row for row in talking}
    columns = [
        f"{name}, limit {limits[name]['limit']:.3f}, published {limits[name]['published']:.2g}" for name in graphs
    ]
    by_graph = {name: [row for row in talking if row["topology"] == name] for name in graphs}
    page.table(
        ["codec", *columns],
        [
            [
                facts.talk_name(group[0]),
                *(f"{mean(row['growth']):.2f} ({mean(row['predicted']):.2f})" for row in group),
            ]
            for group in zip(*by_graph.values(), strict=True)
        ],
    )
    own = [row for row in talking if facts.drawn_apart(row)]
    page.chart(
        "growth",
        lines(
            [
                *(
                    _points(name, [(facts.load(row), mean(row["growth"])) for row in own if row["topology"] == name])
                    for name in graphs
                ),
                _level(own),
            ],
            title="Growth of disagreement per step, without gradients",
            across="noise / noise_limit()",
            down="growth",
            log_x=True,
        ),
        caption="Above 1, workers drift apart. All codecs of the table except the one with shared positions.",
    )
    page.text(_talking_score(talking))
    _learning(page, part)


def _learning(page: Page, part: dict[str, Any]) -> None:
    page.text(
        f"**While learning.** DCD with {len({row['codec'] for row in part['learning']})} codecs, {part['steps']} steps "
        "of the runs above on iid shards, sorted by noise over the limit. *Loss* is that of the average model over "
        f"that of D-PSGD on the same graph. A row *breaks* if this is above {facts.BROKEN:g} or the run was stopped "
        "(†). *Averaging only* is the noise of the same codec in a model of this size whose workers disagree and learn "
        "nothing."
    )
    learning = sorted(part["learning"], key=facts.load)
    page.table(
        [
            "graph",
            "codec",
            "noise",
            "over limit",
            "over published",
            "averaging only: over limit",
            "loss over D-PSGD's",
            "breaks",
        ],
        [
            [
                row["topology"],
                f"`{row['codec']}`",
                shown(row["noise"], digits=3),
                f"{facts.load(row):.2f}",
                f"{mean(row['noise']) / row['published']:,.1f}",
                f"{facts.load_alone(row):.2f}",
                shown(facts.loss_ratios(row), digits=2) + (" †" if facts.stopped(row) else ""),
                "yes" if facts.breaks(row) else "no",
            ]
            for row in learning
        ],
    )
    page.chart(
        "breaking",
        lines(
            [
                _points(
                    name,
                    [(facts.load(row), mean(facts.loss_ratios(row))) for row in learning if row["topology"] == name],
                )
                for name in dict.fromkeys(row["topology"] for row in part["learning"])
            ],
            title="Loss of DCD over that of D-PSGD",
            across="noise / noise_limit()",
            down="ratio of losses",
            log_x=True,
            log_y=True,
        ),
        caption="Each point is a codec on a graph, mean over seeds. 1 is as good as no compression.",
    )
    page.text(_learning_score(part["learning"]))


def _talking_score(talking: Sequence[dict[str, Any]]) -> str:
    own = [row for row in talking if facts.drawn_apart(row)]
    right = sum((facts.load(row) > 1) == (mean(row["growth"]) > 1) for row in own)
    errors = [abs(mean(row["growth"]) / mean(row["predicted"]) - 1) for row in own]
    shared = [row for row in talking if not facts.drawn_apart(row)]
    worse = [row for row in shared if mean(row["growth"]) > 1 and facts.load(row) < 1]
    said = (
        f"The limit correctly tells whether workers drift apart in {right} of {len(own)} cells. The prediction of "
        f"growth is within {100 * max(errors):.0f} % in all cells, and within "
        f"{100 * sorted(errors)[len(errors) // 2]:.1f} % in half of them."
    )
    if shared:
        said += (
            f" The last row is the exception: without `shared=false`, `{shared[0]['codec']}` draws the same positions "
            f"on all workers. Then noise is not independent, and {len(worse)} of {len(shared)} graphs drift apart "
            "below the limit."
        )
    return said


def _learning_score(learning: Sequence[dict[str, Any]]) -> str:
    score = facts.score(learning)
    said = (
        f"Of {score['below']:.0f} rows below the limit, {score['below_broken']:.0f} break; of {score['above']:.0f} "
        f"rows above it, {score['above_broken']:.0f} break."
    )
    if not math.isnan(score["least_broken"] + score["most_whole"]):
        said += (
            f" The lowest noise of a row that breaks is {score['least_broken']:.2f} times the limit, the highest of a "
            f"row that trains {score['most_whole']:.2f} times."
        )
    under, over = facts.published_score(learning)
    trains = [mean(row["noise"]) / row["published"] for row in over if not facts.breaks(row)]
    return said + (
        f" {len(under)} rows are below the published limit, and {sum(map(facts.breaks, under))} of them break. Above "
        f"it, {len(trains)} of {len(over)} rows still train, at up to {max(trains, default=0):,.0f} times the limit."
        f" {_alone_score(learning)}"
    )


def _alone_score(learning: Sequence[dict[str, Any]]) -> str:
    alone = facts.score(learning, facts.load_alone)
    right = alone["below"] - alone["below_broken"] + alone["above_broken"]
    wrong = [row for row in learning if facts.load(row) > 1 and not facts.breaks(row)]
    said = f"The noise of averaging only, over the limit, classifies {right:.0f} of {len(learning)} rows correctly."
    if wrong and all(facts.load_alone(row) <= 1 for row in wrong):
        names = ", ".join(f"`{row['codec']}` on {row['topology']}" for row in wrong)
        said += (
            f" This explains why {names} train above the limit: the noise that averaging alone causes is below it. Our "
            "reading: while learning, single large gradients widen the range and so raise the noise. That noise does "
            "not grow with disagreement, so it does not amplify itself."
        )
    return said


def _points(name: str, places: Sequence[tuple[float, float]]) -> Line:
    """Marks without a line: a gap after each."""
    x, y = [], []
    for across, down in sorted(places):
        x += [across, across]
        y += [down, None]
    return Line(name, x, y)


def _level(rows: Sequence[dict[str, Any]]) -> Line:
    ends = [facts.load(row) for row in rows]
    return Line("unchanged", [min(ends), max(ends)], [1.0, 1.0], dashed=True)


# -------------------------------------------------------------------------------------------------------- speed-up


def speed_up(page: Page, part: dict[str, Any]) -> None:
    page.heading("Speed-up in the number of workers")
    page.text(
        "Logistic regression on 64 features with a fifth of the labels wrong, one example per worker and step, "
        f"learning rate 1.6 sqrt(n / T): gradient noise dominates. {part['repetitions']} repetitions with data of "
        "their own. All workers draw from the same examples, so there is no skew. The spacing of ECD's grid was not "
        "searched. The values are means over the steps of |∇f|² at the average model. A rate of 1/sqrt(nT) is a slope "
        f"of -0.5 on logarithmic axes. T is {part['steps']} where n varies. The last column is the speed-up: the value "
        "for n workers and T steps over that for one worker and nT steps. It is 1 if n workers equal n times the steps."
    )
    alone = {point["n"]: point["values"] for point in part["alone"]}
    page.table(
        ["row", "slope in n", "n = 1", f"n = {part['alone'][-1]['n']}", "over one worker, same examples"],
        [
            [
                f"{told(row)} {row['topology']}",
                shown(facts.slopes(row["points"], "n"), digits=3),
                shown(row["points"][0]["values"], digits=4),
                shown(row["points"][-1]["values"], digits=5),
                shown(facts.ratios(row["points"][-1]["values"], alone[row["points"][-1]["n"]]), digits=3),
            ]
            for row in part["series"]
        ],
    )
    page.chart(
        "speed-up",
        lines(
            [
                *(
                    _curve(f"{NAMES[row['algorithm']]} {row['codec']} {row['topology']}", row["points"])
                    for row in part["series"]
                ),
                _curve("one worker, n T steps", part["alone"], dashed=True),
            ],
            title=f"Mean squared gradient after {part['steps']} steps of n workers",
            across="workers n",
            down="mean |∇f|²",
            log_x=True,
            log_y=True,
        ),
        caption="The dashed line is linear speed-up. Bands are 95 % intervals over repetitions.",
    )
    page.table(
        [
            f"row, n = {part['longer'][0]['points'][0]['n']}",
            "slope in T",
            *(f"T = {p['steps']}" for p in part["longer"][0]["points"]),
        ],
        [
            [
                f"{told(row)} {row['topology']}",
                shown(facts.slopes(row["points"], "steps"), digits=3),
                *(shown(point["values"], digits=5) for point in row["points"]),
            ]
            for row in part["longer"]
        ],
    )


def _curve(name: str, points: Sequence[dict[str, Any]], *, dashed: bool = False) -> Line:
    found = [spread(point["values"]) for point in points]
    return Line(
        name, [point["n"] for point in points], [one.mean for one in found],
        low=[one.low for one in found], high=[one.high for one in found], dashed=dashed,
    )  # fmt: skip
