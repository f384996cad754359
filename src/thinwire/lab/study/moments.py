"""The distribution of a tensor without a parametric family: moments, histogram, and whether it has one hump.

`Hump.departure` is the share of the mass that must move to make a histogram have one hump: half the sum of |h - m|,
where m is the histogram that least squares makes rise up to a mode and fall after it (pool adjacent violators), for the
mode where that is least. A histogram of n elements departs by chance, too; `Hump.noise` bounds what to expect of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...codecs.sparsify import random_positions
from ...errors import OptionError
from ...rng import Draw

Floats = NDArray[np.float64]
BINS = 64
TOLERATED = 0.01  # of the mass may be out of place without anyone calling it a second hump
_AT_ONCE = 1 << 20
_COVERED = 0.99  # of the elements lie in the range of a histogram


@dataclass(frozen=True)
class Moments:
    """Moments of all elements. `kurtosis` is 0 for a Gaussian and 3 for a Laplace density; a constant has 0 and 0."""

    numel: int
    mean: float
    std: float
    skewness: float
    kurtosis: float
    largest: float  # |x|
    zeros: float  # share of the elements
    squares: float  # the sum of them


def moments(x: Tensor) -> Moments:
    """Mean, spread, skewness and excess kurtosis of a tensor, in float64.

    >>> found = moments(torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    >>> found.mean, found.std, found.kurtosis
    (0.0, 1.0, -2.0)
    """
    flat = x.detach().reshape(-1)
    numel = flat.numel()
    if not numel:
        raise OptionError("an empty tensor has no shape to study: leave it out")
    total, squares, largest, zeros = 0.0, 0.0, 0.0, 0
    for piece in _pieces(flat):
        total += float(piece.sum())
        squares += float(piece.square().sum())
        largest = max(largest, float(piece.abs().max()))
        zeros += piece.numel() - int(piece.count_nonzero())
    mean = total / numel
    powers = [0.0, 0.0, 0.0]
    for piece in _pieces(flat):
        apart = piece - mean
        square = apart.square()
        for place, term in enumerate((square, square * apart, square * square)):
            powers[place] += float(term.sum())
    second, third, fourth = (power / numel for power in powers)
    flat_out = second <= (1e-12 * largest) ** 2  # what rounding alone leaves of a constant
    skewness = 0.0 if flat_out else third / second**1.5
    kurtosis = 0.0 if flat_out else fourth / second**2 - 3.0
    return Moments(numel, mean, math.sqrt(second), skewness, kurtosis, largest, zeros / numel, squares)


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    """In float64, part by part, so that a large tensor is not held twice."""
    return (piece.to(torch.float64) for piece in torch.split(flat, _AT_ONCE))


def sample(x: Tensor, most: int, *, draw: Draw) -> Tensor:
    """At most `most` elements of a flat tensor, different ones and all equally likely; the same for the same draw.

    >>> sample(torch.arange(5), 9, draw=Draw())
    tensor([0, 1, 2, 3, 4])
    """
    if x.numel() <= most:
        return x
    return x[random_positions(x.numel(), most, draw.key(), device=x.device).long()]


# ------------------------------------------------------------------------------------------------------- histograms


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width from `low` to `high`; `outside` elements lie beyond."""

    low: float
    high: float
    counts: tuple[int, ...]
    outside: int

    @property
    def width(self) -> float:
        return (self.high - self.low) / len(self.counts)

    @property
    def centres(self) -> Floats:
        return self.low + self.width * (np.arange(len(self.counts), dtype=np.float64) + 0.5)

    @property
    def density(self) -> Floats:
        """Density over all elements, so that a fitted density can be drawn over it."""
        total = sum(self.counts) + self.outside
        return np.asarray(self.counts, dtype=np.float64) / (total * self.width)


def histogram(x: Tensor, *, bins: int = BINS) -> Histogram:
    """A histogram around 0, as wide as 99 % of the elements.

    An odd number of bins would hide what happens at 0 in one of them; two share it.

    >>> histogram(torch.tensor([-1.0, -0.1, 0.1, 1.0]), bins=4).counts
    (1, 1, 1, 1)
    """
    flat = x.detach().reshape(-1)
    return _counted(flat, -_reach(flat), _reach(flat), bins)


def histogram_of_sizes(x: Tensor, *, bins: int = BINS) -> Histogram:
    """A histogram of |x|, from 0 on.

    >>> histogram_of_sizes(torch.tensor([-4.0, 1.0, 2.0, 4.0]), bins=2).counts
    (1, 3)
    """
    sizes = x.detach().reshape(-1).abs()
    return _counted(sizes, 0.0, _reach(sizes), bins)


def _reach(flat: Tensor) -> float:
    """The 99 % quantile of |x|, or the largest |x| if that is 0."""
    sizes = flat.abs()
    rank = min(sizes.numel(), max(1, math.ceil(_COVERED * sizes.numel())))
    found = float(sizes.kthvalue(rank).values)
    return found or float(sizes.max()) or 1.0


def _counted(flat: Tensor, low: float, high: float, bins: int) -> Histogram:
    counts = torch.zeros(bins, dtype=torch.int64, device=flat.device)
    for piece in _pieces(flat):
        counts += torch.histc(piece, bins=bins, min=low, max=high).long()
    return Histogram(low, high, tuple(counts.tolist()), flat.numel() - int(counts.sum()))


# -------------------------------------------------------------------------------------------------------- one hump


@dataclass(frozen=True)
class Hump:
    """How far a histogram is from having one hump."""

    departure: float
    noise: float

    @property
    def one(self) -> bool:
        """Whether the mass that would have to move is below 1 % or explained by chance."""
        return self.departure <= max(TOLERATED, 2 * self.noise)

    def told(self) -> dict[str, Any]:
        return {"departure": self.departure, "noise": self.noise, "one": self.one}


def unimodality(found: Histogram) -> Hump:
    """Whether a histogram has one hump, wherever it is.

    >>> unimodality(Histogram(0, 1, (100, 900, 200, 50), 0)).departure
    0.0
    >>> unimodality(Histogram(0, 1, (600, 0, 0, 600), 0)).one
    False
    """
    shares = _shares(found)
    before = _beginnings(shares)
    after = [fit[::-1] for fit in reversed(_beginnings(shares[::-1]))]
    # Lists of fits by length: a mode is where a rising start ends and a falling end begins.
    departures = [
        0.5 * (np.abs(shares[:mode] - before[mode]).sum() + np.abs(shares[mode:] - after[mode]).sum())
        for mode in range(len(shares) + 1)
    ]
    return Hump(float(min(departures)), _noise(shares, found))


def falling(found: Histogram) -> Hump:
    """Whether a histogram of |x| falls from 0 on: the assumption of the bound (1 - k/d)^2 of Top-k.

    >>> falling(Histogram(0, 1, (900, 200, 100, 50), 0)).departure
    0.0
    >>> falling(Histogram(0, 1, (0, 0, 0, 1000), 0)).one
    False
    """
    shares = _shares(found)
    return Hump(float(0.5 * np.abs(shares - _isotonic(shares[::-1])[::-1]).sum()), _noise(shares, found))


def _shares(found: Histogram) -> Floats:
    """Shares of the elements inside; beyond the range the tails are assumed to fall."""
    counts = np.asarray(found.counts, dtype=np.float64)
    return counts / max(1.0, float(counts.sum()))


def _noise(shares: Floats, found: Histogram) -> float:
    """The expected half sum |h - truth|, for h counted from that many elements.

    Least squares onto an order brings h no farther from any histogram of that order, in the sum of absolute
    differences; so what departs from one hump by chance is at most twice this, on average.
    """
    inside = max(1, sum(found.counts))
    return float(0.5 * np.sqrt(2 * shares * (1 - shares) / (math.pi * inside)).sum())


def _isotonic(values: Floats) -> Floats:
    """The rising sequence nearest to `values` by least squares: neighbours that fall are pooled to their mean."""
    means: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        mean, size = value, 1
        while means and means[-1] > mean:
            mean = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
            size += sizes.pop()
            means.pop()
        means.append(mean)
        sizes.append(size)
    return np.repeat(means, sizes)


def _beginnings(shares: Floats) -> list[Floats]:
    """The isotonic fit of every prefix, the empty one included."""
    return [_isotonic(shares[:length]) if length else np.zeros(0) for length in range(len(shares) + 1)]
