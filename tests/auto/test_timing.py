"""The times of steps: what is summed up, what is left out, and loops that have no forward hook."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from thinwire.auto.timing import StepTimer

BUCKETS = [["a"], ["b", "c"]]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of the timer."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def run_step(
    timer: StepTimer, at: Callable[[float], None], begin: float, *, canary: tuple[int, int] | None = None
) -> None:
    """1 s of forward, 2 s of backward, 3 s until the end, 2 s of them with a message under way."""
    at(begin)
    timer.forward_begins()
    at(begin + 1)
    timer.forward_ends()
    at(begin + 2)
    timer.arrived(["a"])
    at(begin + 3)
    timer.arrived(["b", "c"])
    timer.end_step(begin + 6, [(begin + 3, begin + 4), (begin + 3.5, begin + 5)], canary=canary, buckets=BUCKETS)


def test_the_means_of_timed_steps(at: Callable[[float], None]) -> None:
    timer = StepTimer()
    for number in range(5):
        run_step(timer, at, 1 + 10.0 * number)
    measured = timer.measurement(timer.take())
    assert measured.steps == 3  # two are warm-up
    assert (measured.seconds, measured.forward, measured.backward, measured.rest) == (6.0, 1.0, 2.0, 4.0)
    assert (measured.exchange, measured.last_exchange, measured.steady) == (2.0, 2.0, True)
    assert timer.ready == (0.5, 1.0)
    assert timer.measurement(timer.take()).steps == 0


def test_a_canary_step_is_kept_apart(at: Callable[[float], None]) -> None:
    timer = StepTimer()
    for number in range(4):
        run_step(timer, at, 1 + 10.0 * number, canary=(7, 0) if number == 3 else None)
    totals = timer.take()
    assert (totals.steps, totals.canary, totals.canary_seconds) == (1, (7, 0), 2.0)


def test_a_second_backward_without_forward_is_not_timed(at: Callable[[float], None]) -> None:
    timer = StepTimer()
    for number in range(3):
        run_step(timer, at, 1 + 10.0 * number)
    timer.arrived(["a"])
    timer.end_step(40.0, [], canary=None, buckets=BUCKETS)
    assert timer.take().steps == 1


def test_without_a_forward_hook_all_before_the_first_gradient_counts_as_forward(at: Callable[[float], None]) -> None:
    timer = StepTimer()
    for end in itertools.accumulate([10.0] * 4):
        at(end - 4)
        timer.arrived(["a"])
        at(end - 1)
        timer.arrived(["b", "c"])
        timer.end_step(end, [(end - 4, end)], canary=None, buckets=BUCKETS)
    measured = timer.measurement(timer.take())
    assert (measured.steps, measured.seconds, measured.forward, measured.backward) == (2, 10.0, 6.0, 3.0)
    assert (measured.rest, measured.exchange) == (0.0, 4.0)


def test_times_of_another_recipe_are_forgotten(at: Callable[[float], None]) -> None:
    timer = StepTimer()
    for number in range(5):
        run_step(timer, at, 1 + 10.0 * number)
    timer.recipe_changed()
    run_step(timer, at, 100.0)
    assert timer.measurement(timer.take()).steady is None
    timer.restart()
    assert timer.measurement(timer.take()).exchange == 0.0
