"""The second half of the page top-k: what choosing costs, what is chosen with a memory, what a step takes."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.lab.draw import Bar, Line, bars, lines
from thinwire.lab.study.result import percent

from ..page import Page, shown, spread
from . import claims
from .claims import NAMES
from .looks import Found


def one_tensor(made: Page, part: Found) -> None:
    rows = [row for row in part["rows"] if row["steps"] == 0]
    kinds, names = (
        list(dict.fromkeys(row["data"] for row in rows)),
        list(dict.fromkeys(row["selector"] for row in rows)),
    )
    size = max(part["sizes"])
    made.heading("What does selection cost?")
    made.text(
        f"`thinwire study selectors`: one CPU thread, medians of {part['rounds']} interleaved rounds, {size:,} "
        f"elements without a residual, mean over {len(kinds)} kinds of generated data ({', '.join(kinds)}). `top_k` is "
        "thinwire's exact selection: a sample, one pass, an exact choice among the candidates. `torch.topk` is what "
        "exact Top-k was in 2019. *Passes* counts how often all elements are read."
    )
    for density in sorted({row["density"] for row in rows}):
        chosen = [row for row in rows if row["numel"] == size and row["density"] == density]
        table = []
        for name in names:
            mine = [row for row in chosen if row["selector"] == name]
            table.append(
                [
                    f"`{name}`",
                    shown(claims.by_seed(mine, "median_seconds", times=1e3), digits=2),
                    shown(claims.by_seed(mine, "x_top_k"), digits=2),
                    shown(claims.by_seed(mine, "x_add"), digits=2),
                    claims.fixed(claims.by_seed([row for row in mine if row["passes"] is not None], "passes")),
                    *(
                        claims.fixed([row["selected_over_k"] for row in mine if row["data"] == kind], digits=2)
                        for kind in kinds
                    ),
                ]
            )
        made.text(f"Density {percent(density)}; the last {len(kinds)} columns show selected/k:")
        made.table(["selector", "ms", "x top_k", "x `e += g`", "passes", *kinds], table)
    for density in sorted({row["density"] for row in rows}):
        same = [row for row in rows if row["density"] == density and row["data"] == "gaussian"]
        made.chart(
            f"selectors-{density:g}".replace(".", ""),
            lines(
                [_per_element(same, name) for name in names],
                title=f"Time to select {percent(density)}, per element",
                across="elements",
                down="ns per element",
                log_x=True,
                log_y=True,
            ),
            caption="Gaussian data without a residual, one thread; the last point is from one seed and three rounds.",
        )


def _per_element(rows: Sequence[Found], name: str) -> Line:
    sizes = sorted({row["numel"] for row in rows})
    over = [
        spread([1e9 * r["median_seconds"] / size for r in rows if r["selector"] == name and r["numel"] == size])
        for size in sizes
    ]
    return Line(name, sizes, [one.mean for one in over], [one.low for one in over], [one.high for one in over])


def feedback(made: Page, part: Found) -> None:
    rows = [row for row in part["rows"] if row["steps"]]
    made.heading("What is selected with error feedback?")
    made.text(
        f"{part['feedback_steps']} steps with error feedback; every selector has a residual of its own. Generated "
        f"gradients of {part['feedback_size']:,} elements, and gradients of a perceptron (mlp, 1.1 M) recorded in "
        "dense training. *Outside* is the share of steps that send less than 2/3 k, or 4/3 k and more. Our "
        "`gaussian_k` sends at most 4/3 k, because messages have a fixed size; the published one sends all that it "
        "finds. The last column is the norm of the residual at the end, over that of exact Top-k."
    )
    keys = dict.fromkeys((row["data"], row["density"], row["selector"]) for row in rows)
    table = []
    for data, density, name in keys:
        mine = [r for r in rows if (r["data"], r["density"], r["selector"]) == (data, density, name)]
        if name in ("torch.topk", "trimmed_k"):  # chooses what top_k chooses
            continue
        passes = [row["passes"] for row in mine if row["passes"] is not None]
        table.append(
            [
                data,
                percent(density),
                f"`{name}`",
                claims.fixed([row["x_add"] for row in mine], digits=1),
                claims.fixed(passes, digits=2),
                claims.fixed([row["selected_over_k"] for row in mine], digits=2),
                claims.fixed([100 * row["outside"] for row in mine], digits=0),
                claims.fixed([row["energy_over_top_k"] for row in mine], digits=2),
                claims.fixed([row["memory_over_top_k"] for row in mine], digits=2),
            ]
        )
    heads = ["gradients", "density", "selector", "x `e += g`", "passes", "selected/k", "outside (%)"]
    made.table([*heads, "energy over exact", "residual over exact"], table)


# ----------------------------------------------------------------------------------------------------------- end to end


def steps(made: Page, part: Found) -> None:
    first = part["networks"][0]["settings"]
    made.heading("How long is a step?")
    made.text(
        f"`thinwire compare`: {first['workload']} with {first['parameters']:,} parameters, {first['workers']} "
        f"processes on {len(part['networks'])} emulated networks, {first['steps']} interleaved steps of each recipe, "
        f"{len(first['seeds'])} runs, density {percent(part['density'])} as published, 32-bit values. The published "
        "runs had 16 V100 GPUs, 10 Gbit/s Ethernet and models of 25 to 138 M parameters. Here all processes share "
        "the cores of one machine, and computation is a larger part of a step. The published factors are quoted from "
        "memory: we could read the paper's abstract and code, not its body. The code has weak baselines. Its exact "
        "Top-k is the `torch.topk` of its time. Its DGC takes the k-th largest of a 1 % sample as threshold, which "
        "selects about a hundred times too many elements."
    )
    rows = []
    for network in part["networks"]:
        ours = {row["name"]: row["step_ms"] for row in network["rows"]}
        rows.append([network["network"], "no communication", shown(network["alone_ms"], digits=0), "-", "-"])
        for name, taken in ours.items():
            ratio = "-" if name == "gaussian_k" else shown(claims.faster(network, name), digits=2)
            published = claims.PUBLISHED.get(name)
            said = "-" if published is None else f"{published[0]} to {published[1]}"
            rows.append([network["network"], NAMES[name], shown(taken, digits=0), ratio, said])
    made.table(["network", "selector", "step (ms)", "GaussianK is faster by", "published"], rows)
    groups = []
    for network in part["networks"]:
        over = {row["name"]: spread(row["step_ms"]) for row in network["rows"]}
        over |= {"alone": spread(network["alone_ms"])}
        group = [Bar(NAMES.get(name, "no communication"), s.mean, s.low, s.high) for name, s in over.items()]
        groups.append((network["network"], group))
    made.chart(
        "steps",
        bars(groups, title="Step time", down="ms"),
        caption="Dense, and four ways to select 0.1 % of the elements, on each network.",
    )
