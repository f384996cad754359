"""Estimates the link from training traffic: latency and bandwidth by recursive least squares, a factor per family.

The formulas of `predict/collectives.py` turn latency and bandwidth into the cost of a collective. The real time of a
candidate differs from the formula by a factor. Only one candidate runs at a time, so its factor cannot be separated
from a slower link while it runs. The factor is therefore measured when the candidate starts, and by canaries; every
later deviation is attributed to the link.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..exchange.script import Collective
from ..predict.collectives import Cost, hops

FACTORS = (0.25, 4.0)  # range of a factor
_FORGET = 0.85  # the weight of an observation halves after four more
_NOISE, _LATENCY_NOISE = 0.1, 0.3  # relative error of an exchange time, and of a single small message
_UNSURE, _SETTLED = 1.0, 0.2  # relative error of an unknown value, and its upper limit later
_JUMP, _LATENCY_JUMP = 0.3, 1.0  # relative deviation that counts as a jump if two in a row have the same sign
_CLEAR = 3.0  # a jump is at least this many times the usual error
_MOST = 0.15  # relative change per observation without a jump
_FAR = (0.25, 1e4)  # range of a jump: a value with a small share can shrink unseen
_FAR_DOWN = 0.02  # lower limit of a jump for a value with a large share
_LEAST_LATENCY, _LEAST_BYTE = 1e-6, 8 / 4e11
_TELLS, _LEAST_SHARE = 0.05, 1e-3  # share of the time below which bandwidth is not updated, and the least share used
_GAIN = 0.6  # of a factor towards the measured one


@dataclass(frozen=True)
class LinkEstimate:
    """Latency, bandwidth and factors that predictions use.

    >>> LinkEstimate(latency=0.001, byte_seconds=8e-8).cost("all_reduce", 1e6, ranks=2).seconds
    0.082
    """

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


class _Tracked:
    """One value by recursive least squares on relative errors; two large errors in a row are a jump."""

    def __init__(self, value: float, least: float, jump: float) -> None:
        self.value, self._least, self._jump = max(value, least), least, jump
        self._variance = _UNSURE**2
        self._outliers = 0  # in a row, negative if they were too low
        self._errors: deque[float] = deque(maxlen=20)

    def update(self, error: float, *, noise: float, scale: float = 1.0, confirmed: bool | None = None) -> bool:
        """Take an observation with a relative `error`, known to within `noise`. Return whether the value jumped.

        `scale` is the share of the value in what was observed. A large error that is `confirmed` is a jump without a
        second one; if it is False, a large error is ignored.
        """
        seen = error * scale
        jump = max(self._jump, _CLEAR * spread([1.0 + one for one in self._errors]))  # a busy machine is noisy
        self._errors.append(max(seen, -0.9))
        side = (seen > jump) - (seen < -jump / (1 + jump))
        if side and confirmed is False:
            return False
        self._outliers = self._outliers + side if side * self._outliers > 0 else side
        jumps = abs(self._outliers) >= 2 or (side != 0 and confirmed is True)
        if jumps:
            error = statistics.fmean(list(self._errors)[-1 if confirmed else -2 :]) / scale
            self._outliers, self._variance = 0, _UNSURE**2
            self._errors.clear()
        elif side or scale < _TELLS:
            return False  # a single outlier may be a pause of the machine: wait for the next
        variance = self._variance / _FORGET
        gain = variance / (variance + noise**2)
        far = (_FAR_DOWN, _FAR[1]) if scale > 0.5 else _FAR
        low, high = far if jumps else (1 - _MOST, 1 + _MOST)
        self.value = max(self._least, self.value * min(max(1.0 + gain * error, low), high))
        self._variance = min((1.0 - gain) * variance, _SETTLED**2)
        return jumps


class LinkEstimator:
    """Takes observations, gives a `LinkEstimate`.

    >>> estimator = LinkEstimator(latency=0.001, byte_seconds=8e-8)
    >>> for _ in range(30):
    ...     expected = estimator.byte_seconds * 1.25e7 / 0.99
    ...     _ = estimator.observe_exchange(2.0, expected=expected, latency_share=0.01)
    >>> round(estimator.mbit)  # 12.5 MB in 2 s
    51
    """

    def __init__(self, *, latency: float, byte_seconds: float) -> None:
        self._latency = _Tracked(latency, _LEAST_LATENCY, _LATENCY_JUMP)
        self._byte = _Tracked(byte_seconds, _LEAST_BYTE, _JUMP)
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
        """The bandwidth in Mbit/s."""
        return 8e-6 / self.byte_seconds

    def link(self, *names: str) -> LinkEstimate:
        """The link with the factor of the first name that has one. Names: a candidate, then its family."""
        factor = next((self.factors[name] for name in names if name in self.factors), 1.0)
        return LinkEstimate(self.latency, self.byte_seconds, self.collectives, factor)

    # --------------------------------------------------------------------------------------------- observations

    def observe_exchange(
        self, seconds: float, *, expected: float, latency_share: float, steady: bool | None = None
    ) -> bool:
        """Messages took `seconds` instead of `expected`. Return whether the link changed.

        Messages of one size cannot separate latency from bandwidth. Small messages give the latency, so the remaining
        deviation is bandwidth. `steady`: whether several steps agree, which rules out a pause of the machine.
        """
        share = 1.0 - latency_share
        if not (seconds > 0 and expected > 0):
            return False
        share = max(share, _LEAST_SHARE)  # a share that is small now may dominate after a jump
        error = (seconds / expected - 1.0) / share
        return self._byte.update(error, noise=_NOISE / share, scale=share, confirmed=steady)

    def observe_latency(self, seconds: float) -> bool:
        """A message of a few bytes took `seconds`. Return whether the latency jumped."""
        return seconds > 0 and self._latency.update(seconds / self.latency - 1.0, noise=_LATENCY_NOISE)

    def observe_factor(self, *names: str, seconds: float, expected: float, gain: float = _GAIN) -> None:
        """A candidate took `seconds` on a known link. All `names` (candidate, family) get the factor."""
        if seconds > 0 and expected > 0:
            low, high = FACTORS
            factor = min(max(self.link(*names).factor * (seconds / expected) ** gain, low), high)
            self.factors.update(dict.fromkeys(names, factor))

    # ---------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "latency": self.latency,
            "byte_seconds": self.byte_seconds,
            "collectives": dict(self.collectives),
            "factors": dict(self.factors),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._latency.value, self._byte.value = float(state["latency"]), float(state["byte_seconds"])
        self.collectives, self.factors = dict(state["collectives"]), dict(state["factors"])


def spread(values: list[float]) -> float:
    """A robust standard deviation over the mean; 0 for fewer than three values.

    >>> spread([1.0, 1.0, 1.0, 9.0])
    0.0
    """
    if len(values) < 3:
        return 0.0
    middle = sorted(values)[len(values) // 2]
    deviations = sorted(abs(value - middle) for value in values)
    return 1.48 * deviations[len(deviations) // 2] / middle if middle > 0 and math.isfinite(middle) else 0.0
