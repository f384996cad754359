"""The sections of the page global-qsgd: tables, charts, and the sentences between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from thinwire.lab.draw import Bar, Line, bars, lines

from ..page import Page, shown, spread
from .claims import differences, endings, pays_below, speedups
from .training import BLOCKS, EXPONENTIAL, LINEAR, POWERSGD, QSGD

NAMES = {
    "dense": "dense", "ddp": "DDP, float32", LINEAR: "linear", EXPONENTIAL: "exponential",
    BLOCKS: "linear, one scale per 128", QSGD: "QSGD, 8 bits", POWERSGD: "PowerSGD, rank 4",
    "qsgd:4,block=512|all_gather": "QSGD, 4 bits, blocks of 512",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- bias and variance


def bias(made: Page, rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    made.heading("Bias")
    made.text(
        f"{first['workers']} simulated workers reduce the same {first['numel']} Laplace-distributed elements "
        f"{first['draws']} times with different random draws. *Along* is the bias along the true mean, as a share of "
        "it. Its standard error is the largest bias that could go unnoticed. *Squares* is the mean of (bias / standard "
        "error)² over the elements, which is 1 if no element is biased."
    )
    made.table(
        ["dither", "norm", "along, %", "standard error, %", "squares", "largest |bias| / error"],
        [
            [
                row["dither"], row["norm"], shown([100 * one for one in row["along"]], digits=3),
                f"{100 * _pooled(row['along_error']):.3f}", shown(row["squares"]), f"{max(row['largest']):.1f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _pooled(errors: Sequence[float]) -> float:
    """The standard error of the mean over the seeds."""
    return math.sqrt(sum(error**2 for error in errors)) / len(errors)


def variance(made: Page, rows: Sequence[dict[str, Any]]) -> None:
    made.heading("Variance against the bound, 2 to 64 workers")
    numel = rows[0]["numel"]
    made.text(
        f"θ is n E|G - mean|² / Σ|xᵢ|², measured on {numel:,} elements per worker. The bound is ω(nd) / n: n workers "
        "with one scale are one vector of nd elements. Workers are *alike* (one gradient with a tenth of noise) or "
        "*noise*. The network sums linear codes as int8, so a worker has only 127 // n levels, and θ grows with n. The "
        "published bound of exponential dithering assumes that codes are added exactly. Real codes are added in a "
        "tree, which rounds every partial sum. For that we use a bound of our own: each level of the tree adds at most "
        "an eighth of the squared partial sums."
    )
    most = max(row["workers"] for row in rows)
    for norm, title in (("l2", "the L2 norm"), ("linf", "the largest element")):
        own = [row for row in rows if row["dither"] == "linear" and row["norm"] == norm]
        qsgd = [row for row in rows if row["dither"] == "qsgd"]
        drawn = [*_theta_lines(own, "linear"), _bound_line(own, "bound, linear")]
        drawn += [*_theta_lines([row for row in qsgd if row["gradients"] == "noise"], "QSGD")]
        made.chart(
            f"linear-{norm}",
            lines(drawn, title=f"Linear dithering against {title}", across="workers", down="θ", log_x=True, log_y=True),
            caption=f"Linear dithering at 8 bits against {title}, and 8-bit QSGD with a scale per worker. At "
            f"{most} workers θ is {_over_qsgd(own, qsgd, most):,.0f} times QSGD's.",
        )
    exponential = [row for row in rows if row["dither"] == "exponential" and row["norm"] == "l2"]
    exact = [row for row in exponential if row["addition"] == "exact" and row["gradients"] == "noise"]
    tree = [row for row in exponential if row["addition"] == "network"]
    drawn = [
        *_theta_lines(exact, "added exactly"), _bound_line(exact, "bound, added exactly"),
        *_theta_lines(tree, "added in a tree"), _bound_line(tree, "bound, added in a tree"),
    ]  # fmt: skip
    made.chart(
        "exponential",
        lines(drawn, title="Exponential dithering, L2 norm", across="workers", down="θ", log_x=True, log_y=True),
        caption="Exponential dithering: added exactly, θ falls as 1 / n; added in a tree, it stops falling where "
        "gradients are alike.",
    )
    made.table(
        ["dither", "norm", "added", "gradients", "workers", "levels", "θ", "bound", "θ / bound"],
        [_variance_row(row) for row in rows if row["workers"] in (2, 64)],
    )


def _over_qsgd(own: Sequence[dict[str, Any]], qsgd: Sequence[dict[str, Any]], workers: int) -> float:
    """How many times the variance is that of QSGD, for gradients of noise."""
    first, other = (
        next(row["theta"] for row in rows if row["workers"] == workers and row["gradients"] == "noise")
        for rows in (own, qsgd)
    )
    return spread(first).mean / spread(other).mean


def _variance_row(row: dict[str, Any]) -> list[str]:
    added = {"exact": "exactly", "network": "in a tree" if row["dither"] == "exponential" else "by the network"}
    name = "QSGD" if row["dither"] == "qsgd" else row["dither"]
    return [
        name, row["norm"], "after decoding" if name == "QSGD" else added[row["addition"]], row["gradients"],
        str(row["workers"]), str(row["levels"]), shown(row["theta"], digits=4), f"{row['bound']:.4g}",
        f"{spread(row['theta']).mean / row['bound']:.2f}",
    ]  # fmt: skip


def _theta_lines(rows: Sequence[dict[str, Any]], name: str) -> Iterable[Line]:
    kinds = list(dict.fromkeys(row["gradients"] for row in rows))
    for kind in kinds:
        own = [row for row in rows if row["gradients"] == kind]
        yield _line(
            f"{name}, {kind}" if len(kinds) > 1 else name, [r["workers"] for r in own], [r["theta"] for r in own]
        )


def _bound_line(rows: Sequence[dict[str, Any]], name: str) -> Line:
    own = [row for row in rows if row["gradients"] == rows[0]["gradients"]]
    return Line(name, [row["workers"] for row in own], [row["bound"] for row in own], dashed=True)


def _line(name: str, x: Sequence[float], values: Sequence[Sequence[float | None]]) -> Line:
    spreads = [spread(one) for one in values]
    return Line(name, x, [one.mean for one in spreads], [one.low for one in spreads], [one.high for one in spreads])


def sparsity(made: Page, rows: Sequence[dict[str, Any]]) -> None:
    made.heading("One level: √n fewer non-zero elements")
    made.text(
        f"One level, the L2 norm, {rows[0]['numel']:,} elements per worker. The baseline is QSGD with one level on "
        "every worker. *Fewer*: how many times fewer elements are non-zero, summed over workers. *Noisier*: how many "
        "times larger the variance is. The gradients of *uneven* workers halve from one worker to the next. thinwire "
        "sends codes densely and does not use the zeros."
    )
    even = [row for row in rows if row["gradients"] == "noise"]
    workers = [row["workers"] for row in even]
    made.chart(
        "sparsity",
        lines(
            [
                _line("fewer", workers, [_ratios(row, "nonzero_qsgd", "nonzero") for row in even]),
                _line("noisier", workers, [_ratios(row, "theta", "theta_qsgd") for row in even]),
                Line("√n", workers, [n**0.5 for n in workers], dashed=True),
            ],
            title="One level: Global-QSGD against QSGD", across="workers", down="ratio", log_x=True, log_y=True,
        ),
        caption="One level saves non-zero elements and adds variance; both follow √n.",
    )  # fmt: skip
    made.table(
        ["workers", "gradients", "non-zero", "bound √(nd) + 1", "non-zero, QSGD", "fewer", "noisier", "√n"],
        [
            [
                str(row["workers"]), "even" if row["gradients"] == "noise" else "uneven",
                shown(row["nonzero"], digits=0), f"{row['bound']:,.0f}", shown(row["nonzero_qsgd"], digits=0),
                shown(_ratios(row, "nonzero_qsgd", "nonzero")), shown(_ratios(row, "theta", "theta_qsgd")),
                f"{row['workers'] ** 0.5:.2f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _ratios(row: dict[str, Any], over: str, under: str) -> list[float]:
    return [a / b for a, b in zip(row[over], row[under], strict=True)]


# --------------------------------------------------------------------------------------------------------- training


def training(made: Page, part: dict[str, Any]) -> None:
    made.heading("Convergence")
    made.text(
        f"{part['workers']} simulated workers, {part['steps']} steps of {part['batch']} examples each: {part['about']} "
        f"({part['optimizer']}). All recipes see the same batches and start from the same weights, so differences "
        "from dense are taken per seed. *As good* means below: the interval of the difference reaches zero, or the "
        "difference is less than 1 % of the loss. The learning rate warms up to half of that value and decays linearly "
        "to zero. Linear and exponential dithering are as published: 8 bits, the largest element of the bucket as its "
        "scale."
    )
    rows = part["rows"]
    made.chart(
        "training",
        lines(
            [
                _line(NAMES[row["recipe"]], row["steps"], list(zip(*row["held_out"], strict=True)))
                for row in rows
                if row["recipe"] in ("dense", LINEAR, EXPONENTIAL, QSGD, POWERSGD)
            ],
            title="Held-out loss", across="step", down="loss",
        ),
        caption="Held-out loss of the recipes that the paper compares.",
    )  # fmt: skip
    made.table(
        ["method", "recipe", "held-out loss", "more than dense", "accuracy, %", "kB per step and worker"],
        [
            [
                NAMES[row["recipe"]], f"`{row['recipe']}`", shown(endings(part, row["recipe"]), digits=3),
                shown(differences(part, row["recipe"]), digits=3),
                shown([None if one is None else 100 * one for one in row["accuracy"]], digits=1),
                f"{row['bytes_per_step'] / 1e3:,.0f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def scales(made: Page, part: dict[str, Any]) -> None:
    made.heading("One scale per bucket, or one per block")
    steps = sorted({one["step"] for row in part["rows"] for one in row["nmse"]})
    gpt = {row["block"]: row for row in part["gpt"]["rows"]}
    made.text(
        f"The error of the mean of {part['workers']} workers' gradients, |G - mean|² / |mean|², at steps "
        f"{', '.join(map(str, steps))} of training {part['about']}. The GPT columns show the same for a byte-level "
        f"GPT, whose embedding is part of the bucket (`benchmarks/results/{part['gpt']['file']}`)."
    )
    more = [row["wire_bytes_per_element"] - 1 for row in part["gpt"]["rows"] if row["block"]]
    rows = []
    whole = _by_seed(part["rows"][0])
    for row in part["rows"]:
        own, other = _by_seed(row), gpt.get(row["block"])
        ratios = [a / b for a, b in zip(own, whole, strict=True)]
        rows.append(
            [
                str(row["block"]) if row["block"] else "the bucket, as published", shown(own, digits=4),
                shown(ratios, digits=4), f"{other['median_nmse']:.4f}" if other else "-",
                f"{other['median_ratio']:.4f}" if other else "-",
                f"{other['wire_bytes_per_element']:.3f}" if other else "-",
            ]
        )  # fmt: skip
    made.table(
        ["elements per scale", "error", "over published", "error, GPT", "over published, GPT", "bytes per element"],
        rows,
    )
    made.chart(
        "scales",
        bars(
            [
                (
                    str(row["block"]) if row["block"] else "bucket",
                    [Bar("error", *spread(_by_seed(row))[:3]), Bar("error, GPT", gpt[row["block"]]["median_nmse"])],
                )
                for row in part["rows"]
            ],
            title="Error of the mean, by elements per scale", down="|G - mean|² / |mean|²", log=True,
        ),
        caption="Error of the mean gradient at 8 bits: smaller blocks have a smaller error and send "
        f"{min(more):.1%} to {max(more):.1%} more bytes.",
    )  # fmt: skip


def _by_seed(row: dict[str, Any]) -> list[float]:
    """The mean over the recorded steps, of each seed."""
    found: dict[int, list[float]] = {}
    for one in row["nmse"]:
        found.setdefault(one["seed"], []).append(one["nmse"])
    return [sum(values) / len(values) for values in found.values()]


# ---------------------------------------------------------------------------------------------------------- pay-off


def payoff(made: Page, part: dict[str, Any]) -> None:
    made.heading("Does it pay? Predicted and measured")
    adding, limit = part["adding"], pays_below(part["adding"])
    floats, codes = adding["float_bytes_per_second"], adding["code_bytes_per_second"]
    said = f"below {8 * limit / 1e9:,.1f} Gbit/s" if limit is not None else "on every network"
    made.text(
        f"{part['workers']} processes train {part['about']} for {part['steps']} steps on emulated networks, once per "
        "seed. The prediction is made before the first step (see [plan](../plan.md)). The paper's own model asks only "
        "how fast messages are added. A core adds float32 at γ bytes per second, and a byte of codes takes ω times as "
        "long. Then a quarter of the bytes pays on networks slower than 6γ / (ω - 4), and always if ω < 4. Here one "
        f"core adds float32 at {floats / 1e9:.1f} GB/s and exponential codes at {codes / 1e9:.1f} GB/s, so "
        f"ω = {floats / codes:.1f} (published for an A100: 79), and exponential codes pay {said}. The model assumes a "
        "tree and ignores the cost of quantising and computation. thinwire's prediction includes all three."
    )
    rows = []
    for network in part["networks"]:
        gains = speedups(network)
        for row in network["rows"]:
            predicted, measured = row["predicted_ms"], spread(row["measured_ms"]).mean
            rows.append(
                [
                    f"`{network['network']}`", NAMES[row["recipe"]],
                    "-" if predicted is None else f"{predicted:,.0f}", shown(row["measured_ms"], digits=0),
                    "-" if predicted is None else f"{predicted / measured - 1:+.0%}",
                    shown(gains[row["recipe"]]), f"{row['bytes_per_step'] / 1e3:,.0f}",
                ]
            )  # fmt: skip
    made.table(
        ["network", "recipe", "predicted ms", "measured ms", "error", "times as fast as float32", "kB sent"], rows
    )
    made.chart(
        "payoff",
        bars(
            [
                (
                    network["network"],
                    [
                        Bar(NAMES[name], *spread(values)[:3])
                        for name, values in speedups(network).items()
                        if name != "ddp"
                    ],
                )
                for network in part["networks"]
            ],
            title="Speed-up over float32 all-reduce", down="times as fast (1: no gain)",
        ),
        caption="Measured speed-up of a step over plain DDP, with intervals over repetitions.",
    )  # fmt: skip
    if part["plan"]:
        made.text(
            "A larger model and more networks, with one scale per block, from "
            f"`benchmarks/results/{part['plan']['file']}`: the predicted and the measured speed-up of "
            "`global-qsgd-8` over plain DDP, one run per cell."
        )
        made.table(
            ["network", "workers", "predicted speed-up", "measured speed-up"], _planned_rows(part["plan"]["rows"])
        )


def _planned_rows(rows: Sequence[dict[str, Any]]) -> Iterable[list[str]]:
    cells = {(row["network"], row["workers"], row["recipe"]): row for row in rows}
    for (network, workers, recipe), row in cells.items():
        if recipe == "global-qsgd-8" and (dense := cells.get((network, workers, "ddp"))):
            gains = [dense[key] / row[key] for key in ("predicted_ms", "measured_ms")]
            yield [f"`{network}`", str(workers), *(f"{gain:.2f}" for gain in gains)]
