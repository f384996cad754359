"""The sections of a study's page on top-k: what it leaves out against the bounds, and every layer in a table."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.markup import escape, tag
from . import draw
from .page_parts import Row, caption, recipe_name, section, shown_density
from .result import WORDS, at_density, percent

_BOUNDS = (("classic", "1 - k/d", "ref", "6 4"), ("bell", "(1 - k/d)²", "ref", "2 3"))


def bound_section(rows: Sequence[Row], colours: Sequence[str]) -> str:
    known = [
        (row, colour, sample)
        for row, colour in zip(rows, colours, strict=True)
        if (sample := row["samples"][-1])["whole"]["contraction"]
    ]
    if not known:
        return ""
    legend = tag("li", draw.swatch("s0") + "top-k, measured") + tag("li", draw.swatch("s4") + "Random-k, measured")
    legend += "".join(tag("li", draw.swatch(colour, dash) + escape(name)) for _, name, colour, dash in _BOUNDS)
    left_out = "".join(_left_out(row, sample) for row, _, sample in known)
    gain = [
        draw.Line(row["recipe"], colour, _multiples(sample["whole"]["contraction"], "top_k"), dots=True)
        for row, colour, sample in known
    ]
    gain += [
        draw.Line(name, colour, _multiples(known[0][2]["whole"]["contraction"], key), dash)
        for key, name, colour, dash in _BOUNDS
    ]
    svg = draw.lines(
        gain, across="density k/d", down="delta in units of k/d", label="delta over k/d", log_x=True, log_y=True
    )
    of_recipes = [tag("li", draw.swatch(colour) + escape(row["recipe"])) for row, colour, _ in known]
    of_bounds = [tag("li", draw.swatch(colour, dash) + escape(f"{name} implies")) for _, name, colour, dash in _BOUNDS]
    second = tag(
        "figure",
        tag("figcaption", tag("b", "How much better than the classic bound"))
        + tag("ul", "".join(of_recipes + of_bounds), class_="key")
        + svg,
        id="multiples",
    )
    words = (
        "The share of |u|² that is not kept, at the last look; Random-k is the mean of some draws. delta is 1 less "
        "that share. Classic: any u. Bell: any u whose |u| has a falling density."
    )
    return section(
        "contraction",
        "What top-k leaves out",
        tag("ul", legend, class_="key"),
        tag("div", left_out + second, class_="pair"),
        caption(words),
    )


def _left_out(row: Row, sample: Row) -> str:
    told = sample["whole"]["contraction"]
    lines = [
        draw.Line("top-k", "s0", [(one["density"], one["top_k"]) for one in told], dots=True),
        draw.Line("Random-k", "s4", [(one["density"], one["random_k"]) for one in told], dots=True),
    ]
    lines += [
        draw.Line(name, colour, [(one["density"], one[key]) for one in told], dash)
        for key, name, colour, dash in _BOUNDS
    ]
    said = f"{row['recipe']}, step {sample['step']:,}"
    svg = draw.lines(
        lines, across="density k/d", down="left out of |u|²", label=f"left out by top-k, {said}", log_x=True
    )
    return tag("figure", tag("figcaption", tag("b", escape(said))) + svg)


def _multiples(told: Sequence[Row], key: str) -> list[tuple[float, float]]:
    return [(one["density"], one["delta"][key] * one["d"] / one["k"]) for one in told]


def layer_section(rows: Sequence[Row], colours: Sequence[str]) -> str:
    parts = []
    for place, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        sample = row["samples"][-1]
        lines = [_layer(name, one) for name, one in sample["layers"].items() if one["finite"]]
        if not lines:
            continue
        heads = (
            "layer", "elements", "zeros", "kurtosis", "best fit", "KS Gaussian", "Laplace", "Student t", "out of place",
            "|u| falls", "top-k leaves", "delta × d/k",
        )  # fmt: skip
        head = tag("thead", tag("tr", "".join(tag("th", escape(name), scope="col") for name in heads)))
        table = tag("table", head + tag("tbody", "".join(lines)))
        said = tag("summary", recipe_name(row, colour) + escape(f", step {sample['step']:,}"))
        opened = {"open": ""} if place == 0 else {}
        parts.append(tag("details", said + tag("div", table, class_="scroll layers", tabindex=0), **opened))
    if not parts:
        return ""
    words = (
        f"At the last look; top-k of {percent(shown_density(rows))}. |u| falls: its density decreases from 0 on, which "
        "is all that (1 - k/d)² needs. delta × d/k: 1 is the classic bound, nearly 2 the other one."
    )
    return section("layers", "Layer by layer", *parts, caption(words))


def _layer(name: str, one: Row) -> str:
    told = at_density(one) or {}
    multiple = told["delta"]["top_k"] * told["d"] / told["k"] if told else None
    falls = one["falls"]["one"]
    cells = [
        tag("td", f"{one['numel']:,}", data_value=one["numel"]),
        tag("td", f"{one['zeros']:.0%}", data_value=one["zeros"]),
        draw.cell(one["kurtosis"], 1),
        tag("td", escape(WORDS[one["best"]])),
        *(draw.cell(one["fits"].get(family, {}).get("ks"), 3) for family in ("gaussian", "laplace", "student_t")),
        tag("td", f"{one['hump']['departure']:.1%}", data_value=one["hump"]["departure"]),
        tag("td", "yes" if falls else "no", class_=None if falls else "no"),
        draw.cell(told.get("top_k"), 3),
        draw.cell(multiple, 1),
    ]
    return tag("tr", tag("th", escape(name), scope="row") + "".join(cells))
