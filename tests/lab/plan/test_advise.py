"""Plans: plain DDP where nothing pays, the measured price in words, and maps."""

from __future__ import annotations

import pytest

from thinwire.errors import OptionError
from thinwire.lab.plan.advise import RECIPES, make_plan, statistical_price
from thinwire.lab.plan.heat import as_html, as_text, make_heat, networks_between, numbers_between
from thinwire.predict.devices import Device, Speed
from thinwire.predict.network import NetworkModel
from thinwire.predict.workload import of_size
from thinwire.recipe.presets import PRESETS

A100 = Device.named("a100")
SLOW_CPU = Device("slow", Speed(1e-4, 1e-7))  # a hundred nanoseconds an element: no codec can be worth it
RESNET = of_size(25_600_000, 0.12)


def test_a_slow_network_pays_and_the_words_have_the_numbers() -> None:
    plan = make_plan(RESNET, NetworkModel.named("100mbit,1ms"), A100, workers=4)
    assert plan.advised.speedup > 5
    assert plan.advised.recipe in plan.verdict
    assert f"{plan.advised.speedup:.1f}x" in plan.verdict
    dense = next(row for row in plan.rows if row.recipe == "ddp")
    assert f"{dense.prediction.step:.1f} s" in plan.why
    assert "by the book" in plan.sure
    assert "data sheet" in plan.sure
    steps = [row.prediction.step for row in plan.rows]
    assert steps == sorted(steps)
    assert {row.recipe for row in plan.rows} == set(RECIPES)
    assert plan.advised.recipe in plan.marked
    assert 1 <= len(plan.marked) <= 3


@pytest.mark.parametrize(
    ("network", "device"), [("100gbe", A100), ("100mbit,1ms", SLOW_CPU)], ids=["fast network", "slow coding"]
)
def test_staying_with_ddp_is_an_answer(network: str, device: Device) -> None:
    small = of_size(1_000_000, 0.5)
    plan = make_plan(small, NetworkModel.named(network), device, workers=2)
    assert plan.advised.recipe == "ddp"
    assert plan.verdict.startswith("Stay with plain DDP")
    assert "save less" in plan.why


def test_the_advised_recipe_is_unbiased_where_one_pays() -> None:
    for network in ("10mbit,10ms", "1gbe", "home-dsl"):
        advised = make_plan(RESNET, NetworkModel.named(network), A100, workers=8).advised
        assert not advised.biased


def test_recipes_that_so_many_workers_cannot_run_are_named_with_the_reason() -> None:
    plan = make_plan(RESNET, NetworkModel.named("1gbe"), A100, workers=200)
    assert "global-qsgd-8" in plan.refused
    assert "global-qsgd-8" not in {row.recipe for row in plan.rows}


@pytest.mark.parametrize("name", ["ddp", "torch-fp16", *PRESETS])
def test_every_recipe_has_a_price(name: str) -> None:
    text, exactness, biased = statistical_price(name, 1 << 20)
    assert text
    assert 0 <= exactness <= 1
    assert biased == (
        name
        in {"gaussian-k", "threshold-k", "top-k", "ar-top-k", "ar-top-k-var", "two-shot-top-k", "dgc", "powersgd-4"}
    )


def test_two_bits_cost_more_than_four() -> None:
    prices = [statistical_price(f"two-shot-{bits}", 1 << 20)[1] for bits in (1, 2, 3, 4, 8)]
    assert prices == sorted(prices)


# ------------------------------------------------------------------------------------------------------- maps


def test_a_map_holds_the_plans_of_its_cells() -> None:
    networks, workers = networks_between("10mbit..10gbit"), numbers_between("2..16")
    heat = make_heat(RESNET, networks, A100, workers=workers)
    assert len(heat.cells) == len(networks) == 7
    for line in heat.cells:
        for cell in line:
            plan = make_plan(RESNET, NetworkModel.named(cell.network), A100, workers=cell.workers)
            assert (cell.recipe, cell.speedup) == (plan.advised.recipe, plan.advised.speedup)
    told = as_text(heat).splitlines()
    assert len(told) == 8
    page = as_html(heat, title="<plan>")
    assert page.count("<td") == 28
    assert "&lt;plan&gt;" in page
    assert "<script" not in page


@pytest.mark.parametrize("text", ["0", "8..2", "-1", "two", "2..", "1..1000000"])
def test_absurd_numbers_of_workers_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        numbers_between(text)


@pytest.mark.parametrize("text", ["1gbit..10mbit", "fast..faster", "10mbit..", "unshaped..1gbit"])
def test_absurd_ranges_of_networks_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        networks_between(text)


def test_a_map_does_not_grow_without_end() -> None:
    with pytest.raises(OptionError, match="at most"):
        make_heat(RESNET, ["1gbe"] * 40, A100, workers=list(range(2, 10)))
