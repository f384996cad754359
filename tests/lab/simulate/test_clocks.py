"""Virtual time against closed formulas, and what must hold of it whatever the numbers are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from thinwire.comm.network import FEW_RANKS
from thinwire.errors import OptionError
from thinwire.lab.simulate.arrivals import Routes, deliver
from thinwire.lab.simulate.churn import Absence, checked, drawn
from thinwire.lab.simulate.collectives import ends
from thinwire.lab.simulate.links import Links, Occupied
from thinwire.lab.simulate.pace import Pace
from thinwire.predict.collectives import Link
from thinwire.predict.presets import PRESETS
from thinwire.predict.textbook import ring_all_reduce

RATE, LATENCY = 1e6, 0.01  # of 8mbit,10ms


def links(workers: int) -> Links:
    return Links.named("8mbit,10ms", workers=workers)


@pytest.mark.parametrize("workers", [2, 3, 8, 33])
def test_collectives_take_what_their_formula_says(workers: int) -> None:
    n, size, start = workers, 300_000.0, np.zeros(workers)
    link = Link(LATENCY, 1 / RATE)
    expected = {
        "all_reduce": ring_all_reduce(link, size, n),
        "all_gather": (n - 1) * (LATENCY + size / RATE),
        "all_to_all": LATENCY + (n - 1) / n * size / RATE,
        "small_sum": 2 * (LATENCY + (n - 1) / n * size / RATE),
    }
    for collective, seconds in expected.items():
        assert ends(links(n), collective, size, start) == pytest.approx(np.full(n, seconds)), collective  # type: ignore[arg-type]
    last = ends(links(n), "broadcast", size, start).max()
    levels = math.ceil(math.log2(n))
    if n == 1 << levels:  # else the last level is not full, and may be reached by the first sender
        assert last == pytest.approx(levels * (LATENCY + size / RATE))
    assert LATENCY + levels * size / RATE - 1e-9 <= last <= levels * (LATENCY + size / RATE) + 1e-9
    if n <= FEW_RANKS:
        small = 1000.0
        assert ends(links(n), "all_gather", small, start) == pytest.approx(np.full(n, LATENCY + (n - 1) * small / RATE))


def test_rings_that_are_not_followed_hop_by_hop_take_as_long() -> None:
    few, many = 1000, 1100  # below and above what is followed
    followed = ends(links(few), "all_reduce", 1e6, np.zeros(few)).max()
    reckoned = ends(links(many), "all_reduce", 1e6, np.zeros(many)).max()
    link = Link(LATENCY, 1 / RATE)
    assert followed == pytest.approx(ring_all_reduce(link, 1e6, few))
    assert reckoned == pytest.approx(ring_all_reduce(link, 1e6, many), rel=2e-3)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all", "broadcast", "small_sum"])
def test_nothing_ends_before_it_began_and_later_starts_end_no_sooner(collective: str) -> None:
    for name in PRESETS:
        net = Links.named(name, workers=24)
        begins = np.random.default_rng(1).uniform(0, 1, 24)
        early = ends(net, collective, 1e6, begins)  # type: ignore[arg-type]
        late = ends(net, collective, 1e6, begins + np.where(np.arange(24) == 5, 3.0, 0.0))  # type: ignore[arg-type]
        assert (early >= begins).all()
        assert (late >= early - 1e-9).all()


def test_a_late_worker_delays_all_in_a_ring_and_its_children_only_in_a_tree() -> None:
    begins = np.zeros(8)
    begins[4] = 5.0
    assert (ends(links(8), "all_reduce", 8e5, begins) > 5.0).all()
    tree = ends(links(8), "broadcast", 1e5, begins)
    assert (tree[[0, 1, 2, 3, 5, 6, 7]] < 5.0).all()
    assert tree[4] >= 5.0


def test_messages_share_the_uplink_and_overloaded_downlinks_delay() -> None:
    net = links(4)
    everyone_to_0 = Routes(net, np.array([1, 2, 3]), np.array([0, 0, 0]))
    found = deliver(Occupied.none(net), everyone_to_0, np.full(3, 1e6), np.zeros(4))
    assert found.at == pytest.approx(np.full(3, 3.0 + LATENCY))  # the downlink of worker 0 takes a second for each
    one_to_all = Routes(net, np.array([0, 0, 0]), np.array([1, 2, 3]))
    found = deliver(Occupied.none(net), one_to_all, np.full(3, 1e6), np.zeros(4))
    assert found.at == pytest.approx(np.full(3, 3.0 + LATENCY))  # and so does its uplink
    assert found.phases(np.array([0]))[0] == pytest.approx([0.0, 3.0, LATENCY, 0.0])


def test_an_uplink_that_is_busy_makes_the_next_round_wait() -> None:
    net, routes = links(2), Routes(links(2), np.array([0]), np.array([1]))
    busy = Occupied.none(net)
    first = deliver(busy, routes, np.array([1e6]), np.array([0.0, 0.0]))
    second = deliver(busy, routes, np.array([1e6]), np.array([0.5, 0.0]))
    assert (first.at[0], second.at[0]) == pytest.approx((1.0 + LATENCY, 2.0 + LATENCY))
    assert second.phases(np.array([0]))[0] == pytest.approx([0.5, 1.0, LATENCY, 0.0])


def test_workers_of_one_host_share_its_uplink_and_talk_quickly_inside() -> None:
    net = Links.named("data-centre", workers=16)
    routes = Routes(net, np.array([0, 1, 2]), np.array([8, 9, 3]))
    size = 25e9 / 8
    at = deliver(Occupied.none(net), routes, np.array([size, size, size]), np.zeros(16)).at
    assert at[:2] == pytest.approx([1.0 + 50e-6, 2.0 + 50e-6])
    assert at[2] < 0.05


def test_a_schedule_changes_rates_and_latency_at_its_time() -> None:
    net = Links.named("8mbit,10ms;80mbit,1ms@10s", workers=2)
    routes = Routes(net, np.array([0]), np.array([1]))
    before = deliver(Occupied.none(net), routes, np.array([1e6]), np.array([9.0, 0.0])).at[0] - 9.0
    after = deliver(Occupied.none(net), routes, np.array([1e6]), np.array([11.0, 0.0])).at[0] - 11.0
    assert (before, after) == pytest.approx((1.01, 0.101))


def test_draws_depend_on_seed_step_and_worker_only() -> None:
    pace = Pace(0.1, straggle=0.5, uneven=0.3, seed=4)
    assert (pace.seconds(3, workers=10) == Pace(0.1, straggle=0.5, uneven=0.3, seed=4).seconds(3, workers=10)).all()
    assert (pace.seconds(3, workers=10) != pace.seconds(4, workers=10)).all()
    assert (pace.seconds(3, workers=10) != Pace(0.1, straggle=0.5, seed=5).seconds(3, workers=10)).all()
    many = np.log(Pace(0.1, straggle=0.5).seconds(0, workers=20_000) / 0.1)
    assert (many.mean(), many.std()) == pytest.approx((0.0, 0.5), abs=0.02)


def test_traces_are_in_order_and_nobody_leaves_twice() -> None:
    trace = drawn(workers=50, there=20.0, away=5.0, until=400.0, seed=2)
    assert checked(trace, workers=50) == trace
    away = sum(one.returns - one.leaves for one in trace) / len(trace)
    assert 4.0 < away < 6.0
    with pytest.raises(OptionError, match="away then"):
        checked([Absence(1.0, 5.0, 0), Absence(3.0, 9.0, 0)], workers=2)
    with pytest.raises(OptionError, match="worker 7"):
        checked([Absence(1.0, 5.0, 7)], workers=2)
