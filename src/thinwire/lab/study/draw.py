"""Small drawings as SVG, without a script: lines on plain or logarithmic axes, and histograms with fitted densities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..report import figures
from ..report.markup import escape, tag
from .distributions import density_of

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 40
_STYLES = {"gaussian": ("s0", "6 4"), "laplace": ("s4", "2 3"), "student_t": ("ref", None)}


@dataclass(frozen=True)
class Line:
    """One line: its name, a colour of the style sheet, its points, and how it is dashed."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dash: str | None = None
    dots: bool = False


class Axes:
    """Turns numbers into places, and draws ticks, names and grid."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        wide: int,
        high: int,
        log_x: bool = False,
        log_y: bool = False,
    ) -> None:
        self.wide, self.high, self.x, self.y, self.log_x, self.log_y = wide, high, x, y, log_x, log_y

    def across(self, x: float) -> float:
        return _LEFT + _share(x, *self.x, log=self.log_x) * (self.wide - _LEFT - _RIGHT)

    def down(self, y: float) -> float:
        return self.high - _BOTTOM - _share(y, *self.y, log=self.log_y) * (self.high - _TOP - _BOTTOM)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return "".join(
            f"{'L' if place else 'M'}{self.across(x):.1f} {self.down(y):.1f}" for place, (x, y) in enumerate(points)
        )

    def drawn(self, *, across: str, down: str, x_ticks: Sequence[float] | None = None) -> Iterator[str]:
        bottom, right = self.high - _BOTTOM, self.wide - _RIGHT
        for value in ticks(*self.y, log=self.log_y, most=5):
            place = self.down(value)
            yield tag("line", class_="grid", x1=_LEFT, x2=right, y1=f"{place:.1f}", y2=f"{place:.1f}")
            yield tag("text", escape(written(value)), x=_LEFT - 6, y=f"{place + 4:.1f}", text_anchor="end")
        for value in ticks(*self.x, log=self.log_x, most=5) if x_ticks is None else x_ticks:
            place = self.across(value)
            yield tag("line", class_="base", x1=f"{place:.1f}", x2=f"{place:.1f}", y1=bottom, y2=bottom + 4)
            yield tag("text", escape(written(value)), x=f"{place:.1f}", y=bottom + 17, text_anchor="middle")
        yield tag("line", class_="base", x1=_LEFT, x2=right, y1=bottom, y2=bottom)
        yield tag("text", escape(down), class_="name", x=2, y=14)
        yield tag("text", escape(across), class_="name", x=right, y=self.high - 6, text_anchor="end")


def lines(
    series: Sequence[Line],
    *,
    across: str,
    down: str,
    label: str,
    log_x: bool = False,
    log_y: bool = False,
    wide: int = 460,
    high: int = 280,
    x_ticks: Sequence[float] | None = None,
) -> str:
    """A chart of lines; the legend is not part of it.

    >>> "<svg" in lines([Line("a", "s0", [(1, 2), (2, 3)])], across="x", down="y", label="a chart")
    True
    """
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    if not xs:
        return ""
    x_range, y_range = _range(xs, log=log_x, tight=True), _range(ys, log=log_y)
    axes = Axes(x_range, y_range, wide=wide, high=high, log_x=log_x, log_y=log_y)
    drawn = list(axes.drawn(across=across, down=down, x_ticks=x_ticks))
    for line in series:
        inside = tag("title", escape(line.name))
        drawn.append(
            tag("path", inside, class_=f"curve {line.colour}", d=axes.path(line.points), stroke_dasharray=line.dash)
        )
        for x, y in line.points if line.dots or len(line.points) == 1 else ():
            said = f"{line.name}: {written(y)} at {written(x)}"
            at = {"cx": f"{axes.across(x):.1f}", "cy": f"{axes.down(y):.1f}"}
            drawn.append(tag("circle", tag("title", escape(said)), class_=f"spot {line.colour}", r=3.2, **at))
    return tag("svg", "".join(drawn), viewBox=f"0 0 {wide} {high}", role="img", aria_label=label)


def heights(portraits: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The range that the densities of several tensors share, each by its standard deviation."""
    found = [_heights(_density(one)[1]) for one in portraits]
    return min(low for low, _ in found), max(high for _, high in found)


def shape(
    portrait: Mapping[str, Any], *, between: tuple[float, float], label: str, wide: int = 340, high: int = 230
) -> str:
    """The histogram of a tensor with the three fitted densities over it; the vertical axis is logarithmic."""
    bins, density, unit = _density(portrait)
    floor, top = between
    axes = Axes((bins[0] / unit, bins[-1] / unit), (floor, top), wide=wide, high=high, log_y=True)
    drawn = [*axes.drawn(across="u over its standard deviation", down="density", x_ticks=_symmetric(bins[-1] / unit))]
    drawn.append(tag("path", class_="area", d=_steps(axes, bins / unit, density, floor)))
    grid = np.linspace(bins[0], bins[-1], 121)
    for name, (colour, dash) in _STYLES.items():
        if name not in portrait["fits"]:
            continue
        # A fit is to what is not zero, and the histogram counts all.
        height = np.exp(density_of(name, portrait["fits"][name]).log_density(grid)) * unit * (1 - portrait["zeros"])
        points = [(x / unit, min(max(y, floor), top)) for x, y in zip(grid.tolist(), height.tolist(), strict=True)]
        drawn.append(tag("path", class_=f"curve fit {colour}", d=axes.path(points), stroke_dasharray=dash))
    return tag("svg", "".join(drawn), viewBox=f"0 0 {wide} {high}", role="img", aria_label=label)


