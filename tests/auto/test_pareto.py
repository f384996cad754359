"""The Pareto front and the choice from it, against brute force."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from thinwire.auto.pareto import Point, front, soonest

points = st.lists(
    st.tuples(st.floats(0.01, 100), st.floats(0.01, 1)).map(lambda pair: Point(f"{pair}", *pair)),
    min_size=1,
    max_size=40,
)


def axes(one: Point) -> tuple[float, float]:
    return one.seconds, one.progress_per_step


def beats(one: Point, other: Point) -> bool:
    no_worse = one.seconds <= other.seconds and one.progress_per_step >= other.progress_per_step
    return no_worse and axes(one) != axes(other)


@given(points)
def test_the_front_is_what_nothing_beats(given_points: list[Point]) -> None:
    brute = {axes(p) for p in given_points if not any(beats(other, p) for other in given_points)}
    found = front(given_points)
    assert {axes(p) for p in found} == brute
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert [p.progress_per_step for p in found] == sorted(p.progress_per_step for p in found)


@given(points, st.floats(0, 1))
def test_the_choice_is_the_least_time_to_quality_above_the_floor(given_points: list[Point], floor: float) -> None:
    chosen = soonest(given_points, floor=floor)
    good = [p for p in given_points if p.progress_per_step >= floor]
    if good:
        assert chosen.progress_per_step >= floor
        assert chosen.seconds / chosen.progress_per_step == min(p.seconds / p.progress_per_step for p in good)
        assert any(axes(chosen) == axes(p) for p in front(good))
    else:
        assert chosen.progress_per_step == max(p.progress_per_step for p in given_points)


@given(points)
def test_without_quality_the_fastest_is_chosen(given_points: list[Point]) -> None:
    assert soonest(given_points, quality=False).seconds == min(p.seconds for p in given_points)


def test_a_slower_network_moves_the_choice() -> None:
    """The published rule normalises both axes, so its choice does not move."""
    sizes = {"dense": (1.0, 1.0), "half": (0.5, 0.95), "tenth": (0.1, 0.6), "hundredth": (0.01, 0.3)}
    chosen = [
        soonest([Point(name, 1.0 + slow * size, progress) for name, (size, progress) in sizes.items()]).name
        for slow in (0.01, 0.5, 10.0, 1000.0)
    ]
    assert chosen[0] == "dense"
    assert chosen[-1] == "hundredth"
    assert len(set(chosen)) >= 3


def test_no_progress_costs_infinitely_much() -> None:
    assert math.isinf(Point("nothing", 1.0, 0.0).cost)
