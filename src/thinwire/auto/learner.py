"""The network, learnt from what training sends: two numbers by recursive least squares, corrected for each family.

Latency and time a byte stand for the line; the formulas of `plan/network.py` make them the cost of a collective. What
a candidate really takes differs from the formulas by a factor of its own. Only one runs at a time, so a factor cannot
be told from a slower line while it runs: it is learnt when the candidate is entered, and from single buckets sent that
way; all later news is about the line.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..exchange.script import Collective
from ..predict.network import Cost, hops

_FORGET = 0.85  # an observation counts half after four
_NOISE, _TRIP_NOISE = 0.1, 0.3  # relative, of an observation of messages, and of a single small one
_UNSURE, _SETTLED = 1.0, 0.2  # relative error of a number of which nothing is known, and at most later
_JUMP, _TRIP_JUMP = 0.3, 1.0  # relative: two in a row on the same side, and the line has changed
_CLEAR = 3.0  # times the usual error, at least
_MOST = 0.15  # relative change at a time, while nothing jumps
_FAR = (0.25, 1e4)  # how far it jumps at most: what was small becomes smaller unseen
_FAR_DOWN = 0.02  # and at most where it was most of what was seen
_LEAST_LATENCY, _LEAST_BYTE = 1e-6, 8 / 4e11
_TELLS, _LEAST_SHARE = 0.05, 1e-3  # of the time: below the first, a rate is not followed; of the second it is at least
_FACTORS = (0.25, 4.0)
_PULL = 0.6  # of a factor towards what was just seen


@dataclass(frozen=True)
class Learnt:
    """A line with factors: what predictions are priced on."""

    latency: float
    byte_seconds: float
    collectives: Mapping[str, float] = field(default_factory=dict)
    factor: float = 1.0

    def cost(self, collective: Collective, size: float, *, ranks: int) -> Cost:
        if ranks == 1 or size <= 0:
            return Cost(0.0, 0.0)
        trips, times = hops(collective, size, ranks)
        factor = self.factor * self.collectives.get(collective, 1.0)
        return Cost(factor * trips * self.latency, factor * times * size * self.byte_seconds)


class _Number:
    """One number by recursive least squares on relative errors, with forgetting; it jumps when two in a row say so."""

    def __init__(self, value: float, least: float, jump: float) -> None:
        self.value, self._least, self._jump = max(value, least), least, jump
        self._variance = _UNSURE**2
        self._surprise = 0  # how many observations in a row were far off, with the sign of their side
        self._errors: deque[float] = deque(maxlen=20)

    def take(self, error: float, *, noise: float, scale: float = 1.0, sure: bool | None = None) -> bool:
        """Off by `error` relative to it, known to within `noise`. Whether it has jumped.

        `scale` is how much of what was observed it is: a jump is one of the observation. One that is `sure` needs no
        other to confirm it, one that is not even if it is far off says nothing.
        """
        seen = error * scale
        jump = max(self._jump, _CLEAR * spread([1.0 + one for one in self._errors]))  # on a busy machine all is noisy
        self._errors.append(max(seen, -0.9))
        side = (seen > jump) - (seen < -jump / (1 + jump))
        if side and sure is False:
            return False
        self._surprise = self._surprise + side if side * self._surprise > 0 else side
        jumps = abs(self._surprise) >= 2 or (side != 0 and sure is True)
        if jumps:
            error = statistics.fmean(list(self._errors)[-1 if sure else -2 :]) / scale
            self._surprise, self._variance = 0, _UNSURE**2
            self._errors.clear()
        elif side or scale < _TELLS:
            return False  # one that is far off may be a pause of the machine: wait for the next
        variance = self._variance / _FORGET
        gain = variance / (variance + noise**2)
        far = (_FAR_DOWN, _FAR[1]) if scale > 0.5 else _FAR
        low, high = far if jumps else (1 - _MOST, 1 + _MOST)
        self.value = max(self._least, self.value * min(max(1.0 + gain * error, low), high))
        self._variance = min((1.0 - gain) * variance, _SETTLED**2)
        return jumps


class Learner:
    """Takes observations, gives `Learnt`.

    >>> learner = Learner(latency=0.001, byte_seconds=8e-8)
    >>> for _ in range(30):
    ...     _ = learner.take_line(seconds=2.0, latency_share=0.01, expected=learner.byte_seconds * 1.25e7 / 0.99)
    >>> round(learner.mbit)  # 12.5 MB in 2 s
    51
    """

    def __init__(self, *, latency: float, byte_seconds: float) -> None:
        self._latency = _Number(latency, _LEAST_LATENCY, _TRIP_JUMP)
        self._byte = _Number(byte_seconds, _LEAST_BYTE, _JUMP)
        self.collectives: dict[str, float] = {}
        self.factors: dict[str, float] = {}  # by candidate, and by family

    @property
    def latency(self) -> float:
        return self._latency.value

    @property
    def byte_seconds(self) -> float:
        return self._byte.value

    @property
    def mbit(self) -> float:
        return 8e-6 / self.byte_seconds

    def network(self, *names: str) -> Learnt:
        """The line for a candidate and its family: with the factor of the first that has one."""
        factor = next((self.factors[name] for name in names if name in self.factors), 1.0)
        return Learnt(self.latency, self.byte_seconds, self.collectives, factor)

    # --------------------------------------------------------------------------------------------- observations

    def take_line(self, *, seconds: float, latency_share: float, expected: float, steady: bool | None = None) -> bool:
        """Messages took `seconds` where `expected` were, of which so much is latency. Whether the line has changed.

        Messages of one size cannot tell two numbers. What the small ones say of the latency is taken as it is, and the
        rest is the rate. `steady`: whether several steps agree on that, so that it is no pause of the machine.
        """
        share = 1.0 - latency_share
        if not (seconds > 0 and expected > 0):
            return False
        share = max(share, _LEAST_SHARE)  # what is hardly seen now may be all there is when it grows
        error = (seconds / expected - 1.0) / share
        return self._byte.take(error, noise=_NOISE / share, scale=share, sure=steady)

    def take_trip(self, seconds: float) -> bool:
        """A message so small that it is all latency."""
        return seconds > 0 and self._latency.take(seconds / self.latency - 1.0, noise=_TRIP_NOISE)

    def take_factor(self, *names: str, seconds: float, expected: float, pull: float = _PULL) -> None:
        """A candidate of a family was seen at its work, beside a line that is known; both have the factor now."""
        if seconds > 0 and expected > 0:
            low, high = _FACTORS
            factor = min(max(self.network(*names).factor * (seconds / expected) ** pull, low), high)
            self.factors.update(dict.fromkeys(names, factor))

    # -------------------------------------------------------------------------------------------------- keeping

    def state(self) -> dict[str, Any]:
        return {
            "latency": self.latency,
            "byte_seconds": self.byte_seconds,
            "collectives": dict(self.collectives),
            "factors": dict(self.factors),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._latency.value, self._byte.value = float(state["latency"]), float(state["byte_seconds"])
        self.collectives, self.factors = dict(state["collectives"]), dict(state["factors"])


@dataclass(frozen=True)
class Greeting:
    """What a few messages took when the ranks first met: by collective its size and seconds."""

    ranks: int
    trip: float
    seconds: Mapping[Collective, tuple[int, float]]

    def learner(self) -> Learner:
        """A first idea of the line, and of how each collective differs from its formula."""
        size, taken = self.seconds["all_reduce"]
        trips, times = hops("all_reduce", size, self.ranks)
        small_trips, _ = hops("all_gather", 1024, self.ranks)
        latency = self.trip / max(1.0, small_trips)
        transfer = max(taken - trips * latency, 0.2 * taken)
        learner = Learner(latency=min(latency, taken / trips), byte_seconds=transfer / (times * size))
        line = learner.network("")
        for collective, (amount, seconds) in self.seconds.items():
            book = line.cost(collective, amount, ranks=self.ranks).seconds
            low, high = _FACTORS
            learner.collectives[collective] = min(max(seconds / book, low), high)
        return learner


def spread(values: list[float]) -> float:
    """The standard deviation over the mean, robust against single outliers; 0 for fewer than three.

    >>> spread([1.0, 1.0, 1.0, 9.0])
    0.0
    """
    if len(values) < 3:
        return 0.0
    middle = sorted(values)[len(values) // 2]
    deviations = sorted(abs(value - middle) for value in values)
    return 1.48 * deviations[len(deviations) // 2] / middle if middle > 0 and math.isfinite(middle) else 0.0
