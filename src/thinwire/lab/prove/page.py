"""The page of a proof: one self-contained HTML file that says first what was proved, on what, and what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..draw import numbers
from ..draw.markup import escape, script_json, tag
from ..draw.page import THEME_BUTTON, asset, document
from ..report.tables import facts
from .contract import CHECKS
from .hardware import in_one_line
from .page_benchmark import benchmark_section
from .words import finding, headline, not_proved, verdict

Result = Mapping[str, Any]
_BADGES = {"proved": "proved", "failed": "failed", "not here": "absent"}


def render_page(result: Result) -> str:
    """The page as text.

    Args:
        result: what `thinwire prove --json` writes.

    >>> part = {"name": "kernels on a GPU", "verdict": "not here", "seconds": 0.0, "reason": "<no GPU>", "details": {}}
    >>> found = {"thinwire": "0", "created": "", "command": "", "settings": {}, "machine": {}, "device": "cpu",
    ...          "parts": [part], "proved": True, "missing": ["kernels on a GPU"]}
    >>> page = render_page(found)
    >>> page.startswith("<!doctype html>"), "<no GPU>" in page
    (True, False)
    """
    sections = [
        _header(result),
        _parts(result),
        *(benchmark_section(part, number) for number, part in enumerate(_with(result, "rows"))),
        *(_contract(part) for part in _with(result, "recipes")),
        *(_kernels(part) for part in _with(result, "kernels")),
        _machinery(result),
    ]
    data = f'<script type="application/json" id="result">{script_json(dict(result))}</script>'
    style = asset("thinwire.lab.prove", "prove.css")
    return document(tag("main", "".join(sections)) + data, title=f"{headline(result)} - thinwire", style=style)


def _with(result: Result, key: str) -> list[Mapping[str, Any]]:
    """The parts whose details have something under a key; a part that failed early may have nothing."""
    return [part for part in result["parts"] if part["details"].get(key)]


def _section(key: str, title: str, *parts: str) -> str:
    heading = tag("h2", escape(title), id=f"{key}-title")
    return tag("section", heading + "".join(parts), id=key, aria_labelledby=f"{key}-title")


def _table(
    key: str, heads: Sequence[str], rows: Sequence[str], *, words: Sequence[str] = (), narrow: bool = False
) -> str:
    cells = [tag("th", escape(name), scope="col", class_="words" if name in words else None) for name in heads]
    table = tag("thead", tag("tr", "".join(cells))) + tag("tbody", "".join(rows))
    return tag("div", tag("table", table, id=key, class_="narrow" if narrow else None), class_="scroll", tabindex=0)


# ------------------------------------------------------------------------------------------------------------- parts


def _header(result: Result) -> str:
    created = str(result["created"])
    top = (
        tag("span", "thinwire prove", class_="brand")
        + tag("time", escape(created.replace("T", " ").replace("Z", " UTC")), datetime=created)
        + THEME_BUTTON
    )
    hardware = f"{in_one_line(result['machine'])} · " if result["machine"] else ""
    lines = "".join(
        tag("div", tag("p", escape(line)), class_=f"notice{' failed' if ': failed: ' in line else ''}")
        for line in not_proved(result)
    )
    return tag(
        "header",
        tag("div", top, class_="top")
        + tag("h1", escape(headline(result)))
        + tag("p", escape(f"{hardware}thinwire {result['thinwire']}"), class_="lead", id="hardware")
        + tag("div", lines, id="not-proved"),
    )


def _parts(result: Result) -> str:
    lines = []
    for part in result["parts"]:
        said = verdict(part)
        badge = _BADGES.get(said, "plain")
        seconds = "" if part["verdict"] == "not here" else numbers.seconds(part["seconds"])
        cells = (
            tag("td", tag("span", escape(said), class_=f"verdict {badge}"), class_="words")
            + tag("td", escape(finding(part)), class_="words")
            + tag("td", escape(seconds), data_value=part["seconds"])
        )
        row = tag("th", tag("b", escape(part["name"])), scope="row") + cells
        lines.append(tag("tr", row, data_part=part["name"], data_verdict=part["verdict"]))
    heads = ("part", "verdict", "what was found", "time")
    caption = (
        "Proved: every case was run here and held. Measured: the numbers below, and nothing more. "
        "Not here: this machine lacks what the part needs, so nothing is known about it."
    )
    table = _table("parts-table", heads, lines, words=("verdict", "what was found"))
    return _section("parts", "Verdicts", table, tag("p", caption, class_="caption"))


def _contract(part: Mapping[str, Any]) -> str:
    """Recipes down, checks across."""
    details = part["details"]
    lines = []
    for recipe, checks in details["recipes"].items():
        cells = [tag("th", tag("b", escape(recipe)), scope="row")]
        for check in CHECKS:
            found = checks.get(check)
            if found is None:
                cells.append(tag("td", numbers.NONE, class_="none-here"))
            else:
                cells.append(tag("td", escape(found), class_="holds" if found == "holds" else "broken"))
        lines.append(tag("tr", "".join(cells), data_recipe=recipe))
    meanings = [
        tag("div", tag("dt", escape(name)) + tag("dd", tag("p", escape((check.__doc__ or "").partition("\n")[0]))))
        for name, check in CHECKS.items()
    ]
    where = f"{details['processes']} processes over {details['backend']}; a check holds if every process says so."
    key = "contract"
    return _section(
        key,
        part["name"],
        _table(f"{key}-table", ("recipe", *CHECKS), lines),
        tag("p", escape(where), class_="caption"),
        tag("dl", "".join(meanings), class_="recipes checks"),
    )


def _kernels(part: Mapping[str, Any]) -> str:
    lines = []
    for row in part["details"]["kernels"]:
        good = row["problem"] is None
        cells = (
            tag("td", escape(row["device"]))
            + tag("td", escape(row["body"]))
            + tag("td", numbers.plain(row["cases"]), data_value=row["cases"])
            + tag("td", "equal" if good else escape(row["problem"]), class_="holds" if good else "broken")
        )
        lines.append(tag("tr", tag("th", tag("b", escape(row["kernel"])), scope="row") + cells))
    caption = (
        "Equal bit for bit to the definition in plain torch; block_square_sum and moments to a relative 1e-6, because "
        "sums in float64 have no fixed order. Inputs have zeros of both signs, subnormals, the ends of float32, inf, "
        "NaN, and lengths that fill no chunk."
    )
    key = part["name"].replace(" ", "-").lower()
    table = _table(f"{key}-table", ("kernel", "device", "body", "cases", "result"), lines, narrow=True)
    return _section(key, part["name"], table, tag("p", caption, class_="caption"))


def _machinery(result: Result) -> str:
    machine = {key: value for key, value in result["machine"].items() if key != "gpus"}
    gpus = result["machine"].get("gpus") or {}
    shown = {**machine, **{key: value for key, value in gpus.items() if key != "devices"}}
    for number, device in enumerate(gpus.get("devices", [])):
        shown[f"GPU {number}"] = (
            f"{device['name']}, {device['memory_gb']} GB, sm_{device['capability'].replace('.', '')}"
        )
    settings = {
        key: value for key, value in result["settings"].items() if value not in (None, [])
    }  # the rest is default
    pair = tag("div", tag("div", facts(settings)) + tag("div", facts(shown)), class_="pair")
    command = tag("pre", tag("code", escape(result["command"])), id="command", tabindex=0) if result["command"] else ""
    link = tag("a", "Download the result as JSON", id="download", download="prove.json", href="#")
    return _section("settings", "Settings and machine", pair) + _section(
        "again", "Run it again", command, tag("p", link)
    )
