"""What the pages share: intervals, charts, Markdown, files; and that the published pages are whole."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.papers import reproduce, run
from benchmarks.papers.page import HOLDS, NOT, VERDICTS, Claim, Page, shown, spread, student
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from support.browser import MISSING, Browser
from support.drawings import CHARTS, assert_whole_drawing

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs" / "reproductions"
PAGES = sorted(DOCS.glob("*.md"))
PUBLISHED = {path.stem: path.read_text() for path in sorted(DOCS.glob("*.svg"))}
NAN = math.nan

# ----------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("degrees", [*range(1, 40), 100, 10_000])
def test_points_of_student(degrees: int) -> None:
    assert student(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12))
def test_the_interval_is_that_of_scipy(values: list[float]) -> None:
    found = spread(values)
    if found.half > 1e-6 * abs(found.mean) + 1e-9:  # scipy has none for equal values
        low, high = stats.t.interval(0.95, len(values) - 1, loc=found.mean, scale=stats.sem(values))
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3, abs=1e-3 * found.half)
    assert found.low <= found.mean <= found.high


def test_values_as_text() -> None:
    assert shown([84.1, 84.7, 85.3], digits=1) == "84.7 ± 1.5"
    assert shown([84.72], digits=1) == "84.7"
    assert shown([]) == "-"
    assert shown([1.0, 1.0], unit="ms") == "1.00 ± 0.00 ms"
    assert shown([0.00123, 0.00123]) == "0.0012 ± 0.00"
    assert shown([NAN, None]) == "not finite"
    assert shown([2.0, NAN, 2.0]) == "2.00 ± 0.00 (2 of 3 finite)"
    assert spread([3.0]) == (3.0, 3.0, 3.0, 1)


# --------------------------------------------------------------------------------------------------------------- pages


def found(**changed: Any) -> dict[str, Any]:
    machine = {"processor": "a processor", "cores": 2, "torch": "2"}
    known = {"kind": "reproduce", "name": "top-k", "seeds": [0, 1, 2], "quick": False, "machine": machine}
    return {**known, "date": "2026-01-01", "seconds": {"a": 12.0, "b": 150.0}, "parts": {"a": 1, "b": 2}, **changed}


def test_a_page_is_written_with_its_charts(tmp_path: Path) -> None:
    (tmp_path / "top-k-old.svg").write_text("of an earlier page")
    page = Page.for_run(found(file="x.json"), title="Top-k", paper="Somebody, 2019.")
    page.heading("Results")
    page.table(["recipe", "loss"], [["`ef|top_k`", "2.23 ± 0.01"], ["`dense`", "-"]])
    page.chart(
        "losses",
        CHARTS["lines"],
        caption="Losses [of `dense`].",
    )
    page.claims([Claim("it is fast", HOLDS, "2 ms"), Claim("a|b", NOT, "3 ms\nand more"), Claim("c", NOT, "")])
    place = page.write(tmp_path)
    text = place.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["top-k-losses.svg", "top-k.md"]
    for expected in (
        "# Top-k\n\nSomebody, 2019.", "`make reproduce-top-k`", "`benchmarks/results/x.json`",
        "2.7 min (a 12 s, b 2.5 min)", "Seeds 0, 1, 2", "|---|---:|", "| `ef\\|top_k` | 2.23 ± 0.01 |",
        "![Losses (of dense).](top-k-losses.svg)",
        "| a\\|b | **does not hold** | 3 ms and more |", "Of 3 claims: 1 holds, 2 do not hold.",
    ):  # fmt: skip
        assert expected in text


def test_mistakes_in_a_page_are_refused() -> None:
    page = Page("t", paper="", name="n")
    page.chart("a", "", caption="")
    with pytest.raises(ValueError, match="two charts named a"):
        page.chart("a", "", caption="")
    with pytest.raises(ValueError, match="2 cells under 1 heads"):
        page.table(["one"], [["1", "2"]])
    with pytest.raises(ValueError, match="a verdict is one of holds"):
        Claim("", "perhaps", "")
    assert len(set(VERDICTS)) == 4


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A page of two parts; says which of them were measured."""
    measured: list[str] = []

    def measure(part: str, options: run.Options) -> Any:
        measured.append(part)
        return {"seeds": options.all_seeds, "diverged": NAN, 4: (1, 2)}

    def page(found: dict[str, Any]) -> Page:
        made = Page.for_run(found, title="Made up", paper="")
        made.text(json.dumps(found["parts"]))
        return made

    module = SimpleNamespace(PARTS=("first", "second"), measure=measure, page=page)
    monkeypatch.setattr(run, "module", lambda name: module)
    return measured


