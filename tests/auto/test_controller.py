"""Decisions in simulated trainings, compared with the best fixed choice in hindsight, and rules that always hold.

The controller was developed on the scenarios of seeds 0 to 39, then on those from 1000, 2000, 3000 and 4000 on, which
were held out at first and showed defects. Those from 5000 on ran once, at the end: mean 0.950, worst 1.078.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import pytest

from support.world import CPU, Scenario, World
from thinwire.auto import auto
from thinwire.auto.choices import per_bucket
from thinwire.auto.controller import Controller
from thinwire.auto.estimator import LinkEstimator
from thinwire.auto.observation import Observation
from thinwire.predict.devices import Device
from thinwire.predict.workload import of_size

FAST, SLOW = (1e-4, 8e-9), (1e-2, 8e-6 / 30)


def quiet(seed: int, trace: list[tuple[float, float]], *, parameters: int = 3_300_000, step: float = 0.158) -> Scenario:
    """A scenario whose truth matches the assumptions, on the given network."""
    scenario = Scenario(seed, steps=len(trace))
    scenario.workers, scenario.trace = 4, trace
    scenario.profile = of_size(parameters, step)
    scenario.assumed = scenario.real = Device("cpu", CPU, hook=1e-3)
    scenario.factors = dict.fromkeys(scenario.factors, 1.0)
    scenario.noise, scenario.outliers, scenario.power = 0.02, 0.0, 0.3
    return scenario


def cost_over_best(scenario: Scenario) -> float:
    world = World(scenario)
    best = min(world.fixed(number) for number in range(len(world.candidates)))
    return world.run().cost / best


@pytest.mark.parametrize("seed", [4, 8])
def test_it_is_about_as_good_as_the_best_fixed_choice(seed: int) -> None:
    assert cost_over_best(Scenario(seed, steps=300)) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1000, 2000, 3000, 4000, 5000])
def test_forty_scenarios(first: int) -> None:
    costs = [cost_over_best(Scenario(seed)) for seed in range(first, first + 40)]
    assert statistics.fmean(costs) <= 1.0, costs
    assert max(costs) <= 1.2, costs


def names(world: World, choices: list[int]) -> list[str]:
    return [world.candidates[number].name for number, _ in itertools.groupby(choices)]


def test_on_a_fast_link_dense_stays() -> None:
    world = World(quiet(0, [(2e-5, 8e-11)] * 120))
    run = world.run()
    assert names(world, run.choices) == ["dense"]
    assert run.controller.events == []


def test_a_change_of_the_network_is_followed_within_twenty_steps() -> None:
    world = World(quiet(0, [FAST] * 200 + [SLOW] * 200 + [FAST] * 200))
    run = world.run()
    best = {
        link: min(range(len(world.candidates)), key=lambda n: world.step(at, n)[0] / world.progress(at, n))
        for link, at in ((FAST, 199), (SLOW, 399))
    }
    for link, at in ((FAST, 199), (SLOW, 220), (FAST, 420)):
        step = 199 if link == FAST else 399
        chosen, ideal = run.choices[at], best[link]
        taken, least = (world.step(step, n)[0] / world.progress(step, n) for n in (chosen, ideal))
        assert taken < 1.1 * least, (at, world.candidates[chosen].name, world.candidates[ideal].name)
    assert run.cost < min(world.fixed(number) for number in range(len(world.candidates)))
    told = [event.text for event in run.controller.events]
    assert any("Mbit/s now (was" in text for text in told)


@pytest.mark.parametrize("after", range(4, 20))
def test_a_link_that_changes_while_a_candidate_is_new_is_not_attributed_to_the_candidate(after: int) -> None:
    world = World(quiet(7, [FAST] * after + [SLOW] * 40))
    chosen = world.run().choices[after + 20]
    costs = [world.step(after + 1, n)[0] / world.progress(after + 1, n) for n in range(len(world.candidates))]
    assert costs[chosen] < 1.3 * min(costs), world.candidates[chosen].name


def test_a_decision_is_one_legible_line() -> None:
    world = World(quiet(1, [SLOW] * 40))
    event = world.run().controller.events[0]
    assert event.text.startswith("step 0: ")
    assert "Mbit/s" in event.text
    assert f"{event.recipe} by " in event.text
    assert "ms predicted, was" in event.text


@pytest.mark.parametrize("noise", [0.1, pytest.param(0.3, marks=pytest.mark.slow)])
def test_heavy_noise_and_outliers_do_not_cause_flapping(noise: float) -> None:
    scenario = quiet(3, [(1e-3, 8e-8)] * 400)
    scenario.noise, scenario.outliers = noise, 0.05
    world = World(scenario)
    run = world.run()
    assert run.changes <= 6
    assert run.cost < 1.1 * min(world.fixed(number) for number in range(len(world.candidates)))


def test_a_slow_worker_is_not_a_slow_network() -> None:
    """One worker computes three times as long: all wait for it, and messages take the same time as before."""
    scenario = quiet(4, [(2e-5, 8e-11)] * 150)
    scenario.profile = replace(
        scenario.profile, forward=3 * scenario.profile.forward, backward=3 * scenario.profile.backward
    )
    world = World(scenario)
    assert names(world, world.run().choices) == ["dense"]


def test_canaries_cost_little() -> None:
    scenario = quiet(5, [(1e-3, 8e-9)] * 400)
    world = World(scenario)
    run = world.run()
    assert run.controller.canaries.spent <= 0.02 * run.seconds


def test_a_family_slower_than_predicted_is_left_and_avoided() -> None:
    """Codecs are eight times slower than measured: the switch does not pay, and dense returns for good."""
    scenario = quiet(6, [(1e-4, 4e-9)] * 400)
    slow = scenario.assumed.sweep
    scenario.real = Device("slow", replace(slow, each=8 * slow.each), hook=0.1)
    world = World(scenario)
    run = world.run()
    assert run.cost < 1.15 * world.fixed(0)
    assert names(world, run.choices)[-1] in ("dense", "bf16")
    assert run.changes <= 8


def test_only_what_is_allowed_runs() -> None:
    trace = [SLOW] * 80
    for options, allowed in (
        (auto(allow=["two-shot-4"]), {"dense", "two-shot-4"}),
        (auto(unbiased=True), {one.name for one in auto().allow if one.unbiased}),
    ):
        world = World(quiet(7, trace), options)
        ran = set(names(world, world.run().choices))
        assert ran <= allowed
        assert ran != {"dense"}


def test_a_floor_on_progress_per_step() -> None:
    link = [(1e-2, 8e-6 / 2)] * 100
    world = World(quiet(8, link), auto(max_error=0.1))
    for number in set(world.run().choices):
        assert world.progress(50, number) > 0.88
    quick = World(quiet(8, link), auto(objective="step_time"))
    least = min(quick.step(50, number)[0] for number in range(len(quick.candidates)))
    assert quick.step(50, quick.run().choices[-1])[0] < 1.1 * least


def test_it_continues_from_a_saved_state() -> None:
    world = World(quiet(9, [SLOW] * 60))
    one = world.run().controller
    other = Controller(auto(), world.scenario.assumed, LinkEstimator(latency=1.0, byte_seconds=1.0), workers=4)
    other.set_workload(world.scenario.profile, world.kinds)
    other.load_state_dict(one.state_dict())
    assert other.decision.choice == one.decision.choice
    assert other.performance.estimator.mbit == one.performance.estimator.mbit
    fewer = Controller(
        auto(allow=["bf16"]), world.scenario.assumed, LinkEstimator(latency=1, byte_seconds=1), workers=4
    )
    fewer.set_workload(world.scenario.profile, world.kinds)
    fewer.load_state_dict(one.state_dict())
    assert fewer.candidates[fewer.decision.choice[0]].name == "dense"


def test_kinds_of_buckets_may_differ() -> None:
    """An embedding table may use another candidate than the matrices."""
    controller = Controller(
        auto(), Device("cpu", CPU, hook=1e-3), LinkEstimator(latency=1e-3, byte_seconds=8e-8), workers=4
    )
    profile = of_size(3_000_000, 0.15)
    kinds = ["large"] * (len(profile.buckets) - 1) + ["embeddings"]
    controller.set_workload(profile, kinds)
    controller.decide_first(profile.forward)
    for step in range(30):
        ran = controller.decision
        performance = controller.performance
        expected = performance.predictor.predict(ran.choice, performance.link(ran.choice))
        ready = tuple(bucket.ready for bucket in profile.buckets)
        controller.observe(
            Observation(
                step=step + 1,
                steps=1,
                seconds=expected.step - profile.rest,
                forward=profile.forward,
                backward=profile.backward,
                rest=profile.rest,
                exchange=expected.under_way,
                ready=ready,
                latency=1e-3,
            ),
            ran=ran,
        )
        controller.decide(step + 1)
    choice = controller.decision.choice
    numbers = per_bucket(choice, kinds)
    assert numbers == [choice[0]] * (len(kinds) - 1) + [choice[1]]
    refined = controller._point(choice).cost
    for number in range(len(controller.candidates)):
        assert refined <= 1.06 * controller._point((choice[0], number, choice[2])).cost


def test_nothing_is_predicted_from_nothing() -> None:
    """Without a timed forward pass, predictions are finite."""
    controller = Controller(auto(), Device("cpu", CPU), LinkEstimator(latency=1e-3, byte_seconds=8e-8), workers=4)
    controller.set_workload(of_size(1_000_000, 0.1), ["large", "large"][: len(of_size(1_000_000, 0.1).buckets)])
    assert math.isfinite(controller._point((0, 0, 0)).seconds)
