"""The page on flexible communication: its rules and figures against oracles, and verdicts that follow the numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.papers import flexible
from benchmarks.papers.flexible import choosing_claims, claims, figures, published, rules, runs
from benchmarks.papers.flexible.published import Phase
from benchmarks.papers.flexible.training import WAYS, Job, Ranks, train
from benchmarks.papers.page import HOLDS, IN_PART, NOT, NOT_TESTABLE, Spread
from benchmarks.papers.run import Options

from thinwire import parse
from thinwire.auto.candidates import DENSITIES

SMALL = Path(__file__).parent / "small" / "flexible.json"
CURVE = (0.8, 0.6, 0.45, 0.33, 0.2)


@pytest.fixture
def found() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(SMALL.read_text())
    return made


# ------------------------------------------------------------------------------------------------------ the paper


def test_all_printed_winners_are_those_of_the_formulas() -> None:
    rows = runs.book(Options())["rows"]
    assert len(rows) == 36
    assert sum(row["winner"] == row["published"] for row in rows) == 36
    assert sum(row["code"] == row["published"] for row in rows) == 35  # the ViT of its code is another one


def test_schedules_are_whole_and_scaled() -> None:
    for name, phases in published.SCHEDULES.items():
        assert sum(phase.share for phase in phases) == pytest.approx(1)
        seen = [published.phase_at(name, step / 1000) for step in range(1000)]
        assert seen == sorted(seen)
        for number, phase in enumerate(phases):
            assert seen.count(number) == pytest.approx(1000 * phase.share, abs=2)
    assert runs.schedule_text("C1", (10, 20, 30, 40), lead=5) == (
        "1000mbit,0.2ms@0s;40mbit,0.2ms@15s;40mbit,10ms@35s;1000mbit,10ms@65s"
    )


# ---------------------------------------------------------------------------------------------------------- rules


def test_the_published_knee_stays_where_it_is_when_the_network_gets_slower() -> None:
    """Ten times the latency and a tenth of the rate: every time grows tenfold, beside a constant, and both cancel."""
    quick, slow = Phase(1, 10, 1.0), Phase(10, 1, 1.0)
    assert rules.by_knee(quick, CURVE).ratio == rules.by_knee(slow, CURVE).ratio
    assert rules.by_quotient(quick, CURVE).ratio > 1.5 * rules.by_quotient(slow, CURVE).ratio


def test_time_over_gain_is_the_least_of_the_grid() -> None:
    from thinwire.auto.candidates import energy_at

    phase = Phase(4, 5, 1.0)
    costs = [rules.step_of(one, phase).seconds / energy_at(one, CURVE) for one in rules.RATIOS]
    chosen = rules.by_quotient(phase, CURVE)
    assert chosen.seconds / energy_at(chosen.ratio, CURVE) == pytest.approx(min(costs))


def test_front_and_choice_are_those_of_brute_force() -> None:
    found = rules.against_brute_force(200, size=19)
    assert found["fronts"] == found["choices"] == found["on_front"] == 200


def test_the_gain_curve_is_that_of_exact_top_k() -> None:
    u = torch.randn(5000, generator=torch.Generator().manual_seed(1)) ** 3
    for density, share in zip(DENSITIES, rules.curve_of(u.square()), strict=True):
        kept = u.abs().topk(round(density * 5000)).values.double().square().sum()
        assert share == pytest.approx(float(kept / u.double().square().sum()))


# ------------------------------------------------------------------------------------------------------- training


def test_nothing_is_lost_when_the_ratio_and_the_way_change() -> None:
    ranks = Ranks(parse(WAYS["AG"].format(0.1)), 4, seed=0)
    generator = torch.Generator().manual_seed(0)
    given, delivered = torch.zeros(400), torch.zeros(400)
    for step, (way, ratio) in enumerate((("AG", 0.1), ("STAR", 0.05), ("VAR", 0.2), ("AG", 0.02))):
        ranks.set_recipe(parse(WAYS[way].format(ratio)))
        gradients = [torch.randn(400, generator=generator) for _ in range(4)]
        given += torch.stack(gradients).mean(0)
        delivered += ranks.mean(gradients, step=step)
    owed = torch.stack([one for rank in range(4) if (one := ranks.residual(rank)) is not None]).mean(0)
    torch.testing.assert_close(delivered + owed, given, rtol=1e-4, atol=1e-5)


def test_the_gain_of_a_leader_is_not_that_of_the_mean() -> None:
    """Four ranks with their energy in places of their own: the leader sends all that it has, a quarter of the mean."""
    gradients = [torch.zeros(400) for _ in range(4)]
    for rank, gradient in enumerate(gradients):
        gradient[10 * rank : 10 * rank + 4] = 1.0
    for way, leader, true in (("STAR", 0, 0.25), ("AG", None, 1.0)):
        ranks = Ranks(parse(WAYS[way].format(0.01)), 4, seed=0)
        offered = ranks.offered(gradients)
        gains = ranks.gains(offered, ranks.mean(gradients, step=0), leader)
        assert gains["told"] == pytest.approx(1.0)
        assert gains["true"] == pytest.approx(true)


def test_a_replay_is_timed_by_the_formulas() -> None:
    run = train(Job(0, 8, 4, schedule="C1", policy="0.1", small=True))
    expected = sum(
        rules.step_of(0.1, published.SCHEDULES["C1"][published.phase_at("C1", step / 8)]).seconds for step in range(8)
    )
    assert run["seconds"] == pytest.approx(expected)
    assert [one["way"] for one in run["choices"]] == ["ring", "ring", "tree", "gather"]


# -------------------------------------------------------------------------------------------------------- figures


def test_seconds_to_a_loss_lie_on_the_line_between_two_looks() -> None:
    curve = [{"seconds": 1.0, "held_out": 3.0}, {"seconds": 3.0, "held_out": 1.0}]
    assert figures.seconds_to(curve, 2.0) == pytest.approx(2.0)
    assert figures.seconds_to(curve, 3.5) == 1.0
    assert figures.seconds_to(curve, 0.5) is None


def test_the_page_builds(found: dict[str, Any], tmp_path: Path) -> None:
    assert set(found["parts"]) == set(flexible.PARTS)
    page = flexible.page(found)
    text = page.write(tmp_path).read_text()
    for file in page.charts:
        assert f"]({file})" in text
        assert (tmp_path / file).read_text().startswith("<svg")
    for word in ("nan", "None", "inf "):
        assert word not in text
    assert text.count("| **") == len(claims.all_of(found["parts"]))


def test_who_is_quicker_decides(found: dict[str, Any]) -> None:
    part = copy.deepcopy(found["parts"]["collectives"])
    verdicts = []
    for gather, shared in ((50.0, 20.0), (20.0, 50.0)):
        for setting in part["settings"]:
            for density in figures.densities(part):
                setting["rows"][WAYS["AG"].format(density)]["ms"] = [gather, gather + 1]
                setting["rows"][WAYS["STAR"].format(density)]["ms"] = [shared, shared + 1]
        verdicts.append(claims.shared_wins_at_high_ratios(part).verdict)
    assert verdicts == [HOLDS, NOT]
    for setting in part["settings"]:  # as it should be by the book
        setting["rows"][WAYS["AG"].format(0.1)]["ms"] = [90.0, 91.0]
    assert claims.gather_wins_at_low_ratios(part).verdict == HOLDS
    for setting in part["settings"]:
        setting["rows"][WAYS["AG"].format(0.01)]["ms"] = [950.0, 951.0]
    assert claims.gather_wins_at_low_ratios(part).verdict == NOT


def test_accuracies_decide_between_leaders(found: dict[str, Any]) -> None:
    part = copy.deepcopy(found["parts"]["leaders"])
    for better, verdict in ((0.1, HOLDS), (-0.1, NOT)):
        for run in part["runs"]:
            run["curve"][-1]["accuracy"] = 0.5 + 0.01 * run["seed"] + (better if "norm" in run["recipe"] else 0.0)
        assert claims.variance_helps(part).verdict == verdict
        assert claims.as_accurate_as_gather(part).verdict == HOLDS
    for run in part["runs"]:  # on all shards
        run["curve"][-1]["accuracy"] -= 0.2 if "shared" in run["recipe"] else 0.0
    assert claims.as_accurate_as_gather(part).verdict == NOT


def test_times_decide_between_policies(found: dict[str, Any]) -> None:
    part = copy.deepcopy(found["parts"]["rules"])
    for quickest, verdict in ((True, HOLDS), (False, NOT)):
        for run in part["runs"]:
            run["curve"] = [{"step": 1, "seconds": 0.0, "held_out": 2.0, "accuracy": 0.1}]
            end = 5.0 if (run["policy"] == "published") == quickest else 9.0
            run["curve"].append({"step": 2, "seconds": end + 0.1 * run["seed"], "held_out": 1.0, "accuracy": 0.9})
        assert choosing_claims.rule_beats_fixed(part).verdict == verdict


def test_auto_is_judged_by_its_time_and_by_arriving(found: dict[str, Any]) -> None:
    part = copy.deepcopy(found["parts"]["schedules"])
    for auto, verdict in ((4.0, IN_PART), (40.0, NOT)):  # one seed is never more than a part
        for run in part.values():
            for name, row in run["rows"].items():
                end = auto if name == "auto" else 10.0
                row["curve"] = [{"step": 5, "seconds": end, "held_out": 1.0}]
                row["phases"] = [0]
        assert choosing_claims.auto_beats_fixed(part).verdict == verdict


def test_noise_is_not_agreement() -> None:
    clear, noisy, worse = Spread(0.1, -0.5, 0.7, 3), Spread(-4.7, -10.2, 0.8, 3), Spread(-39.0, -60.0, -18.0, 3)
    judged = figures.equal_or_not
    assert judged([clear, clear]) == HOLDS
    assert judged([clear, noisy]) == NOT_TESTABLE
    assert judged([clear, worse]) == IN_PART
    assert judged([noisy, worse]) == NOT


def test_a_schedule_that_was_not_run_to_its_end_says_so(found: dict[str, Any]) -> None:
    run = found["parts"]["schedules"]["C1"]
    assert figures.phases_seen(run)[0] < figures.phases_seen(run)[1]
    assert "phases were trained in" in flexible.page(found).markdown()


@pytest.mark.slow
def test_every_part_can_be_measured_in_small() -> None:
    for part in ("leaders", "rules"):
        assert flexible.measure(part, Options(seeds=1, quick=True))["runs"]
