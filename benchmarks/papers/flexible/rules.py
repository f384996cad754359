"""Two rules that choose a ratio from the same numbers: the published one, on normalised axes, and time over gain."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thinwire.auto.candidates import DENSITIES, energy_at
from thinwire.auto.pareto import Point, front, soonest
from thinwire.predict import textbook
from thinwire.predict.collectives import Link

from .published import SCHEDULES, SIZES, STEP_MS, WORKERS, Phase

WEIGHTS = (0.6, 0.4)  # of time and of 1 / gain, as published
_GRID = 61
RATIOS = tuple(0.1 * (0.001 / 0.1) ** (number / (_GRID - 1)) for number in range(_GRID))
_FORMULAS = {
    "gather": textbook.gathered_top_k,
    "ring": textbook.shared_top_k_ring,
    "tree": textbook.shared_top_k_tree,
}


class Choice(NamedTuple):
    """A ratio, the way it travels, and the seconds of a step by the formulas."""

    ratio: float
    way: str
    seconds: float


def link_of(phase: Phase) -> Link:
    return Link.of(milliseconds=phase.milliseconds, gigabits=phase.gigabits)


def step_of(ratio: float, phase: Phase, *, model: str = "ResNet50") -> Choice:
    """The step of a ratio by the cheapest of the three ways, nothing overlapped, as published.

    >>> step_of(0.1, Phase(1, 1, 1.0)).way, step_of(0.001, Phase(50, 25, 1.0)).way
    ('ring', 'gather')
    """
    link, dense = link_of(phase), 4 * SIZES[model]
    way = textbook.top_k_winner(link, dense, ratio, WORKERS)
    return Choice(ratio, way, STEP_MS / 1e3 + _FORMULAS[way](link, dense, ratio, WORKERS))


def dense_step(phase: Phase, *, model: str = "ResNet50") -> float:
    """The better of ring and tree."""
    link, dense = link_of(phase), 4 * SIZES[model]
    ways = (textbook.ring_all_reduce, textbook.tree_all_reduce)
    return STEP_MS / 1e3 + min(way(link, dense, WORKERS) for way in ways)


def _points(phase: Phase, curve: Sequence[float], model: str) -> dict[str, tuple[Choice, Point]]:
    found = {}
    for number, ratio in enumerate(RATIOS):
        choice = step_of(ratio, phase, model=model)
        found[str(number)] = (choice, Point(str(number), choice.seconds, energy_at(ratio, curve)))
    return found


def by_knee(phase: Phase, curve: Sequence[float], *, model: str = "ResNet50") -> Choice:
    """The published rule: the front of time and 1 / gain, each from 0 to 1, and the least of the larger of both.

    `curve`: the gain at each of `DENSITIES`. Every ratio of a fine grid is looked at, so a solver could find no better.
    """
    points = _points(phase, curve, model)
    kept = front([point for _, point in points.values()])
    times, losses = [one.seconds for one in kept], [1 / one.progress_per_step for one in kept]

    def height(one: Point) -> float:
        return max(
            WEIGHTS[0] * _normal(one.seconds, times),
            WEIGHTS[1] * _normal(1 / one.progress_per_step, losses),
        )

    return points[min(kept, key=height).name][0]


def by_quotient(phase: Phase, curve: Sequence[float], *, model: str = "ResNet50") -> Choice:
    """The rule of `auto`: the least time for the same progress, from the same numbers."""
    points = _points(phase, curve, model)
    return points[soonest([point for _, point in points.values()]).name][0]


RULES: dict[str, Callable[..., Choice]] = {"published": by_knee, "quotient": by_quotient}


def _normal(value: float, values: Sequence[float]) -> float:
    span = max(values) - min(values)
    return (value - min(values)) / span if span else 0.0


def chosen_ratios(curves: Sequence[Sequence[float]]) -> dict[str, list[dict[str, Any]]]:
    """What both rules choose for every model, every network of both schedules and every gain curve."""
    networks = sorted({(phase.milliseconds, phase.gigabits) for phases in SCHEDULES.values() for phase in phases})
    return {
        name: [
            {
                "model": model,
                "curve": number,
                "ratios": [_ratio(rule, Phase(*one, 1.0), curve, model) for one in networks],
            }
            for model in SIZES
            for number, curve in enumerate(curves)
        ]
        for name, rule in RULES.items()
    }


def _ratio(rule: Callable[..., Choice], phase: Phase, curve: Sequence[float], model: str) -> float:
    ratio: float = rule(phase, curve, model=model).ratio
    return round(ratio, 6)


# --------------------------------------------------------------------------------------------------- brute force


def brute_force_front(points: Sequence[Point]) -> set[str]:
    """By definition: what no other point beats in one objective without losing in the other. Equals count once."""
    kept: dict[tuple[float, float], str] = {}
    for one in points:
        beaten = any(
            other.seconds <= one.seconds
            and other.progress_per_step >= one.progress_per_step
            and (other.seconds < one.seconds or other.progress_per_step > one.progress_per_step)
            for other in points
        )
        if not beaten:
            kept.setdefault((one.seconds, one.progress_per_step), one.name)
    return set(kept.values())


def against_brute_force(sets: int, *, size: int, seed: int = 0) -> dict[str, Any]:
    """Random sets, with ties: is the front that of the definition and the choice the cheapest, and how long is it?"""
    draw = random.Random(seed)
    fronts = choices = on_front = 0
    taken = []
    for _ in range(sets):
        points = [
            Point(str(number), draw.choice((draw.random(), draw.randint(1, 5) / 5)) + 1e-3, draw.randint(1, 40) / 40)
            for number in range(size)
        ]
        begin = time.perf_counter()
        kept, best = front(points), soonest(points)
        taken.append(time.perf_counter() - begin)
        fronts += {(one.seconds, one.progress_per_step) for one in kept} == {
            (one.seconds, one.progress_per_step) for one in points if one.name in brute_force_front(points)
        }
        choices += math.isclose(best.cost, min(one.seconds / one.progress_per_step for one in points))
        on_front += any(math.isclose(best.cost, one.cost) for one in kept)
    taken.sort()
    return {
        "sets": sets,
        "size": size,
        "fronts": fronts,
        "choices": choices,
        "on_front": on_front,
        "microseconds": 1e6 * taken[len(taken) // 2],
    }


def curve_of(magnitudes_squared: Any) -> list[float]:
    """The share of the energy that exact Top-k keeps at each of `DENSITIES`; from u squared, as a tensor."""
    descending, _ = magnitudes_squared.sort(descending=True)
    sums = descending.double().cumsum(0)
    return [float(sums[max(1, round(density * len(sums))) - 1] / sums[-1]) for density in DENSITIES]
