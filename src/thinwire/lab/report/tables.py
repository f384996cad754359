"""The tables and sentences of the report: results, recipes, settings, machine, network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..draw import numbers
from ..draw.markup import escape, tag


@dataclass(frozen=True)
class Column:
    """One column of numbers: its key in a row, its heading, its unit, how it is written, and which end is better."""

    key: str
    heading: str
    unit: str
    write: Callable[[Any], str]
    more_is_better: bool = False


COLUMNS = (
    Column("step_ms", "step", "ms", numbers.milliseconds),
    Column("predicted_ms", "predicted", "ms", numbers.milliseconds),
    Column("fraction_of_no_communication", "speed", "of no communication", numbers.fraction, more_is_better=True),
    Column("cpu_ms", "processor", "ms added", numbers.milliseconds),
    Column("bytes_per_step", "sent", "per step", numbers.size),
    Column("final_loss", "loss", "at the end", numbers.loss),
    Column("seconds_to_target", "time", "to the target", numbers.seconds),
    Column("speedup_over_ddp", "x DDP", "per step", numbers.times, more_is_better=True),
    Column("speedup_to_target", "x DDP", "to the target", numbers.times, more_is_better=True),
)


def results(rows: Sequence[Mapping[str, Any]], styles: Sequence[Mapping[str, Any]]) -> str:
    """The table of all rows; a click on a heading sorts it. A row that did not finish says why.

    >>> row = {"recipe": "bf16", "status": "failed", "problem": "rank 1 died", "step_ms": 240.04}
    >>> page = results([row], [{"colour": "s0"}])
    >>> 'data-value="240.04"' in page, "rank 1 died" in page
    (True, True)
    """
    heads = [_head("recipe", "", "recipe", first="ascending")]
    for column in COLUMNS:
        first = "descending" if column.more_is_better else "ascending"
        heads.append(_head(column.heading, column.unit, column.key, first=first))
    lines = [_line(row, style) for row, style in zip(rows, styles, strict=True)]
    head = tag("thead", tag("tr", "".join(heads)))
    table = tag("table", head + tag("tbody", "".join(lines)), id="results", aria_labelledby="results-title")
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_labelledby="results-title")


def _head(heading: str, unit: str, key: str, *, first: str) -> str:
    label = escape(heading) + (tag("small", escape(unit)) if unit else "")
    button = tag("button", label, type="button", data_key=key, data_first=first)
    return tag("th", button, scope="col", aria_sort="none")


def _line(row: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    status = str(row.get("status") or "finished")
    name = tag("span", "", class_=f"dot {style['colour']}") + tag("b", escape(row.get("recipe")))
    if status != "finished":
        name += " " + tag("span", escape(status), class_="status")
    if row.get("note"):
        name += tag("small", escape(row["note"]), class_="note")
    if row.get("problem"):
        name += tag("small", escape(row["problem"]), class_="problem")
    cells = [tag("th", name, scope="row", data_key="recipe", data_value=row.get("recipe"))]
    for column in COLUMNS:
        value = row.get(column.key)
        width = None
        if column.key == "fraction_of_no_communication" and (share := numbers.number(value)) is not None:
            width = f"--share:{min(max(share, 0), 1):.4f}"
        cells.append(tag("td", column.write(value), data_key=column.key, data_value=numbers.exact(value), style=width))
    return tag("tr", "".join(cells), data_recipe=row.get("recipe"), data_status=status)


def recipes(rows: Sequence[Mapping[str, Any]], styles: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on each recipe, and its text."""
    lines = []
    for row, style in zip(rows, styles, strict=True):
        name = tag("span", "", class_=f"dot {style['colour']}") + escape(row.get("recipe"))
        spelled = tag("code", escape(row["spelled"])) if row.get("spelled") else ""
        about = tag("p", escape(row.get("about") or "")) if row.get("about") else ""
        lines.append(tag("div", tag("dt", name) + tag("dd", about + spelled)))
    return tag("dl", "".join(lines), class_="recipes")


def facts(values: Mapping[str, Any]) -> str:
    """Every key with its value, in the order of the file.

    >>> facts({"batch_per_worker": 8})
    '<dl class="facts"><div><dt>batch per worker</dt><dd data-value="8">8</dd></div></dl>'
    """
    lines = [
        tag(
            "div",
            tag("dt", escape(str(key).replace("_", " ")))
            + tag("dd", escape(numbers.plain(value)), data_value=numbers.exact(value) or None),
        )
        for key, value in values.items()
    ]
    return tag("dl", "".join(lines), class_="facts")


def settings_line(settings: Mapping[str, Any]) -> str:
    """The settings that matter most, in one line of plain text.

    >>> settings_line({"workload": "gpt", "parameters": 3300000, "workers": 4, "network": "100mbit,1ms", "steps": 200})
    'gpt, 3,300,000 parameters · 4 workers · 100mbit,1ms · 200 steps'
    """
    said = []
    model = [str(settings["workload"])] if settings.get("workload") is not None else []
    if settings.get("parameters") is not None:
        model.append(f"{numbers.plain(settings['parameters'])} parameters")
    said.append(", ".join(model))
    for key, words in (("workers", "workers"), ("network", ""), ("steps", "steps"), ("optimizer", "")):
        if settings.get(key) is not None:
            said.append(f"{numbers.plain(settings[key])} {words}".strip())
    return " · ".join(part for part in said if part)


def target_line(settings: Mapping[str, Any]) -> str:
    """The target loss in one sentence of plain text; empty if there is none.

    >>> target_line({"target_loss": 2.23, "target_from": "ddp"})
    'The target is a loss of 2.230, set by ddp.'
    """
    if numbers.number(settings.get("target_loss")) is None:
        return ""
    source = f", set by {settings['target_from']}" if settings.get("target_from") else ""
    return f"The target is a loss of {numbers.loss(settings['target_loss'])}{source}."


def network_line(network: Mapping[str, Any]) -> str:
    """The network as asked and as measured, in one sentence of plain text; empty if nothing is known.

    >>> network_line({"asked": "100mbit,1ms", "method": "switch", "measured": {"mbit": 99.1, "delay_ms": 1.04}})
    'Network: asked 100mbit,1ms; measured 99.1 Mbit/s, 1.04 ms; made by switch.'
    """
    if not network:
        return ""
    said = []
    if network.get("asked") is not None:
        said.append(f"asked {network['asked']}")
    measured = network.get("measured")
    if isinstance(measured, Mapping) and measured:
        units = {"mbit": " Mbit/s", "delay_ms": " ms"}
        told = [f"{numbers.plain(measured[key])}{unit}" for key, unit in units.items() if measured.get(key) is not None]
        said.append("measured " + ", ".join(told))
    else:
        said.append("not measured")
    if network.get("method"):
        said.append(f"made by {network['method']}")
    return f"Network: {'; '.join(said)}."
