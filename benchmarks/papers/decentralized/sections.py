"""The sections of the page on decentralised training: tables, charts, and the sentences between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.lab.draw import Bar, Line, bars, lines

from ..page import Page, shown, spread
from . import facts

NAMES = {"dpsgd": "D-PSGD", "dcd": "DCD", "ecd": "ECD", "naive": "naive", "choco": "CHOCO"}


def told(row: dict[str, Any]) -> str:
    """An algorithm with its codec, as a user writes it."""
    return f"{NAMES[row['algorithm']]} `{row.get('spelled', row['codec'])}`"


# ------------------------------------------------------------------------------------------------- bits and networks


def networks(page: Page, part: dict[str, Any]) -> None:
    page.heading("Bits and networks")
    page.text(
        f"Seconds per epoch of 60,000 images for {part['workers']} workers in a ring and a model with "
        f"{part['parameters']:,} parameters, simulated by [simulate](../simulate.md) without training. "
        f"{_computing(part['grids'][0])}. Compression costs what the data sheet of a GPU says, nearly nothing. "
        "`ddp` is an all-reduce in float32. `global-qsgd` and `two-shot` are compressed and centralised. `dpsgd` is "
        "decentralised in float32. *Gain* is the time of the fastest of these, with the same number of bits or more, "
        "over the time of DCD." + _faithful(part)
    )
    first = part["grids"][0]
    names = list(first["cells"][0]["step_ms"])
    per_epoch = part["steps_an_epoch"] / 1e3
    rows = []
    for cell in first["cells"]:
        seconds = [f"{cell['step_ms'][name] * per_epoch:.1f}" for name in names]
        gains = [f"{facts.gain(cell['step_ms'], bits):.2f}" for bits in (8, 4)]
        rows.append([f"{cell['megabits']} Mbit/s, {cell['latency_ms']} ms", *seconds, *gains])
    page.table(["network", *(f"`{name}`" for name in names), "gain, 8 bits", "gain, 4 bits"], rows)
    for grid in part["grids"]:
        page.chart(
            f"gain-{grid['compute_ms']}",
            lines(
                [
                    Line(
                        f"{latency} ms",
                        [cell["megabits"] for cell in grid["cells"] if cell["latency_ms"] == latency],
                        [facts.gain(cell["step_ms"], 4) for cell in grid["cells"] if cell["latency_ms"] == latency],
                    )
                    for latency in dict.fromkeys(cell["latency_ms"] for cell in grid["cells"])
                ],
                title=f"Gain of 4-bit DCD over the fastest alternative, steps of {grid['compute_ms']} ms",
                across="Mbit/s per worker",
                down="gain",
                log_x=True,
            ),
            caption=f"{_computing(grid)}. The fastest of `ddp`, `dpsgd` and `two-shot-4` over `dcd:4`, by latency.",
        )
    _measured_times(page, part["measured"])


def _computing(grid: dict[str, Any]) -> str:
    return f"Forward and backward take {grid['compute_ms']} ms"


def _faithful(part: dict[str, Any]) -> str:
    one = part["faithful"]
    if one is None:
        return ""
    return (
        f" {one['within_20_per_cent']} of {one['of']} simulated step times are within 20 % of those measured on "
        f"emulated networks (`benchmarks/results/{one['file']}`)."
    )


def _measured_times(page: Page, measured: dict[str, Any] | None) -> None:
    if measured is None:
        return
    page.text(
        "The same, measured with eight processes on an emulated network, with compression on the CPU, one run each "
        f"(`benchmarks/results/{measured['file']}`). The gain is that of `dcd:8`."
    )
    names = list(measured["cells"][0]["epoch_seconds"])
    page.table(
        ["network", *(f"`{name}`" for name in names), "gain, 8 bits"],
        [
            [
                cell["network"],
                *(f"{cell['epoch_seconds'][name]:.1f}" for name in names),
                f"{facts.gain(cell['epoch_seconds'], 8):.2f}",
            ]
            for cell in measured["cells"]
        ],
    )


# ----------------------------------------------------------------------------------------------------- convergence

_BLOCKS = (
    ("8 bits", "min_max:8,block=512"),
    ("4 bits", "min_max:4,block=512"),
    ("2 bits", "min_max:2,block=512"),
    ("sign", "sign:512"),
    ("top 1 %", "top_k:0.01"),
    ("8 bits, fixed grid", "absolute:8"),
    ("4 bits, fixed grid", "absolute:4"),
    ("2 bits, fixed grid", "absolute:2"),
)
_WHOLE = (
    ("8 bits, one L2 norm", "qsgd:8,block=0"),
    ("4 bits, one L2 norm", "qsgd:4,block=0"),
    ("2 bits, one L2 norm", "qsgd:2,block=0"),
    ("4 bits, one range", "min_max:4,block=0"),
    ("2 bits, one range", "min_max:2,block=0"),
    ("sign, one scale", "sign:0"),
)


def convergence(page: Page, part: dict[str, Any]) -> None:
    page.heading("Convergence")
    page.text(
        f"{part['workers']} workers in a ring, a perceptron of {part['parameters']:,} parameters on {part['about']}, "
        f"{part['steps']} steps of {part['batch']} images per worker, {part['optimizer']} for all. Accuracy in per "
        f"cent on {part['held_out']:,} images. *Average* is the accuracy of the average model, *local* that of four "
        "workers' own models. *Apart* is sqrt(mean |x_i - mean|²) / |mean|. With skew, nine tenths of the images are "
        "dealt to workers by class. `block=512`: one scale per 512 parameters. `block=0`: one for the whole model, a "
        "range (`min_max`) or an L2 norm (`qsgd`). Runs are short: compare rows, do not read the level. † marks runs "
        "that were stopped because their training loss passed 1,000."
    )
    rows = []
    pairs = {(row["algorithm"], row["codec"], row["skew"]): row for row in part["rows"]}
    for (algorithm, codec, skew), row in pairs.items():
        if skew:
            continue
        cells = [told(row), f"{row['bits']:.2f}"]
        for one in (row, pairs[algorithm, codec, 0.9]):
            cells += [_accuracy(one, "accuracy"), _accuracy(one, "local_accuracy"), _apart(one)]
        rows.append(cells)
    page.table(
        ["row", "bits per parameter", "iid: average", "local", "apart", "skew: average", "local", "apart"],
        rows,
    )
    _tuning(page, part["tuned"])
    for key, skew, groups, about in (
        ("blocks", 0.0, _BLOCKS, "one scale per 512 parameters"),
        ("whole", 0.0, _WHOLE, "one scale for the whole model"),
        ("skewed", 0.9, _BLOCKS, "one scale per 512 parameters, skewed shards"),
    ):
        page.chart(
            f"accuracy-{key}",
            bars(_groups(pairs, groups, skew), title=f"Accuracy of the average model, {about}", down="per cent"),
            caption=f"Means with 95 % intervals, D-PSGD in float32 at the left: {about}.",
        )


def _groups(pairs: Any, groups: Sequence[tuple[str, str]], skew: float) -> list[tuple[str, list[Bar]]]:
    found = [("32 bits", [_bar(pairs, "dpsgd", "fp32", skew)])]
    for label, codec in groups:
        one = [_bar(pairs, name, codec, skew) for name in NAMES if (name, codec, skew) in pairs]
        if one:
            found.append((label, one))
    return found


def _bar(pairs: Any, algorithm: str, codec: str, skew: float) -> Bar:
    found = spread([run["accuracy"] for run in pairs[algorithm, codec, skew]["runs"]])
    return Bar(NAMES[algorithm], found.mean, max(0.0, found.low), min(100.0, found.high))


def _accuracy(row: dict[str, Any], key: str) -> str:
    lost = any(run["diverged_at"] is not None for run in row["runs"])
    return shown([run[key] for run in row["runs"]], digits=1) + (" †" if lost else "")


def _apart(row: dict[str, Any]) -> str:
    return shown([run["apart"] for run in row["runs"]], digits=3)


def _tuning(page: Page, tuned: Sequence[dict[str, Any]]) -> None:
    page.text(
        "CHOCO's consensus step and the spacing of ECD's fixed grid were chosen on iid shards, by the loss of a seed "
        "that is not in the table. DCD has nothing to choose. Learning rates were not searched. Losses:"
    )
    rows = []
    for one in tuned:
        tried = [f"{_setting(value)}: {'-' if loss is None else f'{loss:.2f}'}" for value, loss in one["tried"]]
        rows.append([told(one), ", ".join(tried), _setting(one["chosen"])])
    page.table(["row", "tried", "chosen"], rows)


def _setting(value: float | None) -> str:
    return "default" if value is None else f"{value:g}"


def measured_accuracy(page: Page, measured: dict[str, Any] | None) -> None:
    if measured is None:
        return
    page.text(
        "Accuracy of the average model in per cent, for a convolutional network on Fashion-MNIST trained by eight "
        f"processes (`benchmarks/results/{measured['file']}`):"
    )
    names = list(measured["cells"][0]["accuracies"])
    page.table(
        ["row", *("iid" if not cell["skew"] else f"skew {cell['skew']}" for cell in measured["cells"])],
        [
            [
                f"`{name}`",
                *(_percent(cell["accuracies"].get(name, [])) for cell in measured["cells"]),
            ]
            for name in names
        ],
    )


def _percent(shares: Sequence[float | None]) -> str:
    return shown([None if one is None else 100 * one for one in shares], digits=1)
