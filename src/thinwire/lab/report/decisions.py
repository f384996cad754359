"""The decisions of `auto` on the report: in words, and the Pareto front it chose from as a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..draw import numbers
from ..draw.frame import Frame, text
from ..draw.markup import escape, tag

_WIDTH, _HEIGHT = 560, 260


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole section, or nothing if no row has decisions.

    >>> section([{"recipe": "ddp"}])
    ''
    >>> told = {"step": 3, "seconds": 1.5, "recipe": "two-shot-2", "text": "step 3: 94 Mbit/s; two-shot-2"}
    >>> "step 3: 94 Mbit/s" in section([{"recipe": "auto", "decisions": [told], "front": []}])
    True
    """
    row = next((row for row in rows if row.get("decisions") is not None), None)
    if row is None:
        return ""
    title = tag("h2", "What auto decided", id="auto-title")
    lines = [_decision(one) for one in row["decisions"]]
    told = tag("ol", "".join(lines), class_="decisions") if lines else tag("p", "It stayed with dense.", class_="empty")
    share = numbers.number(row.get("deciding_share"))
    words = "Vertical lines in the chart against time mark these decisions."
    if share is not None:
        words += f" Deciding took {100 * share:.2f} % of the training time of the first rank."
    drawing = _front(row.get("front") or [], row["decisions"])
    return tag("section", title + told + tag("p", words, class_="caption") + drawing, aria_labelledby="auto-title")


def _decision(one: Mapping[str, Any]) -> str:
    when = tag("b", escape(numbers.seconds(one.get("seconds"))))
    return tag("li", f"{when} {escape(one.get('text'))}", data_step=one.get("step"), data_recipe=one.get("recipe"))


def _front(points: Sequence[Mapping[str, Any]], decisions: Sequence[Mapping[str, Any]]) -> str:
    """Predicted step time against progress per step; the last choice is filled."""
    known = []
    for point in points:
        x = numbers.number(point.get("predicted_ms"))
        y = numbers.number(point.get("progress_per_step", point.get("worth")))  # its name in older files
        if x is not None and y is not None:
            known.append((x, y, str(point.get("recipe"))))
    if not known:
        return ""
    chosen = str(decisions[-1].get("recipe")) if decisions else "dense"
    right = max(x for x, _, _ in known) * 1.05
    frame = Frame.on_page((0.0, right), (0.0, 1.05), width=_WIDTH, height=_HEIGHT)
    drawn = [*frame.grid(across="predicted step, ms", down="progress per step, 1 = dense")]
    drawn.append(frame.curve([(x, y) for x, y, _ in known], colour="thin"))
    for place, (x, y, name) in enumerate(known):
        note = f"{name}: {numbers.milliseconds(x, unit=True)}, progress {y:.2f}"
        style = "chosen" if name == chosen else "open"
        drawn.append(frame.spot(x, y, note=note, style=style, data_recipe=name))
        if name == chosen or place in (0, len(known) - 1):
            across, down = frame.place(x, y)
            side, anchor = (-8, "end") if across > _WIDTH * 0.6 else (8, "start")
            drawn.append(text(across + side, down + 14, name, "chosen-name" if name == chosen else "tick", anchor))
    caption = tag(
        "figcaption",
        tag("b", "The Pareto front of the last decision: no other recipe is faster and also makes more progress"),
    )
    svg = frame.svg(drawn, label="Predicted step time against progress per step")
    return tag("figure", caption + svg, class_="front", id="front")
