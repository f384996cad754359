"""Two objectives, a few dozen points: the front that nothing beats in both, and the point that is reached soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A choice with its predicted step, in seconds, and its worth, as a share of a dense step's progress."""

    name: str
    seconds: float
    worth: float

    @property
    def cost(self) -> float:
        """Seconds for the progress of one dense step."""
        return self.seconds / self.worth if self.worth > 0 else float("inf")


def front(points: Sequence[Point]) -> list[Point]:
    """What no other point beats: quickest first, each next one slower and worth more.

    >>> [one.name for one in front([Point("a", 1, 0.5), Point("b", 2, 0.4), Point("c", 3, 1.0)])]
    ['a', 'c']
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one.seconds, -one.worth)):
        if not kept or point.worth > kept[-1].worth:
            kept.append(point)
    return kept


def soonest(points: Sequence[Point], *, floor: float = 0.0, quality: bool = True) -> Point:
    """The point of the least cost among those worth at least `floor`; with `quality=False`, the quickest of them.

    A front on normalised axes has a knee too, but that knee stays where it is when the network becomes ten times
    slower, because every change of the scale cancels. This quotient does not.

    >>> soonest([Point("a", 1, 0.5), Point("c", 3, 1.0)]).name
    'a'
    """
    good = [one for one in points if one.worth >= floor]
    if not good:
        return max(points, key=lambda one: one.worth)
    return min(good, key=lambda one: (one.cost if quality else one.seconds, -one.worth))
