"""What only a simulation knows: what the slowest worker's time consists of, and how a step grows with the workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import figures
from .markup import axes, escape, tag

_WIDE, _HIGH, _EDGE = 560, 280, 72
_HEADS = ("row", "virtual time", "real time", "workers computing", "the slowest worker's time", "links on its way")


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
        "All workers ran in one process; time is reckoned, not measured. The slowest worker's time is followed back "
        "through whatever it waited for: its own computing, or the letter of a neighbour, and what that had waited for."
    )
    title = tag("h2", "Simulated", id="simulated-title")
    caption = tag("p", words, class_="caption")
    grown = _growth(result.get("growth") or [], rows)
    return tag("section", title + table + caption + grown, aria_labelledby="simulated-title")


def _line(row: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    name = tag("span", "", class_=f"dot {style['colour']}") + tag("b", escape(row.get("recipe")))
    path = row.get("critical_path") or {}
    share = figures.number((row.get("utilisation") or {}).get("mean"))
    cells = [
        tag("td", figures.seconds(row.get("virtual_seconds")), data_value=figures.exact(row.get("virtual_seconds"))),
        tag("td", figures.seconds(row.get("real_seconds")), data_value=figures.exact(row.get("real_seconds"))),
        tag("td", figures.NONE if share is None else f"{100 * share:.0f} %", data_value=figures.exact(share)),
        tag("td", escape(_phases(path.get("phases") or {}))),
        tag("td", escape(", ".join(f"{one['from']} to {one['to']}" for one in (path.get("links") or [])[:3]))),
    ]
    return tag("tr", tag("th", name, scope="row") + "".join(cells), data_recipe=row.get("recipe"))


def _phases(phases: Mapping[str, Any]) -> str:
    known = {name: found for name, value in phases.items() if (found := figures.number(value)) is not None}
    total = sum(known.values())
    if total <= 0:
        return figures.NONE
    shares = sorted(((value / total, name) for name, value in known.items()), reverse=True)
    return ", ".join(f"{name.replace('_', '-')} {100 * share:.0f} %" for share, name in shares if share >= 0.01)


def _growth(points: Sequence[Mapping[str, Any]], rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Time of a step over the number of workers, both logarithmic."""
    lines = []
    for row, style in rows:
        spots = [
            (int(point["workers"]), found)
            for point in points
            if (found := figures.number((point.get("step_ms") or {}).get(row.get("recipe")))) is not None and found > 0
        ]
        if len(spots) > 1:
            lines.append((str(row.get("recipe")), style["colour"], spots))
    if not lines:
        return ""
    numbers = sorted({workers for _, _, spots in lines for workers, _ in spots})
    low = math.floor(math.log10(min(ms for _, _, spots in lines for _, ms in spots)))
    high = max(low + 1, math.ceil(math.log10(max(ms for _, _, spots in lines for _, ms in spots))))
    first, span = math.log2(numbers[0]), math.log2(numbers[-1] / numbers[0]) or 1.0

    def across(workers: float) -> float:
        return _EDGE + (math.log2(workers) - first) / span * (_WIDE - 2 * _EDGE)

    def down(ms: float) -> float:
        return _HIGH - _EDGE - (math.log10(ms) - low) / (high - low) * (_HIGH - 2 * _EDGE)

    drawn = axes(wide=_WIDE, high=_HIGH, edge=_EDGE)
    for power in range(low, high + 1):
        said = figures.milliseconds(10.0**power, unit=True)
        drawn.append(tag("text", escape(said), x=_EDGE - 6, y=f"{down(10.0**power) + 4:.1f}", text_anchor="end"))
    for workers in numbers:
        drawn.append(
            tag("text", f"{workers:,}", x=f"{across(workers):.1f}", y=_HIGH - _EDGE + 16, text_anchor="middle")
        )
    for name, colour, spots in lines:
        path = "".join(f"{'L' if place else 'M'}{across(x):.1f} {down(y):.1f}" for place, (x, y) in enumerate(spots))
        drawn.append(tag("path", tag("title", escape(name)), class_=f"apart-path {colour}", d=path))
        for workers, ms in spots:
            said = f"{name}: {figures.milliseconds(ms, unit=True)} with {workers:,} workers"
            dot = tag("circle", tag("title", escape(said)), cx=f"{across(workers):.1f}", cy=f"{down(ms):.1f}", r=3)
            drawn.append(tag("g", dot, class_="other", data_value=figures.exact(ms), data_workers=workers))
    drawn.append(tag("text", "a step", x=_EDGE, y=_EDGE - 18))
    drawn.append(tag("text", "workers", x=_WIDE - _EDGE, y=_HIGH - 14, text_anchor="end"))
    svg = tag("svg", "".join(drawn), viewBox=f"0 0 {_WIDE} {_HIGH}", role="img", aria_label="A step over the workers")
    caption = tag("figcaption", tag("b", "How a step grows with the number of workers, reckoned without training"))
    return tag("figure", caption + svg, class_="front", id="growth")
