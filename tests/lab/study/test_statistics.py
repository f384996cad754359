"""The statistics of a study against known distributions; scipy is the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, stats

from thinwire import Draw, OptionError
from thinwire.lab.study.distributions import FAMILIES, Gaussian, Laplace, StudentT, best, density_of, fits
from thinwire.lab.study.moments import Histogram, falling, histogram, histogram_of_sizes, moments, sample, unimodality

N = 20_000
Maker = Callable[[np.random.Generator], NDArray[np.float64]]
MADE: dict[str, Maker] = {
    "gaussian": lambda r: r.normal(0.5, 2.0, N),
    "laplace": lambda r: r.laplace(0.5, 2.0, N),
    "t3": lambda r: 0.5 + 2.0 * r.standard_t(3, N),
    "t5": lambda r: 0.5 + 2.0 * r.standard_t(5, N),
}
ORACLE = {"gaussian": stats.norm, "laplace": stats.laplace, "student_t": stats.t}


def made(name: str, seed: int = 0) -> NDArray[np.float64]:
    return MADE[name](np.random.default_rng(seed))


# --------------------------------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("unit", [1.0, 1e-20])
def test_the_family_that_made_the_numbers_is_found_and_its_parameters_are(name: str, unit: float) -> None:
    found = fits(made(name) * unit)
    assert best(found) == ("student_t" if name.startswith("t") else name)
    density = found[best(found)].density
    assert density.location / unit == pytest.approx(0.5, abs=0.08)
    assert density.scale / unit == pytest.approx(2.0, rel=0.04)
    if isinstance(density, StudentT):
        assert density.freedom == pytest.approx(float(name[1]), rel=0.12)


@pytest.mark.parametrize("name", MADE)
def test_likelihood_and_distance_are_those_of_scipy(name: str) -> None:
    values = made(name)
    for family, fit in fits(values).items():
        numbers = fit.density.numbers
        shape = [numbers["freedom"]] if "freedom" in numbers else []
        oracle = ORACLE[family](*shape, loc=numbers["location"], scale=numbers["scale"])
        assert fit.log_likelihood == pytest.approx(float(oracle.logpdf(values).mean()), abs=1e-9)
        assert fit.distance == pytest.approx(float(stats.kstest(values, oracle.cdf).statistic), abs=1e-5)
        assert density_of(family, fit.told()) == fit.density


@pytest.mark.parametrize("name", ["laplace", "t3", "t5"])
def test_no_other_student_t_is_likelier(name: str) -> None:
    values = made(name)
    found = fits(values)["student_t"]

    def unlikely(at: np.ndarray) -> float:
        return -float(stats.t.logpdf(values, np.exp(at[2]), loc=at[0], scale=np.exp(at[1])).mean())

    density = found.density
    assert isinstance(density, StudentT)
    start = np.array([density.location, np.log(density.scale), np.log(density.freedom)])
    searched = optimize.minimize(unlikely, start, method="Nelder-Mead", options={"maxiter": 60})
    assert found.log_likelihood >= -searched.fun - 2e-6


@pytest.mark.parametrize("freedom", [0.3, 0.8, 1.0, 2.5, 7.0, 100.0])
def test_the_distribution_function_of_student_t(freedom: float) -> None:
    x = np.concatenate([np.linspace(-30, 30, 2001), [-1e6, 1e4]])
    assert StudentT(0.0, 1.0, freedom).below(x) == pytest.approx(stats.t.cdf(x, freedom), abs=1e-5)


def test_a_student_t_of_gaussian_numbers_has_nearly_gaussian_tails_and_is_not_chosen() -> None:
    for seed in range(5):
        found = fits(made("gaussian", seed))
        density = found["student_t"].density
        assert isinstance(density, StudentT)
        assert density.freedom > 25
        assert best(found) == "gaussian"


def test_every_density_is_one() -> None:
    grid = np.linspace(-60, 60, 200_001)
    for density in (Gaussian(0.3, 1.5), Laplace(0.3, 1.5), StudentT(0.3, 1.5, 4.0)):
        height = np.exp(density.log_density(grid))
        assert float(height.sum() * (grid[1] - grid[0])) == pytest.approx(1.0, abs=1e-4)
        ends = density.below(np.array([-2.0, 1.0]))
        between = (grid > -2.0) & (grid < 1.0)
        assert float(ends[1] - ends[0]) == pytest.approx(float(height[between].sum() * (grid[1] - grid[0])), abs=1e-3)
    assert {family.name for family in FAMILIES} == set(ORACLE)


def test_nothing_is_fitted_to_a_constant_or_to_too_little() -> None:
    for values in (np.ones(100), np.arange(7.0)):
        with pytest.raises(OptionError, match="8 numbers"):
            fits(values)


# ------------------------------------------------------------------------------------------------------------ moments


@given(st.integers(0, 2**32 - 1), st.sampled_from([9, 1000, 5000]), st.sampled_from([1e-12, 1.0, 1e9]))
@settings(max_examples=15, deadline=None)
def test_moments_are_those_of_scipy(seed: int, numel: int, unit: float) -> None:
    x = torch.from_numpy(np.random.default_rng(seed).laplace(0.3, 1.0, numel) * unit)
    found, values = moments(x), x.numpy()
    assert found.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-9 * unit)
    assert found.std == pytest.approx(values.std(), rel=1e-9)
    assert found.skewness == pytest.approx(stats.skew(values), rel=1e-6, abs=1e-9)
    assert found.kurtosis == pytest.approx(stats.kurtosis(values), rel=1e-6, abs=1e-9)
    assert found.largest == np.abs(values).max()


def test_moments_of_more_than_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[::4] = 0
    whole = moments(x)
    counted = histogram(x)
    monkeypatch.setattr(sys.modules["thinwire.lab.study.moments"], "_AT_ONCE", 64)
    assert moments(x).kurtosis == pytest.approx(whole.kurtosis, rel=1e-12)
    assert histogram(x) == counted
    assert whole.zeros == 0.25


def test_kurtosis_of_known_shapes() -> None:
    r = np.random.default_rng(0)
    for values, expected in ((r.normal(size=400_000), 0.0), (r.laplace(size=400_000), 3.0), (r.uniform(size=N), -1.2)):
        assert moments(torch.from_numpy(values)).kurtosis == pytest.approx(expected, abs=0.15)
    assert moments(torch.full((50,), 0.1)).kurtosis == 0.0


def test_samples_are_elements_once_each_and_the_same_again() -> None:
    x = torch.arange(10_000)
    chosen = sample(x, 500, draw=Draw(seed=3))
    assert len(set(chosen.tolist())) == 500
    assert torch.equal(chosen, sample(x, 500, draw=Draw(seed=3)))
    assert not torch.equal(chosen, sample(x, 500, draw=Draw(seed=4)))


# --------------------------------------------------------------------------------------------------------- histograms


def test_histograms_count_everything_and_integrate_to_what_lies_inside() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    for found, values in ((histogram(x), x), (histogram_of_sizes(x), x.abs())):
        assert sum(found.counts) + found.outside == 5000
        assert found.outside <= 50
        expected = np.histogram(values.double().numpy(), bins=64, range=(found.low, found.high))[0]
        assert list(found.counts) == expected.tolist()
        assert float(found.density.sum() * found.width) == pytest.approx(1 - found.outside / 5000)


def test_a_histogram_of_mostly_zeros_still_has_a_range() -> None:
    x = torch.zeros(1000)
    assert sum(histogram(x).counts) == 1000
    x[3] = 5.0
    assert histogram(x).high == 5.0


UNIMODAL: dict[str, Maker] = {
    "gaussian": lambda r: r.normal(size=N),
    "laplace": lambda r: r.laplace(size=N),
    "t3": lambda r: r.standard_t(3, N),
    "uniform": lambda r: r.uniform(-1, 1, N),
    "off centre": lambda r: r.normal(3.0, 1.0, N),
    "lopsided": lambda r: r.exponential(size=N),
    "many zeros": lambda r: np.where(r.random(N) < 0.6, 0.0, r.normal(size=N)),
}
HUMPED: dict[str, Maker] = {
    "two apart": lambda r: np.concatenate([r.normal(-2, 0.6, N // 2), r.normal(2, 0.6, N // 2)]),
    "a small second": lambda r: np.concatenate([r.normal(0, 1, int(0.9 * N)), r.normal(4.5, 0.4, N // 10)]),
    "three": lambda r: r.normal(size=N) * 0.3 + r.choice([-3, 0, 3], N),
}
ALL_SHAPES = {**UNIMODAL, **HUMPED}


@pytest.mark.parametrize("name", ALL_SHAPES)
def test_one_hump_is_told_from_several(name: str) -> None:
    for seed in range(3):
        values = torch.from_numpy(ALL_SHAPES[name](np.random.default_rng(seed)))
        assert unimodality(histogram(values)).one == (name in UNIMODAL), seed


def test_what_must_move_is_what_was_put_out_of_place() -> None:
    """A tenth of the mass far off, and nothing between: it or the way to it must move."""
    found = unimodality(Histogram(0.0, 1.0, (0, 900, 0, 0, 0, 0, 0, 100), 0))
    assert 0.05 < found.departure <= 0.1
    assert unimodality(Histogram(0.0, 1.0, tuple(range(64)), 0)).departure == 0.0


@given(st.lists(st.integers(0, 400), min_size=3, max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_nearest_with_one_hump_is_not_far_from_the_best_of_all(counts: list[int]) -> None:
    """Least squares is within twice of the least sum of absolute differences, which linear programming finds."""
    if not sum(counts):
        return
    shares = np.array(counts) / sum(counts)
    size, least = len(shares), np.inf
    for mode in range(size):
        # minimise sum t with |m - h| <= t, m rising up to the mode and falling after it
        order = np.zeros((size - 1, 2 * size))
        for place in range(size - 1):
            sign = 1.0 if place < mode else -1.0
            order[place, place], order[place, place + 1] = sign, -sign
        near = np.block([[np.eye(size), -np.eye(size)], [-np.eye(size), -np.eye(size)]])
        solved = optimize.linprog(
            np.concatenate([np.zeros(size), np.ones(size)]),
            A_ub=np.vstack([order, near]),
            b_ub=np.concatenate([np.zeros(size - 1), shares, -shares]),
        )
        least = min(least, 0.5 * solved.fun)
    found = unimodality(Histogram(0.0, 1.0, tuple(counts), 0)).departure
    assert least - 1e-9 <= found <= 2 * least + 1e-9


def test_chance_departs_by_less_than_twice_the_noise() -> None:
    found = [
        unimodality(histogram(torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, 2000)))) for seed in range(20)
    ]
    assert 0 < sum(one.departure for one in found) / 20 < 2 * found[0].noise


def test_falling_needs_the_hump_at_zero() -> None:
    r = np.random.default_rng(0)
    for values, falls in (
        (r.normal(size=N), True),
        (r.laplace(size=N), True),
        (r.normal(3.0, 1.0, N), False),
        (r.choice([-1.0, 1.0], N) + 0.01 * r.normal(size=N), False),
    ):
        assert falling(histogram_of_sizes(torch.from_numpy(values))).one == falls
