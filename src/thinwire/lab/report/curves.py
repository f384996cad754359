"""The loss curves, made small enough to draw: a few hundred points a recipe, each with the words its tooltip says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import figures

COLOURS = 7  # as many as the style sheet has, `--s0` and so on; the reference has one of its own
DASHES = 4
MARKS = 6
REFERENCE = "ddp"


def styles(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str | int]]:
    """Colour, dash and mark of each row; no two of the first 84 share all three.

    >>> styles([{"recipe": "ddp"}, {"recipe": "two-shot-4"}])
    [{'colour': 'ref', 'dash': 1, 'mark': 0}, {'colour': 's0', 'dash': 0, 'mark': 1}]
    """
    found: list[dict[str, str | int]] = []
    place = 0
    for row in rows:
        if row.get("recipe") == REFERENCE:
            found.append({"colour": "ref", "dash": 1, "mark": 0})
            continue
        dash = place // COLOURS % DASHES
        found.append({"colour": f"s{place % COLOURS}", "dash": dash, "mark": (place + 1) % MARKS})
        place += 1
    return found


def thin(count: int, *, most: int = 300) -> list[int]:
    """Which of `count` points to draw: evenly spaced ones, and denser ones at the start for the logarithmic axis.

    >>> thin(4), len(thin(10_000)) <= 300, thin(10_000)[:4], thin(10_000)[-1]
    ([0, 1, 2, 3], True, [0, 1, 2, 3], 9999)
    """
    if count <= most:
        return list(range(count))
    even = most * 2 // 3
    early = most - even
    chosen = {round(place * (count - 1) / (even - 1)) for place in range(even)}
    chosen |= {round(count ** (place / early)) - 1 for place in range(early)}
    return sorted(chosen)


def drawn(rows: Sequence[Mapping[str, Any]], *, target: Any) -> dict[str, Any]:
    """What the script draws: for each row its style and its points `[seconds, bytes, loss, held_out]` with their words.

    >>> curve = [{"step": 10, "seconds": 2.4, "bytes": 15_000_000, "loss": 3.1, "held_out": None}]
    >>> drawn([{"recipe": "bf16", "curve": curve}], target=2.23)["series"][0]["points"]
    [[2.4, 15000000, 3.1, None]]
    """
    series = []
    for row, style in zip(rows, styles(rows), strict=True):
        curve = row.get("curve") or []
        kept = [curve[place] for place in thin(len(curve))]
        points = [[_finite(point.get("seconds")), _finite(point.get("bytes")), *_losses(point)] for point in kept]
        said = [
            [
                f"step {figures.plain(point.get('step'))}",
                figures.seconds(point.get("seconds")),
                figures.size(point.get("bytes")),
                figures.loss(point.get("loss")),
                figures.loss(point.get("held_out")),
            ]
            for point in kept
        ]
        marks = [at for one in row.get("decisions") or () if (at := _finite(one.get("seconds"))) is not None]
        series.append({"name": str(row.get("recipe")), **style, "points": points, "said": said, "marks": marks})
    return {"target": _finite(target), "targetSaid": figures.loss(target), "series": series}


def _losses(point: Mapping[str, Any]) -> list[Any]:
    return [_finite(point.get("loss")), _finite(point.get("held_out"))]


def _finite(value: Any) -> Any:
    """The value itself, not a rounded or converted one, where it can be drawn."""
    return None if figures.number(value) is None else value
