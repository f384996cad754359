"""The loss curves as data for the script of the report: at most 300 points a recipe, each with its tooltip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..draw import numbers
from ..draw.palette import styles


def thin(count: int, *, most: int = 300) -> list[int]:
    """The points to draw out of `count`: evenly spaced ones, and denser ones at the start for a logarithmic axis.

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
    """The data of the script: for each row its style, its points `[seconds, bytes, loss, held_out]` and their tooltips.

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
                f"step {numbers.plain(point.get('step'))}",
                numbers.seconds(point.get("seconds")),
                numbers.size(point.get("bytes")),
                numbers.loss(point.get("loss")),
                numbers.loss(point.get("held_out")),
            ]
            for point in kept
        ]
        marks = [at for one in row.get("decisions") or () if (at := _finite(one.get("seconds"))) is not None]
        series.append({"name": str(row.get("recipe")), **style, "points": points, "said": said, "marks": marks})
    return {"target": _finite(target), "targetSaid": numbers.loss(target), "series": series}


def _losses(point: Mapping[str, Any]) -> list[Any]:
    return [_finite(point.get("loss")), _finite(point.get("held_out"))]


def _finite(value: Any) -> Any:
    """The value itself, neither rounded nor converted, or None if it cannot be drawn."""
    return None if numbers.number(value) is None else value
