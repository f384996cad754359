"""The critical path: what the time of the slowest worker consists of, and over which links it came.

Every worker carries along what made up its own time: of its own computing, or of the letter it waited for and the time
of whoever sent that. So nothing has to be kept of the past but who was waited for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .links import Floats, Whole

PHASES = ("compute", "coding", "queue", "transfer", "latency", "downlink", "other")
_FIRST_OF_WAY = PHASES.index("queue")
_KEPT = 1 << 26  # steps times workers for which it is kept who was waited for


class Path:
    """Follows all workers through their steps.

    >>> path = Path(2, steps=1)
    >>> path.computed(np.array([1.0, 3.0]), np.array([0, 1]))
    >>> path.post()
    >>> path.waited(np.array([0]), np.array([1]), np.array([[0.0, 0.5, 0.25, 0.0]]))  # worker 0, for worker 1
    >>> path.of(0)["compute"], path.of(0)["transfer"]
    (3.0, 0.5)
    """

    def __init__(self, workers: int, *, steps: int) -> None:
        self._made = np.zeros((workers, len(PHASES)))
        self._posted = self._made.copy()  # as it was when the letters of the last step were sent
        keeps = steps * workers <= _KEPT
        self._waited_for: list[Whole] | None = [] if keeps else None
        self._own = np.arange(workers)

    def begin(self) -> None:
        """A step begins: nobody waits yet."""
        if self._waited_for is not None:
            self._waited_for.append(self._own.astype(np.int32))

    def computed(self, seconds: Floats, workers: Whole) -> None:
        self._made[workers, 0] += seconds

    def coded(self, seconds: Floats | float, workers: Whole) -> None:
        self._made[workers, 1] += seconds

    def waited(self, workers: Whole, sources: Whole, phases: Floats) -> None:
        """These workers went on when letters of these sources had come, whose ways took so long."""
        self._made[workers] = self._posted[sources]
        self._made[workers, _FIRST_OF_WAY : _FIRST_OF_WAY + 4] += phases
        if self._waited_for:
            self._waited_for[-1][workers] = sources

    def idle(self, seconds: Floats, workers: Whole) -> None:
        """Deadlines that passed, time away, ends of collectives that others caused."""
        self._made[workers, -1] += seconds

    def post(self) -> None:
        """Letters are sent now."""
        self._posted = self._made.copy()

    def seconds(self) -> Floats:
        total: Floats = self._made.sum(axis=1)
        return total

    def of(self, worker: int) -> dict[str, float]:
        """Seconds by phase."""
        return dict(zip(PHASES, self._made[worker].tolist(), strict=True))

    def links(self, worker: int, *, most: int = 5) -> list[dict[str, Any]]:
        """Over which links the path of a worker came most often."""
        if self._waited_for is None:
            return []
        seen: Counter[tuple[int, int]] = Counter()
        for waited_for in reversed(self._waited_for):
            source = int(waited_for[worker])
            if source != worker:
                seen[source, worker] += 1
            worker = source
        return [{"from": a, "to": b, "steps": count} for (a, b), count in sorted(seen.items(), key=_often)[:most]]


def _often(item: tuple[tuple[int, int], int]) -> tuple[int, tuple[int, int]]:
    return -item[1], item[0]
