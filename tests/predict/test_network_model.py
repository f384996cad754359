"""Networks by name, by link and by file; what cannot be is refused in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import OptionError
from thinwire.predict import textbook
from thinwire.predict.collectives import Link, hops
from thinwire.predict.fit import Regime
from thinwire.predict.network import COLLECTIVES, Fit, NetworkModel
from thinwire.predict.presets import PRESETS


def measured(ranks: int = 4) -> NetworkModel:
    fits = {
        collective: Fit.through(collective, [(size, 1e-3 + size * 1e-8) for size in (1e3, 1e4, 1e5, 1e6)])
        for collective in COLLECTIVES
    }
    return NetworkModel("lab", Link(1e-3, 1e-8), ranks, fits, pairs={"0-1": Link(1e-3, 1e-8)})


def test_a_link_prices_collectives_by_the_book() -> None:
    network, link = NetworkModel("one link", Link(1e-3, 1e-8)), Link(1e-3, 1e-8)
    for ranks in (2, 4, 8, 64):
        ring = network.cost("all_reduce", 1e6, ranks=ranks)
        assert ring.seconds == pytest.approx(textbook.ring_all_reduce(link, 1e6, ranks))
        there = network.cost("all_to_all", 1e6, ranks=ranks).seconds
        back = network.cost("all_gather", 2e6 / ranks, ranks=ranks)
        assert there == pytest.approx(1e-3 + (ranks - 1) / ranks * 1e-2)
        assert back.transfer == pytest.approx((ranks - 1) / ranks * 2e-2)
    assert network.cost("all_reduce", 1e6, ranks=1).seconds == 0.0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_latency_ranks_never_cost_less(collective: Any) -> None:
    base = NetworkModel("one link", Link(1e-3, 1e-8))
    for size in (1e3, 1e5, 1e7):
        for ranks in (2, 3, 8, 9, 64):
            here = base.cost(collective, size, ranks=ranks).seconds
            assert base.cost(collective, 2 * size, ranks=ranks).seconds >= here
            assert NetworkModel("far", Link(2e-3, 1e-8)).cost(collective, size, ranks=ranks).seconds > here
            assert NetworkModel("slow", Link(1e-3, 2e-8)).cost(collective, size, ranks=ranks).seconds > here
            assert base.cost(collective, size, ranks=ranks + 1).seconds >= here


def test_a_measured_network_says_what_was_measured_and_scales_to_other_numbers_of_ranks() -> None:
    network = measured(ranks=4)
    assert network.cost("all_reduce", 1e5, ranks=4).seconds == pytest.approx(2e-3, rel=0.01)
    trips = hops("all_reduce", 1e5, 8)[0] / hops("all_reduce", 1e5, 4)[0]
    assert network.cost("all_reduce", 1e5, ranks=8).latency == pytest.approx(1e-3 * trips, rel=0.01)


def test_two_levels_cost_more_than_the_outer_one_and_less_than_one_level_of_all() -> None:
    two = NetworkModel.named("nvlink+10gbe")
    outer = NetworkModel("flat", two.link)
    for ranks in (16, 64):
        inside = outer.cost("all_reduce", 1e8, ranks=ranks // 8).seconds
        whole = two.cost("all_reduce", 1e8, ranks=ranks).seconds
        assert inside < whole < 1.2 * outer.cost("all_reduce", 1e8, ranks=ranks).seconds
    assert two.cost("all_reduce", 1e8, ranks=8).seconds < 0.1 * outer.cost("all_reduce", 1e8, ranks=8).seconds


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    measured().save(str(path))
    again = NetworkModel.named(str(path))
    assert again.as_dict() == measured().as_dict()
    assert again.cost("swap", 5e4, ranks=4) == measured().cost("swap", 5e4, ranks=4)


def _changed(**changes: Any) -> str:
    return json.dumps({**measured().as_dict(), **changes})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("[1, 2]", "is not a network that thinwire probe wrote"),
        ("{}", "is not a network that thinwire probe wrote"),
        (json.dumps({"schema": 1, "kind": "compare"}), "is not a network of this version"),
        (_changed(schema=99), "is not a network of this version"),
        (_changed(mbit=0), "is not a network that thinwire probe wrote"),
        (_changed(mbit=-5), "no network has"),
        (_changed(latency_ms=-1), "no network has"),
        (_changed(latency_ms="fast"), "is not a network that thinwire probe wrote"),
        (_changed(ranks=1), "two ranks or more"),
        (_changed(ranks=None), "two ranks or more"),
        (
            _changed(fits=[{"collective": "shout", "regimes": [], "points": [], "error": 0}]),
            "a collective that is none",
        ),
        (_changed(fits=[{"collective": "swap", "regimes": [], "points": [], "error": 0}]), "a link without a rate"),
    ],
)
def test_a_corrupt_or_foreign_file_is_refused_in_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "network.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=said) as refusal:
        NetworkModel.named(str(path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["0mbit", "-1mbit", "100mbit,-5ms", "fast", "missing.json", "1gbit@0s;1mbit@9s"])
def test_absurd_networks_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        NetworkModel.named(text)


def test_presets_are_what_people_have() -> None:
    for name, gigabits in (("1gbe", 1), ("10gbe", 10), ("25gbe", 25), ("100gbe", 100)):
        assert NetworkModel.named(name).link.byte_seconds == pytest.approx(8e-9 / gigabits)
    assert {"cross-region", "home-dsl", "nvlink+10gbe"} <= PRESETS.keys()
    for name, preset in PRESETS.items():
        if not preset.uniform:
            continue
        network = NetworkModel.named(name)
        network.check(network.name)
        again = NetworkModel.from_dict(network.as_dict())
        assert again.link.byte_seconds == pytest.approx(network.link.byte_seconds)
        assert (again.inner, again.per_host) == (network.inner, network.per_host)


def test_regimes_end_with_everything() -> None:
    fit = Fit("swap", (Regime(1e4, 1e-3, 0.0), Regime(math.inf, 2e-3, 1e-8)), 0.0)
    assert fit.regime(1e4).latency == 1e-3
    assert fit.regime(1e12).latency == 2e-3
