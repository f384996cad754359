"""Times forward, backward and exchange of every step on one rank, and sums them up from one round to the next."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .alarm import steady
from .candidates import DENSITIES
from .reports import Measurement

_GAPS = 9  # pauses between steps whose median is `rest`: a pause for evaluation is not part of training
_WARM = 2  # steps in which DDP rebuilds its buckets
_WINDOW = 3  # steps whose median is the exchange time


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one span.

    >>> union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass
class _Clock:
    """Times of the step under way, from time.perf_counter."""

    forward: float = 0.0
    forward_end: float = 0.0
    arrivals: list[tuple[float, Sequence[str]]] = field(default_factory=list)

    def ready(self, buckets: Sequence[Sequence[str]]) -> tuple[float, ...]:
        """When each bucket was ready, as a share of backward."""
        begin, last = self.forward_end, self.arrivals[-1][0]
        arrived = {name: at for at, names in self.arrivals for name in names}
        length = max(last - begin, 1e-9)
        ends = [max((arrived.get(name, last) for name in bucket), default=last) for bucket in buckets]
        return tuple(min(1.0, max(0.0, (at - begin) / length)) for at in ends)


@dataclass
class Totals:
    """Sums over the steps since the last round."""

    steps: int = 0
    seconds: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    canary_seconds: float = 0.0
    canary: tuple[int, int] | None = None
    offered: float = 0.0
    left: float = 0.0
    curve: list[float] = field(default_factory=list)


class StepTimer:
    """The stopwatch of one rank.

    >>> timer = StepTimer()
    >>> for _ in range(3):  # two of them are warm-up
    ...     timer.forward_begins(); timer.forward_ends(); timer.arrived(["weight"])
    ...     timer.end_step(time.perf_counter(), [(0.0, 0.5)], canary=None, buckets=[["weight"]])
    >>> timer.measurement(timer.take()).exchange, timer.ready
    (0.5, (1.0,))
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.ready: tuple[float, ...] = ()  # by bucket, in the last timed step
        self._clock = _Clock()
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._exchanges: deque[float] = deque(maxlen=_WINDOW)
        self._last_end: float | None = None
        self._sees_forward = False
        self._steps = 0

    def forward_begins(self) -> None:
        self._sees_forward = True
        self._clock.forward, self._clock.forward_end = time.perf_counter(), 0.0

    def forward_ends(self) -> None:
        self._clock.forward_end = time.perf_counter()

    def arrived(self, names: Sequence[str]) -> None:
        """Gradients with these names are ready.

        A loop without a forward hook counts everything before its first gradient as forward.
        """
        now, clock = time.perf_counter(), self._clock
        if not self._sees_forward and not clock.arrivals and self._last_end is not None:
            clock.forward, clock.forward_end = self._last_end, now
        clock.arrivals.append((now, names))

    @property
    def forward(self) -> float:
        """Seconds of the last forward pass; 0 if it was not seen."""
        return max(0.0, self._clock.forward_end - self._clock.forward)

    def end_step(
        self,
        end: float,
        spans: Sequence[tuple[float, float]],
        *,
        canary: tuple[int, int] | None,
        buckets: Sequence[Sequence[str]] | None,
    ) -> None:
        """The step ended at `end`. `spans`: its collectives. `buckets`: names of tensors, to update `ready`."""
        clock, totals = self._clock, self.totals
        self._steps += 1
        if self._steps > _WARM and clock.arrivals and 0 < clock.forward <= clock.forward_end:
            if self._last_end is not None and clock.forward > self._last_end:
                self._gaps.append(clock.forward - self._last_end)
            if canary is not None:  # not comparable with other steps
                totals.canary_seconds, totals.canary = union(spans), canary
            else:
                totals.steps += 1
                totals.seconds += end - clock.forward
                totals.forward += clock.forward_end - clock.forward
                totals.backward += clock.arrivals[-1][0] - clock.forward_end
                self._exchanges.append(union(spans))
            if buckets is not None:
                self.ready = clock.ready(buckets)
        self._last_end, self._clock = end, _Clock()

    def take(self) -> Totals:
        """The totals since the last call."""
        totals, self.totals = self.totals, Totals()
        return totals

    def measurement(self, totals: Totals) -> Measurement:
        """The means of the totals, with the exchange times of the last steps."""
        count, latest = max(1, totals.steps), list(self._exchanges) if totals.steps else []
        return Measurement(
            steps=totals.steps,
            seconds=totals.seconds / count,
            forward=totals.forward / count,
            backward=totals.backward / count,
            rest=statistics.median(self._gaps) if self._gaps else 0.0,
            canary=totals.canary_seconds,
            offered=totals.offered,
            left=totals.left,
            steady=steady(latest, enough=_WINDOW),
            exchange=statistics.median_low(latest) if latest else 0.0,
            last_exchange=latest[-1] if latest else 0.0,
            curve=tuple(totals.curve or [0.0] * len(DENSITIES)),
        )

    def recipe_changed(self) -> None:
        """Forget exchange times: those of another recipe are not comparable."""
        self._exchanges.clear()

    def restart(self) -> None:
        """Forget the steps since the last round, as after loading a checkpoint."""
        self.totals, self._clock, self._last_end = Totals(), _Clock(), None
        self._exchanges.clear()
