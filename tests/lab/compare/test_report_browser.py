"""The report in a real browser: what a reader sees and does."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from support.browser import MISSING, Browser
from support.hostile import NUMBERS, hostile_result
from support.made_up import HOSTILE, made_up_result, with_decisions
from support.report_page import Page

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

CONTRASTS = """
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (text) => {
  const linear = (c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const [r, g, b] = channels(text).map((c) => linear(c / 255));
  return .2126 * r + .7152 * g + .0722 * b;
};
const found = [];
for (const one of document.querySelectorAll("body *")) {
  const text = [...one.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join("").trim();
  if (!text || /^(SCRIPT|STYLE|NOSCRIPT)$/.test(one.tagName) || !one.getClientRects().length) continue;
  const ink = getComputedStyle(one)[one.namespaceURI.endsWith("svg") ? "fill" : "color"];
  let under = one;
  while (under && /, 0\\)$|transparent/.test(getComputedStyle(under).backgroundColor)) under = under.parentElement;
  const [low, high] = [light(ink), light(getComputedStyle(under).backgroundColor)].sort((a, b) => a - b);
  found.push([(high + .05) / (low + .05), text.slice(0, 40)]);
}
return found;
"""


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Page:
    return Page(browser, tmp_path, made_up_result())


def test_it_is_quiet_and_complete(page: Page) -> None:
    page.quiet()
    names = [row["recipe"] for row in page.result["rows"]]
    assert page.series("chart-time", drawn=True) == page.series("chart-bytes", drawn=True) == names
    assert page.run("return document.querySelectorAll('#breakdown .line').length") == len(names)
    assert page.run("return document.querySelectorAll('#bytes .line').length") == len(names)
    assert page.run("return document.querySelector('h1').innerText") == page.result["headline"]
    assert page.run("return document.getElementById('command').innerText") == page.result["command"]
    assert page.run(
        "return [...document.querySelectorAll('.canvas svg')].every((svg) => svg.getAttribute('aria-label'))"
    )


def test_table_numbers_equal_the_result(page: Page) -> None:
    cells = page.run(
        "return [...document.querySelectorAll('#results tbody tr')].map((row) => Object.fromEntries("
        "[...row.cells].map((cell) => [cell.dataset.key, [cell.innerText, cell.dataset.value]])))"
    )
    factors = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    for row, shown in zip(page.result["rows"], cells, strict=True):
        for key in NUMBERS:
            text, exact = shown[key]
            if row[key] is None:
                assert (text, exact) == ("–", "")
                continue
            assert float(exact) == row[key]
            value, _, unit = text.replace(",", "").rstrip("×").partition(" ")
            digit = 10.0 ** -len(value.partition(".")[2]) * factors.get(unit, 1)
            assert abs(float(value) * factors.get(unit, 1) - row[key]) <= 0.5001 * digit


def test_bars_are_as_long_as_the_result_says(page: Page) -> None:
    parts = page.run(
        "return [...document.querySelectorAll('#breakdown .part')].map((part) => [part.closest('.line').dataset.recipe,"
        "part.dataset.part, Number(part.dataset.value), part.getBoundingClientRect().width])"
    )
    rows = {row["recipe"]: row for row in page.result["rows"]}
    left, tick, label = page.run(
        "const ticks = [...document.querySelectorAll('#breakdown .axis.all span')];"
        "const [first, last] = [ticks[0], ticks[ticks.length - 1]].map((tick) => tick.getBoundingClientRect().x);"
        "return [first, last, ticks[ticks.length - 1].textContent]"
    )
    scale = (tick - left) / float(label.replace(",", "").removesuffix(" ms"))
    for recipe, part, value, width in parts:
        row = rows[recipe]
        assert value == (row["step_ms"] if part == "whole" else row["breakdown"][f"{part}_ms"])
        assert width == pytest.approx(value * scale, abs=0.15)
    limit = page.run("return document.querySelector('#breakdown .limit').getBoundingClientRect().x")
    assert limit - left == pytest.approx(page.result["no_communication"]["step_ms"] * scale, abs=0.3)
    page.click("#zoom input")
    assert page.run("return document.querySelector('#breakdown .compute').getBoundingClientRect().width") > 100


def test_a_failed_row_says_why(page: Page) -> None:
    text = page.run("return document.querySelector('#results tr[data-status=failed]').innerText")
    assert "failed" in text
    assert page.result["rows"][-1]["problem"] in text
    assert page.result["rows"][2]["note"] in page.run("return document.getElementById('results').innerText")


def test_a_click_sorts_and_what_is_missing_goes_last(page: Page) -> None:
    order = "return [...document.querySelectorAll('#results tbody tr')].map((row) => row.dataset.recipe)"
    rows = page.result["rows"]
    for key in NUMBERS:
        known = [row for row in rows if row[key] is not None]
        missing = [row["recipe"] for row in rows if row[key] is None]
        first_down = key == "fraction_of_no_communication" or key.startswith("speedup")
        for down in (first_down, not first_down):
            page.click(f"#results button[data-key={key}]")
            expected = [row["recipe"] for row in sorted(known, key=lambda row: row[key], reverse=down)]
            found = page.run(order)
            assert [recipe for recipe in found if recipe in expected] == expected
            assert sorted(found[len(expected) :]) == sorted(missing)
            way = page.run("return document.querySelector('th[aria-sort$=ending]').getAttribute('aria-sort')")
            assert way == ("descending" if down else "ascending")


def test_the_legend_switches_series(page: Page) -> None:
    names = [row["recipe"] for row in page.result["rows"]]
    page.legend("two-shot-2")
    for chart in ("chart-time", "chart-bytes"):
        assert page.series(chart, drawn=True) == [name for name in names if name != "two-shot-2"]
        assert page.series(chart) == names
    page.legend("two-shot-2")
    assert page.series("chart-time", drawn=True) == names
    page.click("#show-none")
    assert page.series("chart-time", drawn=True) == []
    assert "switched on" in page.run("return document.querySelector('#chart-time .nothing').textContent")
    page.click("#show-all")
    assert page.series("chart-time", drawn=True) == names
    page.quiet()


@pytest.mark.parametrize("kind", ["mouse", "touch"])
@pytest.mark.parametrize("chart", ["chart-time", "chart-bytes"])
def test_pointing_shows_the_values(page: Page, chart: str, kind: str) -> None:
    page.click("#show-none")
    page.legend("two-shot-2")
    point = page.result["rows"][5]["curve"][-1]
    page.browser.move(*page.last_mark(chart), kind=kind)
    said = page.tip()
    assert said is not None
    assert said.splitlines()[0] == "two-shot-2"
    assert f"loss {point['loss']:.3f}" in said
    assert f"held-out {point['held_out']:.3f}" in said
    assert f"{point['seconds']:.1f} s, {point['bytes'] / 1e6:.0f} MB" in said
    assert "step 200" in said
    page.browser.move(5, 5, kind=kind)
    assert page.tip(shown=False) is None


def test_keys_walk_along_the_points(page: Page) -> None:
    page.run("document.querySelector('#chart-time svg').focus()")
    right, down, escape = "\ue014", "\ue015", "\ue00c"
    page.browser.press(right, right)
    assert (page.tip() or "").startswith(f"ddp\nloss {page.result['rows'][0]['curve'][1]['loss']:.3f}")
    page.browser.press(down)
    assert (page.tip() or "").startswith(f"torch-fp16\nloss {page.result['rows'][1]['curve'][1]['loss']:.3f}")
    page.browser.press(escape)
    assert page.tip(shown=False) is None


def test_zooming_in_keeps_what_is_pointed_at_in_sight(page: Page) -> None:
    heights = "return [...document.querySelectorAll('#chart-time .mark')].map((m) => m.getBoundingClientRect().y)"
    page.click("#near input")
    top = page.run("return document.querySelector('#chart-time svg').getBoundingClientRect().y")
    assert len(page.run(heights)) >= 9
    assert min(page.run(heights)) > top
    page.run("document.querySelector('#chart-time svg').focus()")
    page.browser.press("\ue014")
    low = min(point["loss"] for row in page.result["rows"] for point in row["curve"])
    shown = re.search(r"loss ([\d.]+)", page.tip() or "")
    assert shown
    assert float(shown[1]) < low + 0.7
    page.quiet()


def test_axes_have_units_and_both_scales(page: Page) -> None:
    ticks = "return [...document.querySelectorAll(`#${arguments[0]} .tick`)].map((tick) => tick.textContent)"
    for chart, unit in (("chart-time", r"[\d,.]+ s"), ("chart-bytes", r"[\d,.]+ [kMG]?B|0")):
        shown = []
        for _ in range(2):
            shown.append(page.run(ticks, chart))
            assert len(shown[-1]) >= 3
            assert all(re.fullmatch(unit, tick) for tick in shown[-1])
            page.click(f"#{chart} input")
        assert shown[0] != shown[1]


@pytest.mark.parametrize("width", [1280, 360])
def test_text_has_contrast_in_both_themes(page: Page, width: int) -> None:
    page.browser.window(width)
    grounds = []
    for _ in range(2):
        page.legend("ar-top-k")
        measured = page.run(CONTRASTS)
        assert len(measured) > 150
        assert [(ratio, text) for ratio, text in measured if ratio < 4.5] == []
        grounds.append(page.run("return getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
    assert grounds[0] != grounds[1]


def test_the_theme_follows_the_system_and_paper_is_light(page: Page) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.browser.scheme("dark")
    assert page.run(ground) != light
    page.browser.devtools("Emulation.setEmulatedMedia", media="print")
    assert page.run(ground) == light
    assert page.run("return document.getElementById('theme').getClientRects().length") == 0
    assert len(page.browser.devtools("Page.printToPDF")["data"]) > 20_000


def test_a_phone_scrolls_the_table_not_the_page(browser: Browser, tmp_path: Path) -> None:
    result = made_up_result()
    result["rows"][3]["recipe"] = "x" * 300
    result["rows"][4]["problem"] = result["rows"][4]["spelled"] = result["command"] = "y" * 500
    page = Page(browser, tmp_path, result, width=360)
    page.quiet()
    assert page.run("const box = document.querySelector('.scroll'); return box.scrollWidth > box.clientWidth")
    assert page.run("return Math.min(...[...document.querySelectorAll('.canvas svg')].map((s) => s.clientWidth))") > 300


def test_hostile_strings_stay_text(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, tmp_path, hostile_result())
    page.browser.move(*page.last_mark("chart-time"))
    assert (page.tip() or "").startswith(HOSTILE.split("\u2028")[0])
    assert page.run("return document.images.length") == 0
    assert page.run("return document.querySelector('#results tbody th b').textContent") == HOSTILE
    assert page.run("return document.title") != "broken"
    page.quiet()


def test_decisions_are_marked_against_time_only(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, tmp_path, with_decisions(made_up_result()))
    page.quiet()
    count = "return document.querySelectorAll(`#${arguments[0]} .decision`).length"
    assert page.run(count, "chart-time") == 2
    assert page.run(count, "chart-bytes") == 0
    assert page.run("return document.querySelectorAll('.decisions li').length") == 2
    assert page.run("return document.querySelector('#front .chosen').dataset.recipe") == "bf16"
    assert page.run("return document.querySelector('#front svg').getBoundingClientRect().width") > 200
    assert page.run("return document.images.length") == 0
    page.legend("auto")
    assert page.run(count, "chart-time") == 0


def test_the_download_is_the_result(page: Page, tmp_path: Path) -> None:
    page.browser.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#download")
    place = tmp_path / "thinwire-compare.json"
    for _ in range(100):
        if place.exists() and place.stat().st_size:
            break
        time.sleep(0.05)
    assert json.loads(place.read_text()) == page.result


def _bare(**row: Any) -> dict[str, Any]:
    return {"schema": 1, "kind": "compare", "rows": [{"recipe": "ddp", **row}]}


def _diverged() -> dict[str, Any]:
    result = made_up_result(recipes=4)
    for point in result["rows"][2]["curve"][5:]:
        point["loss"] = 1e9 if point["step"] < 100 else float("nan")
    return result


@pytest.mark.parametrize(
    ("result", "drawn"),
    [
        (_bare(), 0),
        (_bare(curve=[{"step": 1, "seconds": 0.0, "bytes": 0, "loss": 3.0, "held_out": None}]), 1),
        (_bare(curve=[{"step": 1, "seconds": 1.0, "bytes": 9, "loss": 3.0}] * 2, step_ms=0.0, bytes_per_step=0), 1),
        (_bare(curve=[{"step": 1, "seconds": None, "bytes": None, "loss": None}]), 0),
        (made_up_result(points=1, failed=False), 9),
        (made_up_result(recipes=30, points=3000), 30),
        (_diverged(), 4),
    ],
    ids=["nothing", "one point at zero", "one place", "nulls", "one point each", "many", "diverged"],
)  # fmt: skip
def test_odd_results_are_drawn_without_a_word(
    browser: Browser, tmp_path: Path, result: dict[str, Any], drawn: int
) -> None:
    page = Page(browser, tmp_path, result)
    for chart in ("chart-time", "chart-bytes"):
        for log in (False, True):
            if page.run("return document.querySelector(arguments[0]).checked", f"#{chart} input") != log:
                page.click(f"#{chart} input")
            assert len(page.series(chart)) == len(result["rows"])
            at_zero = log and any(point.get("seconds") == 0 for point in result["rows"][0].get("curve", []))
            assert len(page.series(chart, drawn=True)) == (0 if at_zero else drawn)
            assert "NaN" not in page.run("return document.querySelector(arguments[0]).innerHTML", f"#{chart} .canvas")
    page.quiet()
