"""Histograms of gradients with their fitted densities, as drawings for the page of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..draw.axis import Axis
from ..draw.frame import Frame
from ..draw.legend import key, swatch
from .distributions import density_of

_STYLES = {"gaussian": ("s0", "6 4"), "laplace": ("s4", "2 3"), "student_t": ("ref", None)}


def heights(portraits: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The range that the densities of several tensors share, each by its standard deviation."""
    found = [_heights(_density(one)[1]) for one in portraits]
    return min(low for low, _ in found), max(high for _, high in found)


def shape(
    portrait: Mapping[str, Any], *, between: tuple[float, float], label: str, width: int = 340, height: int = 230
) -> str:
    """The histogram of a tensor with the three fitted densities over it; the vertical axis is logarithmic."""
    bins, density, unit = _density(portrait)
    floor, top = between
    frame = Frame.on_page((bins[0] / unit, bins[-1] / unit), (floor, top), width=width, height=height, log_y=True)
    drawn = [*frame.grid(across="u over its standard deviation", down="density", x_ticks=_symmetric(bins[-1] / unit))]
    drawn.append(frame.area(_steps(bins / unit, density, floor)))
    grid = np.linspace(bins[0], bins[-1], 121)
    for name, (colour, dash) in _STYLES.items():
        if name not in portrait["fits"]:
            continue
        # Densities are fitted to the elements that are not zero; the histogram counts all.
        fitted = np.exp(density_of(name, portrait["fits"][name]).log_density(grid)) * unit * (1 - portrait["zeros"])
        points = [(x / unit, min(max(y, floor), top)) for x, y in zip(grid.tolist(), fitted.tolist(), strict=True)]
        drawn.append(frame.curve(points, colour=f"thin {colour}", dash=dash))
    return frame.svg(drawn, label=label)


def two_shapes(portrait: Mapping[str, Any], *, colour: str, label: str, width: int = 460, height: int = 280) -> str:
    """The gradient's histogram as a line over that of u, on the same axes, in standard deviations of u."""
    bins, density, unit = _density(portrait)
    gradient_bins, gradient_density, _ = _density(portrait["gradient"], unit=unit)
    reach = max(bins[-1], gradient_bins[-1]) / unit
    low, top = _heights(density)
    other_low, other_top = _heights(gradient_density)
    floor = min(low, other_low)
    frame = Frame.on_page((-reach, reach), (floor, max(top, other_top)), width=width, height=height, log_y=True)
    drawn = [*frame.grid(across="in standard deviations of u", down="density", x_ticks=_symmetric(reach))]
    drawn.append(frame.area(_steps(bins / unit, density, floor), colour=colour))
    drawn.append(frame.curve(_steps(gradient_bins / unit, gradient_density, floor, closed=False), colour="ref"))
    return frame.svg(drawn, label=label)


def fit_legend() -> str:
    """Which line is which density."""
    words = {"gaussian": "Gaussian", "laplace": "Laplace", "student_t": "Student t"}
    return key([(swatch("", area=True), "u"), *((swatch(*_STYLES[name]), words[name]) for name in _STYLES)])


# ------------------------------------------------------------------------------------------------------------- helpers


def _density(portrait: Mapping[str, Any], *, unit: float | None = None) -> tuple[Any, Any, float]:
    """Edges of the bins, density by standard deviation, and the standard deviation."""
    told = portrait["histogram"]
    counts = np.asarray(told["counts"], dtype=np.float64)
    edges = np.linspace(told["low"], told["high"], len(counts) + 1)
    unit = unit or float(portrait["std"]) or 1.0
    total = counts.sum() + told["outside"]
    return edges, counts / (total * (edges[1] - edges[0]) / unit), unit


def _heights(density: Any) -> tuple[float, float]:
    """Down to the lowest bin that holds something."""
    some = density[density > 0]
    return 10.0 ** math.floor(math.log10(some.min())), float(some.max()) * 1.6


def _steps(edges: Any, density: Any, floor: float, *, closed: bool = True) -> list[tuple[float, float]]:
    """The outline of a histogram; closed, it goes down to the floor on both sides."""
    foot = [(float(edges[0]), floor), (float(edges[-1]), floor)] if closed else []
    points = foot[:1]
    for place, height in enumerate(density.tolist()):
        points += [(float(edges[place]), max(height, floor)), (float(edges[place + 1]), max(height, floor))]
    return [*points, *foot[1:]]


def _symmetric(reach: float) -> list[float]:
    """Ticks at 0 and equally many on both sides."""
    right = [value for value, _ in Axis(0.0, reach, 0.0, 1.0).ticks() if value > 0]
    right = right[1::2] if len(right) > 4 else right
    return [-value for value in reversed(right)] + [0.0, *right]
