"""The benchmark on the page of a proof: a bar for each contender with its spread, and the numbers below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..draw import numbers
from ..draw.markup import escape, tag

_COLOURS = {"ddp": "baseline", "no-communication": "baseline"}


def benchmark_section(part: Mapping[str, Any], number: int) -> str:
    """One benchmark; `number` keeps the names of two on one page apart."""
    details = part["details"]
    key = f"benchmark-{number}"
    heading = tag("h2", escape(part["name"]), id=f"{key}-title")
    body = (
        heading
        + _bars(details["rows"])
        + _table(details["rows"], key)
        + tag("p", escape(_about(details)), class_="caption")
    )
    return tag("section", body, id=key, aria_labelledby=f"{key}-title")


def _about(details: Mapping[str, Any]) -> str:
    names = " ".join(f"{name}={value}" for name, value in details["environment"].items())
    text = (
        f"A GPT of {numbers.plain(details['parameters'])} parameters in {details['computes_in']}, "
        f"{details['batch_per_process']} sequences of {details['sequence']} bytes in each of {details['processes']} "
        f"processes over {details['backend']}{f' with {names}' if names else ''}, {details['steps']} steps of each "
        f"contender in laps of {details['lap']}. "
        "Contenders take turns lap by lap; a ratio is taken within one round. Spread: the middle half of the rounds. "
        "no-communication is plain DDP that sends nothing: the limit of every recipe."
    )
    if details["backend"] == "gloo":
        text += " Over the loopback no network is slow: this shows what compression costs, not what it gains."
    return text


def _bars(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median as a bar, the middle half as a line on it."""
    most = 1.02 * max(row["step_ms"]["high"] for row in rows)
    lines = []
    for place, row in enumerate(rows):
        step = row["step_ms"]
        said = f"{row['contender']}: {numbers.milliseconds(step['median'], unit=True)} a step"
        colour = _COLOURS.get(row["contender"], f"s{place % 7}")
        bar = tag("i", "", class_=f"part {colour}", style=f"--long:{step['median']:.6g}")
        whisker = tag("i", "", class_="whisker", style=f"--low:{step['low']:.6g};--high:{step['high']:.6g}")
        drawn = tag("div", tag("div", bar, class_="bar step", role="img", aria_label=said) + whisker, class_="track")
        told = tag("span", numbers.milliseconds(step["median"], unit=True), class_="told", data_value=step["median"])
        lines.append(tag("div", tag("span", escape(row["contender"]), class_="name") + drawn + told, class_="line"))
    return tag("div", "".join(lines), class_="bars", style=f"--most:{most:.6g}")


def _table(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    heads = ("contender", "ms a step", "spread", "x DDP", "spread", "sent a step")
    cells = "".join(tag("th", escape(name), scope="col") for name in heads)
    lines = []
    for row in rows:
        step, ratio = row["step_ms"], row["times_ddp"]
        lines.append(
            tag(
                "tr",
                tag("th", tag("b", escape(row["contender"])), scope="row")
                + tag("td", numbers.milliseconds(step["median"]), data_value=step["median"])
                + tag("td", f"{numbers.milliseconds(step['low'])} to {numbers.milliseconds(step['high'])}")
                + tag("td", f"{ratio['median']:.2f}", data_value=ratio["median"])
                + tag("td", f"{ratio['low']:.2f} to {ratio['high']:.2f}")
                + tag("td", numbers.size(row["bytes_per_step"]), data_value=numbers.exact(row["bytes_per_step"])),
                data_contender=row["contender"],
            )
        )
    table = tag("table", tag("thead", tag("tr", cells)) + tag("tbody", "".join(lines)), id=f"{key}-table")
    return tag("div", table, class_="scroll", tabindex=0)
