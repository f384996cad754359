"""Fits latency and time per byte to timings, in as few ranges of sizes as describe them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]  # size in bytes, seconds
_MOST_REGIMES = 3
_WORTH_A_REGIME = 0.5  # another range must halve the squared error
_GOOD = 0.01  # relative error below which no further range is needed


@dataclass(frozen=True)
class Regime:
    """seconds = latency + byte_seconds * size, for sizes up to `upto`."""

    upto: float
    latency: float
    byte_seconds: float

    def seconds(self, size: float) -> float:
        return self.latency + self.byte_seconds * size


def fit_line(points: Sequence[Point]) -> tuple[float, float]:
    """Latency and seconds per byte, neither below 0, with the least squared *relative* error.

    Relative, because an error of a millisecond matters in a message of ten milliseconds, not in one of a second.

    >>> latency, byte_seconds = fit_line([(1e3, 0.00201), (1e6, 0.012), (4e6, 0.042)])
    >>> round(latency, 4), round(byte_seconds * 1e6, 4)
    (0.002, 0.01)
    """
    weights = [1 / max(seconds, 1e-9) ** 2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    if spread <= 0:
        return max(0.0, mean_seconds), 0.0
    together = sum(
        w * (size - mean_size) * (seconds - mean_seconds) for w, (size, seconds) in zip(weights, points, strict=True)
    )
    slope = max(0.0, together / spread)
    latency = mean_seconds - slope * mean_size
    if latency < 0:  # the best line through 0
        above = sum(w * size * seconds for w, (size, seconds) in zip(weights, points, strict=True))
        below = sum(w * size * size for w, (size, _) in zip(weights, points, strict=True))
        return 0.0, max(0.0, above / below)
    return latency, slope


def fit_regimes(points: Sequence[Point]) -> tuple[Regime, ...]:
    """One range of sizes, or two or three where they describe the points much better."""
    ordered = sorted(points)
    best = _lines(ordered, ())
    for count in range(2, _MOST_REGIMES + 1):
        if _squares(best, ordered) <= len(ordered) * _GOOD**2:
            break
        sizes = sorted({size for size, _ in ordered})
        choices = [
            _lines(ordered, cuts)
            for cuts in itertools.combinations([math.sqrt(a * b) for a, b in itertools.pairwise(sizes)], count - 1)
            if _enough(sizes, cuts)
        ]
        if not choices:
            break
        next_best = min(choices, key=lambda regimes: _squares(regimes, ordered))
        if _squares(next_best, ordered) > _WORTH_A_REGIME * _squares(best, ordered):
            break
        best = next_best
    return best


def fit_error(regimes: Sequence[Regime], points: Sequence[Point]) -> float:
    """The median relative error over the points."""
    return statistics.median(abs(_predicted(regimes, size) / seconds - 1) for size, seconds in points)


def _enough(sizes: Sequence[float], cuts: Sequence[float]) -> bool:
    """Two sizes in every range: fewer do not determine a latency and a rate."""
    edges = [0.0, *cuts, math.inf]
    return all(sum(low < size <= high for size in sizes) >= 2 for low, high in itertools.pairwise(edges))


def _lines(ordered: Sequence[Point], cuts: Sequence[float]) -> tuple[Regime, ...]:
    edges = [0.0, *cuts, math.inf]
    return tuple(
        Regime(high, *fit_line([point for point in ordered if low < point[0] <= high]))
        for low, high in itertools.pairwise(edges)
    )


def _predicted(regimes: Sequence[Regime], size: float) -> float:
    return next(regime for regime in regimes if size <= regime.upto).seconds(size)


def _squares(regimes: Sequence[Regime], points: Sequence[Point]) -> float:
    return sum((_predicted(regimes, size) / max(seconds, 1e-9) - 1) ** 2 for size, seconds in points)
