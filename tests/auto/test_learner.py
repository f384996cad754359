"""The line from noisy observations: where it ends, how soon it follows, and what does not move it."""

from __future__ import annotations

import math
import random

import pytest

from thinwire.auto.learner import Greeting, Learner, spread
from thinwire.predict.network import NetworkModel

SIZE = 12.5e6


def observe(learner: Learner, latency: float, byte_seconds: float, dice: random.Random, *, noise: float = 0.05) -> bool:
    """One step of 6 trips and 1.5 sizes, and a small message."""
    learner.take_trip(latency * math.exp(dice.gauss(0, noise)))
    expected = 6 * learner.latency + 1.5 * SIZE * learner.byte_seconds
    taken = (6 * latency + 1.5 * SIZE * byte_seconds) * math.exp(dice.gauss(0, noise))
    return learner.take_line(seconds=taken, latency_share=6 * learner.latency / expected, expected=expected)


@pytest.mark.parametrize(("milliseconds", "mbit"), [(1, 100), (20, 100), (0.1, 1000), (5, 20), (50, 1000)])
def test_it_ends_at_the_truth(milliseconds: float, mbit: float) -> None:
    dice, learner = random.Random(0), Learner(latency=1e-3, byte_seconds=8e-6 / 300)
    for _ in range(60):
        observe(learner, milliseconds / 1e3, 8e-6 / mbit, dice)
    assert learner.latency == pytest.approx(milliseconds / 1e3, rel=0.25)
    truth = 6e-3 * milliseconds + 1.5 * SIZE * 8e-6 / mbit
    assert 6 * learner.latency + 1.5 * SIZE * learner.byte_seconds == pytest.approx(truth, rel=0.1)
    if 6e-3 * milliseconds < truth / 2:  # else the rate hardly shows
        assert learner.mbit == pytest.approx(mbit, rel=0.25)


def test_a_change_is_noticed_within_a_few_steps() -> None:
    dice, learner = random.Random(1), Learner(latency=1e-4, byte_seconds=8e-9)
    for _ in range(30):
        assert not observe(learner, 1e-4, 8e-9, dice)
    noticed = [observe(learner, 1e-2, 8e-6 / 30, dice) for _ in range(5)]
    assert any(noticed[:2])
    assert learner.mbit == pytest.approx(30, rel=0.3)
    noticed = [observe(learner, 1e-4, 8e-9, dice) for _ in range(8)]
    assert any(noticed[:3])
    assert learner.mbit == pytest.approx(1000, rel=0.3)


def test_steps_that_agree_are_believed_at_once() -> None:
    for agree, jumps in ((None, False), (False, False), (True, True)):
        learner = Learner(latency=1e-4, byte_seconds=8e-9)
        for _ in range(10):
            learner.take_line(seconds=0.15, latency_share=0.0, expected=0.15, steady=agree)
        assert learner.take_line(seconds=3.0, latency_share=0.0, expected=0.15, steady=agree) == jumps
        assert learner.mbit == pytest.approx(50 if jumps else 1000, rel=0.1)


def test_single_outliers_move_nothing() -> None:
    dice, learner = random.Random(2), Learner(latency=1e-3, byte_seconds=8e-8)
    for step in range(200):
        expected = 6 * learner.latency + 1.5 * SIZE * learner.byte_seconds
        factor = 5.0 if step % 10 == 5 else math.exp(dice.gauss(0, 0.05))
        assert not learner.take_line(seconds=factor * expected, latency_share=0.1, expected=expected)
    assert learner.mbit == pytest.approx(100, rel=0.25)


def test_messages_of_one_size_do_not_let_the_numbers_drift() -> None:
    """One equation, two numbers: without small messages beside it, the time a byte must not run away."""
    dice, learner = random.Random(3), Learner(latency=5e-3, byte_seconds=8e-8)
    for _ in range(2000):
        observe(learner, 5e-3, 8e-8, dice, noise=0.1)
    assert learner.mbit == pytest.approx(100, rel=0.4)
    assert learner.latency == pytest.approx(5e-3, rel=0.4)


@pytest.mark.parametrize("network", ["100mbit,1ms", "20mbit,20ms", "1gbit,0.1ms"])
def test_a_greeting_finds_the_line(network: str) -> None:
    model, ranks = NetworkModel.named(network), 4
    sizes = {"all_reduce": 1 << 19, "all_gather": 1 << 18, "all_to_all": 1 << 18}
    seconds = {name: (size, model.cost(name, size, ranks=ranks).seconds) for name, size in sizes.items()}
    learner = Greeting(ranks, model.cost("all_gather", 1024, ranks=ranks).latency, seconds).learner()
    assert learner.latency == pytest.approx(model.line.latency, rel=0.1)
    assert learner.byte_seconds == pytest.approx(model.line.byte_seconds, rel=0.1)
    for name, (size, taken) in seconds.items():
        assert learner.network("any").cost(name, size, ranks=ranks).seconds == pytest.approx(taken, rel=0.05)


def test_nothing_that_is_observed_breaks_it() -> None:
    learner = Learner(latency=0.0, byte_seconds=0.0)
    for seconds in (0.0, -1.0, 1e9, 1e-12):
        learner.take_trip(seconds)
        learner.take_line(seconds=seconds, latency_share=0.5, expected=1.0)
        learner.take_factor("two_shot", seconds=seconds, expected=1.0)
        assert 0 < learner.latency < math.inf
        assert 0 < learner.byte_seconds < math.inf
    assert 0.25 <= learner.factors["two_shot"] <= 4.0


def test_it_goes_on_after_it_was_saved() -> None:
    dice, one = random.Random(4), Learner(latency=1e-3, byte_seconds=8e-8)
    one.take_factor("two_shot", seconds=2.0, expected=1.0)
    for _ in range(20):
        observe(one, 2e-3, 4e-8, dice)
    other = Learner(latency=1.0, byte_seconds=1.0)
    other.load(one.state())
    assert other.state() == one.state()


def test_the_spread_is_that_of_most() -> None:
    assert spread([1.0, 2.0]) == 0.0
    assert spread([1.0] * 20 + [50.0]) == 0.0
    dice = random.Random(5)
    assert spread([math.exp(dice.gauss(0, 0.1)) for _ in range(500)]) == pytest.approx(0.1, rel=0.2)
