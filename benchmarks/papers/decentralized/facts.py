"""Numbers that sections and verdicts of the page on decentralised training derive from what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..page import spread

BROKEN = 1.5  # times the loss of D-PSGD
_CENTRAL = {8: ("global-qsgd-8", "two-shot-8"), 4: ("two-shot-4",)}


def gain(times: Mapping[str, float], bits: int) -> float:
    """Time of the fastest method that is not both compressed and decentralised, over DCD with this number of bits."""
    others = [times[name] for name in ("ddp", "dpsgd@ring", *_CENTRAL[bits]) if name in times]
    return min(others) / times[f"dcd:{bits}@ring"]


def mean(values: Sequence[float | None]) -> float:
    return spread(values).mean


# ------------------------------------------------------------------------------------------------------ convergence


def row_of(rows: Sequence[dict[str, Any]], algorithm: str, codec: str, skew: float = 0.0) -> dict[str, Any] | None:
    """None where it was not run."""
    same = (one for one in rows if (one["algorithm"], one["codec"], one["skew"]) == (algorithm, codec, skew))
    return next(same, None)


def behind(rows: Sequence[dict[str, Any]], algorithm: str, codec: str, skew: float = 0.0) -> list[float]:
    """Points of accuracy behind D-PSGD, for each seed; empty where it was not run."""
    row, dense = row_of(rows, algorithm, codec, skew), row_of(rows, "dpsgd", "fp32", skew)
    if row is None or dense is None:
        return []
    return [a["accuracy"] - b["accuracy"] for a, b in zip(dense["runs"], row["runs"], strict=True)]


# ------------------------------------------------------------------------------------------------------------ noise


def load(row: Mapping[str, Any]) -> float:
    """Measured noise over the limit of the graph."""
    return mean(row["noise"]) / float(row["limit"])


def drawn_apart(row: Mapping[str, Any]) -> bool:
    """Whether every worker draws for itself, as the theory of the limit has it."""
    return not row["codec"].startswith("random_k") or "shared=false" in row["codec"]


def talk_name(row: Mapping[str, Any]) -> str:
    """A codec; by its share of the limit where its density was chosen so."""
    if row["codec"].startswith("random_k") and drawn_apart(row):
        density = float(row["codec"].partition(":")[2].partition(",")[0])
        return f"`random_k`, {(1 / density - 1) / row['limit']:.1f} x the limit"
    return f"`{row['codec']}`" + ("" if drawn_apart(row) else ", positions shared")


def loss_ratios(row: Mapping[str, Any]) -> list[float | None]:
    """Loss over that of D-PSGD on the same graph, for each seed."""
    pairs = zip(row["loss"], row["dense_loss"], strict=True)
    return [None if loss is None else loss / dense for loss, dense in pairs]


def stopped(row: Mapping[str, Any]) -> bool:
    return any(at is not None for at in row["diverged_at"])


def breaks(row: Mapping[str, Any]) -> bool:
    return stopped(row) or None in row["loss"] or not mean(loss_ratios(row)) <= BROKEN


def load_alone(row: Mapping[str, Any]) -> float:
    """The same noise without any gradient, of the codec on a model of this size."""
    return mean(row["alone"]["noise"]) / float(row["limit"])


def score(learning: Sequence[Mapping[str, Any]], by: Callable[[Mapping[str, Any]], float] = load) -> dict[str, float]:
    """How well noise over the limit tells which rows break."""
    below, above = [row for row in learning if by(row) <= 1], [row for row in learning if by(row) > 1]
    return {
        "below": len(below),
        "below_broken": sum(map(breaks, below)),
        "above": len(above),
        "above_broken": sum(map(breaks, above)),
        "least_broken": min((by(row) for row in learning if breaks(row)), default=math.nan),
        "most_whole": max((by(row) for row in learning if not breaks(row)), default=math.nan),
    }


def published_score(learning: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The rows below the limit of the paper, and those above."""
    under = [row for row in learning if mean(row["noise"]) < row["published"]]
    return under, [row for row in learning if row not in under]


# --------------------------------------------------------------------------------------------------------- speed-up


def slopes(points: Sequence[Mapping[str, Any]], over: str) -> list[float]:
    """Of the logarithm of the values over that of `over`, by least squares, for each repetition."""
    x = [math.log(point[over]) for point in points]
    middle = sum(x) / len(x)
    square = sum((one - middle) ** 2 for one in x)
    each = zip(*(point["values"] for point in points), strict=True)
    return [sum((a - middle) * math.log(b) for a, b in zip(x, values, strict=True)) / square for values in each]


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(values, others, strict=True)]
