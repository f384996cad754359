"""The critical path of simulated workers: the phases of the time of the slowest one, and the links on its path.

Every worker has the phases of its own time: of its computing, or of the message it waited for and of the time of the
sender. So only the worker that was waited for is stored for each step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .links import Floats, Whole

PHASES = ("compute", "coding", "queue", "transfer", "latency", "downlink", "other")
_FIRST_OF_MESSAGE = PHASES.index("queue")
_KEPT = 1 << 26  # steps times workers up to which the worker that was waited for is stored


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
        self._posted = self._made.copy()  # when the messages of the last step were sent
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
        """These workers continued when messages of these sources arrived, whose phases took this long."""
        self._made[workers] = self._posted[sources]
        self._made[workers, _FIRST_OF_MESSAGE : _FIRST_OF_MESSAGE + 4] += phases
        if self._waited_for:
            self._waited_for[-1][workers] = sources

    def idle(self, seconds: Floats, workers: Whole) -> None:
        """Other waiting: deadlines, absences, collectives."""
        self._made[workers, -1] += seconds

    def post(self) -> None:
        """Messages are sent now."""
        self._posted = self._made.copy()

    def seconds(self) -> Floats:
        total: Floats = self._made.sum(axis=1)
        return total

    def of(self, worker: int) -> dict[str, float]:
        """Seconds by phase."""
        return dict(zip(PHASES, self._made[worker].tolist(), strict=True))

    def links(self, worker: int, *, most: int = 5) -> list[dict[str, Any]]:
        """The links that are most often on the path of a worker."""
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
