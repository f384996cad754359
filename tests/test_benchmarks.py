"""Benchmark results stay small and readable, scripts explain themselves, tables in docs match the results."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from benchmarks.scripts import auto, comparisons, gossip, pages, results, simulate, tables
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
FILES = sorted(results.RESULTS.glob("*.json"))
MOST_LINES, LONGEST_LINE = 10_000, 2_000
SCRIPTS = (
    "auto", "correlated_rounding", "ddp_overhead", "global_qsgd_blocks", "gossip", "hotpath", "local_steps", "losses",
    "paired", "plan", "simulate", "soak", "tables", "threshold_k", "trust",
)  # fmt: skip
HELPERS = {
    "__init__",
    "comparisons",
    "gossip_rank",
    "gru",
    "hotpath_rank",
    "pages",
    "results",
    "soak_rank",
    "trust_loss",
    "trust_ranks",
    "trust_trials",
}


# ------------------------------------------------------------------------------------------------------------- results


def test_results_stay_small() -> None:
    assert FILES
    assert sum(file.read_text().count("\n") for file in FILES) < MOST_LINES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_results_file_is_as_its_writer_leaves_it(file: Path) -> None:
    """It parses, no line is long, and no script left samples or long numbers in it."""
    text = file.read_text()
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert isinstance(found, dict)
    assert max(map(len, text.splitlines())) < LONGEST_LINE
    assert results.as_text(found) == text
    assert not {"step_seconds", "lap_seconds", "losses"} & set(lists_of_lists(found))


def lists_of_lists(value: Any) -> Iterator[str]:
    """The keys of all lists whose items are long lists: where samples hide."""
    if isinstance(value, dict):
        for key, one in value.items():
            if isinstance(one, list) and any(isinstance(item, list) and len(item) > 4 for item in one):
                yield key
            yield from lists_of_lists(one)
    elif isinstance(value, list):
        for one in value:
            yield from lists_of_lists(one)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=20), inner, max_size=8),
    max_leaves=80,
)


@given(_ANYTHING)
def test_the_layout_changes_nothing(value: Any) -> None:
    text = results.as_text(value)
    assert json.loads(text) == results.plain(value)
    assert text.endswith("\n")
    assert results.as_text(json.loads(text)) == text


def test_records_of_a_table_have_a_line_each() -> None:
    rows = [{"recipe": "ef|top_k:0.01|all_gather", "step_ms": [number / 7] * 9} for number in range(5)]
    lines = results.as_text({"rows": rows}).splitlines()
    assert len(lines) == len(rows) + 4
    assert all(len(line) <= results.WIDTH + 1 for line in lines)
    assert len(results.as_text({"counts": list(range(1000))}).splitlines()) < 25


def test_the_newest_file_is_found_by_its_date(tmp_path: Path) -> None:
    for name in ("2026-01-02-auto.json", "2026-11-01-auto.json", "2026-12-01-plan.json"):
        (tmp_path / name).write_text("{}")
    assert results.newest("auto", folder=tmp_path) == tmp_path / "2026-11-01-auto.json"
    assert results.newest("gossip", folder=tmp_path) is None
    with pytest.raises(SystemExit, match=r"no \*-nothing\.json yet"):
        results.given_or_newest(Path(), "nothing")


# --------------------------------------------------------------------------------------------------------- comparisons


def comparison() -> dict[str, Any]:
    repeat = {
        "seed": 0,
        "step_ms": 2.0,
        "lap_seconds": [6.0],
        "step_seconds": [[1.0, 2.0], [3.0]],
        "curve": [{"step": 1}],
    }
    row = {"recipe": "ddp", "step_ms": 2.0, "curve": [{"step": 1, "held_out": 3.0}], "repeats": [repeat]}
    forecast = {
        "network": {"mbit": 99.0, "fits": [{"collective": "all_reduce", "regimes": [], "points": [[1, 2.0]] * 9}]},
        "profile": {"name": "gpt", "buckets": [{"shapes": [[3, 4], [5]], "ready": 0.1}]},
        "device": {"hook": 0.01, "speeds": {"encode": [1.0, 2.0]}},
    }
    found = {"kind": "compare", "created": "2026-01-31T00:00:00Z", "settings": {"network": "100mbit,1ms"}}
    return {**found, "forecast": forecast, "no_communication": {"step_ms": 1.0, "repeats": [repeat]}, "rows": [row]}


def test_a_comparison_keeps_figures_and_summaries() -> None:
    before = comparison()
    found = comparisons.brief_comparison(before)
    assert before == comparison()
    (row,) = found["rows"]
    assert row["curve"] == [{"step": 1, "held_out": 3.0}]
    summary = {"median": 2.0, "quartiles": [1.5, 2.5], "count": 3}
    assert row["repeats"] == [{"seed": 0, "step_ms": 2.0, "step_seconds": summary}]
    assert found["no_communication"]["repeats"] == row["repeats"]
    forecast = found["forecast"]
    assert forecast["network"]["fits"] == [{"collective": "all_reduce", "regimes": []}]
    assert forecast["profile"]["buckets"] == [{"elements": 17, "ready": 0.1}]
    assert forecast["device"] == {"hook": 0.01}


def test_files_of_the_command_are_kept_in_short(tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps(comparison()))
    place = tables.keep(raw, folder=tmp_path)
    assert place.name == "2026-01-31-compare-100mbit.json"
    assert results.read(place) == results.plain(comparisons.brief_comparison(comparison()))
    raw.write_text(json.dumps({"numel": 8, "threads": 1, "rounds": 7, "rows": [{"name": "moments"}]}))
    assert tables.keep(raw, folder=tmp_path).name == "kernels.json"
    raw.write_text("{}")
    with pytest.raises(SystemExit, match="is not from `thinwire kernels"):
        tables.keep(raw, folder=tmp_path)


# ------------------------------------------------------------------------------------------------------ scripts, tables


def test_every_script_is_looked_at() -> None:
    assert {path.stem for path in (ROOT / "benchmarks" / "scripts").glob("*.py")} == {*SCRIPTS, *HELPERS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_how_to_run_it_and_what_it_writes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = import_module(f"benchmarks.scripts.{name}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"]) if name == "tables" else script.main()
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m benchmarks.scripts.{name}" in told
    assert "benchmarks/results" in told


@pytest.mark.parametrize(
    ("script", "kind", "places"),
    [
        (auto.table, "auto", [("README.md", "auto table"), ("docs/auto.md", "auto table")]),
        (gossip.tables, "gossip", [("docs/gossip.md", "gossip tables")]),
        (simulate.tables, "simulate", [("docs/internet-scale.md", "tables")]),
    ],
)
def test_tables_in_docs_are_those_of_the_newest_results(script: Any, kind: str, places: list[tuple[str, str]]) -> None:
    text = script(results.read(results.given_or_newest(Path(), kind)))
    for name, mark in places:
        assert f"<!-- {mark} -->\n\n{text.strip()}\n\n{pages.END}" in (ROOT / name).read_text()


def test_a_block_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\nkept\n<!-- end -->\n")
    for _ in range(2):
        pages.replace_block(page, "one", "\nnew\n")
        written = "a\n<!-- one -->\n\nnew\n\n<!-- end -->\nb\n<!-- two -->\nkept\n<!-- end -->\n"
        assert page.read_text() == written
    with pytest.raises(SystemExit, match="has no place for the table"):
        pages.replace_block(page, "three", "")


# ------------------------------------------------------------------------------------------------------------ examples

_EXAMPLES = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if "\n    >>> " in path.read_text())


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_docstrings_are_right(path: Path) -> None:
    module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
