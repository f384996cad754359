"""Charts and axes: whole drawings whatever the values are, gaps that stay gaps, and places that follow the values."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.browser import MISSING, Browser
from support.drawings import CHARTS, HOSTILE, assert_whole_drawing
from thinwire.errors import OptionError
from thinwire.lab.draw import Axis, Bar, Line, bars, lines
from thinwire.lab.draw.chart import lines_on_page
from thinwire.lab.draw.legend import key, swatch
from thinwire.lab.draw.numbers import brief
from thinwire.lab.draw.page import THEME_BUTTON, document, write_page
from thinwire.lab.draw.palette import COLOURS

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("svg", CHARTS.values(), ids=CHARTS.keys())
def test_a_file_is_a_whole_drawing(svg: str) -> None:
    assert_whole_drawing(svg)


def test_a_gap_is_not_bridged() -> None:
    whole = lines([Line("a", [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])], title="", across="", down="")
    broken = lines([Line("a", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 4.0, 5.0])], title="", across="", down="")
    assert (whole.count("<polyline"), broken.count("<polyline")) == (1, 2)


def test_heights_of_bars_are_their_values() -> None:
    drawn = ElementTree.fromstring(bars([("g", [Bar("a", 10.0), Bar("b", 5.0), Bar("c", -5.0)])], title="", down=""))
    named = [one for one in drawn.iter(f"{SVG}rect") if one.get("height") != "12"]  # those of the legend are 12
    ten, five, minus = (float(one.get("height", "")) for one in named)
    assert ten == pytest.approx(2 * five, abs=0.2)
    assert five == pytest.approx(minus, abs=0.2)
    base = float(named[0].get("y", "")) + ten
    assert float(named[2].get("y", "")) == pytest.approx(base, abs=0.2)


def test_a_drawing_on_a_page_has_no_style_of_its_own_and_keeps_the_data_of_its_points() -> None:
    line = Line("a", [1, 2], [3.0, 4.0], colour="ref", marks=True, notes=["one", HOSTILE], data=[{"data_n": 1}] * 2)
    svg = lines_on_page([line], across="x", down="y", label="a chart")
    root = ElementTree.fromstring(svg)
    assert not list(root.iter("style"))
    spots = [one for one in root.iter() if one.get("class") == "spot"]
    assert [one.get("data-n") for one in spots] == ["1", "1"]
    assert spots[1][0].text == HOSTILE
    assert lines_on_page([Line("a", [1], [None])], across="", down="", label="nothing") == ""


def test_series_beyond_the_colours_have_other_dashes() -> None:
    svg = lines([Line(f"{n}", [0, 1], [0, 1]) for n in range(2 * COLOURS)], title="", across="", down="")
    drawn = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}g") if any(one.iter(f"{SVG}polyline"))]
    looks = {(group.get("class"), next(group.iter(f"{SVG}polyline")).get("stroke-dasharray")) for group in drawn}
    assert len(looks) == 2 * COLOURS


# --------------------------------------------------------------------------------------------------------------- axes


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=8))
def test_an_axis_holds_its_values_in_order(values: list[float]) -> None:
    axis = Axis.over(values, begin=0, end=100)
    assert axis.low <= min(values)
    assert max(values) <= axis.high
    places = [axis(value) for value in sorted(values)]
    assert places == sorted(places)
    ticks = [value for value, _ in axis.ticks()]
    assert 2 <= len(ticks) <= 12
    assert len({said for _, said in axis.ticks()}) == len(ticks)
    assert all(axis.low - 1e-9 * abs(axis.low) <= tick <= axis.high + 1e-9 * abs(axis.high) for tick in ticks)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=8))
def test_a_logarithmic_axis_does_so_too(values: list[float]) -> None:
    axis = Axis.over(values, begin=0, end=100, log=True)
    assert axis.low <= min(values)
    assert max(values) <= axis.high
    assert 0 <= axis(min(values)) <= axis(max(values)) <= 100
    assert all(2 <= len(ticks) <= 12 for ticks in (axis.ticks(), axis.ticks(values)))
    assert len({said for _, said in axis.ticks()}) == len(axis.ticks())
    assert all(axis.low <= tick <= axis.high for tick, _ in axis.ticks())


def test_ticks_say_where_they_are() -> None:
    for high in (1.0, 8.9, 11.0, 12.5, 120.0, 0.03):
        for value, said in Axis.over([0.0, high], begin=0, end=1).ticks():
            assert float(said.replace(",", "")) == pytest.approx(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (120.0, "120"), (0.002, "0.002"), (-1.5, "−1.5"), (20_000, "20,000"), (5e-6, "5·10⁻⁶"), (1e8, "10⁸")],
)
def test_numbers_on_axes(value: float, said: str) -> None:
    assert brief(value) == said


# -------------------------------------------------------------------------------------------------------------- pages


def test_a_page_without_a_button_has_no_script(tmp_path: Path) -> None:
    assert "<script" not in document("<main></main>", title="t")
    assert "<script" in document(f"<main>{THEME_BUTTON}</main>", title="t")
    with pytest.raises(OptionError, match="choose another file"):
        write_page("text", tmp_path / "no" / "page.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if MISSING:
        pytest.skip(MISSING)
    opened = Browser()
    yield opened
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drawings_follow_the_theme_on_a_page_and_in_a_file(browser: Browser, tmp_path: Path, scheme: str) -> None:
    series = [Line("a", [0, 1, 2], [1.0, 3.0, 2.0])]
    drawing = lines_on_page(series, across="x", down="y", label="a chart") + key([(swatch("s0"), "a")])
    page = write_page(document(f"<main><figure>{drawing}</figure></main>", title="t"), tmp_path / "page.html")
    alone = tmp_path / "chart.svg"
    alone.write_text(lines(series, title="t", across="x", down="y"))
    strokes = set()
    for place in (page, alone):
        browser.log()
        browser.scheme(scheme)
        browser.window(800)
        browser.open(place)
        assert browser.log() == []
        strokes.add(browser.script("return getComputedStyle(document.querySelector('polyline')).stroke"))
    assert strokes == {"rgb(9, 89, 182)" if scheme == "light" else "rgb(13, 125, 214)"}
