"""The policy in a Reducer: ranks in threads switch together, canaries last a step, and a state continues."""

from __future__ import annotations

import pytest
import torch

from thinwire import Reducer, parse
from thinwire.auto import auto
from thinwire.auto.agreement import Decision
from thinwire.auto.choices import uniform
from thinwire.auto.controller import Controller
from thinwire.auto.tuner import AutoTuner
from thinwire.comm.local import LocalNetwork, on_all_ranks

NAMES = ["dense", "bf16", "two-shot-4"]
Script = list[tuple[str, str | None]]  # for each round a candidate, and one for a canary
RECIPES = {name: str(parse(name)) for name in NAMES}


def tuned(network: LocalNetwork, script: Script) -> tuple[Reducer, AutoTuner]:
    """A reducer whose rank 0 decides by a script."""
    reducer = Reducer("dense", group=network, policy=auto(allow=NAMES))
    tuner = reducer.policy
    assert isinstance(tuner, AutoTuner)
    assert (tuner._controller is not None) == (network.rank == 0)
    if tuner._controller is not None:
        follow(tuner._controller, script)
    return reducer, tuner


def follow(controller: Controller, script: Script) -> None:
    decisions = iter(script)

    def decide(step: int) -> Decision:
        name, tried = next(decisions, script[-1])
        canary = None if tried is None else (NAMES.index(tried), 0)
        return Decision(step, uniform(NAMES.index(name)), 1, canary)

    controller.decide = decide  # type: ignore[method-assign]


def train(reducer: Reducer, steps: int) -> list[tuple[str, list[str], list[float]]]:
    """The recipe, the overrides and the sums of the means of every step."""
    ran = []
    for step in range(steps):
        works = [reducer.start(name, torch.full((64, 64), float(step))) for name in ("first", "second")]
        recipe, overrides = str(reducer.policy.recipe), sorted(reducer.policy.overrides)
        ran.append((recipe, overrides, [float(work.wait().sum()) for work in works]))
        reducer.commit()
    return ran


def test_ranks_switch_at_the_same_step() -> None:
    script: Script = [("bf16", None), ("bf16", "two-shot-4"), ("two-shot-4", None)]
    results = on_all_ranks(LocalNetwork.of(2), lambda network: train(tuned(network, script)[0], 7))
    assert results[0] == results[1]
    recipes, overrides, _ = zip(*results[0], strict=True)
    assert list(dict.fromkeys(recipes)) == [RECIPES[name] for name in NAMES]
    assert overrides.count(["first"]) == 1  # the canary
    assert overrides.count([]) == len(overrides) - 1


def test_a_state_continues_on_all_ranks() -> None:
    def run(network: LocalNetwork) -> tuple[str, str, bool]:
        reducer, tuner = tuned(network, [("two-shot-4", None)])
        train(reducer, 4)
        state = tuner.state_dict()
        _, other = tuned(network, [("two-shot-4", None)])
        other.load_state_dict(state)
        saved = str(other.recipe)
        other.load_state_dict(None)
        return saved, str(other.recipe), state["controller"] is not None

    for rank, (saved, anew, decides) in enumerate(on_all_ranks(LocalNetwork.of(2), run)):
        assert (saved, anew, decides) == (RECIPES["two-shot-4"], RECIPES["dense"], rank == 0)


def test_collectives_are_timed_only_while_auto_reads_the_times() -> None:
    """Not in a warm-up, and not after it was closed: nobody takes the times then, and they would be kept for ever."""

    def run(network: LocalNetwork) -> list[bool]:
        reducer = Reducer("dense", group=network, policy=auto(allow=NAMES), warmup_steps=3)
        timed = []
        for _ in range(3):
            train(reducer, 3)
            timed.append(any(one.spans is not None for one in reducer.networks))
            if len(timed) == 2:
                assert sum(len(one.spans or ()) for one in reducer.networks) < 20
                reducer.set_recipe("bf16")
        assert not isinstance(reducer.policy, AutoTuner)
        return timed

    assert on_all_ranks(LocalNetwork.of(2), run) == [[False, True, False]] * 2


@pytest.mark.parametrize("steps", [1, 30])
def test_a_single_rank_stays_dense(steps: int) -> None:
    reducer = Reducer("dense", group=LocalNetwork.alone(), policy=auto())
    assert {recipe for recipe, *_ in train(reducer, steps)} == {RECIPES["dense"]}