def test_measuring_writes_strict_json_and_the_page(made_up: list[str], tmp_path: Path) -> None:
    out, docs = tmp_path / "r.json", tmp_path / "docs"
    arguments = ["top-k", "--out", str(out), "--docs", str(docs)]
    reproduce.main([*arguments, "--parts", "second", "--seeds", "2"])
    assert not docs.exists()
    reproduce.main([*arguments, "--parts", "first", "--seeds", "2"])
    assert made_up == ["second", "first"]
    told = json.loads(out.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told["kind"] == "reproduce"
    assert list(told["parts"]) == list(told["seconds"]) == ["first", "second"]
    assert told["parts"]["first"] == {"seeds": [0, 1], "diverged": None, "4": [1, 2]}
    before = (docs / "top-k.md").read_text()
    (docs / "top-k.md").unlink()
    reproduce.main(["top-k", "--page", str(out), "--docs", str(docs)])
    assert (docs / "top-k.md").read_text() == before
    assert len(made_up) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "third"], "choose from first, second"),
        (["--parts", "first", "--seeds", "5"], "another run"),
        (["--parts", "first", "--quick"], "another run"),
    ],
)
def test_runs_are_not_mixed(made_up: list[str], tmp_path: Path, arguments: list[str], message: str) -> None:
    common = ["top-k", "--out", str(tmp_path / "r.json"), "--docs", str(tmp_path)]
    reproduce.main(common)
    with pytest.raises(SystemExit, match=message):
        reproduce.main([*common, *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick"], "--quick needs --out and --docs"),
        (["--seeds", "0"], "at least 1"),
        (["--page", "WRONG"], "not of top-k"),
    ],
)
def test_what_cannot_be_is_refused_first(
    made_up: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(found(name="flexible")))
    with pytest.raises(SystemExit):
        reproduce.main(["top-k", *(str(wrong) if one == "WRONG" else one for one in arguments)])
    assert message in capsys.readouterr().err
    assert made_up == []


def test_every_page_has_a_target_in_the_makefile() -> None:
    makefile = (DOCS.parents[1] / "Makefile").read_text()
    index = (DOCS / "README.md").read_text()
    for name in run.NAMES:
        assert re.search(rf"^REPRODUCTIONS := .*\breproduce-{name}\b", makefile, re.MULTILINE)
        assert f"({name}.md)" in index
        assert f"`make reproduce-{name}`" in index


# ----------------------------------------------------------------------------------------------------- published pages


@pytest.mark.parametrize("svg", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_published_chart_is_a_whole_drawing(svg: str) -> None:
    assert_whole_drawing(svg)


@pytest.mark.parametrize("name", run.NAMES)
def test_the_published_page_is_what_the_newest_file_says(name: str, tmp_path: Path) -> None:
    file = run.newest(name)
    assert file is not None
    found = run.load(file)
    assert not found["quick"]
    assert len(found["seeds"]) >= 3
    assert sum(found["seconds"].values()) < 20 * 60
    run.build(found).write(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert "What was claimed, and what was found" in written[f"{name}.md"]
    published = {path.name: path.read_text() for path in DOCS.glob(f"{name}*")}
    assert published == written


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_images_load_and_links_lead_somewhere(browser: Browser, page: Path, tmp_path: Path) -> None:
    made = tmp_path / "page.html"
    made.write_text(as_html(page.read_text(), page.parent))
    browser.open(made)
    images = browser.script("return [...document.images].map((one) => [one.src, one.complete, one.naturalWidth])")
    assert len(images) == page.read_text().count("![")
    assert [one for one in images if not one[1] or one[2] < 200] == []
    for target in browser.script("return [...document.links].map((one) => one.href)"):
        if target.startswith("file://"):
            assert Path(target.removeprefix("file://").partition("#")[0]).exists(), target


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_no_text_leaves_its_chart(browser: Browser, tmp_path: Path) -> None:
    for key, svg in CHARTS.items():
        if key != "many":  # its title is longer than any drawing
            (tmp_path / f"{key}.svg").write_text(svg)
    for place in [*tmp_path.iterdir(), *DOCS.glob("*.svg")]:
        browser.open(place)
        outside = browser.script(
            "const box = document.documentElement.getBoundingClientRect();"
            "return [...document.querySelectorAll('text')].filter((one) => {"
            "  const r = one.getBoundingClientRect();"
            "  return r.width && (r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1);"
            "}).map((one) => one.textContent)"
        )
        assert outside == [], place.name


def as_html(markdown: str, folder: Path) -> str:
    """Only what this test looks at: images and links, from where the page lies."""
    html = re.sub(r"!\[([^\]]*)\]\(([^)\s]+)\)", r'<img alt="\1" src="\2">', markdown)
    html = re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', html)
    return f'<!doctype html><base href="{folder.resolve().as_uri()}/">{html}'
