"""Lines through timings: known ones are found again, through noise, and in the ranges where they hold."""

from __future__ import annotations

import math
import random

import pytest

from thinwire.predict.fit import Regime, fit_error, fit_line, fit_regimes

SIZES = [2.0**power for power in range(10, 27, 2)]


@pytest.mark.parametrize("latency", [1e-4, 5e-3, 0.05])
@pytest.mark.parametrize("rate", [2.5e6, 12.5e6, 1.25e9])
def test_a_known_line_is_found_through_noise(latency: float, rate: float) -> None:
    draw = random.Random(0)
    points = [(size, (latency + size / rate) * draw.gauss(1, 0.03)) for size in SIZES for _ in range(4)]
    found_latency, found_byte = fit_line(points)
    sizes_that_tell = (
        sum(size / rate > 0.3 * latency for size in SIZES),
        sum(size / rate < 3 * latency for size in SIZES),
    )
    if sizes_that_tell[0] >= 3:
        assert 1 / found_byte == pytest.approx(rate, rel=0.1)
    if sizes_that_tell[1] >= 3:
        assert found_latency == pytest.approx(latency, rel=0.1)
    assert fit_error(fit_regimes(points), points) < 0.05


def test_two_ways_of_sending_give_two_regimes() -> None:
    def seconds(size: float) -> float:
        return 2e-3 + size / 12e6 if size < 100_000 else 9e-3 + size / 24e6

    points = [(size, seconds(size)) for size in SIZES]
    regimes = fit_regimes(points)
    assert len(regimes) == 2
    assert 2**16 < regimes[0].upto < 2**18
    assert regimes[0].latency == pytest.approx(2e-3, rel=0.01)
    assert 1 / regimes[1].byte_seconds == pytest.approx(24e6, rel=0.01)
    assert regimes[1].upto == math.inf


def test_one_line_is_not_cut_into_pieces_by_noise() -> None:
    draw = random.Random(1)
    counts = [
        len(fit_regimes([(size, (1e-3 + size / 1e8) * draw.gauss(1, 0.02)) for size in SIZES])) for _ in range(20)
    ]
    assert sum(counts) / len(counts) < 2


def test_nothing_is_ever_negative() -> None:
    falling = [(1e3, 0.02), (1e6, 0.01), (1e7, 0.005)]
    steep = [(1e6, 0.001), (2e6, 0.1), (4e6, 0.4)]
    for points in (falling, steep, [(5.0, 1e-3)], [(5.0, 1e-3), (5.0, 2e-3)]):
        latency, byte_seconds = fit_line(points)
        assert latency >= 0
        assert byte_seconds >= 0
        for regime in fit_regimes(points):
            assert regime.seconds(1e6) >= 0


def test_an_exact_fit_has_no_error() -> None:
    regime = Regime(math.inf, 1e-3, 1e-8)
    points = [(size, regime.seconds(size)) for size in SIZES]
    assert fit_error(fit_regimes(points), points) < 1e-9
