"""Step time against progress per step: the Pareto front, and the point with the least time to quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A choice with its predicted step time and its progress per step, relative to a dense step.

    >>> Point("sparse", 0.2, 0.5).cost
    0.4
    """

    name: str
    seconds: float
    progress_per_step: float

    @property
    def cost(self) -> float:
        """Seconds for the progress of one dense step."""
        return self.seconds / self.progress_per_step if self.progress_per_step > 0 else float("inf")


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front, fastest first: every next point is slower and makes more progress.

    >>> [one.name for one in front([Point("a", 1, 0.5), Point("b", 2, 0.4), Point("c", 3, 1.0)])]
    ['a', 'c']
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one.seconds, -one.progress_per_step)):
        if not kept or point.progress_per_step > kept[-1].progress_per_step:
            kept.append(point)
    return kept


def soonest(points: Sequence[Point], *, floor: float = 0.0, quality: bool = True) -> Point:
    """The point with the least cost whose progress is at least `floor`; with `quality=False` the fastest one.

    The knee of a front on normalised axes is another rule. That knee does not move when the network becomes ten times
    slower, because normalisation cancels the change. Time divided by progress does react.

    >>> soonest([Point("a", 1, 0.5), Point("c", 3, 1.0)]).name
    'a'
    """
    good = [one for one in points if one.progress_per_step >= floor]
    if not good:
        return max(points, key=lambda one: one.progress_per_step)
    return min(good, key=lambda one: (one.cost if quality else one.seconds, -one.progress_per_step))
