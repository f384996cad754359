"""The checks of the DDP contract: what holds passes, and each kind of broken promise is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from thinwire.lab.prove import contract
from thinwire.lab.prove.part import Found
from thinwire.lab.prove.parts import judge_benchmark, judge_contract
from thinwire.lab.prove.place import Place
from thinwire.lab.prove.training import Training
from thinwire.recipe.presets import PRESETS


@pytest.fixture
def place() -> Iterator[Place]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Place(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["dense", "two-shot-2-ef", "threshold-k"])
def test_checks_pass_on_one_rank(place: Place, recipe: str) -> None:
    found = {check: contract.CHECKS[check](recipe, place) for check in contract.checks_of(recipe)}
    assert {check: problem for check, problem in found.items() if problem} == {}


def test_only_dense_is_compared_with_plain_ddp() -> None:
    compared = {recipe for recipe in PRESETS if "plain DDP" in contract.checks_of(recipe)}
    assert compared == {"dense"}
    assert "plain DDP" in contract.checks_of("fp32|all_reduce")


def test_replicas_that_differ_are_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "same_on_all", lambda self, tensors: False)
    assert contract.replicas_are_equal("bf16", place) == "gradients differ between ranks in step 0"


def test_a_dense_that_is_not_dense_is_found(place: Place) -> None:
    problem = contract.dense_equals_ddp("bf16", place)
    assert problem == "gradients differ from plain DDP in step 0"


def test_an_overflow_that_is_not_seen_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "spoil", lambda self, parameter, value: None)
    assert contract.overflow_leaves_no_trace("threshold-k", place) == "inf on rank 0 was not seen by rank 0"


def test_an_overflow_that_leaves_a_trace_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = contract._without_step, []

    def other_each_time(state: Any) -> Any:
        calls.append(state)
        return {"call": len(calls), "state": original(state)}

    monkeypatch.setattr(contract, "_without_step", other_each_time)
    assert contract.overflow_leaves_no_trace("threshold-k", place) == "inf on rank 0 changed what rank 0 remembers"


def test_a_state_that_does_not_resume_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights come back, the residuals do not."""
    original = contract._through_file

    def without_memory(value: Any, device: torch.device) -> Any:
        return original({**value, "link": _zeroed(value["link"])}, device)

    monkeypatch.setattr(contract, "_through_file", without_memory)
    assert contract.state_resumes("top-k", place) == "gradients differ 1 steps after resuming"


def _zeroed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _zeroed(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, Tensor) and state.is_floating_point() else state


def test_gradients_that_get_lost_are_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Training.gradients
    monkeypatch.setattr(Training, "gradients", lambda self: [0.99 * gradient for gradient in original(self)])
    problem = contract.recipe_can_change("top-k", place)
    assert problem is not None
    assert problem.startswith("error feedback lost 1.0e-02 of the gradients' norm")


def test_a_pass_that_travels_under_no_sync_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    from torch.nn.parallel import DistributedDataParallel

    monkeypatch.setattr(DistributedDataParallel, "no_sync", lambda self: contextlib.nullcontext())
    problem = contract.no_sync_accumulates("top-k", place)
    assert problem == "a gradient changed under no_sync"


def test_states_are_compared_by_value() -> None:
    """Whatever order their parts were saved in; the number of steps does not count."""
    one = {"a": torch.tensor([float("nan"), -0.0]), "info": '{"step": 3, "recipe": "x"}', "step": 3}
    other = {"info": '{"recipe": "x", "step": 4}', "a": torch.tensor([float("nan"), -0.0]), "step": 4}
    assert contract._same(contract._without_step(one), contract._without_step(other))
    other["a"] = torch.tensor([float("nan"), 0.0])
    assert not contract._same(contract._without_step(one), contract._without_step(other))


# ------------------------------------------------------------------------------------------------------- verdicts

WANTED = [("bf16", "replicas"), ("bf16", "resume")]


def said(rank: int, check: str, problem: str | None = None) -> dict[str, Any]:
    return {"event": "check", "rank": rank, "recipe": "bf16", "check": check, "problem": problem}


def judged(told: list[dict[str, Any]], problem: str | None = None) -> Found:
    return judge_contract(told, WANTED, {"processes": 2, "backend": "gloo"}, problem)


def test_a_check_holds_if_every_rank_says_so() -> None:
    everything = [said(rank, check) for rank in range(2) for _, check in WANTED]
    found = judged(everything)
    assert found.problem is None
    assert found.details["held"] == found.details["checks"] == 2
    missing = judged(everything[:-1])
    assert missing.problem == "bf16, resume: not finished"
    wrong = judged([*everything[:-1], said(1, "resume", "weights differ")])
    assert wrong.problem == "bf16, resume: rank 1: weights differ"
    assert wrong.details["recipes"] == {"bf16": {"replicas": "holds", "resume": "rank 1: weights differ"}}
    assert judged(everything, "rank 0 was ended by signal 9").problem == "rank 0 was ended by signal 9"


def test_a_benchmark_needs_finite_losses_and_laps() -> None:
    laps = [{"event": "lap", "contender": "ddp", "round": number, "step_ms": 5.0} for number in range(3)]
    ended = {"event": "summary", "contender": "ddp", "bytes_per_step": -1.0, "finite": True}
    good = judge_benchmark([*laps, ended], {}, None)
    assert good.problem is None
    assert good.details["rows"][0]["bytes_per_step"] is None
    assert judge_benchmark([*laps, {**ended, "finite": False}], {}, None).problem == "the loss of ddp is not finite"
    assert judge_benchmark([], {}, None).problem == "nothing was measured"
    assert judge_benchmark([], {}, "rank 1: RuntimeError").problem == "rank 1: RuntimeError"
