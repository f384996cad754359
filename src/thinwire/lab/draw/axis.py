"""An axis of a chart: its range, its ticks, and the place of every value, linear or logarithmic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from .numbers import brief

_FEW, _SEVERAL = 10, 13
_ENOUGH = 3  # ticks; with fewer whole powers of ten, values between them are marked too


def usable(value: float | None, *, log: bool = False) -> bool:
    """Whether the value has a place on an axis.

    >>> usable(1.0), usable(None), usable(float("nan")), usable(0.0, log=True)
    (True, False, False, False)
    """
    return value is not None and math.isfinite(value) and (value > 0 or not log)


@dataclass(frozen=True)
class Axis:
    """From values to places between `begin` and `end`, in pixels.

    >>> axis = Axis.over([3.0, 97.0], begin=0, end=200)
    >>> axis.low, axis.high, axis(50.0), [said for _, said in axis.ticks()]
    (0.0, 100.0, 100.0, ['0', '20', '40', '60', '80', '100'])
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def over(
        cls, values: Iterable[float | None], *, begin: float, end: float, log: bool = False, zero: bool = False
    ) -> Axis:
        """An axis that holds all values. It starts at 0 with `zero`, or if the values reach down to 40 % of the top."""
        found = _usable(values, log)
        low, high = _log_range(found) if log else _range(found, zero=zero)
        return cls(low, high, begin, end, log)

    @classmethod
    def between(cls, values: Iterable[float | None], *, begin: float, end: float, log: bool = False) -> Axis:
        """An axis without margins: it begins at the least value and ends at the largest."""
        found = _usable(values, log)
        if found and min(found) < max(found):
            return cls(min(found), max(found), begin, end, log)
        return cls.over(found, begin=begin, end=end, log=log)

    def __call__(self, value: float) -> float:
        """The place of a value; a value outside the range is put on its edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, values: Iterable[float] = ()) -> list[tuple[float, str]]:
        """Values to mark, each with its label: the given ones, if they are few and far enough apart.

        On a linear axis the given values must be whole numbers, such as phases.

        >>> [said for _, said in Axis(0.001, 0.5, 0, 1, log=True).ticks()]
        ['0.001', '0.01', '0.1']
        """
        given = sorted(set(_usable(values, self.log)))
        if self.log:
            return self._log_ticks(given)
        whole = 1 < len(given) <= _SEVERAL and all(value == round(value) for value in given)
        gaps = [above - below for below, above in itertools.pairwise(given)]
        if whole and min(gaps) >= (given[-1] - given[0]) / _SEVERAL:
            return [(value, brief(value)) for value in given]
        step = _step(self.high - self.low)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        decimals += round(step, decimals) != round(step, decimals + 1)  # steps of 2.5
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        places = [place * step for place in range(first, last + 1)]
        if max(abs(self.low), abs(self.high)) >= 1e6 or decimals > 4:
            return [(value, brief(value)) for value in places]
        return [(value, f"{value:,.{decimals}f}".replace("-", "−")) for value in places]

    def _log_ticks(self, given: list[float]) -> list[tuple[float, str]]:
        if 1 < len(given) <= _FEW:
            apart = (math.log(self.high) - math.log(self.low)) / _FEW
            kept: list[float] = []
            for value in given:
                if not kept or math.log(value) - math.log(kept[-1]) > 0.5 * apart:
                    kept.append(value)
            if len(kept) > 1:
                return [(value, brief(value)) for value in kept]
        return [(value, brief(value)) for value in _log_places(self.low, self.high)]


def _usable(values: Iterable[float | None], log: bool) -> list[float]:
    return [value for value in values if value is not None and usable(value, log=log)]


def _range(found: list[float], *, zero: bool) -> tuple[float, float]:
    if not found:
        return 0.0, 1.0
    low, high = min(found), max(found)
    if zero or 0 <= low <= 0.4 * high:
        low = min(low, 0.0)
    if zero or 0 >= high >= 0.4 * low:
        high = max(high, 0.0)
    large = max(abs(low), abs(high))
    if large < 1e-290:  # too close to 0 to compute a step
        return (0.0, 1.0) if low >= 0 else (-1.0, 1.0)
    if high - low < 1e-12 * large:  # equal values: some room on both sides
        low, high = low - large / 2, high + large / 2
    step = _step(high - low)
    return min(low, math.floor(low / step + 1e-9) * step), max(high, math.ceil(high / step - 1e-9) * step)


def _log_range(found: list[float]) -> tuple[float, float]:
    if not found:
        return 0.1, 10.0
    low, high = min(found), max(found)
    if high / low < 3:
        room = math.sqrt(3 / (high / low))
        low, high = low / room, high * room
    room = (high / low) ** 0.03
    return low / room, high * room


def _step(width: float) -> float:
    """A round step that gives about five ticks."""
    rough = width / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _log_places(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        inside = [value for value in values if low <= value <= high]
        if len(inside) >= _ENOUGH:
            break
    every = math.ceil(len(inside) / _FEW)
    return inside[::every]
