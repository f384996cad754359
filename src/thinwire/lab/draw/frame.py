"""The frame of a drawing: two axes with grid, ticks and names, and the curves, spots and areas placed on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .axis import Axis
from .markup import escape, tag
from .numbers import brief

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 40  # pixels around the plot of a drawing on a page


@dataclass(frozen=True)
class Frame:
    """Two axes. The vertical one begins at the bottom.

    >>> frame = Frame(Axis(0, 10, 52, 448), Axis(0, 1, 240, 26), width=460, height=280)
    >>> frame.place(5, 0.5)
    (250.0, 133.0)
    """

    x: Axis
    y: Axis
    width: float
    height: float

    @classmethod
    def on_page(
        cls,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        width: float,
        height: float,
        log_x: bool = False,
        log_y: bool = False,
    ) -> Frame:
        """A frame over given ranges, with the margins of drawings on a page."""
        across = Axis(*x, LEFT, width - RIGHT, log_x)
        return cls(across, Axis(*y, height - BOTTOM, TOP, log_y), width, height)

    def place(self, x: float, y: float) -> Point:
        return self.x(x), self.y(y)

    # ------------------------------------------------------------------------------------------------ what is around

    def grid(
        self, *, across: str, down: str, values: Sequence[float] = (), x_ticks: Sequence[float] | None = None
    ) -> Iterator[str]:
        """Grid, ticks and the names of both axes. `values` are those of x, which are marked if they are few."""
        left, right, bottom, top = self.x.begin, self.x.end, self.y.begin, self.y.end
        for value, said in self.y.ticks():
            y = f"{self.y(value):.1f}"
            yield tag("line", class_="grid", x1=f"{left:.1f}", x2=f"{right:.1f}", y1=y, y2=y)
            yield text(left - 8, self.y(value) + 4, said, "tick", "end")
        yield self.base()
        marked = self.x.ticks(values) if x_ticks is None else [(value, brief(value)) for value in x_ticks]
        for value, said in marked:
            x = f"{self.x(value):.1f}"
            yield tag("line", class_="base", x1=x, x2=x, y1=f"{bottom:.1f}", y2=f"{bottom + 5:.1f}")
            yield text(self.x(value), bottom + 18, said, "tick", "middle")
        if down:
            yield text(2 if left <= LEFT else 16, top - 12, down, "axis-name", "start")
        if across:
            yield text(right, bottom + 34, across, "axis-name", "end")

    def base(self, at: float | None = None) -> str:
        """The horizontal axis, at the bottom or at the height of a value."""
        y = f"{self.y.begin if at is None else self.y(at):.1f}"
        return tag("line", class_="base", x1=f"{self.x.begin:.1f}", x2=f"{self.x.end:.1f}", y1=y, y2=y)

    # ------------------------------------------------------------------------------------------------ what is drawn

    def curve(
        self, points: Sequence[Point], *, colour: str = "", dash: str | None = None, name: str | None = None
    ) -> str:
        title = "" if name is None else tag("title", escape(name))
        style = f"curve {colour}".strip()
        return tag("polyline", title, class_=style, points=self._places(points), stroke_dasharray=dash)

    def area(self, points: Sequence[Point], *, colour: str = "", style: str = "area") -> str:
        return tag("polygon", class_=f"{style} {colour}".strip(), points=self._places(points))

    def spot(self, x: float, y: float, *, shape: int = 0, note: str = "", style: str = "", **data: Any) -> str:
        """A mark at a point: a circle, a square or a triangle, with a tooltip and further attributes."""
        return mark(*self.place(x, y), shape=shape, note=note, style=style, **data)

    def _places(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def svg(self, body: Sequence[str], *, label: str) -> str:
        """A drawing on a page, which has the style sheet."""
        box = f"0 0 {self.width:g} {self.height:g}"
        return tag("svg", "".join(body), class_="drawing", viewBox=box, role="img", aria_label=label)


def text(x: float, y: float, said: str, style: str, anchor: str) -> str:
    """A line of text."""
    return tag("text", escape(said), class_=style, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def mark(x: float, y: float, *, shape: int = 0, note: str = "", style: str = "", **data: Any) -> str:
    """A circle, a square or a triangle around a place in pixels.

    >>> mark(10, 20, shape=1)
    '<rect class="spot" x="7.0" y="17.0" width="6" height="6"></rect>'
    """
    title = tag("title", escape(note)) if note else ""
    style = f"spot {style}".strip()
    if shape % 3 == 1:
        return tag("rect", title, class_=style, x=f"{x - 3:.1f}", y=f"{y - 3:.1f}", width=6, height=6, **data)
    if shape % 3 == 2:
        return tag("path", title, class_=style, d=f"M{x:.1f} {y - 4:.1f}l4 7h-8z", **data)
    return tag("circle", title, class_=style, cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.2, **data)
