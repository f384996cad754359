"""The front and the choice against brute force."""

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


def beats(one: Point, other: Point) -> bool:
    no_worse = one.seconds <= other.seconds and one.worth >= other.worth
    return no_worse and (one.seconds, one.worth) != (other.seconds, other.worth)


@given(points)
def test_the_front_is_what_nothing_beats(given_points: list[Point]) -> None:
    brute = {(p.seconds, p.worth) for p in given_points if not any(beats(other, p) for other in given_points)}
    found = front(given_points)
    assert {(p.seconds, p.worth) for p in found} == brute
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert [p.worth for p in found] == sorted(p.worth for p in found)


@given(points, st.floats(0, 1))
def test_the_choice_is_the_least_time_to_quality_above_the_floor(given_points: list[Point], floor: float) -> None:
    chosen = soonest(given_points, floor=floor)
    good = [p for p in given_points if p.worth >= floor]
    if good:
        assert chosen.worth >= floor
        assert chosen.seconds / chosen.worth == min(p.seconds / p.worth for p in good)
        assert any((chosen.seconds, chosen.worth) == (p.seconds, p.worth) for p in front(good))
    else:
        assert chosen.worth == max(p.worth for p in given_points)


@given(points)
def test_without_quality_the_quickest_is_chosen(given_points: list[Point]) -> None:
    assert soonest(given_points, quality=False).seconds == min(p.seconds for p in given_points)


def test_a_slower_network_moves_the_choice() -> None:
    """The published rule normalises both axes, and then its choice stays where it is."""
    sizes = {"dense": (1.0, 1.0), "half": (0.5, 0.95), "tenth": (0.1, 0.6), "hundredth": (0.01, 0.3)}
    chosen = [
        soonest([Point(name, 1.0 + slow * size, worth) for name, (size, worth) in sizes.items()]).name
        for slow in (0.01, 0.5, 10.0, 1000.0)
    ]
    assert chosen[0] == "dense"
    assert chosen[-1] == "hundredth"
    assert len(set(chosen)) >= 3


def test_what_is_worth_nothing_is_never_reached() -> None:
    assert math.isinf(Point("nothing", 1.0, 0.0).cost)
