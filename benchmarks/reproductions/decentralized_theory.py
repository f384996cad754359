"""Two sections of the page on decentralised training: where DCD breaks, the speed-up in the number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import decentralized_facts as facts
from .chart import Line, lines
from .decentralized_facts import mean
from .decentralized_sections import NAMES, told
from .page import Page, shown, spread

# ------------------------------------------------------------------------------------------------ where DCD breaks


def noise(page: Page, part: dict[str, Any]) -> None:
    page.heading("Where DCD breaks, and what predicts it")
    page.text(
        "Noise is |C(z) - z|² / |z|² of what a worker sends, measured in every step. `noise_limit()` is where, by "
        "our reckoning, the workers of DCD begin to drift apart in mean square when each draws its noise for itself; "
        "`published_noise_limit()` is (1 - ρ)² / 4μ², below which the paper proves convergence."
    )
    page.text(
        "**Without any gradient.** Workers begin at random and only talk. By which factor the energy of their "
        "disagreement grows in a step: measured, and in brackets what the same theory predicts from the measured "
        "noise. `random_k` keeps as many elements as give the limit times the factor."
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
            title="Growth of disagreement in a step, without any gradient",
            across="noise / noise_limit()",
            down="growth",
            log_x=True,
        ),
        caption="Above 1 the workers drift apart. Every codec of the table but the one whose positions are shared.",
    )
    page.text(_talking_score(talking))
    _learning(page, part)


def _learning(page: Page, part: dict[str, Any]) -> None:
    page.text(
        f"**While learning.** DCD with {len({row['codec'] for row in part['learning']})} codecs, {part['steps']} steps "
        "of the run of the section above on iid shards, sorted by noise over the limit. Loss is that of the average "
        "model over that of D-PSGD on the same graph; a row breaks where it is above "
        f"{facts.BROKEN:g} or the run was stopped (†). Talking only: the noise of the same codec in a model of this "
        "size whose workers disagree and learn nothing."
    )
    learning = sorted(part["learning"], key=facts.load)
    page.table(
        [
            "graph",
            "codec",
            "noise",
            "over limit",
            "over published",
            "talking only: over limit",
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
        caption="Each point is a codec on a graph, mean of the seeds. 1 is as good as without compression.",
    )
    page.text(_learning_score(part["learning"]))


def _talking_score(talking: Sequence[dict[str, Any]]) -> str:
    own = [row for row in talking if facts.drawn_apart(row)]
    right = sum((facts.load(row) > 1) == (mean(row["growth"]) > 1) for row in own)
    errors = [abs(mean(row["growth"]) / mean(row["predicted"]) - 1) for row in own]
    shared = [row for row in talking if not facts.drawn_apart(row)]
    worse = [row for row in shared if mean(row["growth"]) > 1 and facts.load(row) < 1]
    said = (
        f"The limit says rightly whether the workers drift apart in {right} of {len(own)} cells; growth is predicted "
        f"within {100 * max(errors):.0f} % in all of them, within {100 * sorted(errors)[len(errors) // 2]:.1f} % in "
        "half."
    )
    if shared:
        said += (
            f" The last row is the exception: `{shared[0]['codec']}` draws the same positions on all workers unless "
            f"it is told `shared=false`. Then noise is not independent, and {len(worse)} of {len(shared)} graphs "
            "drift apart below the limit."
        )
    return said


def _learning_score(learning: Sequence[dict[str, Any]]) -> str:
    score = facts.score(learning)
    said = (
        f"Of {score['below']:.0f} rows below the limit {score['below_broken']:.0f} break, of {score['above']:.0f} "
        f"above it {score['above_broken']:.0f} do."
    )
    if not math.isnan(score["least_broken"] + score["most_whole"]):
        said += (
            f" The lowest noise that breaks is {score['least_broken']:.2f} times the limit, the highest that trains "
            f"{score['most_whole']:.2f} times."
        )
    under, over = facts.published_score(learning)
    trains = [mean(row["noise"]) / row["published"] for row in over if not facts.breaks(row)]
    return said + (
        f" Below the published limit are {len(under)} rows, of which {sum(map(facts.breaks, under))} break; above it "
        f"{len(trains)} of {len(over)} train all the same, at up to {max(trains, default=0):,.0f} times of it."
        f" {_alone_score(learning)}"
    )


def _alone_score(learning: Sequence[dict[str, Any]]) -> str:
    alone = facts.score(learning, facts.load_alone)
    right = alone["below"] - alone["below_broken"] + alone["above_broken"]
    wrong = [row for row in learning if facts.load(row) > 1 and not facts.breaks(row)]
    said = f"The noise of talking only, over the limit, tells {right:.0f} of {len(learning)} rows rightly."
    if wrong and all(facts.load_alone(row) <= 1 for row in wrong):
        names = ", ".join(f"`{row['codec']}` on {row['topology']}" for row in wrong)
        said += (
            f" So {names} can train above the limit: on disagreement the noise is below it. Our reading: while "
            "learning, single large gradients stretch the range and with it the noise, but that noise does not grow "
            "with disagreement, and so does not feed itself."
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
        "Logistic regression on 64 features with a fifth of the labels wrong, one example a worker and step, learning "
        f"rate 1.6 sqrt(n / T): gradient noise dominates. {part['repetitions']} repetitions with data of their own; "
        "all workers draw from the same examples (there is no skew); the spacing of ECD's grid was not searched. Mean "
        "over the steps of |∇f|² at the average model; a rate of 1/sqrt(nT) is a slope of -0.5 on logarithmic axes. "
        f"T is {part['steps']} where n varies. The last column is the speed-up itself: the value for n workers and T "
        "steps over that for one worker and nT steps, 1 if n workers are worth n times the steps."
    )
    alone = {point["n"]: point["values"] for point in part["alone"]}
    page.table(
        ["row", "slope in n", "n = 1", f"n = {part['alone'][-1]['n']}", "over one worker with as many examples"],
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
        caption="Linear speed-up is to lie on the dashed line. Bands are 95 % intervals over repetitions.",
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
