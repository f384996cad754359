"""The page of a simulation in a real browser: virtual time on the axes, the growth chart, the critical path."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.browser import MISSING, Browser
from support.report_page import Page
from thinwire.lab.simulate import Settings, simulate

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return simulate(
        Settings(
            workers=6, algorithms=("dpsgd", "dcd:4"), recipes=("ddp",), topology="ring", network="three-regions",
            steps=6, lap=2,
        )
    )  # fmt: skip


@pytest.fixture
def page(browser: Browser, tmp_path: Path, result: dict[str, object]) -> Page:
    return Page(browser, tmp_path, result)


def test_every_row_is_drawn_by_virtual_time_and_by_bytes(page: Page) -> None:
    page.quiet()
    names = [row["recipe"] for row in page.result["rows"]]
    assert names == ["dpsgd@ring", "dcd:4@ring", "ddp"]
    assert page.series("chart-time", drawn=True) == page.series("chart-bytes", drawn=True) == names
    page.legend("dpsgd@ring")
    page.legend("ddp")
    page.browser.move(*page.last_mark("chart-time"))
    said = page.tip()
    assert said is not None
    last = page.result["rows"][1]["curve"][-1]
    assert f"{last['seconds']:.2f} s" in said


def test_the_growth_chart_has_a_point_for_every_row_and_number_of_workers(page: Page) -> None:
    drawn = page.run(
        "return [...document.querySelectorAll('#growth .spot')].map((g) => [+g.dataset.workers, +g.dataset.value])"
    )
    told = [(p["workers"], ms) for p in page.result["growth"] for ms in p["step_ms"].values()]
    assert sorted(map(tuple, drawn)) == sorted(told)
    boxes = page.run(
        "const whole = document.querySelector('#growth svg').getBoundingClientRect();"
        "return [...document.querySelectorAll('#growth .spot')].every((c) => { const b = c.getBoundingClientRect();"
        "return b.left >= whole.left && b.right <= whole.right && b.top >= whole.top && b.bottom <= whole.bottom })"
    )
    assert boxes is True


def test_the_table_tells_what_the_slowest_worker_waited_for(page: Page) -> None:
    lines = page.run("return [...document.querySelectorAll('#simulated tbody tr')].map((row) => row.innerText)")
    for row, line in zip(page.result["rows"], lines, strict=True):
        phases = row["critical_path"]["phases"]
        most = max(phases, key=phases.get)
        assert most.replace("_", "-") in line
        assert "compute" in line


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_window(
    browser: Browser, tmp_path: Path, result: dict[str, object], scheme: str
) -> None:
    page = Page(browser, tmp_path, result, width=390)
    browser.scheme(scheme)
    page.quiet()
