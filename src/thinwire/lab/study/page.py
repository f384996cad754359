"""The page of a study: one self-contained HTML file with tables, histograms and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import OptionError
from ..draw import numbers
from ..draw.chart import Line, lines_on_page
from ..draw.legend import key, swatch
from ..draw.markup import escape, script_json, tag
from ..draw.numbers import cell
from ..draw.page import THEME_BUTTON, asset, document
from ..draw.page import write_page as write_text
from ..draw.palette import styles
from ..report.tables import facts
from . import shapes
from .page_bounds import bound_section, layer_section
from .page_parts import Row, caption, recipe_name, section, shown_density
from .result import HEADS, KIND, SCHEMA, WORDS, at_density, percent, sentences


def render_page(result: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        result: what `Study.result` returns and `thinwire study gradients --json` writes.

    >>> import torch
    >>> from thinwire.lab.study.portrait import Lens, look
    >>> from thinwire.lab.study.result import result_of
    >>> sample = look([("w", torch.randn(5000), None)], step=0, lens=Lens())
    >>> page = render_page(result_of([{"recipe": "<hr>", "samples": [sample]}], settings={}))
    >>> page.startswith("<!doctype html>"), "<hr>" in page
    (True, False)
    """
    rows = _checked(result)
    colours = [str(style["colour"]) for style in styles(rows)]
    parts = [
        _header(result),
        _table(rows, colours),
        _shapes(rows, colours),
        _over_training(rows, colours),
        _feedback(rows, colours),
        bound_section(rows, colours),
        layer_section(rows, colours),
        _machinery(result),
    ]
    data = f'<script type="application/json" id="result">{script_json(dict(result))}</script>'
    body = tag("main", "".join(parts)) + data
    return document(body, title=f"{result['headline']} - thinwire", style=asset(__package__, "study.css"))


def write_page(result: Mapping[str, Any], path: str | Path) -> Path:
    """Write the page to a file, and return its path."""
    return write_text(render_page(result), path)


