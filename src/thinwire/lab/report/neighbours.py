"""Decentralised rows: the loss of the averaged model beside that of the local ones, and how far models are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import figures
from .markup import axes, escape, tag

_WIDE, _HIGH, _EDGE = 560, 240, 44
_HEADS = ("row", "algorithm", "topology", "averaged loss", "local loss", "models apart", "accuracy")


def section(rows: Sequence[Mapping[str, Any]], styles: Sequence[Mapping[str, Any]]) -> str:
    """The whole section, or nothing where no row is decentralised.

    >>> section([{"recipe": "ddp"}], [{"colour": "s0"}])
    ''
    >>> row = {"recipe": "dcd:4@ring", "algorithm": "dcd", "topology": "ring", "averaged_loss": 2.5, "local_loss": 2.6}
    >>> "2.600" in section([row], [{"colour": "s0"}])
    True
    """
    shown = [(row, style) for row, style in zip(rows, styles, strict=True) if row.get("algorithm")]
    if not shown:
        return ""
    title = tag("h2", "Decentralised training", id="neighbours-title")
    head = tag("thead", tag("tr", "".join(tag("th", escape(name), scope="col") for name in _HEADS)))
    lines = "".join(_line(row, style) for row, style in shown)
    table = tag("div", tag("table", head + tag("tbody", lines), id="neighbours"), class_="scroll", tabindex=0)
    words = (
        "Every worker has a model of its own. The loss of such a row elsewhere on this page is that of the average of "
        "all models; apart is the root of the mean squared distance to it, over its length."
    )
    caption = tag("p", words, class_="caption")
    return tag("section", title + table + caption + _apart(shown), aria_labelledby="neighbours-title")


def _line(row: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    name = tag("span", "", class_=f"dot {style['colour']}") + tag("b", escape(row.get("recipe")))
    accuracy = figures.number(row.get("accuracy"))
    cells = [
        tag("td", escape(row.get("algorithm"))),
        tag("td", escape(row.get("topology"))),
        tag("td", figures.loss(row.get("averaged_loss")), data_value=figures.exact(row.get("averaged_loss"))),
        tag("td", figures.loss(row.get("local_loss")), data_value=figures.exact(row.get("local_loss"))),
        tag("td", _distance(row.get("consensus_distance")), data_value=figures.exact(row.get("consensus_distance"))),
        tag("td", figures.NONE if accuracy is None else f"{100 * accuracy:.1f} %", data_value=figures.exact(accuracy)),
    ]
    return tag("tr", tag("th", name, scope="row") + "".join(cells), data_recipe=row.get("recipe"))


def _distance(value: Any) -> str:
    found = figures.number(value)
    return figures.NONE if found is None else f"{found:.2g}"


def _apart(shown: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """How far models are apart over the steps, on a logarithmic scale."""
    lines = []
    for row, style in shown:
        spots = [
            (point["step"], far)
            for point in row.get("curve") or []
            if (far := figures.number(point.get("consensus_distance"))) is not None and far > 0
        ]
        if len(spots) > 1:
            lines.append((str(row.get("recipe")), style["colour"], spots))
    if not lines:
        return ""
    last = max(step for _, _, spots in lines for step, _ in spots)
    low = math.floor(math.log10(min(far for _, _, spots in lines for _, far in spots)))
    high = max(low + 1, math.ceil(math.log10(max(far for _, _, spots in lines for _, far in spots))))

    def across(step: float) -> float:
        return float(_EDGE + step / last * (_WIDE - 2 * _EDGE))

    def down(far: float) -> float:
        return _HIGH - _EDGE - (math.log10(far) - low) / (high - low) * (_HIGH - 2 * _EDGE)

    drawn = axes(wide=_WIDE, high=_HIGH, edge=_EDGE)
    for power in range(low, high + 1):
        drawn.append(tag("text", f"1e{power}", x=_EDGE - 6, y=f"{down(10.0**power) + 4:.1f}", text_anchor="end"))
    for name, colour, spots in lines:
        path = "".join(
            f"{'L' if place else 'M'}{across(step):.1f} {down(far):.1f}" for place, (step, far) in enumerate(spots)
        )
        drawn.append(tag("path", tag("title", escape(name)), class_=f"apart-path {colour}", d=path))
    drawn.append(tag("text", "models apart", x=_EDGE, y=_EDGE - 18))
    drawn.append(tag("text", escape(f"step {last:,}"), x=_WIDE - _EDGE, y=_HIGH - 14, text_anchor="end"))
    svg = tag("svg", "".join(drawn), viewBox=f"0 0 {_WIDE} {_HIGH}", role="img", aria_label="How far models are apart")
    return tag("figure", svg, class_="front", id="apart")
