"""The bars of the report as HTML: the time of a step by part, and the bytes that it sends.

Lengths are style variables. The same markup serves every width and zooms without a redraw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..draw import numbers
from ..draw.axis import Axis
from ..draw.markup import escape, tag

WORK = ("compute", "encode", "exchange", "decode")
PARTS = (*WORK, "exposed", "whole")


def breakdown(rows: Sequence[Mapping[str, Any]], *, no_communication_ms: Any) -> str:
    """Two bars a recipe: all of its work in a row, and the measured step as compute and exposed communication.

    >>> row = {"recipe": "bf16", "step_ms": 200.0, "breakdown": {"compute_ms": 150.0, "exposed_ms": 50.0}}
    >>> page = breakdown([row], no_communication_ms=150.0)
    >>> 'data-part="exposed" data-value="50.0"' in page, 'class="limit"' in page
    (True, True)
    """
    limit = numbers.number(no_communication_ms)
    drawn = [(row, _work(row), _step(row)) for row in rows]
    lengths = [sum(value for _, value in bar) for _, work, step in drawn for bar in (work, step)]
    most = max([*lengths, limit or 0.0])
    if most <= 0:
        return tag("p", "No step was timed.", class_="empty")
    # DDP is often ten times slower than the rest. The second scale shows the rest.
    steps = sorted(length for length in (sum(value for _, value in step) for _, _, step in drawn) if length > 0)
    near = min(most, 1.15 * max([*(steps[: (len(steps) + 1) // 2]), 2 * (limit or 0.0)]))
    lines = [_line(row, _bar("work", work, row) + _bar("step", step, row)) for row, work, step in drawn]
    mark = ""
    if limit:
        words = f"no communication {numbers.milliseconds(no_communication_ms, unit=True)}"
        mark = tag(
            "div", tag("span", escape(words)), class_="limit", data_value=numbers.exact(no_communication_ms),
            style=f"--at:{limit:.6g}",
        )  # fmt: skip
    axes = _scale(_from_zero(most), "all", "ms") + (_scale(_from_zero(near), "near", "ms") if near < most else "")
    plot = tag("div", axes + mark, class_="plot", aria_hidden="true")
    style = f"--most:{most * 1.02:.6g};--all:{most * 1.02:.6g};--near:{near:.6g}"
    zoom = " zooms" if near < most * 0.7 else ""
    return tag("div", plot + "".join(lines), class_="bars breakdown" + zoom, id="breakdown", style=style)


def _work(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Compute, encode, exchange and decode, if at least one of the last three was measured."""
    parts = row.get("breakdown") or {}
    found = [(part, numbers.number(parts.get(f"{part}_ms"))) for part in WORK]
    known = [(part, value) for part, value in found if value is not None]
    return known if any(part != "compute" for part, _ in known) else []


def _step(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The step as compute and exposed; as a whole if it was not split."""
    parts = row.get("breakdown") or {}
    compute, exposed = numbers.number(parts.get("compute_ms")), numbers.number(parts.get("exposed_ms"))
    if compute is not None and exposed is not None:
        return [("compute", compute), ("exposed", exposed)]
    whole = numbers.number(row.get("step_ms"))
    return [] if whole is None else [("whole", whole)]


def _bar(kind: str, parts: Sequence[tuple[str, float]], row: Mapping[str, Any]) -> str:
    if not parts:
        return ""
    breakdown = row.get("breakdown") or {}
    pieces, said = [], []
    for part, value in parts:
        raw = row.get("step_ms") if part == "whole" else breakdown.get(f"{part}_ms")
        words = f"{'step, not split' if part == 'whole' else part} {numbers.milliseconds(raw, unit=True)}"
        said.append(words)
        pieces.append(
            tag(
                "i",
                "",
                class_=f"part {part}",
                data_part=part,
                data_value=numbers.exact(raw),
                data_said=f"{row.get('recipe')}: {words}",
                style=f"--long:{max(value, 0):.6g}",
            )
        )
    label = f"{row.get('recipe')}, {'work' if kind == 'work' else 'step'}: {', '.join(said)}"
    return tag("div", "".join(pieces), class_=f"bar {kind}", role="img", aria_label=label)


def _line(row: Mapping[str, Any], bars: str) -> str:
    value = row.get("step_ms")
    told = tag("span", numbers.milliseconds(value, unit=True), class_="told", data_value=numbers.exact(value))
    inside = bars or tag("small", escape(row.get("status") or "not measured"), class_="none")
    name = tag("span", escape(row.get("recipe")), class_="name")
    return tag("div", name + tag("div", inside, class_="track") + told, class_="line", data_recipe=row.get("recipe"))


def bytes_bars(rows: Sequence[Mapping[str, Any]], styles: Sequence[Mapping[str, Any]]) -> str:
    """Bytes per step on a logarithmic axis that starts at a power of ten below the smallest.

    >>> 'data-value="1500000"' in bytes_bars([{"recipe": "bf16", "bytes_per_step": 1500000}], [{"colour": "s0"}])
    True
    """
    sizes = [found for row in rows if (found := numbers.number(row.get("bytes_per_step"))) is not None and found > 0]
    if not sizes:
        return tag("p", "No bytes were counted.", class_="empty")
    low = math.ceil(math.log10(min(sizes))) - 1
    high = math.log10(max(sizes)) + 0.04
    ticks = [(float(power - low), _power_label(power)) for power in range(low, math.floor(high) + 1)]
    lines = []
    for row, style in zip(rows, styles, strict=True):
        value = row.get("bytes_per_step")
        found = numbers.number(value)
        long = math.log10(found) - low if found is not None and found > 0 else 0.0
        told = tag("span", numbers.size(value), class_="told", data_value=numbers.exact(value))
        said = f"{row.get('recipe')}: {numbers.size(value)} per step"
        piece = tag("i", "", class_=f"part {style['colour']}", data_said=said, style=f"--long:{max(long, 0):.5f}")
        bar = tag("div", piece, class_="bar step", role="img", aria_label=said)
        name = tag("span", escape(row.get("recipe")), class_="name")
        lines.append(tag("div", name + tag("div", bar, class_="track") + told, class_="line"))
    plot = tag("div", _scale(ticks, "all", ""), class_="plot", aria_hidden="true")
    return tag("div", plot + "".join(lines), class_="bars", id="bytes", style=f"--most:{high - low:.5f}")


def _power_label(power: int) -> str:
    """A power of ten in bytes, without decimals.

    >>> _power_label(5), _power_label(6), _power_label(0)
    ('100 kB', '1 MB', '1 B')
    """
    value, unit = numbers.size(10.0**power).split(" ")
    return f"{float(value):g} {unit}"


def _from_zero(most: float) -> list[tuple[float, str]]:
    """Three to six round numbers from 0.

    >>> [label for _, label in _from_zero(1900)]
    ['0', '500', '1,000', '1,500']
    """
    return Axis(0.0, most, 0.0, 1.0).ticks()


def _scale(ticks: Sequence[tuple[float, str]], scale: str, unit: str) -> str:
    lines = []
    for place, (at, label) in enumerate(ticks):
        words = f"{label} {unit}" if unit and place == len(ticks) - 1 else label
        lines.append(tag("span", tag("em", escape(words)), style=f"--at:{at:.6g}"))
    return tag("div", "".join(lines), class_=f"axis {scale}")
