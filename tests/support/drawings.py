"""Drawings of hostile values, and what must hold for every SVG drawing."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from thinwire.lab.draw import Bar, Line, bars, lines

NAN = math.nan
HOSTILE = 'a|long & <strange> "name", and more'

# Whatever a measurement may hand to a chart.
CHARTS = {
    "lines": lines(
        [
            Line("dense", [0, 10, 20], [2.0, 1.0, 0.5], [1.9, 0.9, 0.4], [2.1, 1.1, 0.6]),
            Line(HOSTILE, [0, 10, 20], [None, NAN, 0.7], dashed=True),
        ],
        title="Losses", across="step", down="loss",
    ),
    "logarithmic": lines(
        [Line("θ", [2, 4, 64], [0.1, 0.0, -1.0], [-1.0, 0.0, 0.0], [0.2, 0.1, 0.1]), Line("b", [2, 4], [1e-9, 1e9])],
        title="θ", across="workers", down="", log_x=True, log_y=True,
    ),
    "one point": lines([Line("a", [3], [5.0], [4.0], [6.0])], title="one", across="", down=""),
    "equal": lines([Line("a", [1, 2], [5.0, 5.0], [5.0, 5.0], [5.0, 5.0])], title="equal", across="", down=""),
    "empty": lines([], title="none", across="", down=""),
    "no values": lines([Line("a", [], []), Line("b", [1], [None])], title="no", across="", down="", log_y=True),
    "many": lines([Line(f"{n}", [0, 1], [n, n + 1]) for n in range(20)], title="many " * 30, across="x", down="y"),
    "bars": bars(
        [("global_qsgd:8,norm=linf", [Bar("a", 3.0, 2.0, 4.0), Bar("b", None)]), ("x", [Bar("a", -1), Bar("b", NAN)])],
        title="Bars", down="ms",
    ),
    "logarithmic bars": bars([(str(i), [Bar("a", 10.0**-i, 0, 1)]) for i in range(30)], title="b", down="", log=True),
    "no bars": bars([], title="none", down=""),
    "zero bars": bars([("a", [Bar("x", 0.0)]), ("b", [])], title="zero", down=""),
}  # fmt: skip


def assert_whole_drawing(svg: str) -> None:
    """It has a name, all its places are finite and inside, and it loads nothing."""
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert "nan" not in svg.lower()
    assert "inf" not in re.sub("linf", "", svg)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", svg)
    assert "<script" not in svg
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for one, name, number in _places(root):
        assert 0 <= number <= (width if "x" in name else height), ElementTree.tostring(one)


def _places(root: ElementTree.Element) -> Iterator[tuple[ElementTree.Element, str, float]]:
    for one in root.iter():
        for name in ("x", "cx", "x1", "x2", "y", "cy", "y1", "y2"):
            if one.get(name):
                yield one, name, float(one.get(name, ""))
        for place, number in enumerate(re.split(r"[ ,]", one.get("points", "")) if one.get("points") else []):
            yield one, "x" if place % 2 == 0 else "y", float(number)
