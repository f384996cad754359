"""Charts as SVG files: lines with bands, grouped bars with whiskers; light and dark, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .axis import Axis, brief, usable

WIDTH, LEFT, RIGHT, PLOT = 760, 72, 28, 270
_CHARACTER = 0.56  # of the font size: how wide a character is, at most times
_TEXT, _SMALL = 13, 12
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_COLOURS = 7
_VALUES = 16  # bars that leave room for their values above them
_BANDS = 3  # that may lie over each other before they hide the lines
_MARKERS = 24  # points; more would run into each other

# The colours are those of the report of `compare`, in the same order.
_STYLE = """
svg { background: #fdfdfc; font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
text { fill: #1a1e23; font-size: 13px; } .title { font-size: 15px; font-weight: 600; }
.tick, .axis, .value { fill: #565e68; font-size: 12px; } .value { font-size: 11px; }
.rule { stroke: #e2e4e7; } .base { stroke: #b9bec5; } .whisker { stroke: #1a1e23; stroke-width: 1.3; fill: none; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.mark, .bar { fill: var(--c); } .band { fill: var(--c); opacity: .16; }
.faint .band { opacity: .07; } .stem { stroke: var(--c); stroke-width: 1.3; }
.s0 { --c: #0959b6; } .s1 { --c: #97920c; } .s2 { --c: #cf67ae; } .s3 { --c: #0493e9; } .s4 { --c: #7e3402; }
.s5 { --c: #642b7d; } .s6 { --c: #a96250; }
@media (prefers-color-scheme: dark) {
svg { background: #14171a; } text { fill: #e7e9eb; } .tick, .axis, .value { fill: #a2abb5; }
.rule { stroke: #2c3238; } .base { stroke: #4a525b; } .whisker { stroke: #e7e9eb; }
.band { opacity: .24; } .faint .band { opacity: .12; }
.s0 { --c: #0d7dd6; } .s1 { --c: #e9c31b; } .s2 { --c: #a74390; } .s3 { --c: #2bae94; } .s4 { --c: #d27f36; }
.s5 { --c: #b090ee; } .s6 { --c: #746900; }
}
""".strip()


@dataclass(frozen=True)
class Line:
    """Points joined in the order of x; `low` and `high` are the interval of each y. None and NaN leave a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """One value of a group, with its interval; None is drawn as a dash."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None


def lines(
    series: Sequence[Line], *, title: str, across: str, down: str, log_x: bool = False, log_y: bool = False
) -> str:
    """Lines over a common axis, each with its band."""
    legend, top = _legend([(one.name, one.dashed) for one in series], title=title, boxes=False)
    bottom = top + PLOT
    xs = [x for one in series for x in one.x]
    ys = [y for one in series for y in (*one.y, *_inside(one.low, log_y), *_inside(one.high, log_y))]
    x_axis = Axis.over(xs, begin=LEFT, end=WIDTH - RIGHT, log=log_x)
    y_axis = Axis.over(ys, begin=bottom, end=top, log=log_y)
    if not log_x and (found := [x for x in xs if usable(x)]) and min(found) < max(found):
        x_axis = Axis(min(found), max(found), LEFT, WIDTH - RIGHT)  # no empty ends: time begins where it begins
    body = [*legend, *_grid(y_axis), *_across(x_axis, bottom, xs)]
    many = len(series) > _BANDS
    body += [piece for place, one in enumerate(series) for piece in _line(one, place, x_axis, y_axis, many=many)]
    if not any(usable(y, log=log_y) for y in ys):
        body.append(_say((LEFT + WIDTH - RIGHT) / 2, (top + bottom) / 2, "nothing to draw", "axis", "middle"))
    body.append(_say((LEFT + WIDTH - RIGHT) / 2, bottom + 42, across, "axis", "middle"))
    return _svg(body, title=title, down=down, top=top, height=bottom + 54)


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str, down: str, log: bool = False) -> str:
    """Groups of bars; bars of one name have one colour."""
    names = list(dict.fromkeys(bar.name for _, group in groups for bar in group))
    legend, top = _legend([(name, False) for name in names] if len(names) > 1 else [], title=title, boxes=True)
    bottom = top + PLOT
    every = [bar for _, group in groups for bar in group]
    values = [value for bar in every for value in (bar.value, bar.low, bar.high)]
    axis = Axis.over(values, begin=bottom, end=top + 14, log=log, zero=not log)
    body, base = [*legend, *_grid(axis)], axis(axis.low if log else 0.0)
    room = (WIDTH - RIGHT - LEFT) / max(1, len(groups))
    deepest = 0
    for place, (label, group) in enumerate(groups):
        left, width = LEFT + place * room, min(46.0, room * 0.8 / max(1, len(group)))
        start = left + (room - width * len(group)) / 2
        for number, bar in enumerate(group):
            small = len(every) <= _VALUES and width >= 24
            body += _bar(bar, names.index(bar.name), start + number * width, width, axis, base, value=small)
        words = _wrapped(label, room - 6)
        deepest = max(deepest, len(words))
        body += [_say(left + room / 2, bottom + 19 + 15 * row, one, "tick", "middle") for row, one in enumerate(words)]
    body.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base:.1f}" y2="{base:.1f}"/>')
    if not groups:
        body.append(_say((LEFT + WIDTH - RIGHT) / 2, (top + bottom) / 2, "nothing to draw", "axis", "middle"))
    return _svg(body, title=title, down=down, top=top, height=bottom + 18 + 15 * max(1, deepest))


# --------------------------------------------------------------------------------------------------------- drawing


def _line(one: Line, place: int, x_axis: Axis, y_axis: Axis, *, many: bool) -> Iterator[str]:
    colour, dash = f"s{place % _COLOURS}", _dash(place, one.dashed)
    drawable = [usable(x, log=x_axis.log) and usable(y, log=y_axis.log) for x, y in zip(one.x, one.y, strict=True)]
    yield f'<g class="{colour}{" faint" if many else ""}">'
    for run in _runs(drawable):
        points = [(x_axis(one.x[i]), y_axis(float(one.y[i] or 0.0))) for i in run]
        if one.low is not None and one.high is not None:
            yield from _band(one, run, x_axis, y_axis)
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline class="line"{dash} points="{path}"/>'
        if len(one.x) <= _MARKERS or len(points) == 1:
            yield from (_mark(x, y, place) for x, y in points)
    yield "</g>"


def _band(one: Line, run: Sequence[int], x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """An interval that reaches below a logarithmic axis ends at its rim."""
    assert one.low is not None
    assert one.high is not None
    found = []
    for i in run:
        low, high = one.low[i], one.high[i]
        if usable(low) and usable(high, log=y_axis.log):
            at = y_axis(y_axis.low) if y_axis.log and float(low or 0) <= 0 else y_axis(float(low or 0.0))
            found.append((x_axis(one.x[i]), at, y_axis(float(high or 0.0))))
    if len(found) == 1:
        x, low_y, high_y = found[0]
        yield f'<line class="stem" x1="{x:.1f}" x2="{x:.1f}" y1="{low_y:.1f}" y2="{high_y:.1f}"/>'
    elif found:
        rim = [(x, high_y) for x, _, high_y in found] + [(x, low_y) for x, low_y, _ in reversed(found)]
        yield f'<polygon class="band" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in rim)}"/>'


def _bar(bar: Bar, colour: int, left: float, width: float, axis: Axis, base: float, *, value: bool) -> Iterator[str]:
    middle, bar_width = left + width / 2, width * 0.86
    if not usable(bar.value, log=axis.log):
        yield _say(middle, base - 4, "–", "value", "middle")
        return
    at = axis(float(bar.value or 0.0))
    top, height = min(at, base), abs(at - base)
    style, x = f"bar s{colour % _COLOURS}", left + width * 0.07
    yield f'<rect class="{style}" x="{x:.1f}" y="{top:.1f}" width="{bar_width:.1f}" height="{height:.1f}"/>'
    highest = top
    if usable(bar.low) and usable(bar.high, log=axis.log) and bar.low != bar.high:
        low = axis(max(float(bar.low or 0.0), axis.low))
        high = axis(float(bar.high or 0.0))
        cap = min(5.0, width * 0.2)
        yield (
            f'<path class="whisker" d="M{middle:.1f} {low:.1f}V{high:.1f}'
            f'M{middle - cap:.1f} {low:.1f}h{2 * cap:.1f}M{middle - cap:.1f} {high:.1f}h{2 * cap:.1f}"/>'
        )
        highest = min(highest, high)
    if value:
        said = brief(float(f"{bar.value:.{3 if width > 40 else 2}g}"))
        yield _say(middle, highest - 4, said, "value", "middle")


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


def _mark(x: float, y: float, place: int) -> str:
    if place % 3 == 1:
        return f'<rect class="mark" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    if place % 3 == 2:
        return f'<path class="mark" d="M{x:.1f} {y - 4:.1f}l4 7h-8z"/>'
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>'


def _dash(place: int, dashed: bool) -> str:
    """Colours come again after seven; then the dash differs."""
    kind = 1 if dashed and place < _COLOURS else place // _COLOURS % len(_DASHES) + (2 if dashed else 0)
    dash = _DASHES[kind % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


# ---------------------------------------------------------------------------------------------------- what is around


def _svg(body: Sequence[str], *, title: str, down: str, top: float, height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}"'
    named = [f'<text class="title" x="16" y="{24 + 19 * row}">{escape(one)}</text>' for row, one in _title(title)]
    label = _say(16, top - 15, down, "axis", "start")
    return "\n".join(
        [f'{head} height="{height:.0f}" role="img" aria-label="{escape(title)}">', f"<title>{escape(title)}</title>",
         f"<style>\n{_STYLE}\n</style>", *named, label, *body, "</svg>", ""]
    )  # fmt: skip


def _title(title: str) -> list[tuple[int, str]]:
    return list(enumerate(_wrapped(title, WIDTH - 32, size=15.5)))


def _legend(names: Sequence[tuple[str, bool]], *, title: str, boxes: bool) -> tuple[list[str], float]:
    """Its drawing below the title, in as many rows as it takes, and where the plot begins."""
    body, x, y = [], 16.0, 24 + 19 * (len(_title(title)) - 1) + 26.0
    for place, (name, dashed) in enumerate(names):
        width = (18 if boxes else 28) + _CHARACTER * _TEXT * len(name) + 18
        if x > 16 and x + width > WIDTH - RIGHT:
            x, y = 16.0, y + 20
        colour = f"s{place % _COLOURS}"
        if boxes:
            body.append(f'<rect class="bar {colour}" x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12"/>')
        else:
            dash = _dash(place, dashed)
            line = f'<line class="line"{dash} x1="{x:.1f}" x2="{x + 22:.1f}" y1="{y - 4:.1f}" y2="{y - 4:.1f}"/>'
            body.append(f'<g class="{colour}">{line}{_mark(x + 11, y - 4, place)}</g>')
        body.append(_say(x + (18 if boxes else 28), y, name, "name", "start"))
        x += width
    return body, y + (40 if names else 16)


def _grid(axis: Axis) -> Iterator[str]:
    for value, said in axis.ticks():
        y = axis(value)
        yield f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _say(LEFT - 8, y + 4, said, "tick", "end")


def _across(axis: Axis, bottom: float, values: Sequence[float]) -> Iterator[str]:
    yield f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>'
    for value, said in axis.ticks(values):
        x = axis(value)
        yield f'<line class="base" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 5:.1f}"/>'
        yield _say(x, bottom + 20, said, "tick", "middle")


def _say(x: float, y: float, text: str, style: str, anchor: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _wrapped(text: str, width: float, *, size: float = _SMALL) -> list[str]:
    """Words in rows of at most this width; a longer word is cut, with hyphens and commas as good places."""
    most = max(4, int(width / (_CHARACTER * size)))
    pieces = [piece for word in text.split() for piece in _cut(word, most)]
    rows: list[str] = []
    for piece in pieces:
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


def _inside(values: Sequence[float | None] | None, log: bool) -> list[float | None]:
    """Ends of intervals that may stretch the axis: none that a logarithmic axis cannot hold."""
    return [value for value in values or () if usable(value, log=log)]
