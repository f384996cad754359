"""Numbers as text: times, bytes, losses, ratios and the labels of axes look the same on every page.

Each function takes a number or None. None becomes a dash; NaN and infinity become "not finite".
"""

from __future__ import annotations

import math
from typing import Any

from .markup import tag

NONE = "–"
NOT_FINITE = "not finite"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def number(value: Any) -> float | None:
    """The value as a finite float, or None.

    >>> number(3), number("3"), number(True), number(float("nan")), number(None)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer beyond every float
        return None
    return found if math.isfinite(found) else None


def _missing(value: Any) -> str:
    return NOT_FINITE if isinstance(value, float) and not math.isfinite(value) else NONE


def _three_digits(value: float) -> str:
    """At least three digits, and no more decimals than that takes: 4.21, 48.0, 1,898."""
    size = abs(value)
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{decimals}f}"


def milliseconds(value: Any, *, unit: bool = False) -> str:
    """Milliseconds; the unit only where no heading says it.

    >>> milliseconds(240.04), milliseconds(1898.2, unit=True), milliseconds(None)
    ('240', '1,898 ms', '–')
    """
    found = number(value)
    return _missing(value) if found is None else _three_digits(found) + (" ms" if unit else "")


def seconds(value: Any) -> str:
    """Seconds, with the unit.

    >>> seconds(48.0), seconds(2.4), seconds(379.6)
    ('48.0 s', '2.40 s', '380 s')
    """
    found = number(value)
    return _missing(value) if found is None else _three_digits(found) + " s"


def size(value: Any) -> str:
    """Bytes, in powers of 1000.

    >>> size(1_500_000), size(19_812_345), size(512), size(0), size(999_999)
    ('1.50 MB', '19.8 MB', '512 B', '0 B', '1.00 MB')
    """
    found = number(value)
    if found is None:
        return _missing(value)
    for factor, unit in _UNITS:
        if abs(found) >= factor * 0.9995:
            return f"{_three_digits(found / factor)} {unit}"
    return f"{found:,.0f} B"


def loss(value: Any) -> str:
    """Three decimals: less than the difference between two seeds.

    >>> loss(2.2312), loss(float("nan"))
    ('2.231', 'not finite')
    """
    found = number(value)
    if found is None:
        return _missing(value)
    return f"{found:,.3f}" if abs(found) < 1e6 else f"{found:.3e}"


def fraction(value: Any) -> str:
    """Two decimals.

    >>> fraction(0.6512)
    '0.65'
    """
    found = number(value)
    return _missing(value) if found is None else f"{found:,.2f}"


def times(value: Any) -> str:
    """A ratio: how many times faster.

    >>> times(5.182), times(12.34)
    ('5.18×', '12.3×')
    """
    found = number(value)
    return _missing(value) if found is None else _three_digits(found) + "×"


def exact(value: Any) -> str:
    """The value as JSON writes it, for `data-value`; empty where there is none.

    >>> exact(240.04), exact(1500000), exact(None)
    ('240.04', '1500000', '')
    """
    return "" if number(value) is None else repr(value)


def plain(value: Any) -> str:
    """A setting of any kind, in words.

    >>> plain([0, 1]), plain(3300000), plain(True), plain(None), plain({"mbit": 99.1}), plain(0.001)
    ('0, 1', '3,300,000', 'yes', 'none', 'mbit 99.1', '0.001')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items()) or "none"
    return str(value)


def brief(value: float) -> str:
    """A number in few characters, for an axis.

    >>> brief(0.002), brief(20_000), brief(5e-6), brief(-0.5)
    ('0.002', '20,000', '5·10⁻⁶', '−0.5')
    """
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    if -4 < power < 6:
        said = f"{value:,.{max(0, 2 - power)}f}"
        return (said.rstrip("0").rstrip(".") if "." in said else said).replace("-", "−")
    factor = f"{value / 10.0**power:.3g}".replace("-", "−")
    raised = f"10{str(power).translate(_RAISED)}"
    return raised if factor == "1" else f"{factor}·{raised}"


def cell(value: Any, digits: int = 2) -> str:
    """A table cell that shows a rounded number and holds the exact one.

    >>> cell(0.12345)
    '<td data-value="0.12345">0.12</td>'
    """
    found = number(value)
    return tag("td", NONE if found is None else f"{found:,.{digits}f}", data_value=exact(value))
