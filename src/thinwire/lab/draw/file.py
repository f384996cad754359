"""A chart as an SVG file of its own: title and legend above the plot, and the style for light and dark inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .frame import mark, text
from .markup import escape, tag
from .palette import file_style

WIDTH, HEIGHT = 760, 270  # pixels of the file, and of the height of its plot
LEFT, RIGHT = 72, 28  # pixels beside the plot
_EDGE = 16
_CHARACTER = 0.56  # width of a character over the font size, at most
_TITLE, _NAME, _LABEL = 15.5, 13.0, 12.0  # font sizes
_AXES = 54  # pixels below the plot: ticks and the name of the axis


@dataclass(frozen=True)
class Entry:
    """One series in the legend. Without a shape it is a box: the series is drawn as bars."""

    name: str
    colour: str
    dash: str | None = None
    shape: int | None = None


@dataclass(frozen=True)
class Plot:
    """The plot inside a file, in pixels."""

    top: float
    height: float  # of the whole file
    left: float = LEFT
    right: float = WIDTH - RIGHT
    width: float = WIDTH

    @property
    def bottom(self) -> float:
        return self.top + HEIGHT

    def empty(self) -> str:
        """What a chart without values says."""
        return text(
            (self.left + self.right) / 2, (self.top + self.bottom) / 2, "nothing to draw", "axis-name", "middle"
        )


def svg_file(
    entries: Sequence[Entry], body: Callable[[Plot], Iterator[str]], *, title: str, below: float = _AXES
) -> str:
    """The whole file. `below` is the space under the plot."""
    rows = list(enumerate(wrapped(title, WIDTH - 2 * _EDGE, size=_TITLE)))
    named = [text(_EDGE, 24 + 19 * row, one, "title", "start") for row, one in rows]
    legend, top = _legend(entries, begin=24 + 19 * (len(rows) - 1) + 26.0)
    plot = Plot(top, top + HEIGHT + below)
    size = f'viewBox="0 0 {WIDTH} {plot.height:.0f}" width="{WIDTH}" height="{plot.height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" {size} role="img" aria-label="{escape(title)}">'
    style = f"<title>{escape(title)}</title>\n<style>\n{file_style()}</style>"
    return "\n".join([head, style, *named, *legend, *body(plot), "</svg>", ""])


def _legend(entries: Sequence[Entry], *, begin: float) -> tuple[list[str], float]:
    """The legend below the title, in as many rows as needed, and where the plot begins."""
    body, x, y = [], float(_EDGE), begin
    for entry in entries:
        indent = 18 if entry.shape is None else 28
        width = indent + _CHARACTER * _NAME * len(entry.name) + 18
        if x > _EDGE and x + width > WIDTH - RIGHT:
            x, y = float(_EDGE), y + 20
        body += [_sample(entry, x, y), text(x + indent, y, entry.name, "key-name", "start")]
        x += width
    return body, y + (40 if entries else 16)


def _sample(entry: Entry, x: float, y: float) -> str:
    if entry.shape is None:
        return tag("rect", class_=f"column {entry.colour}", x=f"{x:.1f}", y=f"{y - 10:.1f}", width=12, height=12)
    at = f"{y - 4:.1f}"
    line = tag("line", class_="curve", x1=f"{x:.1f}", x2=f"{x + 22:.1f}", y1=at, y2=at, stroke_dasharray=entry.dash)
    return tag("g", line + mark(x + 11, y - 4, shape=entry.shape), class_=entry.colour)


def wrapped(words: str, width: float, *, size: float = _LABEL) -> list[str]:
    """Words in rows of at most this width. A longer word is cut, if possible after a hyphen or a comma.

    >>> wrapped("global_qsgd:8,norm=linf", 100)
    ['global_qsgd:8,', 'norm=linf']
    """
    most = max(4, int(width / (_CHARACTER * size)))
    rows: list[str] = []
    for piece in (piece for word in words.split() for piece in _cut(word, most)):
        if rows and len(rows[-1]) + 1 + len(piece) <= most:
            rows[-1] += f" {piece}"
        else:
            rows.append(piece)
    return rows or [""]


def _cut(word: str, most: int) -> list[str]:
    found = []
    while len(word) > most:
        good = max(word.rfind(sign, 0, most) for sign in "-,|:_/")
        end = good + 1 if good > 1 else most
        found.append(word[:end])
        word = word[end:]
    return [*found, word]
