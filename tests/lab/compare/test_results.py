"""Rows from what workers told: every number recomputed here by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from thinwire.errors import OptionError, ThinwireError
from thinwire.lab.compare.contenders import NO_COMMUNICATION, Contender
from thinwire.lab.compare.results import Results
from thinwire.lab.compare.runner import Settings, split_recipes
from thinwire.recipe.presets import PRESETS

BREAKDOWN = {"encode_ms": 1.0, "exchange_ms": 2.0, "decode_ms": 3.0, "cpu_ms": 2.5, "exposed_ms": 4.0}


def lap(name: str, step: int, *, seconds: float, before: float, loss: float, sent: float = 100.0) -> dict[str, Any]:
    """Five steps that took `seconds` together, after `before` seconds of training."""
    return {
        "event": "lap",
        "contender": name,
        "seed": 0,
        "step": step,
        "seconds": before + seconds,
        "bytes": sent * step,
        "loss": loss + 0.1,
        "held_out": loss,
        "lap_seconds": seconds,
        "lap_bytes": sent * 5,
        "lap_cpu_seconds": seconds / 4,
        "step_seconds": [seconds / 5] * 5,
        "breakdown": BREAKDOWN if name not in ("ddp", NO_COMMUNICATION) else dict.fromkeys(BREAKDOWN),
    }


def told(results: Results, name: str, seconds: float, losses: list[float]) -> None:
    for number, loss in enumerate(losses):
        results.take(lap(name, 5 * (number + 1), seconds=seconds, before=seconds * number, loss=loss))


@pytest.fixture
def results() -> Results:
    results = Results(["ddp", "two-shot-2", "threshold-k"], 15, "100mbit,1ms")
    told(results, NO_COMMUNICATION, 1.0, [5.0, 4.0, 3.0])
    told(results, "ddp", 10.0, [5.0, 4.0, 3.0])
    results.take({"event": "target", "seed": 0, "loss": 3.0})
    told(results, "two-shot-2", 2.0, [5.0, 4.0, 3.5, 2.5])
    told(results, "threshold-k", 1.25, [5.5, 5.0, 4.5, 4.0])
    return results


def test_rows(results: Results) -> None:
    found = results.as_dict()
    assert found["no_communication"]["step_ms"] == pytest.approx(200.0)
    ddp, quantised, sparse = found["rows"]
    assert [row["step_ms"] for row in found["rows"]] == pytest.approx([2000.0, 400.0, 250.0])
    assert [row["fraction_of_no_communication"] for row in found["rows"]] == pytest.approx([0.1, 0.5, 0.8])
    assert found["no_communication"]["cpu_ms"] == pytest.approx(50.0)
    assert [row["cpu_ms"] for row in found["rows"]] == pytest.approx([450.0, 50.0, 12.5])  # above no communication
    assert [row["final_loss"] for row in found["rows"]] == [3.0, 3.5, 4.5]  # after 15 steps, not after more
    assert [row["bytes_per_step"] for row in found["rows"]] == [100.0] * 3
    assert ddp["seconds_to_target"] == 30.0
    assert quantised["seconds_to_target"] == pytest.approx(7.0)  # half-way between the third and the fourth look
    assert sparse["seconds_to_target"] is None
    assert [row["speedup_over_ddp"] for row in found["rows"]] == pytest.approx([1.0, 5.0, 8.0])
    assert [row["speedup_to_target"] for row in found["rows"]] == [1.0, pytest.approx(30 / 7), None]
    assert quantised["breakdown"] == {"compute_ms": pytest.approx(200.0), **BREAKDOWN}
    assert ddp["breakdown"]["exposed_ms"] == pytest.approx(1800.0)
    assert ddp["breakdown"]["encode_ms"] is None
    assert found["headline"] == "4.3x faster than DDP on 100mbit,1ms, same loss: two-shot-2"


def test_the_first_steps_are_on_the_clock_but_not_in_the_step_time() -> None:
    results = Results(["ddp"], 5, "unshaped")
    event = lap("ddp", 5, seconds=14.0, before=0.0, loss=3.0)
    event["step_seconds"] = [10.0, 1.0, 1.0, 1.0, 1.0]
    results.take(event)
    [row] = results.as_dict()["rows"]
    assert row["step_ms"] == pytest.approx(1000.0)
    assert row["curve"][0]["seconds"] == 14.0


def test_a_busy_lap_does_not_move_the_step_time(results: Results) -> None:
    before = results.as_dict()["rows"][1]["step_ms"]
    results.take(lap("two-shot-2", 25, seconds=50.0, before=8.0, loss=2.4))
    assert results.as_dict()["rows"][1]["step_ms"] == before


def test_what_failed_or_was_stopped_says_so(results: Results) -> None:
    results.take({"event": "failed", "contender": "threshold-k", "seed": 0, "problem": "all_gather failed"})
    rows = results.as_dict()["rows"]
    assert [row["status"] for row in rows] == ["finished", "finished", "failed"]
    assert rows[2]["problem"] == "all_gather failed"
    early = Results(["ddp"], 100, "unshaped")
    told(early, "ddp", 1.0, [5.0])
    assert early.as_dict()["rows"][0]["status"] == "stopped"


def test_a_loss_that_is_not_finite_is_no_number() -> None:
    results = Results(["two-shot-2"], 5, "unshaped")
    told(results, "two-shot-2", 1.0, [math.nan])
    [row] = results.as_dict()["rows"]
    assert row["final_loss"] is None
    assert row["curve"][0]["held_out"] is None


def test_headlines_claim_no_more_than_was_measured() -> None:
    slow = Results(["ddp", "two-shot-2"], 5, "unshaped")
    told(slow, "ddp", 1.0, [3.0])
    slow.take({"event": "target", "seed": 0, "loss": 3.0})
    told(slow, "two-shot-2", 2.0, [3.0])
    assert slow.as_dict()["headline"] == "Nothing is faster than DDP on unshaped: stay with it"
    worse = Results(["ddp", "threshold-k"], 5, "10mbit")
    told(worse, "ddp", 4.0, [3.0])
    told(worse, "threshold-k", 1.0, [4.0])
    assert worse.as_dict()["headline"] == "4.0x faster than DDP on 10mbit, loss 4.000 instead of 3.000: threshold-k"
    assert Results(["ddp"], 5, "10mbit").as_dict()["headline"] == "1 recipes on 10mbit"


def test_means_over_seeds() -> None:
    results = Results(["ddp"], 5, "10mbit")
    for seed, seconds, loss in ((0, 1.0, 3.0), (1, 3.0, 4.0)):
        results.take({**lap("ddp", 5, seconds=seconds, before=0.0, loss=loss), "seed": seed})
        results.take({"event": "target", "seed": seed, "loss": loss})
    [row] = results.as_dict()["rows"]
    assert (row["final_loss"], row["step_ms"], row["seconds_to_target"]) == (3.5, pytest.approx(400.0), 2.0)
    assert [repeat["seed"] for repeat in row["repeats"]] == [0, 1]


# ------------------------------------------------------------------------------------------------------------ settings


def test_every_preset_is_a_contender_with_a_sentence() -> None:
    for name in PRESETS:
        assert Contender.named(name).about != "A recipe as given."


def test_recipes_with_commas_of_their_own() -> None:
    text = (
        "ddp,ef|rotated:2|two_shot:3,feedback=true,global_qsgd:8,dither=exponential,norm=l2|all_reduce,torch-powersgd:4"
    )
    assert split_recipes(text) == (
        "ddp",
        "ef|rotated:2|two_shot:3,feedback=true",
        "global_qsgd:8,dither=exponential,norm=l2|all_reduce",
        "torch-powersgd:4",
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"workers": 0}, "1 to 64 workers, not 0"),
        ({"workers": 65}, "1 to 64 workers, not 65"),
        ({"steps": 0}, "--steps is a number of 1 or more"),
        ({"repeats": 0}, "--repeats is a number of 1 or more"),
        ({"lap": 0}, "--lap is a number of 1 or more"),
        ({"seed": -1}, "--seed is a number of 0 or more"),
        ({"extra": -0.5}, "--extra is a share"),
        ({"recipes": ()}, "there is nothing to compare"),
        ({"recipes": ("ddp", "ddp")}, "named twice"),
        ({"recipes": ("two-shots-2",)}, "did you mean two-shot-2"),
        ({"recipes": ("nonsense",)}, "choose ddp, auto, dcd:4@ring, torch-fp16"),
        ({"recipes": ("torch-powersgd",)}, "write torch-powersgd:4"),
        ({"recipes": ("torch-powersgd:0",)}, "write torch-powersgd:4"),
        ({"recipes": ("top_k:0.01|all_reduce",)}, "use all_gather"),
        ({"network": "fast"}, "fast"),
        ({"network": "100mbits"}, "100mbits"),
        ({"method": "magic"}, "there is no method magic"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ThinwireError, match=told) as refused:
        Settings(**{"recipes": ("ddp",), **options})
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, (OptionError, ValueError))
