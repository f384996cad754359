"""The report as text: numbers, escaping, what it refuses. `test_report_browser.py` looks at it in a browser."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from support.hostile import NUMBERS, hostile_result
from support.made_up import HOSTILE, made_up_result, with_decisions
from thinwire.errors import OptionError
from thinwire.lab.draw import numbers, palette
from thinwire.lab.report import curves, render_report, write_report


class Elements(HTMLParser):
    """Every start tag with its attributes, and the raw text of the script elements by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.inside: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or "" if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data


def test_the_raw_result_is_inside_unchanged() -> None:
    result = made_up_result()
    assert json.loads(Elements(render_report(result)).scripts["result"]) == result


def test_hostile_strings_stay_text() -> None:
    calm, hostile = Elements(render_report(made_up_result(recipes=3))), Elements(render_report(hostile_result()))
    assert not any(tag == "img" or any(name.startswith("on") for name in attrs) for tag, attrs in hostile.found)
    assert sum(tag == "script" for tag, _ in hostile.found) == sum(tag == "script" for tag, _ in calm.found) == 3
    assert json.loads(hostile.scripts["result"]) == hostile_result()


def test_nothing_is_fetched() -> None:
    page = render_report(made_up_result())
    addresses = [attrs[name] for _, attrs in Elements(page).found for name in ("src", "href") if name in attrs]
    assert addresses == ["data:,", "#result"]
    assert "url(#" in page
    assert not re.search(r"@import|url\((?![#`])", page.replace("url(#", ""))


def test_every_row_has_every_number_exactly() -> None:
    result = made_up_result()
    cells = [attrs for tag, attrs in Elements(render_report(result)).found if tag == "td"]
    assert [(attrs["data-key"], attrs["data-value"]) for attrs in cells] == [
        (key, "" if row[key] is None else repr(row[key])) for row in result["rows"] for key in NUMBERS
    ]


def test_what_is_not_finite_is_said_and_is_valid_json() -> None:
    result = made_up_result(recipes=2, failed=False)
    result["rows"][1].update(final_loss=math.nan, step_ms=math.inf)
    result["rows"][1]["curve"][-1]["loss"] = math.nan
    page = render_report(result)
    assert page.count("not finite") >= 2
    kept = json.loads(Elements(page).scripts["result"])
    assert kept["rows"][1]["final_loss"] is None
    assert kept["rows"][1]["curve"][-1]["loss"] is None


def test_every_setting_is_shown() -> None:
    result = made_up_result()
    result["settings"]["something_new"] = {"a": [1, 2.5]}
    page = render_report(result)
    assert "<dt>something new</dt><dd>a 1, 2.5</dd>" in page
    assert all(key.replace("_", " ") in page for key in [*result["settings"], *result["machine"]])


def test_only_rows_are_needed() -> None:
    page = render_report({"schema": 1, "kind": "compare", "rows": [{"recipe": "ddp"}]})
    assert "No step was timed." in page
    assert "No bytes were counted." in page


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "kernels"}, "not a result of thinwire compare"),
        ({"schema": None}, "not a result of thinwire compare"),
        ({"schema": 2}, "schema 2"),
        ({"rows": []}, "no rows"),
        ({"rows": None}, "no rows"),
    ],
)
def test_other_files_are_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        render_report({**made_up_result(recipes=1), **change})


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    assert write_report(made_up_result(recipes=2), place) == place
    before = place.read_bytes()
    broken = made_up_result(recipes=2) | {"machine": {"processor": object()}}
    with pytest.raises(TypeError):
        write_report(broken, place)
    assert place.read_bytes() == before
    assert list(tmp_path.iterdir()) == [place]


def test_the_same_result_makes_the_same_report_and_stays_as_it_was() -> None:
    result = made_up_result()
    kept = copy.deepcopy(result)
    assert render_report(result) == render_report(result)
    assert result == kept


@pytest.mark.parametrize(
    "value", [0, 0.004, 0.9994, 9.994, 9.996, 99.94, 99.96, 999.6, 1234.5, 999_499, 999_501, 1.5e9]
)
def test_written_numbers_are_the_value_rounded_at_their_last_digit(value: float) -> None:
    for write in (numbers.milliseconds, numbers.seconds, numbers.times, numbers.fraction, numbers.loss, numbers.size):
        said, _, unit = write(value).replace(",", "").rstrip("×").partition(" ")
        factor = {"kB": 1e3, "MB": 1e6, "GB": 1e9}.get(unit, 1)
        digit = 10.0 ** -len(said.partition(".")[2])
        assert abs(float(said) * factor - value) <= 0.5001 * digit * factor


@pytest.mark.parametrize("count", [0, 1, 2, 299, 300, 301, 5000, 100_000])
def test_thinning_keeps_both_ends_and_order(count: int) -> None:
    kept = curves.thin(count)
    assert len(kept) <= 300
    assert kept == sorted(set(kept))
    assert kept[:1] + kept[-1:] == ([0, count - 1] if count else [])


def test_thirty_rows_are_told_apart() -> None:
    rows = [{"recipe": "ddp"}] + [{"recipe": f"r{place}"} for place in range(29)]
    styles = [tuple(style.values()) for style in palette.styles(rows)]
    assert len(set(styles)) == 30


# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISIONS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def _oklab(colour: str, vision: str) -> tuple[float, ...]:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(max(sum(m * c for m, c in zip(line, linear, strict=True)), 0), 1) for line in VISIONS[vision])
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
    )


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_series_colours_keep_apart_for_every_eye(theme: int, vision: str) -> None:
    pairs = (palette.REFERENCE, *palette.SERIES)
    assert len(pairs) == palette.COLOURS + 1
    colours = [_oklab(pair[theme], vision) for pair in pairs]
    assert min(math.dist(one, other) for one, other in itertools.combinations(colours, 2)) > 0.08


def test_decisions_of_auto_are_told_and_marked() -> None:
    page = render_report(with_decisions(made_up_result()))
    assert "What auto decided" in page
    assert "step 40: 940 Mbit/s now (was 94)" in page
    assert HOSTILE not in page
    assert "0.49 % of the training time" in page
    assert '"marks":[0.0,12.5]' in page
    assert 'data-recipe="bf16"' in page
    assert "What auto decided" not in render_report(made_up_result())


def test_an_auto_that_stayed_with_dense_says_so() -> None:
    result = with_decisions(made_up_result())
    result["rows"][5] |= {"decisions": [], "front": [], "deciding_share": None}
    assert "It stayed with dense." in render_report(result)
