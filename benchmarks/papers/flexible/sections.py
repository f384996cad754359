"""The first half of the page flexible: the fastest collective by formulas and measured, and the leaders."""

from __future__ import annotations

from thinwire.lab.draw import Bar, bars, lines

from ..page import Page, shown, spread
from . import choosing, figures
from .figures import Found
from .published import RATES, SAID
from .training import WAYS as TOP_K

# ----------------------------------------------------------------------------------------------------- collectives


def book(made: Page, part: Found) -> None:
    rows = part["rows"]
    right = sum(row["winner"] == row["published"] for row in rows)
    off = [abs(a / b - 1) for row in rows for a, b in zip(row["ms"], row["published_ms"], strict=True)]
    made.heading("Which collective is fastest, by the formulas")
    made.text(
        "The fastest collective by the formulas of [plan](../plan.md#by-the-book), and the winner that Table VI prints "
        f"(8 workers, 1 ms): {right} of {len(rows)} agree. Times differ by {100 * sum(off) / len(off):.1f} % on "
        "average. If a cell has two names, the second is the printed one."
    )
    by_row: dict[tuple[str, float], list[Found]] = {}
    for row in rows:
        by_row.setdefault((row["model"], row["ratio"]), []).append(row)
    made.table(
        ["model", "ratio", *(f"{rate:g} Gbit/s" for rate in RATES)],
        [[model, percent(ratio), *map(_winner, cells)] for (model, ratio), cells in by_row.items()],
    )


def _winner(row: Found) -> str:
    ours, printed = SAID[row["winner"]], SAID[row["published"]]
    return ours if ours == printed else f"{ours} (**{printed}**)"


def percent(ratio: float) -> str:
    return f"{100 * ratio:g} %"


def collectives(made: Page, part: Found) -> None:
    made.heading("Which collective is fastest, measured")
    made.text(
        f"`thinwire compare`, workload {part['workload']} ({part['parameters']:,} parameters), {part['steps']} steps "
        "per seed, three of them warm-up, on emulated networks; all workers share two cores. Exact Top-k with error "
        "feedback, by all-gather (AG) or shared (STAR); dense is plain DDP. thinwire sends positions in a narrow code "
        "instead of 4 bytes, so the all-gather sends less than the formulas assume. *even*: the 95 % interval of the "
        "difference contains zero. gloo adds in a ring and has no tree to choose."
    )
    rows = []
    for setting in part["settings"]:
        dense = shown(setting["rows"]["ddp"]["ms"], digits=0)
        for density in figures.densities(part):
            plan = [setting["rows"][TOP_K[way].format(density)]["predicted_ms"] for way in ("AG", "STAR")]
            rows.append(
                [
                    f"`{setting['network']}`",
                    str(setting["workers"]),
                    percent(density),
                    dense,
                    *(shown(figures.ms(setting, way, density), digits=0) for way in ("AG", "STAR")),
                    " / ".join("-" if value is None else f"{value:.0f}" for value in plan),
                    figures.faster(setting, density),
                    *(figures.foretold(setting, density, by=by) or "-" for by in ("plan", "book")),
                ]
            )
    heads = ["network", "workers", "ratio", "dense, ms", "AG, ms", "STAR, ms", "plan: AG / STAR", "faster"]
    made.table([*heads, "by plan", "by formulas"], rows)
    groups = [
        (
            f"{setting['network']}, {setting['workers']} workers",
            [
                _bar(f"{way} {percent(density)}", figures.ms(setting, way, density))
                for density in figures.densities(part)
                for way in ("AG", "STAR")
            ],
        )
        for setting in part["settings"]
    ]
    drawing = bars(groups, title="A step of Top-k by all-gather and by sharing", down="milliseconds")
    made.chart("collectives", drawing, caption="A step of Top-k by all-gather (AG) and of shared Top-k (STAR).")


def _bar(name: str, values: list[float | None]) -> Bar:
    found = spread(values)
    return Bar(name, found.mean, found.low, found.high) if found.n else Bar(name, None)


# --------------------------------------------------------------------------------------------------------- leaders


def leaders(made: Page, part: Found) -> None:
    skews = sorted({run["skew"] for run in part["runs"]})
    recipes = list(dict.fromkeys(run["recipe"] for run in part["runs"]))
    made.heading("STAR against VAR")
    made.text(
        f"Training of {part['about']}, {part['workers']} simulated workers with batches of {part['batch']}, "
        f"{part['steps']} steps of SGD with rate {part['rate']:g} and momentum {part['momentum']:g}; the whole model "
        f"is one tensor, as in the paper. With skew, {100 * skews[-1]:.0f} % of the examples are dealt by class. "
        "*told* is the gain that the leader measures, or the mean over workers for the all-gather. *true* is the share "
        "of the mean gradient's energy that arrives. Both are means over the run. We chose the rate after trials of "
        "0.1, 0.03 and 0.01 with the first seed, which is also among the runs below. With 0.1, dense training was "
        "unstable and sharing at 1 % failed. A ratio of 0.1 %, at which sharing was further behind in those trials, "
        "was left out to save time."
    )
    heads = ["recipe"]
    for skew in skews:
        heads += [f"accuracy, {shards(skew)}, %", f"loss, {shards(skew)}", f"told / true, {shards(skew)}"]
    made.table(heads, [_leader_row(part, recipe, skews) for recipe in recipes])
    for skew in skews:
        for density in figures.leader_densities(part):
            drawn = ["dense", *(text.format(density) for text in TOP_K.values())]
            series = [choosing.loss_line(label(recipe), figures.runs_of(part, recipe, skew)) for recipe in drawn]
            title = f"Held-out loss at {percent(density)}, {shards(skew)}"
            made.chart(
                f"leaders-{'skewed' if skew else 'alike'}-{1 / density:.0f}",
                lines(series, title=title, across="step", down="loss"),
                caption=f"{title}, by the worker that chooses the positions.",
            )


def _leader_row(part: Found, recipe: str, skews: list[float]) -> list[str]:
    cells = [label(recipe)]
    for skew in skews:
        right = [None if value is None else 100 * value for value in figures.ends(part, recipe, skew)]
        cells += [shown(right, digits=1), shown(figures.ends(part, recipe, skew, "held_out"))]
        gains = [spread(figures.gains(part, recipe, skew, key)) for key in ("told", "true")]
        cells.append(" / ".join(f"{one.mean:.2f}" for one in gains) if all(one.n for one in gains) else "-")
    return cells


def shards(skew: float) -> str:
    return f"skew {skew:g}" if skew else "shards alike"


def label(recipe: str) -> str:
    """A recipe in short.

    >>> label("ef|top_k:0.01|shared_top_k:norm"), label("dense")
    ('VAR 1 %', 'dense')
    """
    for way, text in TOP_K.items():
        prefix, suffix = text.split("{:g}")
        if recipe.startswith(prefix) and recipe.endswith(suffix):
            return f"{way} {percent(float(recipe[len(prefix) : -len(suffix)]))}"
    return recipe
