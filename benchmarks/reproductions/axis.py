"""An axis of a chart: which range, which ticks, how numbers are written on it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FEW, _SEVERAL = 10, 13
_ENOUGH = 3  # ticks; with fewer whole powers of ten, values between them are marked too


def usable(value: float | None, *, log: bool = False) -> bool:
    """Whether it has a place on the axis."""
    return value is not None and math.isfinite(value) and (value > 0 or not log)


@dataclass(frozen=True)
class Axis:
    """From values to places between `begin` and `end`, in pixels."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def over(
        cls, values: Iterable[float | None], *, begin: float, end: float, log: bool = False, zero: bool = False
    ) -> Axis:
        """An axis that holds all values. It starts at zero with `zero`, or where most of it would lie above anyway."""
        found = [value for value in values if value is not None and usable(value, log=log)]
        if log:
            low, high = _log_range(found)
        else:
            low, high = _range(found, zero=zero)
        return cls(low, high, begin, end, log)

    def __call__(self, value: float) -> float:
        """The place of a value; what lies outside is put on the rim."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, values: Iterable[float] = ()) -> list[tuple[float, str]]:
        """Values to mark, and what is written there: the given ones, if these are few and there is room for each.

        On an axis that is not logarithmic they must be whole numbers, such as phases.
        """
        given = sorted({value for value in values if usable(value, log=self.log)})
        if self.log and 1 < len(given) <= _FEW:
            apart = (math.log(self.high) - math.log(self.low)) / _FEW
            kept: list[float] = []
            for value in given:
                if not kept or math.log(value) - math.log(kept[-1]) > 0.5 * apart:
                    kept.append(value)
            if len(kept) > 1:
                return [(value, brief(value)) for value in kept]
        if self.log:
            return [(value, brief(value)) for value in _log_ticks(self.low, self.high)]
        whole = 1 < len(given) <= _SEVERAL and all(value == round(value) for value in given)
        gaps = [above - below for below, above in itertools.pairwise(given)]
        if whole and min(gaps) >= (given[-1] - given[0]) / _SEVERAL:
            return [(value, brief(value)) for value in given]
        step = _step(self.high - self.low)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        decimals += round(step, decimals) != round(step, decimals + 1)  # steps of 2.5
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [place * step for place in range(first, last + 1)]
        large = max(abs(self.low), abs(self.high))
        if large >= 1e6 or decimals > 4:
            return [(value, brief(value)) for value in values]
        return [(value, f"{value:,.{decimals}f}".replace("-", "−")) for value in values]


def brief(value: float) -> str:
    """A number in few characters: 0.002, 50, 20,000, 5·10⁻⁶."""
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    if -4 < power < 6:
        said = f"{value:,.{max(0, 2 - power)}f}"
        return (said.rstrip("0").rstrip(".") if "." in said else said).replace("-", "−")
    factor = f"{value / 10.0**power:.3g}".replace("-", "−")
    raised = f"10{str(power).translate(_RAISED)}"
    return raised if factor == "1" else f"{factor}·{raised}"


def _range(found: list[float], *, zero: bool) -> tuple[float, float]:
    if not found:
        return 0.0, 1.0
    low, high = min(found), max(found)
    if zero or 0 <= low <= 0.4 * high:
        low = min(low, 0.0)
    if zero or 0 >= high >= 0.4 * low:
        high = max(high, 0.0)
    large = max(abs(low), abs(high))
    if large < 1e-290:  # zero, as far as a step can be reckoned
        return (0.0, 1.0) if low >= 0 else (-1.0, 1.0)
    if high - low < 1e-12 * large:  # one value, or equal ones: some room on both sides
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


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        inside = [value for value in values if low <= value <= high]
        if len(inside) >= _ENOUGH:
            break
    every = math.ceil(len(inside) / _FEW)
    return inside[::every]