def two_shapes(portrait: Mapping[str, Any], *, colour: str, label: str, wide: int = 460, high: int = 280) -> str:
    """The gradient's histogram as a line over that of u, on the same axes, in standard deviations of u."""
    bins, density, unit = _density(portrait)
    gradient_bins, gradient_density, _ = _density(portrait["gradient"], unit=unit)
    reach = max(bins[-1], gradient_bins[-1]) / unit
    low, top = _heights(density)
    other_low, other_top = _heights(gradient_density)
    floor = min(low, other_low)
    axes = Axes((-reach, reach), (floor, max(top, other_top)), wide=wide, high=high, log_y=True)
    drawn = [*axes.drawn(across="in standard deviations of u", down="density", x_ticks=_symmetric(reach))]
    drawn.append(tag("path", class_=f"area {colour}", d=_steps(axes, bins / unit, density, floor)))
    outline = _steps(axes, gradient_bins / unit, gradient_density, floor, closed=False)
    drawn.append(tag("path", class_="curve ref", d=outline))
    return tag("svg", "".join(drawn), viewBox=f"0 0 {wide} {high}", role="img", aria_label=label)


def swatch(colour: str, dash: str | None = None, *, area: bool = False) -> str:
    """A piece of a line, for a legend."""
    body = tag("rect", class_=f"area {colour}", x=0, y=2, width=26, height=9) if area else ""
    if not area:
        body = tag("path", class_=f"curve {colour}", d="M0 6H26", stroke_dasharray=dash)
    return tag("svg", body, width=26, height=12, viewBox="0 0 26 12", aria_hidden="true")


def fit_legend() -> str:
    """Which line is which density."""
    words = {"gaussian": "Gaussian", "laplace": "Laplace", "student_t": "Student t"}
    items = [tag("li", swatch(*_STYLES[name]) + words[name]) for name in _STYLES]
    return tag("ul", tag("li", swatch("", area=True) + "u") + "".join(items), class_="key")


# ------------------------------------------------------------------------------------------------------------- helpers


def _density(portrait: Mapping[str, Any], *, unit: float | None = None) -> tuple[Any, Any, float]:
    """Edges of the bins, density by standard deviation, and the standard deviation."""
    told = portrait["histogram"]
    counts = np.asarray(told["counts"], dtype=np.float64)
    edges = np.linspace(told["low"], told["high"], len(counts) + 1)
    unit = unit or float(portrait["std"]) or 1.0
    total = counts.sum() + told["outside"]
    return edges, counts / (total * (edges[1] - edges[0]) / unit), unit


def _heights(density: Any) -> tuple[float, float]:
    """Down to the lowest bin that holds something."""
    some = density[density > 0]
    return 10.0 ** math.floor(math.log10(some.min())), float(some.max()) * 1.6


def _steps(axes: Axes, edges: Any, density: Any, floor: float, *, closed: bool = True) -> str:
    """The outline of a histogram, down to its foot where it is to be filled."""
    foot = [(float(edges[0]), floor), (float(edges[-1]), floor)] if closed else []
    points = foot[:1]
    for place, height in enumerate(density.tolist()):
        points += [(float(edges[place]), max(height, floor)), (float(edges[place + 1]), max(height, floor))]
    return axes.path([*points, *foot[1:]])


def _share(value: float, low: float, high: float, *, log: bool) -> float:
    if log:
        value, low, high = math.log10(value), math.log10(low), math.log10(high)
    return (value - low) / (high - low)


def _range(values: Sequence[float], *, log: bool, tight: bool = False) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        room = 1.0 if tight else 1.15
        return (low / room, high * room) if high > low else (low / 3, high * 3)
    if tight:
        return (low, high) if high > low else (low - 1, high + 1)
    return min(0.0, low), high * 1.05 if high > 0 else 1.0


def ticks(low: float, high: float, *, log: bool = False, most: int = 5) -> list[float]:
    """Round numbers in a range.

    >>> ticks(0, 1), ticks(0.001, 0.5, log=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.001, 0.01, 0.1])
    """
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        powers = [10.0**power for power in range(first, last + 1)]
        if last - first > most + 1:
            powers = powers[:: math.ceil(len(powers) / (most + 1))]
        found = [power for power in powers if low * 0.999 <= power <= high * 1.001]
        between = [power * digit for power in powers for digit in (1, 2, 5)]
        return found if len(found) > 1 else [value for value in between if low * 0.999 <= value <= high * 1.001]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((digit * power for digit in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _symmetric(reach: float) -> list[float]:
    """A tick at 0 and as many on either side."""
    right = [value for value in ticks(0.0, reach, most=3) if value > 0]
    return [-value for value in reversed(right)] + [0.0, *right]


def written(value: float) -> str:
    """A tick or a value: short, and never 1e-05.

    >>> written(0.001), written(1000.0), written(2e-7), written(0.0)
    ('0.001', '1,000', '2e-7', '0')
    """
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):,.6f}".rstrip("0").rstrip(".")
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def cell(value: Any, digits: int = 2) -> str:
    """A table cell of a number, with the number itself beside what is shown.

    >>> cell(0.12345)
    '<td data-value="0.12345">0.12</td>'
    """
    found = figures.number(value)
    return tag("td", figures.NONE if found is None else f"{found:,.{digits}f}", data_value=figures.exact(value))
