"""The simulation part of the report: the critical path of the slowest worker, and step time over the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..draw import numbers
from ..draw.chart import Line, lines_on_page
from ..draw.markup import escape, tag

_HEADS = ("row", "virtual time", "real time", "workers computing", "the slowest worker's time", "links on its path")


def section(result: Mapping[str, Any], styles: Sequence[Mapping[str, Any]]) -> str:
    """The whole section, or nothing where this is not a simulation.

    >>> section({"kind": "compare", "rows": []}, [])
    ''
    >>> row = {"recipe": "dcd@ring", "virtual_seconds": 12.0, "critical_path": {"phases": {"compute": 3.0}}}
    >>> "compute 100 %" in section({"kind": "simulate", "rows": [row]}, [{"colour": "s0"}])
    True
    """
    if result.get("kind") != "simulate":
        return ""
    rows = list(zip(result["rows"], styles, strict=True))
    head = tag("thead", tag("tr", "".join(tag("th", escape(name), scope="col") for name in _HEADS)))
    lines = "".join(_line(row, style) for row, style in rows)
    table = tag("div", tag("table", head + tag("tbody", lines), id="simulated"), class_="scroll", tabindex=0)
    words = (
        "All workers ran in one process. Time is computed, not measured. The time of the slowest worker is its "
        "critical path: its own computing and the messages that it waited for, followed back to their senders."
    )
    title = tag("h2", "Simulated", id="simulated-title")
    caption = tag("p", words, class_="caption")
    grown = _growth(result.get("growth") or [], rows)
    return tag("section", title + table + caption + grown, aria_labelledby="simulated-title")


def _line(row: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    name = tag("span", "", class_=f"dot {style['colour']}") + tag("b", escape(row.get("recipe")))
    path = row.get("critical_path") or {}
    share = numbers.number((row.get("utilisation") or {}).get("mean"))
    cells = [
        tag("td", numbers.seconds(row.get("virtual_seconds")), data_value=numbers.exact(row.get("virtual_seconds"))),
        tag("td", numbers.seconds(row.get("real_seconds")), data_value=numbers.exact(row.get("real_seconds"))),
        tag("td", numbers.NONE if share is None else f"{100 * share:.0f} %", data_value=numbers.exact(share)),
        tag("td", escape(_phases(path.get("phases") or {}))),
        tag("td", escape(", ".join(f"{one['from']} to {one['to']}" for one in (path.get("links") or [])[:3]))),
    ]
    return tag("tr", tag("th", name, scope="row") + "".join(cells), data_recipe=row.get("recipe"))


def _phases(phases: Mapping[str, Any]) -> str:
    known = {name: found for name, value in phases.items() if (found := numbers.number(value)) is not None}
    total = sum(known.values())
    if total <= 0:
        return numbers.NONE
    shares = sorted(((value / total, name) for name, value in known.items()), reverse=True)
    return ", ".join(f"{name.replace('_', '-')} {100 * share:.0f} %" for share, name in shares if share >= 0.01)


def _growth(points: Sequence[Mapping[str, Any]], rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Step time over the number of workers, both logarithmic."""
    series = []
    for row, style in rows:
        name = str(row.get("recipe"))
        known = [
            (int(point["workers"]), ms)
            for point in points
            if (ms := numbers.number((point.get("step_ms") or {}).get(row.get("recipe")))) is not None and ms > 0
        ]
        if len(known) > 1:
            series.append(
                Line.through(
                    name,
                    known,
                    colour=str(style["colour"]),
                    marks=True,
                    notes=[f"{name}: {numbers.milliseconds(ms, unit=True)} with {n:,} workers" for n, ms in known],
                    data=[{"data_workers": n, "data_value": numbers.exact(ms)} for n, ms in known],
                )
            )
    if not series:
        return ""
    svg = lines_on_page(
        series, across="workers", down="ms a step", label="Step time over the number of workers", log_x=True,
        log_y=True, width=560,
    )  # fmt: skip
    caption = tag("figcaption", tag("b", "Step time over the number of workers, computed without training"))
    return tag("figure", caption + svg, class_="front", id="growth")
