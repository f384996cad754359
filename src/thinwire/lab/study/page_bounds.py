"""The sections on Top-k of a study's page: the energy it leaves out beside the bounds, and a table of all layers."""

from __future__ import annotations

from collections.abc import Sequence

from ..draw.chart import Line, lines_on_page
from ..draw.legend import key, swatch
from ..draw.markup import escape, tag
from ..draw.numbers import cell
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
    legend = key(
        [
            (swatch("s0"), "top-k, measured"),
            (swatch("s4"), "Random-k, measured"),
            *((swatch(colour, dash), name) for _, name, colour, dash in _BOUNDS),
        ]
    )
    left_out = "".join(_left_out(row, sample) for row, _, sample in known)
    gain = [
        Line.through(row["recipe"], _multiples(sample["whole"]["contraction"], "top_k"), colour=colour, marks=True)
        for row, colour, sample in known
    ]
    gain += [
        Line.through(
            name, _multiples(known[0][2]["whole"]["contraction"], bound), colour=colour, dash=dash, marks=False
        )
        for bound, name, colour, dash in _BOUNDS
    ]
    svg = lines_on_page(
        gain, across="density k/d", down="delta in units of k/d", label="delta over k/d", log_x=True, log_y=True
    )
    second_legend = key(
        [
            *((swatch(colour), row["recipe"]) for row, colour, _ in known),
            *((swatch(colour, dash), f"{name} implies") for _, name, colour, dash in _BOUNDS),
        ]
    )
    second = tag(
        "figure",
        tag("figcaption", tag("b", "How much better than the classic bound")) + second_legend + svg,
        id="multiples",
    )
    words = (
        "The share of |u|² that is not kept, at the last look; Random-k is the mean of some draws. delta is 1 less "
        "that share. Classic: any u. Bell: any u whose |u| has a falling density."
    )
    return section(
        "contraction",
        "What top-k leaves out",
        legend,
        tag("div", left_out + second, class_="pair"),
        caption(words),
    )


def _left_out(row: Row, sample: Row) -> str:
    told = sample["whole"]["contraction"]
    lines = [
        Line.through("top-k", [(one["density"], one["top_k"]) for one in told], colour="s0", marks=True),
        Line.through("Random-k", [(one["density"], one["random_k"]) for one in told], colour="s4", marks=True),
    ]
    lines += [
        Line.through(name, [(one["density"], one[bound]) for one in told], colour=colour, dash=dash, marks=False)
        for bound, name, colour, dash in _BOUNDS
    ]
    said = f"{row['recipe']}, step {sample['step']:,}"
    svg = lines_on_page(
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
        cell(one["kurtosis"], 1),
        tag("td", escape(WORDS[one["best"]])),
        *(cell(one["fits"].get(family, {}).get("ks"), 3) for family in ("gaussian", "laplace", "student_t")),
        tag("td", f"{one['hump']['departure']:.1%}", data_value=one["hump"]["departure"]),
        tag("td", "yes" if falls else "no", class_=None if falls else "no"),
        cell(told.get("top_k"), 3),
        cell(multiple, 1),
    ]
    return tag("tr", tag("th", escape(name), scope="row") + "".join(cells))
