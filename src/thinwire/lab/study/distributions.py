"""Gaussian, Laplace and Student t densities fitted by maximum likelihood, and how well each fits.

Location and scale of the Student t are found for given degrees of freedom by expectation maximisation (Liu and Rubin
1995, in the quick form of Meng and van Dyk 1997), the degrees of freedom by golden section on the likelihood that this
reaches. Its distribution function is an integral: with x = sqrt(nu) sinh(v), its density is that of cosh(v)^-nu.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import OptionError
from .moments import Floats

LEAST = 8  # numbers that a fit needs
_FREEDOM = (0.3, 100.0)  # beyond 100, a Student t is a Gaussian for every purpose here
_SECTION = (math.sqrt(5) - 1) / 2
_GRID = 4096


@dataclass(frozen=True)
class Density(ABC):
    """A fitted density with a location and a scale."""

    name: ClassVar[str]
    location: float
    scale: float

    @classmethod
    @abstractmethod
    def fitted(cls, values: Floats) -> Density:
        """The maximum likelihood fit of this family."""

    @abstractmethod
    def log_density(self, values: Floats) -> Floats: ...

    @abstractmethod
    def below(self, values: Floats) -> Floats:
        """The share of the mass below each value."""

    @property
    def numbers(self) -> dict[str, float]:
        return {key: float(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Gaussian(Density):
    """Mean and standard deviation.

    >>> Gaussian.fitted(np.array([1.0, 3.0]))
    Gaussian(location=2.0, scale=1.0)
    """

    name = "gaussian"

    @classmethod
    def fitted(cls, values: Floats) -> Gaussian:
        return cls(float(values.mean()), float(values.std()))

    def log_density(self, values: Floats) -> Floats:
        z = (values - self.location) / self.scale
        return -0.5 * z * z - math.log(self.scale * math.sqrt(2 * math.pi))

    def below(self, values: Floats) -> Floats:
        z = torch.from_numpy((values - self.location) / self.scale)
        share: Floats = torch.special.ndtr(z).numpy()
        return share


@dataclass(frozen=True)
class Laplace(Density):
    """Median and mean distance from it.

    >>> Laplace.fitted(np.array([0.0, 1.0, 5.0]))
    Laplace(location=1.0, scale=1.6666666666666667)
    """

    name = "laplace"

    @classmethod
    def fitted(cls, values: Floats) -> Laplace:
        median = float(np.median(values))
        return cls(median, float(np.abs(values - median).mean()))

    def log_density(self, values: Floats) -> Floats:
        return -np.abs(values - self.location) / self.scale - math.log(2 * self.scale)

    def below(self, values: Floats) -> Floats:
        z = (values - self.location) / self.scale
        tail = 0.5 * np.exp(-np.abs(z))
        return np.where(z < 0, tail, 1 - tail)


@dataclass(frozen=True)
class StudentT(Density):
    """Location, scale and degrees of freedom, which are between 0.3 (the heaviest tails) and 100 (nearly Gaussian).

    >>> StudentT(0.0, 1.0, 1.0).below(np.array([0.0, 1.0])).round(4).tolist()
    [0.5, 0.75]
    """

    name = "student_t"
    freedom: float

    @classmethod
    def fitted(cls, values: Floats) -> StudentT:
        middle = float(np.median(values))
        apart = np.abs(values - middle)
        unit = float(np.median(apart)) or float(apart.mean())
        low, high = (math.log(limit) for limit in _FREEDOM)
        start = (middle, unit)
        tried: dict[float, tuple[float, StudentT]] = {}

        def reached(log_freedom: float) -> float:
            nonlocal start
            found = _most_likely(values, math.exp(log_freedom), *start)
            start = found.location, found.scale
            tried[log_freedom] = float(found.log_density(values).mean()), found
            return tried[log_freedom][0]

        left, right = high - _SECTION * (high - low), low + _SECTION * (high - low)
        at_left, at_right = reached(left), reached(right)
        while high - low > 0.005:  # half a percent of the degrees of freedom
            if at_left >= at_right:
                high, right, at_right = right, left, at_left
                left = high - _SECTION * (high - low)
                at_left = reached(left)
            else:
                low, left, at_left = left, right, at_right
                right = low + _SECTION * (high - low)
                at_right = reached(right)
        for limit in _FREEDOM:  # golden section never looks at the ends
            reached(math.log(limit))
        return max(tried.values(), key=lambda one: one[0])[1]

    def log_density(self, values: Floats) -> Floats:
        nu = self.freedom
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi) - math.log(self.scale)
        z = (values - self.location) / self.scale
        return constant - (nu + 1) / 2 * np.log1p(z * z / nu)

    def below(self, values: Floats) -> Floats:
        nu = self.freedom
        far = 40 / nu  # where cosh(v)^-nu is e^-40
        edge = far + math.log(2) if far > 20 else math.acosh(math.exp(far))
        grid = np.linspace(0.0, edge, 2 * _GRID + 1)
        log_cosh = grid + np.log1p(np.exp(-2 * grid)) - math.log(2)
        height = np.exp(-nu * log_cosh)
        # Simpson's rule over two steps at a time
        pieces = height[:-1:2] + 4 * height[1::2] + height[2::2]
        grown = np.concatenate(([0.0], np.cumsum(pieces)))
        v = np.arcsinh((values - self.location) / (self.scale * math.sqrt(nu)))
        half: Floats = np.interp(np.abs(v), grid[::2], grown / grown[-1]) / 2
        return 0.5 + np.sign(v) * half


def _most_likely(values: Floats, freedom: float, location: float, scale: float) -> StudentT:
    """Location and scale for given degrees of freedom."""
    for _ in range(60):
        z = (values - location) / scale
        weights = (freedom + 1) / (freedom + z * z)
        total = float(weights.sum())
        location_now = float((weights * values).sum()) / total
        apart = values - location_now
        # Divided by the sum of the weights and not by their number: it has the same fixed point and is there sooner.
        scale_now = math.sqrt(float((weights * apart * apart).sum()) / total)
        moved = abs(location_now - location) + abs(scale_now - scale)
        location, scale = location_now, max(scale_now, 1e-300)
        if moved <= 1e-6 * scale:
            break
    return StudentT(location, scale, freedom)


FAMILIES: tuple[type[Density], ...] = (Gaussian, Laplace, StudentT)


# ---------------------------------------------------------------------------------------------------- how well it fits


@dataclass(frozen=True)
class Fit:
    """A density, its log-likelihood in nats per element, and its Kolmogorov-Smirnov distance."""

    density: Density
    log_likelihood: float
    distance: float  # Kolmogorov and Smirnov
    penalised: float  # log-likelihood less ln(n) / 2n for each number fitted (Schwarz)

    def told(self) -> dict[str, Any]:
        return {
            **self.density.numbers,
            "log_likelihood": self.log_likelihood,
            "penalised": self.penalised,
            "ks": self.distance,
        }


def kolmogorov_smirnov(ordered: Floats, density: Density) -> float:
    """The largest distance between a distribution function and that of sorted values.

    >>> kolmogorov_smirnov(np.array([-1.0, 1.0]), Laplace(0.0, 1.0)).__round__(3)
    0.316
    """
    share = density.below(ordered)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - share).max(), (share - steps[:-1]).max()))


def fits(values: Floats) -> dict[str, Fit]:
    """Every family fitted to these numbers, which must not all be equal.

    >>> found = fits(np.random.default_rng(0).laplace(size=2000))
    >>> best(found), round(found["laplace"].density.scale, 1)
    ('laplace', 1.0)
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if len(ordered) < LEAST or ordered[0] == ordered[-1]:
        raise OptionError(f"a density is fitted to {LEAST} numbers or more that are not all equal")
    unit = float(np.abs(ordered).max())  # gradients may be so small that their squares are no numbers any more
    found = {}
    for family in FAMILIES:
        density = _stretched(family.fitted(ordered / unit), unit)
        likely = float(density.log_density(ordered).mean())
        free = len(density.numbers)
        penalty = free * math.log(len(ordered)) / (2 * len(ordered))
        found[family.name] = Fit(density, likely, kolmogorov_smirnov(ordered, density), likely - penalty)
    return found


def best(found: dict[str, Fit]) -> str:
    """The family with the highest log-likelihood, after a penalty for each number that was fitted.

    Without the penalty a Student t would always be at least as good as a Gaussian, which it contains.
    """
    return max(found, key=lambda name: found[name].penalised)


def _stretched(density: Density, unit: float) -> Density:
    numbers = density.numbers | {"location": density.location * unit, "scale": density.scale * unit}
    return type(density)(**numbers)


def density_of(name: str, numbers: dict[str, Any]) -> Density:
    """A fitted density from its parameters in a result.

    >>> density_of("laplace", {"location": 0.0, "scale": 2.0, "ks": 0.01})
    Laplace(location=0.0, scale=2.0)
    """
    family = next(family for family in FAMILIES if family.name == name)
    known = family.__dataclass_fields__
    return family(**{key: float(value) for key, value in numbers.items() if key in known})
