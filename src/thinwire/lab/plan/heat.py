"""A map of plans: the advised recipe and its speed-up over numbers of workers and networks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import OptionError
from ...predict.devices import Device
from ...predict.network import NetworkModel
from ...predict.spec import FASTEST, SLOWEST, parse_network
from ...predict.workload import Profile
from ..draw.markup import escape, tag
from ..draw.page import asset, document
from ..draw.palette import SHADES
from .advise import RECIPES, make_plan

_MOST_CELLS = 200
_STEPS = (1.05, 1.5, 2.0, 4.0, 8.0, 16.0)  # speed-ups at which the shade of a cell changes
_DARK = 4  # the shade from which on text is white


@dataclass(frozen=True)
class Cell:
    workers: int
    network: str
    recipe: str
    speedup: float
    step: float


@dataclass(frozen=True)
class Heat:
    """Rows are networks, columns numbers of workers."""

    workers: tuple[int, ...]
    networks: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {
                "network": cell.network,
                "workers": cell.workers,
                "recipe": cell.recipe,
                "speedup_over_ddp": cell.speedup,
                "predicted_ms": 1e3 * cell.step,
            }
            for line in self.cells
            for cell in line
        ]
        return {"workers": list(self.workers), "networks": list(self.networks), "cells": rows}


def numbers_between(text: str) -> tuple[int, ...]:
    """`8`, or `2..64` in doublings.

    >>> numbers_between("2..64"), numbers_between("8"), numbers_between("3..10")
    ((2, 4, 8, 16, 32, 64), (8,), (3, 6, 10))
    """
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if not match:
        raise OptionError(f"--workers is a number or a range such as 2..64, not {text}")
    low = int(match[1])
    high = int(match[2] or low)
    if not 1 <= low <= high <= 100_000:
        raise OptionError(f"--workers is from 1 to 100,000, the smaller number first, not {text}")
    found, at = [], low
    while at < high:
        found.append(at)
        at *= 2
    return (*found, high)


def networks_between(text: str) -> tuple[str, ...]:
    """One network, or a range of rates with the delay of either end: `10mbit..10gbit`, `10mbit,5ms..1gbit`.

    >>> networks_between("10mbit..1gbit,1ms")
    ('10mbit,1ms', '32mbit,1ms', '100mbit,1ms', '320mbit,1ms', '1gbit,1ms')
    >>> networks_between("10gbe")
    ('10gbe',)
    """
    low, dots, high = text.partition("..")
    if not dots:
        NetworkModel.named(text)
        return (text,)
    ends = [parse_network(end).phases for end in (low, high)]
    if any(len(phases) != 1 or phases[0].rate_bits is None for phases in ends):
        raise OptionError(f"a range of networks goes from one rate to another, such as 10mbit..10gbit, not {text}")
    first, last = ends[0][0], ends[1][0]
    delay = max(first.delay_seconds, last.delay_seconds)
    assert first.rate_bits is not None
    assert last.rate_bits is not None
    if not SLOWEST <= first.rate_bits < last.rate_bits <= FASTEST:
        raise OptionError(f"a range of networks goes from the slower rate to the faster one, not {text}")
    steps = max(1, round(2 * math.log10(last.rate_bits / first.rate_bits)))
    rates = [first.rate_bits * (last.rate_bits / first.rate_bits) ** (step / steps) for step in range(steps)]
    suffix = f",{delay * 1e3:g}ms" if delay else ""
    return tuple(f"{_rate(rate)}{suffix}" for rate in (*rates, last.rate_bits))


def _rate(bits: float) -> str:
    """A rate in two digits."""
    unit, size = next(pair for pair in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)) if bits >= 0.999 * pair[1])
    rounded = float(f"{bits / size:.2g}")
    return f"{rounded:g}{unit}"


def make_heat(
    profile: Profile,
    networks: Sequence[str],
    device: Device,
    *,
    workers: Sequence[int],
    base: NetworkModel | None = None,
    recipes: Sequence[str] = RECIPES,
) -> Heat:
    """A plan for every cell. `base` is the network, if it was measured."""
    if len(networks) * len(workers) > _MOST_CELLS:
        raise OptionError(f"a map has at most {_MOST_CELLS} cells: narrow --workers or --network")
    rows = []
    for text in networks:
        network = base or NetworkModel.named(text)
        row = []
        for count in workers:
            plan = make_plan(profile, network, device, workers=count, recipes=recipes)
            best = plan.advised
            row.append(Cell(count, text, best.recipe, best.speedup, best.prediction.step))
        rows.append(tuple(row))
    return Heat(tuple(workers), tuple(networks), tuple(rows))


def as_text(heat: Heat) -> str:
    """For a terminal: recipe and speed-up in every cell."""
    heads = ["network", *(f"{count} workers" for count in heat.workers)]
    lines = [
        [name, *(f"{cell.recipe} {cell.speedup:.1f}x" for cell in cells)]
        for name, cells in zip(heat.networks, heat.cells, strict=True)
    ]
    widths = [max(len(line[place]) for line in (heads, *lines)) for place in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *lines)
    )


def as_html(heat: Heat, *, title: str, notes: Sequence[str] = ()) -> str:
    """One page without a script; a darker cell gains more."""
    heads = "".join(tag("th", f"{count}", scope="col") for count in ("network, workers", *heat.workers))
    rows = [
        tag("tr", tag("th", escape(name), scope="row") + "".join(map(_html_cell, cells)))
        for name, cells in zip(heat.networks, heat.cells, strict=True)
    ]
    caption = tag("caption", "Advised recipe and speed-up over plain DDP, a step")
    table = tag("table", caption + tag("thead", tag("tr", heads)) + tag("tbody", "".join(rows)), class_="map")
    words = "".join(tag("p", escape(note), class_="lead") for note in notes)
    body = tag("main", tag("h1", escape(title)) + words + tag("div", table, class_="scroll", tabindex=0))
    return document(body, title=title, style=asset(__package__, "map.css"))


def _html_cell(cell: Cell) -> str:
    shade = sum(cell.speedup > step for step in _STEPS)
    ink = "#fff" if shade >= _DARK else "#12262f"
    words = tag("b", f"{cell.speedup:.1f}x") + " " + tag("span", escape(cell.recipe))
    return tag(
        "td", words + tag("small", f"{1e3 * cell.step:,.0f} ms"), class_="cell",
        style=f"background:{SHADES[shade]};color:{ink}",
    )  # fmt: skip
