"""Line charts as SVG: curves with bands and marks, on a page or as a file that stands alone, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .axis import Axis, usable
from .file import Entry, Plot, svg_file
from .frame import BOTTOM, LEFT, RIGHT, TOP, Frame
from .markup import tag
from .numbers import brief
from .palette import COLOURS, dash_of

_BANDS = 3  # that may overlap before they hide the curves
_MARKED = 24  # points; more marks would run into each other


@dataclass(frozen=True)
class Line:
    """Points joined in the order of x; `low` and `high` are the interval of each y. None and NaN leave a gap.

    `colour` is a class of the palette and `dash` a dash pattern; by default both follow from the place of the line.
    `marks` says whether points are marked; by default, if they are few. `notes` are the tooltips of the points and
    `data` their further attributes.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False
    colour: str | None = None
    dash: str | None = None
    marks: bool | None = None
    notes: Sequence[str] | None = None
    data: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def through(cls, name: str, points: Sequence[tuple[float, float]], **options: Any) -> Line:
        """The line through points (x, y).

        >>> Line.through("a", [(1, 2.0), (2, 3.0)]).y
        [2.0, 3.0]
        """
        return cls(name, [x for x, _ in points], [y for _, y in points], **options)


def lines(
    series: Sequence[Line], *, title: str, across: str, down: str, log_x: bool = False, log_y: bool = False
) -> str:
    """A chart as an SVG file, with title and legend.

    >>> chart = lines([Line("dense", [0, 10], [2.0, 1.0])], title="Loss", across="step", down="loss")
    >>> chart.startswith("<svg xmlns"), chart.count("<polyline")
    (True, 1)
    """
    entries = [Entry(one.name, _colour(one, place), _dash(one, place), place) for place, one in enumerate(series)]

    def body(plot: Plot) -> Iterator[str]:
        x = _x_axis(series, plot.left, plot.right, log_x)
        y = _y_axis(series, plot.top, plot.bottom, log_y)
        yield from _drawn(Frame(x, y, plot.width, plot.height), series, across, down)
        if not _any(series, log_y):
            yield plot.empty()

    return svg_file(entries, body, title=title)


def lines_on_page(
    series: Sequence[Line],
    *,
    across: str,
    down: str,
    label: str,
    log_x: bool = False,
    log_y: bool = False,
    width: int = 460,
    height: int = 280,
    x_ticks: Sequence[float] | None = None,
) -> str:
    """A chart inside a page, which has the style sheet and the legend; empty if there is nothing to draw.

    >>> "<svg" in lines_on_page([Line("a", [1, 2], [2.0, 3.0])], across="x", down="y", label="a chart")
    True
    """
    if not _any(series, log_y):
        return ""
    x = _x_axis(series, LEFT, width - RIGHT, log_x)
    frame = Frame(x, _y_axis(series, TOP, height - BOTTOM, log_y), width, height)
    return frame.svg(list(_drawn(frame, series, across, down, x_ticks=x_ticks)), label=label)


def _any(series: Sequence[Line], log: bool) -> bool:
    return any(usable(y, log=log) for one in series for y in one.y)


def _x_axis(series: Sequence[Line], left: float, right: float, log: bool) -> Axis:
    """A linear axis without margins: time begins where it begins."""
    values = [x for one in series for x in one.x]
    return Axis.over(values, begin=left, end=right, log=True) if log else Axis.between(values, begin=left, end=right)


def _y_axis(series: Sequence[Line], top: float, bottom: float, log: bool) -> Axis:
    values = [y for one in series for y in (*one.y, *(one.low or ()), *(one.high or ()))]
    return Axis.over(values, begin=bottom, end=top, log=log)


def _drawn(
    frame: Frame, series: Sequence[Line], across: str, down: str, *, x_ticks: Sequence[float] | None = None
) -> Iterator[str]:
    values = [x for one in series for x in one.x]
    yield from frame.grid(across=across, down=down, values=values, x_ticks=x_ticks)
    for place, one in enumerate(series):
        yield f'<g class="{_colour(one, place)}{" faint" if len(series) > _BANDS else ""}">'
        yield from _line(frame, one, place)
        yield "</g>"


def _line(frame: Frame, one: Line, place: int) -> Iterator[str]:
    drawable = [usable(x, log=frame.x.log) and usable(y, log=frame.y.log) for x, y in zip(one.x, one.y, strict=True)]
    for run in _runs(drawable):
        if one.low is not None and one.high is not None:
            yield from _band(frame, one, run)
        if len(run) > 1:
            yield frame.curve([(one.x[i], one.y[i] or 0.0) for i in run], dash=_dash(one, place), name=one.name)
        if len(run) == 1 or (len(one.x) <= _MARKED if one.marks is None else one.marks):
            yield from (_mark(frame, one, i, place) for i in run)


def _mark(frame: Frame, one: Line, i: int, place: int) -> str:
    x, y = one.x[i], one.y[i] or 0.0
    note = one.notes[i] if one.notes is not None else f"{one.name}: {brief(y)} at {brief(x)}"
    return frame.spot(x, y, shape=place, note=note, **(one.data[i] if one.data is not None else {}))


def _band(frame: Frame, one: Line, run: Sequence[int]) -> Iterator[str]:
    """An interval that reaches below a logarithmic axis ends at its edge."""
    assert one.low is not None
    assert one.high is not None
    found = []
    for i in run:
        low, high = one.low[i], one.high[i]
        if usable(low) and usable(high, log=frame.y.log):
            found.append((one.x[i], max(low or 0.0, frame.y.low), high or 0.0))
    if len(found) == 1:
        x, low, high = found[0]
        across, bottom, top = f"{frame.x(x):.1f}", f"{frame.y(low):.1f}", f"{frame.y(high):.1f}"
        yield tag("line", class_="stem", x1=across, x2=across, y1=bottom, y2=top)
    elif found:
        edge = [(x, high) for x, _, high in found] + [(x, low) for x, low, _ in reversed(found)]
        yield frame.area(edge, style="band")


def _runs(drawable: Sequence[bool]) -> Iterator[list[int]]:
    """Stretches without a gap."""
    run: list[int] = []
    for place, good in enumerate(drawable):
        if good:
            run.append(place)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _colour(one: Line, place: int) -> str:
    return f"s{place % COLOURS}" if one.colour is None else one.colour


def _dash(one: Line, place: int) -> str | None:
    if one.dash is not None or one.colour is not None:
        return one.dash
    return dash_of(place, dashed=one.dashed)