def _checked(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    if result.get("kind") != KIND or result.get("schema") != SCHEMA:
        raise OptionError(f"this is not a result of thinwire study with schema {SCHEMA}: run the study again")
    rows = [dict(row) for row in result["rows"]]
    for row in rows:
        row["samples"] = [sample for sample in row["samples"] if sample["whole"]["finite"]]
    rows = [row for row in rows if row["samples"]]
    if not rows:
        raise OptionError("every look met inf or NaN: there is nothing to draw")
    return rows


def _header(result: Mapping[str, Any]) -> str:
    created = str(result["created"])
    settings = result["settings"]
    said = [
        str(settings.get("workload") or settings.get("model") or ""),
        f"{numbers.plain(settings['parameters'])} parameters" if settings.get("parameters") else "",
        f"{settings['workers']} workers" if settings.get("workers") else "",
        f"{numbers.plain(settings['steps'])} steps" if settings.get("steps") else "",
        str(settings.get("optimizer") or ""),
    ]
    top = (
        tag("span", "thinwire study", class_="brand")
        + tag("time", escape(created.replace("T", " ").replace("Z", " UTC")), datetime=created)
        + THEME_BUTTON
    )
    words = "".join(tag("li", escape(sentence)) for sentence in sentences(result))
    return tag(
        "header",
        tag("div", top, class_="top")
        + tag("h1", escape(result["headline"]))
        + tag("p", escape(" · ".join(part for part in said if part)), class_="lead")
        + tag("ul", words, class_="words", id="findings"),
    )


def _table(rows: Sequence[Row], colours: Sequence[str]) -> str:
    lines = []
    for row, colour in zip(rows, colours, strict=True):
        for sample in row["samples"]:
            whole = sample["whole"]
            fit = whole["fits"].get(whole["best"], {})
            one = at_density(whole) or {}
            best = WORDS[whole["best"]] + (f" {fit['freedom']:.1f}" if "freedom" in fit else "")
            cells = [
                tag("td", f"{sample['step']:,}", data_value=sample["step"]),
                tag("td", f"{whole['memory_share']:.0%}", data_value=whole["memory_share"]),
                cell(whole["kurtosis"], 1),
                tag("td", escape(best)),
                cell(fit.get("ks"), 3),
                tag("td", f"{whole['hump']['departure']:.2%}", data_value=whole["hump"]["departure"]),
                *(cell(one.get(key), 4) for key in ("top_k", "classic", "bell")),
            ]
            lines.append(tag("tr", tag("th", recipe_name(row, colour), scope="row") + "".join(cells)))
    head = tag("thead", tag("tr", "".join(tag("th", escape(name), scope="col") for name in HEADS)))
    table = tag("div", tag("table", head + tag("tbody", "".join(lines)), id="whole"), class_="scroll", tabindex=0)
    words = (
        "u is the gradient and what the memory adds to it. Memory: |e|² / (|g|² + |e|²). Kurtosis: 0 for a Gaussian, 3 "
        "for a Laplace density. Best fit: by likelihood, with a penalty for each fitted number; Student t with its "
        "degrees of freedom. KS: the largest distance of its distribution function from that of u. Out of place: the "
        "share of the mass that would have to move for one hump. Top-k leaves: |u - TopK(u)|² / |u|² at "
        f"{percent(shown_density(rows))}, with the two bounds on it."
    )
    return section("model", "The whole model", table, caption(words))


def _shapes(rows: Sequence[Row], colours: Sequence[str]) -> str:
    parts = [shapes.fit_legend()]
    between = shapes.heights([sample["whole"] for row in rows for sample in row["samples"]])
    for row, colour in zip(rows, colours, strict=True):
        drawn = []
        for sample in row["samples"]:
            said = f"step {sample['step']:,}"
            svg = shapes.shape(sample["whole"], between=between, label=f"u of {row['recipe']} at {said}")
            best = tag("small", escape(WORDS[sample["whole"]["best"]]))
            drawn.append(tag("figure", tag("figcaption", tag("b", escape(said)) + best) + svg))
        parts.append(tag("h3", recipe_name(row, colour)) + tag("div", "".join(drawn), class_="grid-of-shapes"))
    words = (
        "Logarithmic density over 99 % of the elements; each fit is by maximum likelihood to the elements that are not "
        "zero. Under a logarithm a Gaussian is a parabola and a Laplace density a tent."
    )
    return section("shapes", "The shape of u", *parts, caption(words))


def _over_training(rows: Sequence[Row], colours: Sequence[str]) -> str:
    if max(len(row["samples"]) for row in rows) < 2:
        return ""

    def series(value: Any) -> list[Line]:
        found = []
        for row, colour in zip(rows, colours, strict=True):
            looks = [(float(sample["step"]), value(sample["whole"])) for sample in row["samples"]]
            known = [(x, float(y)) for x, y in looks if y is not None and y > 0]
            if known:
                found.append(Line.through(row["recipe"], known, colour=colour, marks=True))
        return found

    def left(whole: Row) -> float | None:
        one = at_density(whole)
        return None if one is None else float(one["top_k"])

    charts = [
        ("Kurtosis", "plus 3: of a Gaussian 3", series(lambda whole: whole["kurtosis"] + 3), True),
        ("Tails", "freedom of the Student t", series(lambda w: w["fits"].get("student_t", {}).get("freedom")), True),
        (f"Left out by top-k of {percent(shown_density(rows))}", "of |u|²", series(left), False),
    ]
    drawn = []
    for title, down, lines, log in charts:
        svg = lines_on_page(lines, across="step", down=down, label=title, log_y=log, width=380, height=260)
        if svg:
            drawn.append(tag("figure", tag("figcaption", tag("b", escape(title))) + svg))
    legend = key([(swatch(colour), row["recipe"]) for row, colour in zip(rows, colours, strict=True)])
    words = (
        "Of the whole model. The fewer degrees of freedom, the heavier the tails; from 30 or so on, they are Gaussian."
    )
    return section("training", "While it trains", legend, tag("div", "".join(drawn), class_="trio"), caption(words))


def _feedback(rows: Sequence[Row], colours: Sequence[str]) -> str:
    """The gradient beside u, where a memory makes them differ."""
    parts, lines = [], []
    for row, colour in zip(rows, colours, strict=True):
        remembered = [sample for sample in row["samples"] if sample["whole"]["gradient"]]
        if not remembered:
            continue
        last = remembered[-1]
        said = f"{row['recipe']}, step {last['step']:,}"
        svg = shapes.two_shapes(last["whole"], colour=colour, label=f"gradient and u of {said}")
        legend = key([(swatch(colour, area=True), "u = g + e"), (swatch("ref"), "gradient g")])
        title = tag("figcaption", tag("b", escape(said)))
        parts.append(tag("figure", title + legend + svg))
        lines += [_change(row, colour, sample) for sample in remembered]
    if not parts:
        return ""
    heads = ("recipe", "step", "memory", "kurtosis of g", "of u", "freedom of g", "of u", "largest / std of g", "of u")
    head = tag("thead", tag("tr", "".join(tag("th", escape(name), scope="col") for name in heads)))
    table = tag("div", tag("table", head + tag("tbody", "".join(lines)), id="change"), class_="scroll", tabindex=0)
    words = (
        "g and u of the same steps. What is sent leaves the memory, so that the largest elements are cut off at every "
        "step, while the rest adds up over steps."
    )
    return section(
        "feedback", "What error feedback does", tag("div", "".join(parts), class_="pair"), table, caption(words)
    )


def _change(row: Row, colour: str, sample: Row) -> str:
    whole = sample["whole"]
    gradient = whole["gradient"]

    def freedom(one: Row) -> Any:
        return one["fits"].get("student_t", {}).get("freedom")

    cells = [
        tag("td", f"{sample['step']:,}", data_value=sample["step"]),
        tag("td", f"{whole['memory_share']:.0%}", data_value=whole["memory_share"]),
        *(cell(one["kurtosis"], 1) for one in (gradient, whole)),
        *(cell(freedom(one), 1) for one in (gradient, whole)),
        *(cell(one["largest"] / one["std"] if one["std"] else None, 1) for one in (gradient, whole)),
    ]
    return tag("tr", tag("th", recipe_name(row, colour), scope="row") + "".join(cells))


def _machinery(result: Mapping[str, Any]) -> str:
    pair = tag("div", tag("div", facts(result["settings"])) + tag("div", facts(result["machine"])), class_="pair")
    command = tag("pre", tag("code", escape(result["command"])), id="command", tabindex=0) if result["command"] else ""
    download = tag(
        "p", tag("a", "Download the result as JSON", id="download", download="thinwire-study.json", href="#")
    )
    return section("settings", "Settings and machine", pair) + section("again", "Run it again", command, download)
