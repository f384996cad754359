"""Every number of theory.py against one found another way: enumeration, integration, or a search for the worst input.

A bound must hold for the worst input that a search finds, and must not lie far above it either: `reached` is how near.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import integrate, optimize, stats

from thinwire import kernels, theory
from thinwire.rng import Draw

Vector = npt.NDArray[np.float64]
Error = Callable[[Vector], float]  # E|C(x) - x|^2 / |x|^2, exactly


# ---------------------------------------------------------------------------------------------- errors, written exactly


def uniform_error(x: Vector, scale: float, levels: int) -> float:
    """Rounding |x| / scale at random to multiples of 1 / levels: f (1 - f) steps squared an element."""
    place = np.abs(x) / scale * levels
    fraction = place - np.floor(place)
    return float((fraction * (1 - fraction)).sum() * (scale / levels) ** 2 / (x @ x))


def sign_error(x: Vector, scale: float) -> float:
    """A random sign times the scale, whose mean is x: second moment scale^2 an element."""
    return float((scale**2 - x * x).sum() / (x @ x))


def powers_error(x: Vector, scale: float, levels: int) -> float:
    """Rounding at random between neighbouring powers of two from 2**(1 - levels) to 1, and zero."""
    y = np.abs(x) / scale
    lowest = 2.0 ** (1 - levels)
    below = 2.0 ** np.floor(np.log2(np.maximum(y, lowest)))
    variance = np.where(y < lowest, y * (lowest - y), (y - below) * (2 * below - y))
    return float(variance.sum() * scale**2 / (x @ x))


def min_max_error(x: Vector, bits: int) -> float:
    step = (x.max() - x.min()) / (2**bits - 1)
    if step == 0:
        return 0.0
    place = (x - x.min()) / step
    fraction = place - np.floor(place + 1e-12)
    return float((np.maximum(fraction, 0) * (1 - fraction)).sum() * step**2 / (x @ x))


def starting_points(d: int, seed: int) -> list[Vector]:
    """Inputs from which to search: all shapes that are the worst for some quantiser, and random ones."""
    rng = np.random.default_rng(seed)
    one_and_rest = [
        np.concatenate([[1.0], np.full(d - 1, rest)])
        for rest in (1 / (1 + math.sqrt(d)), *(0.5 / levels for levels in (1, 2, 3, 7, 15)))
    ]
    two_and_rest = [np.concatenate([[1.0, -1.0], np.full(d - 2, rest)]) for rest in (0.0, 0.1)] if d > 2 else []
    shapes = [np.ones(d), np.eye(1, d)[0] + 1e-6, np.linspace(1, 2, d), *one_and_rest, *two_and_rest]
    noise = [rng.standard_normal(d) for _ in range(6)] + [rng.standard_cauchy(d) for _ in range(4)]
    return [*shapes, *noise, *(shape + 0.05 * rng.standard_normal(d) for shape in one_and_rest)]


def worst(error: Error, d: int, seed: int = 0) -> float:
    """The largest error a search finds: every starting point, then hill climbing by random changes of few elements."""
    rng = np.random.default_rng(seed)
    candidates = sorted(starting_points(d, seed), key=error, reverse=True)[:6]
    best = -math.inf
    for x in candidates:
        value, size = error(x), 0.3
        for _ in range(250):
            change = rng.standard_normal(d) * (rng.random(d) < max(0.3, 1.0 / d)) * np.abs(x).max() * size
            trial = x + change
            found = error(trial)
            if found > value:
                x, value = trial, found
            else:
                size = max(size * 0.98, 1e-4)
        best = max(best, value)
    return best


def assert_bound(error: Error, d: int, bound: float, *, reached: float) -> None:
    found = worst(error, d)
    assert found <= bound * (1 + 1e-9)
    assert found >= reached * bound


# ----------------------------------------------------------------------------------------------------------- quantisers


@pytest.mark.parametrize(("d", "s"), [(1, 1), (2, 1), (4, 1), (10, 1), (16, 2), (30, 3), (64, 7), (300, 2), (300, 127)])
def test_uniform_l2(d: int, s: int) -> None:
    def error(x: Vector) -> float:
        return uniform_error(x, float(np.linalg.norm(x)), s)

    assert_bound(error, d, theory.uniform_l2(d, s), reached=0.0 if d == 1 else 0.4)


def test_uniform_l2_is_reached_where_every_element_lies_between_two_levels() -> None:
    for s in (1, 2, 5):
        x = np.ones(4 * s * s)
        assert uniform_error(x, float(np.linalg.norm(x)), s) == pytest.approx(theory.uniform_l2(4 * s * s, s))


@pytest.mark.parametrize(("d", "s"), [(2, 1), (4, 1), (10, 1), (16, 2), (30, 3), (64, 7), (300, 2), (300, 127)])
def test_uniform_linf(d: int, s: int) -> None:
    def error(x: Vector) -> float:
        return uniform_error(x, float(np.abs(x).max()), s)

    assert_bound(error, d, theory.uniform_linf(d, s), reached=0.35)
    assert theory.uniform_linf(1, s) == 0.0


@pytest.mark.parametrize("d", [1, 2, 3, 10, 100])
def test_one_bit_l2_is_exact_for_every_input(d: int) -> None:
    for x in starting_points(d, 1) if d > 1 else [np.array([3.0])]:
        assert sign_error(x, float(np.linalg.norm(x))) == pytest.approx(theory.one_bit_l2(d), abs=1e-9)


@pytest.mark.parametrize("d", [2, 3, 10, 100, 1000])
def test_ternary(d: int) -> None:
    def error(x: Vector) -> float:
        return uniform_error(x, float(np.abs(x).max()), 1)

    assert_bound(error, d, theory.ternary(d), reached=0.999)
    # The closed form of the error, and the place of its maximum among inputs (1, a, ..., a).
    x = np.random.default_rng(d).standard_normal(d)
    assert error(x) == pytest.approx(np.abs(x).max() * np.abs(x).sum() / (x @ x) - 1)
    found = optimize.minimize_scalar(
        lambda a: -error(np.concatenate([[1.0], np.full(d - 1, a)])), bounds=(1e-6, 1), method="bounded"
    )
    assert found.x == pytest.approx(1 / (1 + math.sqrt(d)), rel=1e-3)
    assert -found.fun == pytest.approx(theory.ternary(d), rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("d", [3, 10, 64])
def test_min_max(d: int, bits: int) -> None:
    assert_bound(lambda x: min_max_error(x, bits), d, theory.min_max(d, bits), reached=0.3)
    # Two ends and zeros: the zeros lie exactly between the two middle levels.
    x = np.concatenate([[1.0, -1.0], np.zeros(d - 2)])
    assert min_max_error(x, bits) == pytest.approx(theory.min_max(d, bits) * (d - 2) / d, rel=1e-6)


def test_natural() -> None:
    """(x - 1)(2 - x) / x^2 between 1 and 2, the same in every octave; 1/8 at 4/3."""
    x = np.linspace(1, 2, 100_001)
    error = (x - 1) * (2 - x) / x**2
    assert error.max() == pytest.approx(theory.natural(), rel=1e-9)
    assert x[error.argmax()] == pytest.approx(4 / 3, abs=1e-4)


@pytest.mark.parametrize("s", [1, 2, 3, 5, 7, 127])
@pytest.mark.parametrize("d", [1, 2, 10, 100, 400])
def test_exponential(d: int, s: int) -> None:
    def error(x: Vector) -> float:
        return powers_error(x, float(np.linalg.norm(x)), s)

    if d == 1:
        assert error(np.array([2.0])) <= theory.exponential(d, s)
        return
    assert_bound(error, d, theory.exponential(d, s), reached=0.15)
    assert_bound(lambda x: powers_error(x, float(np.abs(x).max()), s), d, theory.exponential(d, s), reached=0.0)


@pytest.mark.parametrize(("norm", "workers"), [("l2", 1), ("l2", 4), ("l2", 16), ("linf", 4)])
def test_global_theta_by_simulation(norm: str, workers: int) -> None:
    """n workers round against one scale: E|mean of C(x_i) - mean of x_i|^2 <= theta / n sum |x_i|^2."""
    rng = np.random.default_rng(workers)
    d, levels, draws = 20, 3, 4000
    whole = workers * d
    bound_of_whole = theory.uniform_l2(whole, levels) if norm == "l2" else theory.uniform_linf(whole, levels)
    theta = theory.global_theta(bound_of_whole, workers)
    ratios = []
    for kind in ("gaussian", "one worker large", "spread", "equal"):
        x = rng.standard_normal((workers, d))
        if kind == "one worker large":
            x[1:] *= 0.05
        elif kind == "spread":
            x = np.full((workers, d), 0.5 / levels) * np.where(rng.random((workers, d)) < 0.5, -1, 1)
            x[0, 0] = 1.0
        elif kind == "equal":
            x = np.repeat(x[:1], workers, axis=0)
        scale = np.linalg.norm(x) if norm == "l2" else np.abs(x).max()
        place = x / scale * levels
        rounded = np.floor(place + rng.random((draws, workers, d))) * scale / levels
        error = ((rounded.mean(axis=1) - x.mean(axis=0)) ** 2).sum(axis=1)
        bound = theta / workers * (x * x).sum()
        assert error.mean() <= bound + 4 * error.std() / math.sqrt(draws)
        ratios.append(error.mean() / bound)
        assert np.abs(rounded.mean(axis=(0, 1)) - x.mean(axis=0)).max() < 6 * scale / levels / math.sqrt(draws)
    assert max(ratios) > 0.3


def test_exponential_tree_penalty() -> None:
    values = [theory.exponential_tree_penalty(workers) for workers in (1, 2, 4, 16, 64)]
    assert [round(value, 2) for value in values] == [1.0, 1.12, 1.27, 1.60, 2.03]
    assert theory.exponential_tree_penalty(3) == theory.exponential_tree_penalty(4)
    assert theory.exponential_tree_penalty(5) == theory.exponential_tree_penalty(8)


def test_one_addition_of_exponential_codes_stays_within_one_level_of_the_penalty() -> None:
    """The second moment of the rounded sum over the squared sum, for every gap and sign: by rule and measured."""
    largest = 0.0
    for gap in range(8):
        for opposite in (False, True):
            small = 2.0**-gap
            total = 1 - small if opposite else 1 + small
            if total == 0:
                continue
            other, chance = (0.5, 2 * small) if opposite else (2.0, small)
            by_rule = ((1 - chance) + chance * other**2) / total**2
            assert (1 - chance) + chance * other == pytest.approx(total)
            draws = 1 << 15
            a = torch.full((draws,), 20, dtype=torch.uint8)
            b = torch.full((draws,), 20 - gap + 128 * opposite, dtype=torch.uint8)
            codes = kernels.exponential_add(a, b, top=40, key=Draw(seed=gap).key()).double()
            values = torch.pow(2.0, codes - 20)
            assert float(values.mean()) == pytest.approx(total, rel=0.03)
            assert float(values.square().mean()) / total**2 == pytest.approx(by_rule, rel=0.06)
            largest = max(largest, by_rule)
    assert 1.1 < largest <= theory.exponential_tree_penalty(2)


# ----------------------------------------------------------------------------------------------- rotation and codebooks


def lloyd_max(bits: int) -> float:
    """Mean squared error of the best quantiser of a unit Gaussian, by Lloyd's iteration with exact integrals."""
    words = stats.norm.ppf((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(20_000):
        ends = np.concatenate([[-np.inf], (words[1:] + words[:-1]) / 2, [np.inf]])
        mass = np.diff(stats.norm.cdf(ends))
        centres = -np.diff(stats.norm.pdf(ends)) / mass
        if np.abs(centres - words).max() < 1e-12:
            break
        words = centres
    ends = np.concatenate([[-np.inf], (words[1:] + words[:-1]) / 2, [np.inf]])
    error: float = sum(
        integrate.quad(lambda x, w=word: (x - w) ** 2 * stats.norm.pdf(x), low, high, epsabs=1e-13)[0]
        for word, low, high in zip(words, ends[:-1], ends[1:], strict=True)
    )
    return error


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_lloyd_max_errors(bits: int) -> None:
    assert lloyd_max(bits) == pytest.approx(theory.LLOYD_MAX_ERROR[bits], abs=6e-7)
    if bits == 1:
        assert theory.LLOYD_MAX_ERROR[1] == pytest.approx(1 - 2 / math.pi, abs=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rotated_with_the_smallest_error_keeps_what_the_codebook_does(bits: int) -> None:
    """A scale smaller by a = 1 - D has the error a^2 (1 + omega) - 2a + 1, which is D for omega = D / (1 - D)."""
    error = lloyd_max(bits)
    assert 0.97 * (1 - error) <= theory.rotated_mmse(bits) <= 1 - error


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rotated_is_the_error_after_the_unbiased_scale(bits: int) -> None:
    """For z uniform on a large sphere, the estimate c |z|^2 / <c, z> errs by D / (1 - D), to which 5 % are added."""
    error = lloyd_max(bits)
    assert error / (1 - error) <= theory.rotated(bits) <= 1.06 * error / (1 - error)
    rng = np.random.default_rng(bits)
    words = stats.norm.ppf((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(2000):
        ends = np.concatenate([[-np.inf], (words[1:] + words[:-1]) / 2, [np.inf]])
        words = -np.diff(stats.norm.pdf(ends)) / np.diff(stats.norm.cdf(ends))
    measured = []
    for _ in range(300):
        z = rng.standard_normal(1024)
        z /= math.sqrt(float((z * z).mean()))
        c = words[np.searchsorted((words[1:] + words[:-1]) / 2, z)]
        estimate = c * (z @ z) / (c @ z)
        measured.append(float(((estimate - z) ** 2).sum() / (z @ z)))
    assert np.mean(measured) == pytest.approx(error / (1 - error), rel=0.02)
    assert np.mean(measured) <= theory.rotated(bits)


# ---------------------------------------------------------------------------------------------------------- sparsifiers


@pytest.mark.parametrize(("d", "k"), [(1, 1), (3, 1), (5, 2), (6, 3), (7, 7)])
def test_random_k_by_enumeration(d: int, k: int) -> None:
    x = np.random.default_rng(d).standard_normal(d)
    errors, mean = [], np.zeros(d)
    for kept in itertools.combinations(range(d), k):
        sent = np.zeros(d)
        sent[list(kept)] = x[list(kept)] * d / k
        errors.append(((sent - x) ** 2).sum())
        mean += sent
    assert np.mean(errors) / (x @ x) == pytest.approx(theory.random_k(d, k), abs=1e-12)
    assert mean / math.comb(d, k) == pytest.approx(x)


def kept_by_top_k(x: Vector, k: int) -> float:
    squares = np.sort(x * x)
    return float(squares[-k:].sum() / squares.sum())


@pytest.mark.parametrize(("d", "k"), [(2, 1), (10, 3), (50, 1), (50, 49)])
def test_top_k_keeps_its_share_of_any_input_and_no_more_of_equal_ones(d: int, k: int) -> None:
    lost = worst(lambda x: 1 - kept_by_top_k(x, k), d)
    assert lost <= 1 - theory.top_k(d, k) + 1e-12
    assert lost == pytest.approx(1 - theory.top_k(d, k), abs=1e-6)
    assert kept_by_top_k(np.ones(d), k) == pytest.approx(theory.top_k(d, k))


BELLS = {
    "gaussian": stats.norm,
    "laplace": stats.laplace,
    "uniform": stats.uniform(-1, 2),
    "student-t5": stats.t(5),
    "logistic": stats.logistic,
    "triangle": stats.triang(0.5, -1, 2),
}


@pytest.mark.parametrize("name", BELLS)
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.9])
def test_top_k_bell_by_integration(name: str, share: float) -> None:
    """Energy above the two-sided quantile of a symmetric bell, over all of it."""
    bell = BELLS[name]
    threshold = bell.ppf(1 - share / 2)
    end = bell.support()[1]

    def energy(low: float) -> float:
        middle = min(end, max(low, bell.ppf(1 - 1e-9)))
        near: float = integrate.quad(lambda x: x * x * bell.pdf(x), low, middle, limit=500)[0]
        far: float = integrate.quad(lambda x: x * x * bell.pdf(x), middle, end, limit=500)[0]
        return near + far

    kept = energy(threshold) / energy(0.0)
    bound = theory.top_k_bell(1_000_000, round(1_000_000 * share))
    assert bound == pytest.approx(1 - (1 - share) ** 2)
    assert kept >= bound - 1e-9


def test_top_k_bell_is_reached_where_the_squares_are_uniform_and_fails_without_a_bell() -> None:
    d = 10_000
    uniform_squares = np.sqrt((np.arange(d) + 0.5) / d)
    for k in (10, 100, 5000, 9999):
        assert kept_by_top_k(uniform_squares, k) == pytest.approx(theory.top_k_bell(d, k), rel=1e-3)
    assert kept_by_top_k(np.ones(d), 1000) == pytest.approx(0.1)
    assert kept_by_top_k(np.ones(d), 1000) < theory.top_k_bell(d, 1000) - 0.08
    two_humps = 5 + np.random.default_rng(0).standard_normal(d)
    assert kept_by_top_k(two_humps, 1000) < theory.top_k_bell(d, 1000)
    assert theory.top_k_bell(d, d) == 1.0
    assert all(theory.top_k_bell(d, k) >= theory.top_k(d, k) for k in (1, 10, d))


def test_top_k_bell_on_samples() -> None:
    rng = np.random.default_rng(1)
    for sample in (rng.standard_normal(50_000), rng.laplace(size=50_000), rng.uniform(-1, 1, 50_000)):
        for k in (50, 500, 5000):
            assert kept_by_top_k(sample, k) >= theory.top_k_bell(50_000, k)


# --------------------------------------------------------------------------------------------- sign, rounding, low rank


@pytest.mark.parametrize("d", [1, 2, 10, 100])
def test_sign(d: int) -> None:
    def lost(x: Vector) -> float:
        sent = np.sign(x) * np.abs(x).mean()
        return float(((sent - x) ** 2).sum() / (x @ x))

    if d == 1:
        assert theory.sign(1) == 1.0
        return
    found = worst(lost, d)
    assert found <= 1 - theory.sign(d) + 1e-9
    one_hot = np.full(d, 1e-12)
    one_hot[0] = 1.0
    assert lost(one_hot) == pytest.approx(1 - theory.sign(d), abs=1e-9)


@pytest.mark.parametrize(("mantissa", "dtype"), [(7, torch.bfloat16), (10, torch.float16), (3, torch.float8_e4m3fn)])
def test_rounding(mantissa: int, dtype: torch.dtype) -> None:
    """Every float32 mantissa, to 2**-16, in one octave of the type's normal range: the others are the same."""
    x = 1 + torch.arange(1 << 16, dtype=torch.float32) / (1 << 16)
    error = ((x.to(dtype).double() - x.double()) / x.double()).square()
    assert float(error.max()) <= 1 - theory.rounding(mantissa)
    assert float(error.max()) >= 0.85 * (1 - theory.rounding(mantissa))


@pytest.mark.parametrize(("rows", "columns", "rank"), [(5, 5, 1), (8, 3, 2), (3, 8, 3), (20, 30, 4), (4, 4, 9)])
def test_low_rank(rows: int, columns: int, rank: int) -> None:
    rng = np.random.default_rng(rows)
    bound = theory.low_rank(rows, columns, rank)
    assert 0 < bound <= 1
    for matrix in [
        rng.standard_normal((rows, columns)),
        rng.standard_cauchy((rows, columns)),
        np.ones((rows, columns)),
    ]:
        values = np.linalg.svd(matrix, compute_uv=False)
        assert (values[:rank] ** 2).sum() / (values**2).sum() >= bound - 1e-12
    equal = np.eye(rows, columns)
    values = np.linalg.svd(equal, compute_uv=False)
    assert (values[:rank] ** 2).sum() / (values**2).sum() == pytest.approx(bound)


# ---------------------------------------------------------------------------------------------------------- all of them


def test_bounds_grow_with_the_tensor_and_shrink_with_the_bits() -> None:
    sizes = [1, 2, 64, 1000, 10**6]
    for levels in (1, 3, 7, 127):
        for bound in (theory.uniform_l2, theory.uniform_linf, theory.exponential):
            values = [bound(d, levels) for d in sizes]
            assert values == sorted(values)
            assert all(value >= 0 for value in values)
    for d in sizes:
        for bound in (theory.uniform_l2, theory.uniform_linf, theory.exponential):
            values = [bound(d, levels) for levels in (1, 3, 7, 15, 31, 63, 127)]
            assert values == sorted(values, reverse=True)
        assert theory.uniform_linf(d, 3) <= theory.uniform_l2(d, 3)
    assert theory.rotated(4) < theory.rotated(3) < theory.rotated(2)


def test_every_function_has_a_test() -> None:
    stated = [name for name, value in vars(theory).items() if callable(value) and not name.startswith("_")]
    source = Path(__file__).read_text()
    assert [name for name in stated if f"theory.{name}(" not in source] == []
