"""Grouped bars with whiskers as an SVG file, on a linear or a logarithmic axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .axis import Axis, usable
from .file import LEFT, RIGHT, WIDTH, Entry, Plot, svg_file, wrapped
from .frame import Frame, text
from .markup import tag
from .numbers import brief
from .palette import COLOURS

_VALUES = 16  # bars that leave room for their values above them


@dataclass(frozen=True)
class Bar:
    """One value of a group, with its interval; None is drawn as a dash."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None


Group = tuple[str, Sequence[Bar]]


def bars(groups: Sequence[Group], *, title: str, down: str, log: bool = False) -> str:
    """Groups of bars as an SVG file; bars of one name have one colour.

    >>> bars([("ring", [Bar("dense", 3.0, 2.5, 3.5)])], title="Times", down="ms").count("<rect")
    1
    """
    names = list(dict.fromkeys(bar.name for _, group in groups for bar in group))
    colours = {name: f"s{place % COLOURS}" for place, name in enumerate(names)}
    entries = [Entry(name, colour) for name, colour in colours.items()] if len(names) > 1 else []
    every = [bar for _, group in groups for bar in group]
    values = [value for bar in every for value in (bar.value, bar.low, bar.high)]

    room = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    labels = [wrapped(label, room - 6) for label, _ in groups]

    def body(plot: Plot) -> Iterator[str]:
        axis = Axis.over(values, begin=plot.bottom, end=plot.top + 14, log=log, zero=not log)
        frame = Frame(Axis(0.0, 1.0, plot.left, plot.right), axis, plot.width, plot.height)
        yield from frame.grid(across="", down=down, x_ticks=())
        for place, (_, group) in enumerate(groups):
            left = plot.left + place * room
            yield from _group(axis, group, colours, left, room, values=len(every) <= _VALUES)
            for row, said in enumerate(labels[place]):
                yield text(left + room / 2, plot.bottom + 19 + 15 * row, said, "tick", "middle")
        yield frame.base(axis.low if log else 0.0)
        if not groups:
            yield plot.empty()

    return svg_file(entries, body, title=title, below=18 + 15 * max(map(len, labels), default=1))


def _group(
    axis: Axis, group: Sequence[Bar], colours: Mapping[str, str], left: float, room: float, *, values: bool
) -> Iterator[str]:
    width = min(46.0, room * 0.8 / max(1, len(group)))
    start = left + (room - width * len(group)) / 2
    for place, bar in enumerate(group):
        yield from _bar(axis, bar, colours[bar.name], start + place * width, width, value=values and width >= 24)


def _bar(axis: Axis, bar: Bar, colour: str, left: float, width: float, *, value: bool) -> Iterator[str]:
    middle, base = left + width / 2, axis(axis.low if axis.log else 0.0)
    if not usable(bar.value, log=axis.log):
        yield text(middle, base - 4, "–", "value", "middle")
        return
    at = axis(float(bar.value or 0.0))
    highest = min(at, base)
    place = {"x": f"{left + width * 0.07:.1f}", "y": f"{highest:.1f}"}
    size = {"width": f"{width * 0.86:.1f}", "height": f"{abs(at - base):.1f}"}
    yield tag("rect", class_=f"column {colour}", **place, **size)
    if usable(bar.low) and usable(bar.high, log=axis.log) and bar.low != bar.high:
        low, high = axis(max(float(bar.low or 0.0), axis.low)), axis(float(bar.high or 0.0))
        cap = min(5.0, width * 0.2)
        ends = "".join(f"M{middle - cap:.1f} {y:.1f}h{2 * cap:.1f}" for y in (low, high))
        yield tag("path", class_="whisker", d=f"M{middle:.1f} {low:.1f}V{high:.1f}{ends}")
        highest = min(highest, high)
    if value:
        said = brief(float(f"{bar.value:.{3 if width > 40 else 2}g}"))
        yield text(middle, highest - 4, said, "value", "middle")
