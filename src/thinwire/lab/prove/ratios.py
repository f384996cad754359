"""Laps of a paired benchmark become medians, and ratios to plain DDP with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and ends.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    {'median': 3.0, 'low': 2.0, 'high': 4.0, 'least': 1.0, 'most': 5.0}
    """
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    names = ("median", "low", "high", "least", "most")
    found = (statistics.median(values), quartiles[0], quartiles[2], min(values), max(values))
    return {name: round(value, 4) for name, value in zip(names, found, strict=True)}


def rows(laps: Mapping[str, Mapping[int, float]], *, baseline: str = "ddp") -> list[dict[str, Any]]:
    """A row for each contender: milliseconds a step, and how many times faster than plain DDP.

    A ratio is taken within a round, where both met the same machine; the median is that of the rounds' ratios.

    >>> found = rows({"ddp": {0: 10.0, 1: 20.0}, "bf16": {0: 5.0, 1: 10.0}})
    >>> found[1]["contender"], found[1]["times_ddp"]["median"]
    ('bf16', 2.0)
    """
    plain = laps[baseline]
    return [
        {
            "contender": name,
            "rounds": len(own),
            "step_ms": spread(list(own.values())),
            "times_ddp": spread([plain[number] / value for number, value in own.items() if number in plain]),
        }
        for name, own in laps.items()
    ]
