"""The cost model of collectives: rounds and bytes of every schedule, and that all who count them count the same."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from thinwire.exchange.script import Collective, Send
from thinwire.lab.simulate.collectives import ends
from thinwire.lab.simulate.links import Links
from thinwire.predict.collectives import Link, Name, hops, levels, schedule, schedule_of
from thinwire.predict.network import NetworkModel

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
NAMES: tuple[Name, ...] = get_args(Name)
RATE, LATENCY = 1e6, 0.01  # of 8mbit,10ms


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 33])
def test_rounds_and_volume_follow_from_each_other(name: Name, ranks: int) -> None:
    found = schedule(name, ranks)
    assert found.rounds >= 1
    assert 0 <= found.message <= 1
    per_round = {"ring": 1, "tree": 1, "direct": ranks - 1, "doubling": (ranks - 1) / levels(ranks)}
    assert found.volume == pytest.approx(found.rounds * per_round[found.algorithm] * found.message)
    cost = found.cost(Link(LATENCY, 1 / RATE), 1e6)
    assert cost.seconds == pytest.approx(found.rounds * LATENCY + found.volume * 1e6 / RATE)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_waits_for_nothing(name: Name) -> None:
    found = schedule(name, 1)
    assert (found.rounds, found.volume) == (0, 0.0)


def test_the_schedules_are_those_of_the_textbooks() -> None:
    for n in (2, 4, 5, 16):
        log = math.ceil(math.log2(n))
        expected: dict[Name, tuple[int, float]] = {
            "ring_all_reduce": (2 * (n - 1), 2 * (n - 1) / n),
            "tree_all_reduce": (2 * log, 2 * log),
            "direct_all_reduce": (2, 2 * (n - 1) / n),
            "ring_all_gather": (n - 1, n - 1),
            "direct_all_gather": (1, n - 1),
            "doubling_all_gather": (log, n - 1),
            "ring_reduce_scatter": (n - 1, (n - 1) / n),
            "direct_all_to_all": (1, (n - 1) / n),
            "tree_broadcast": (log, log),
            "direct_gather": (1, n - 1),
            "tree_barrier": (2 * log, 0.0),
            "neighbour": (1, 1.0),
        }
        assert expected.keys() == set(NAMES)
        for name, (rounds, volume) in expected.items():
            found = schedule(name, n)
            assert found.rounds == rounds, name
            assert found.volume == pytest.approx(volume), name


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [1e3, 3e5])
def test_plan_and_simulator_agree_on_equal_links(collective: Collective, ranks: int, size: float) -> None:
    links = Links.named("8mbit,10ms", workers=ranks)
    simulated = ends(links, collective, size, np.zeros(ranks)).max()
    planned = NetworkModel("", Link(LATENCY, 1 / RATE)).cost(collective, size, ranks=ranks)
    assert simulated == pytest.approx(planned.seconds)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 20])
def test_scripts_count_the_bytes_of_the_schedules(collective: Collective, ranks: int) -> None:
    """A tree's busiest link carries more than the mean rank sends: a script counts the mean."""
    size = 1_200_000 * ranks
    if collective != "broadcast":
        assert Send(collective, size, "x").sent(ranks) == pytest.approx(hops(collective, size, ranks)[1] * size)
    assert schedule_of(collective, size, ranks).ranks == ranks
