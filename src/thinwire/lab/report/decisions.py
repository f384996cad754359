"""What `auto` did: its decisions in words, and the front it chose from, as a small drawing that needs no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import figures
from .markup import axes, escape, tag

_WIDE, _HIGH, _EDGE = 560, 260, 44


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole section, or nothing where no row has decisions.

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
    share = figures.number(row.get("deciding_share"))
    words = "Vertical lines in the chart against time mark these decisions."
    if share is not None:
        words += f" Deciding took {100 * share:.2f} % of the training time of the first rank."
    drawing = _front(row.get("front") or [], row["decisions"])
    return tag("section", title + told + tag("p", words, class_="caption") + drawing, aria_labelledby="auto-title")


def _decision(one: Mapping[str, Any]) -> str:
    when = tag("b", escape(figures.seconds(one.get("seconds"))))
    return tag("li", f"{when} {escape(one.get('text'))}", data_step=one.get("step"), data_recipe=one.get("recipe"))


def _front(points: Sequence[Mapping[str, Any]], decisions: Sequence[Mapping[str, Any]]) -> str:
    """Predicted step against worth; the last choice is filled."""
    spots = [
        (figures.number(p.get("predicted_ms")), figures.number(p.get("worth")), str(p.get("recipe"))) for p in points
    ]
    known = [(x, y, name) for x, y, name in spots if x is not None and y is not None]
    if not known:
        return ""
    chosen = str(decisions[-1].get("recipe")) if decisions else "dense"
    right = max(x for x, _, _ in known) * 1.05

    def across(x: float) -> float:
        return _EDGE + x / right * (_WIDE - 2 * _EDGE)

    def down(y: float) -> float:
        return _HIGH - _EDGE - min(y, 1.0) * (_HIGH - 2 * _EDGE)

    path = "".join(f"{'L' if place else 'M'}{across(x):.1f} {down(y):.1f}" for place, (x, y, _) in enumerate(known))
    drawn = [
        *axes(wide=_WIDE, high=_HIGH, edge=_EDGE),
        tag("path", class_="front-path", d=path),
    ]
    for place, (x, y, name) in enumerate(known):
        said = f"{name}: {figures.milliseconds(x, unit=True)}, worth {y:.2f}"
        dot = tag(
            "circle",
            tag("title", escape(said)),
            cx=f"{across(x):.1f}",
            cy=f"{down(y):.1f}",
            r=4.5 if name == chosen else 3,
        )
        label = ""
        if name == chosen or place in (0, len(known) - 1):
            last = across(x) > _WIDE * 0.6
            label = tag(
                "text", escape(name), x=f"{across(x) + (-8 if last else 8):.1f}", y=f"{down(y) + 14:.1f}",
                text_anchor="end" if last else "start",
            )  # fmt: skip
        drawn.append(tag("g", dot + label, class_="chosen" if name == chosen else "other", data_recipe=name))
    drawn.append(tag("text", "worth of a step, 1 = dense", x=_EDGE, y=_EDGE - 18))
    ends = f"predicted step, up to {figures.milliseconds(right / 1.05, unit=True)}"
    drawn.append(tag("text", escape(ends), x=_WIDE - _EDGE, y=_HIGH - 14, text_anchor="end"))
    svg = tag("svg", "".join(drawn), viewBox=f"0 0 {_WIDE} {_HIGH}", role="img", aria_label="The front auto chose from")
    caption = tag("figcaption", tag("b", "The front it chose from last: nothing else is both quicker and worth more"))
    return tag("figure", caption + svg, class_="front", id="front")
