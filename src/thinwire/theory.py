"""Variance and contraction of every codec, in one place; the tests check each against measurement.

`omega`: E|C(x) - x|^2 <= omega |x|^2 for an unbiased C.   `delta`: E|C(x) - x|^2 <= (1 - delta) |x|^2 for any C.
d is the number of elements that share a scale, s the number of positive levels.
"""

from __future__ import annotations

import math

# Mean squared error of the best (Lloyd-Max) b-bit quantiser of a unit Gaussian.
LLOYD_MAX_ERROR = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}


def uniform_l2(d: int, s: int) -> float:
    """QSGD with s levels against the L2 norm: min(d / 4s^2, sqrt(d) / s).

    The published min(d / s^2, sqrt(d) / s) bounds a step's variance f(1 - f) by 1; it is at most 1/4.

    >>> uniform_l2(100, 1)
    10.0
    """
    return min(d / (4 * s * s), math.sqrt(d) / s)


def one_bit_l2(d: int) -> float:
    """Stochastic sign against the L2 norm: every element has second moment |x|^2, hence d - 1."""
    return float(d - 1)


def uniform_linf(d: int, s: int) -> float:
    """s levels against max |x|: the largest element is exact, the others vary by at most step^2 / 4, or step |x|."""
    return min((d - 1) / (4 * s * s), math.sqrt(d) / s)


def ternary(d: int) -> float:
    """TernGrad: max|x| |x|_1 / |x|^2 - 1, whose largest value over all x is (sqrt(d) - 1) / 2."""
    return (math.sqrt(d) - 1) / 2


def min_max(d: int, bits: int) -> float:
    """Stochastic rounding between min and max: (max - min)^2 <= 2 |x|^2, step^2 / 4 an element."""
    levels: int = 2**bits - 1
    return d / (2 * levels * levels)


def natural() -> float:
    """Random rounding to a neighbouring power of two (Horvath et al. 2019)."""
    return 1 / 8


def exponential(d: int, s: int) -> float:
    """s powers of two against the L2 norm (Global-QSGD): 1/8 + r min(1, r), r = sqrt(d) 2^(1-s)."""
    r = math.sqrt(d) * 2.0 ** (1 - s)
    return 1 / 8 + r * min(1.0, r)


def global_theta(omega_of_concatenation: float, workers: int) -> float:
    """Global-QSGD's class U(theta): E|G - mean|^2 <= theta / n sum_i |x_i|^2, theta = omega(n d) / n.

    It follows from the reduction property: n workers with one scale are one vector of n d elements.
    """
    return omega_of_concatenation / workers


def exponential_tree_penalty(workers: int) -> float:
    """Growth of the second moment when exponential codes are added in a tree: 9/8 a level.

    >>> round(exponential_tree_penalty(4), 2)
    1.27
    """
    return math.pow(9 / 8, math.ceil(math.log2(workers))) if workers > 1 else 1.0


def rotated(bits: int) -> float:
    """Rotation, Lloyd-Max codebook, unbiased EDEN scale: D / (1 - D) for a large uniform rotation.

    Random Hadamard transforms are not quite that: 1.05 times it is the largest error found in a search over inputs with
    few dominating or many equal elements, a measurement and not a proof.
    """
    error = LLOYD_MAX_ERROR[bits]
    return 1.05 * error / (1 - error)


def rotated_mmse(bits: int) -> float:
    """Delta of the same with the scale smaller by 1 - D: 1 - D for a large uniform rotation.

    With a = 1 - D, a codec of variance omega errs by a^2 (1 + omega) - 2 a + 1, which is D for omega = D / (1 - D).

    >>> round(1 - rotated_mmse(1), 3)
    0.375
    """
    shrink = 1 - LLOYD_MAX_ERROR[bits]
    return 2 * shrink - shrink * shrink * (1 + rotated(bits))


def random_k(d: int, k: int) -> float:
    """k of d elements at random, scaled by d / k: d / k - 1."""
    return d / k - 1


def top_k(d: int, k: int) -> float:
    """Delta of the k largest: at least k / d for any x."""
    return k / d


def top_k_bell(d: int, k: int) -> float:
    """Delta of the k largest of data whose squares have a non-increasing density (any bell shape): 1 - (1 - k/d)^2."""
    return 1 - (1 - k / d) ** 2


def sign(d: int) -> float:
    """Delta of sign(x) |x|_1 / d: |x|_1^2 / (d |x|^2), at least 1 / d."""
    return 1 / d


def rounding(mantissa_bits: int) -> float:
    """Delta of rounding to nearest with that many explicit mantissa bits, inside the type's normal range."""
    return 1 - 2.0 ** (-2 * (mantissa_bits + 1))


def low_rank(rows: int, columns: int, rank: int) -> float:
    """Delta of the best rank-r approximation, which the warm-started power iteration approaches: r / min(m, n)."""
    return min(1.0, rank / min(rows, columns))
