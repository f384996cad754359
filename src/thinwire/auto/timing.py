"""What a rank times in its steps, and what it can tell of its gradients and buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..predict.workload import Bucket, Profile
from ..reduce.buckets import Layout
from .candidates import DENSITIES

_SAMPLED = 1 << 14  # elements that are looked at


@dataclass
class Clock:
    """The step under way, in seconds of time.perf_counter."""

    forward: float = 0.0
    forward_end: float = 0.0
    arrivals: list[tuple[float, list[str]]] = field(default_factory=list)


@dataclass
class Sums:
    """What the steps since the last round took."""

    steps: int = 0
    seconds: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    canary: float = 0.0
    offered: float = 0.0
    left: float = 0.0
    curve: list[float] = field(default_factory=list)


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that are in at least one span.

    >>> union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def energy_curve(flat: torch.Tensor | None) -> list[float]:
    """How much of its energy the largest elements hold, at each density; from a sample.

    >>> [round(share, 2) for share in energy_curve(torch.tensor([3.0, 1.0, -1.0, 1.0, 2.0]))]
    [0.56, 0.56, 0.56, 0.56, 0.56]
    """
    if flat is None or flat.numel() < len(DENSITIES):
        return []
    stride = max(1, flat.numel() // _SAMPLED)
    squares = flat.detach()[::stride].float().square().sort(descending=True).values.cumsum(0)
    total = float(squares[-1])
    if not 0 < total < math.inf:
        return []
    places = [max(1, round(density * squares.numel())) - 1 for density in DENSITIES]
    return [float(squares[place]) / total for place in places]


def guess(layout: Layout, processors: float) -> Profile:
    """The buckets of a layout; ready one after the other until a step was timed."""
    total = max(1, sum(parcel.numel + parcel.exact_numel for parcel in layout.parcels))
    done, buckets = 0, []
    for parcel in layout.parcels:
        done += parcel.numel + parcel.exact_numel
        buckets.append(Bucket.of(parcel, done / total))
    return Profile("training", 0.01, 0.02, 0.001, tuple(buckets), processors)
