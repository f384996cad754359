"""Decentralised rows of the report: loss of the averaged and of the local models, and their consensus distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..draw import numbers
from ..draw.chart import Line, lines_on_page
from ..draw.markup import escape, tag

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
        "Every worker has its own model. Elsewhere on this page, the loss of such a row is the loss of the averaged "
        "model. Models apart: the root mean square distance to the averaged model, over its norm."
    )
    caption = tag("p", words, class_="caption")
    return tag("section", title + table + caption + _apart(shown), aria_labelledby="neighbours-title")


def _line(row: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    name = tag("span", "", class_=f"dot {style['colour']}") + tag("b", escape(row.get("recipe")))
    accuracy = numbers.number(row.get("accuracy"))
    cells = [
        tag("td", escape(row.get("algorithm"))),
        tag("td", escape(row.get("topology"))),
        tag("td", numbers.loss(row.get("averaged_loss")), data_value=numbers.exact(row.get("averaged_loss"))),
        tag("td", numbers.loss(row.get("local_loss")), data_value=numbers.exact(row.get("local_loss"))),
        tag("td", _distance(row.get("consensus_distance")), data_value=numbers.exact(row.get("consensus_distance"))),
        tag("td", numbers.NONE if accuracy is None else f"{100 * accuracy:.1f} %", data_value=numbers.exact(accuracy)),
    ]
    return tag("tr", tag("th", name, scope="row") + "".join(cells), data_recipe=row.get("recipe"))


def _distance(value: Any) -> str:
    found = numbers.number(value)
    return numbers.NONE if found is None else f"{found:.2g}"


def _apart(shown: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The consensus distance over the steps, on a logarithmic axis."""
    series = []
    for row, style in shown:
        points = [
            (float(point["step"]), far)
            for point in row.get("curve") or []
            if (far := numbers.number(point.get("consensus_distance"))) is not None and far > 0
        ]
        if len(points) > 1:
            series.append(Line.through(str(row.get("recipe")), points, colour=str(style["colour"]), marks=False))
    if not series:
        return ""
    svg = lines_on_page(
        series, across="step", down="models apart", label="How far models are apart", log_y=True, width=560, height=240
    )
    return tag("figure", svg, class_="front", id="apart")
