"""The link from noisy observations: accuracy, reaction to changes, robustness; and the calibration before it."""

from __future__ import annotations

import math
import random

import pytest

from thinwire.auto.calibrate import Calibration
from thinwire.auto.estimator import LinkEstimator, spread
from thinwire.exchange.script import Collective
from thinwire.predict.network import NetworkModel

SIZE = 12.5e6


def observe(
    estimator: LinkEstimator, latency: float, byte_seconds: float, dice: random.Random, *, noise: float = 0.05
) -> bool:
    """One step with 6 latencies and 1.5 times the size, and a small message."""
    estimator.observe_latency(latency * math.exp(dice.gauss(0, noise)))
    expected = 6 * estimator.latency + 1.5 * SIZE * estimator.byte_seconds
    taken = (6 * latency + 1.5 * SIZE * byte_seconds) * math.exp(dice.gauss(0, noise))
    return estimator.observe_exchange(taken, expected=expected, latency_share=6 * estimator.latency / expected)


@pytest.mark.parametrize(("milliseconds", "mbit"), [(1, 100), (20, 100), (0.1, 1000), (5, 20), (50, 1000)])
def test_it_converges_to_the_truth(milliseconds: float, mbit: float) -> None:
    dice, estimator = random.Random(0), LinkEstimator(latency=1e-3, byte_seconds=8e-6 / 300)
    for _ in range(60):
        observe(estimator, milliseconds / 1e3, 8e-6 / mbit, dice)
    assert estimator.latency == pytest.approx(milliseconds / 1e3, rel=0.25)
    truth = 6e-3 * milliseconds + 1.5 * SIZE * 8e-6 / mbit
    assert 6 * estimator.latency + 1.5 * SIZE * estimator.byte_seconds == pytest.approx(truth, rel=0.1)
    if 6e-3 * milliseconds < truth / 2:  # else the bandwidth hardly shows
        assert estimator.mbit == pytest.approx(mbit, rel=0.25)


def test_a_change_is_noticed_within_a_few_steps() -> None:
    dice, estimator = random.Random(1), LinkEstimator(latency=1e-4, byte_seconds=8e-9)
    for _ in range(30):
        assert not observe(estimator, 1e-4, 8e-9, dice)
    noticed = [observe(estimator, 1e-2, 8e-6 / 30, dice) for _ in range(5)]
    assert any(noticed[:2])
    assert estimator.mbit == pytest.approx(30, rel=0.3)
    noticed = [observe(estimator, 1e-4, 8e-9, dice) for _ in range(8)]
    assert any(noticed[:3])
    assert estimator.mbit == pytest.approx(1000, rel=0.3)


def test_steps_that_agree_are_believed_at_once() -> None:
    for agree, jumps in ((None, False), (False, False), (True, True)):
        estimator = LinkEstimator(latency=1e-4, byte_seconds=8e-9)
        for _ in range(10):
            estimator.observe_exchange(0.15, expected=0.15, latency_share=0.0, steady=agree)
        assert estimator.observe_exchange(3.0, expected=0.15, latency_share=0.0, steady=agree) == jumps
        assert estimator.mbit == pytest.approx(50 if jumps else 1000, rel=0.1)


def test_single_outliers_move_nothing() -> None:
    dice, estimator = random.Random(2), LinkEstimator(latency=1e-3, byte_seconds=8e-8)
    for step in range(200):
        expected = 6 * estimator.latency + 1.5 * SIZE * estimator.byte_seconds
        factor = 5.0 if step % 10 == 5 else math.exp(dice.gauss(0, 0.05))
        assert not estimator.observe_exchange(factor * expected, expected=expected, latency_share=0.1)
    assert estimator.mbit == pytest.approx(100, rel=0.25)


def test_messages_of_one_size_do_not_let_the_numbers_drift() -> None:
    """One equation, two unknowns: without small messages, the time per byte must not drift."""
    dice, estimator = random.Random(3), LinkEstimator(latency=5e-3, byte_seconds=8e-8)
    for _ in range(2000):
        observe(estimator, 5e-3, 8e-8, dice, noise=0.1)
    assert estimator.mbit == pytest.approx(100, rel=0.4)
    assert estimator.latency == pytest.approx(5e-3, rel=0.4)


@pytest.mark.parametrize("network", ["100mbit,1ms", "20mbit,20ms", "1gbit,0.1ms"])
def test_calibration_finds_the_link(network: str) -> None:
    model, ranks = NetworkModel.named(network), 4
    sizes: dict[Collective, int] = {"all_reduce": 1 << 19, "all_gather": 1 << 18, "all_to_all": 1 << 18}
    seconds = {name: (size, model.cost(name, size, ranks=ranks).seconds) for name, size in sizes.items()}
    estimator = Calibration(ranks, model.cost("all_gather", 1024, ranks=ranks).latency, seconds).estimator()
    assert estimator.latency == pytest.approx(model.link.latency, rel=0.1)
    assert estimator.byte_seconds == pytest.approx(model.link.byte_seconds, rel=0.1)
    for name, (size, taken) in seconds.items():
        assert estimator.link("any").cost(name, size, ranks=ranks).seconds == pytest.approx(taken, rel=0.05)


def test_no_observation_breaks_it() -> None:
    estimator = LinkEstimator(latency=0.0, byte_seconds=0.0)
    for seconds in (0.0, -1.0, 1e9, 1e-12):
        estimator.observe_latency(seconds)
        estimator.observe_exchange(seconds, expected=1.0, latency_share=0.5)
        estimator.observe_factor("two_shot", seconds=seconds, expected=1.0)
        assert 0 < estimator.latency < math.inf
        assert 0 < estimator.byte_seconds < math.inf
    assert 0.25 <= estimator.factors["two_shot"] <= 4.0


def test_it_continues_from_a_saved_state() -> None:
    dice, one = random.Random(4), LinkEstimator(latency=1e-3, byte_seconds=8e-8)
    one.observe_factor("two_shot", seconds=2.0, expected=1.0)
    for _ in range(20):
        observe(one, 2e-3, 4e-8, dice)
    other = LinkEstimator(latency=1.0, byte_seconds=1.0)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()


def test_the_spread_ignores_outliers() -> None:
    assert spread([1.0, 2.0]) == 0.0
    assert spread([1.0] * 20 + [50.0]) == 0.0
    dice = random.Random(5)
    assert spread([math.exp(dice.gauss(0, 0.1)) for _ in range(500)]) == pytest.approx(0.1, rel=0.2)
