"""The page of Global-QSGD: its statistics on known data, and verdicts that turn round when the numbers do."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.papers import global_qsgd, run
from benchmarks.papers.global_qsgd.claims import all_of, as_good, graded, pays_below
from benchmarks.papers.global_qsgd.moments import (
    alikeness,
    bias_of,
    delivered,
    gradients,
    mean_of,
    sparsity,
    theta_of,
    tree_theta,
    variance,
)  # fmt: skip
from benchmarks.papers.global_qsgd.training import BLOCKS, EXPONENTIAL, LINEAR, POWERSGD, QSGD, scales
from benchmarks.papers.page import HOLDS, IN_PART, NOT, NOT_TESTABLE

from thinwire import theory
from thinwire.predict.textbook import global_qsgd_pays

SMALL = Path(__file__).parent / "small" / "global-qsgd.json"
Parts = dict[str, Any]


@pytest.fixture
def parts() -> Parts:
    found: Parts = json.loads(SMALL.read_text())["parts"]
    return found


# ---------------------------------------------------------------------------------------------------------- statistics


def test_a_known_bias_is_found_and_none_where_there_is_none() -> None:
    torch.manual_seed(0)
    true = torch.randn(300).double()
    noise = torch.randn(500, 300).double()
    fair = bias_of(true + noise, true)
    assert abs(fair["along"]) < 4 * fair["along_error"]
    assert fair["squares"] == pytest.approx(1, abs=0.3)
    shrunk = bias_of(0.9 * true + noise, true)
    assert shrunk["along"] == pytest.approx(-0.1, abs=4 * shrunk["along_error"])
    assert shrunk["squares"] > 3
    assert shrunk["largest"] > 5


def test_theta_is_that_of_its_definition() -> None:
    given = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])]
    got = mean_of(given) + torch.tensor([[1.0, 0.0], [0.0, -2.0]]).double()
    assert theta_of(got, given) == pytest.approx(2 * (1 + 4) / 2 / (1 + 4 + 9))
    assert theta_of(mean_of(given)[None], given) == 0


def test_gradients_are_what_they_are_called() -> None:
    assert alikeness([torch.ones(5)] * 7) == pytest.approx(1)
    for workers in (2, 16):
        kinds = {kind: gradients(kind, workers=workers, numel=4096, seed=1) for kind in ("alike", "noise", "uneven")}
        assert alikeness(kinds["alike"]) > 0.95
        assert alikeness(kinds["noise"]) == pytest.approx(1 / workers, rel=0.15)
        sizes = [float(x.norm()) for x in kinds["uneven"]]
        assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.2)
        assert not torch.equal(kinds["noise"][0], gradients("noise", workers=workers, numel=4096, seed=2)[0])


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("kind", ["alike", "noise"])
def test_the_bound_of_the_tree_holds_and_is_not_far(workers: int, kind: str) -> None:
    given = gradients(kind, workers=workers, numel=2000, seed=0)
    if kind == "alike":
        given = [given[0] * 0 + 0.75] * workers  # half-way between two powers: what rounds worst
        given[0] = given[0].clone()
        given[0][0] = 1.0
    got = delivered("global_qsgd:8,dither=exponential|all_reduce", given, draws=8, seed=0)
    bound = tree_theta(theory.exponential(workers * 2000, 120), workers)
    assert theta_of(got, given) < bound
    if kind == "alike":
        assert theta_of(got, given) > 0.2 * bound
    assert tree_theta(0.1, 1) == pytest.approx(0.1)


def test_measured_parts_have_the_expected_values() -> None:
    options = run.Options(seeds=1, quick=True)
    for row in variance(options):
        assert 0 < row["theta"][0] < 1.3 * row["bound"]
    for row in sparsity(options):
        given = gradients(row["gradients"], workers=row["workers"], numel=row["numel"], seed=0)
        whole = math.sqrt(sum(float(x.square().sum()) for x in given))
        expected = sum(float(x.abs().sum()) for x in given) / whole  # every element with chance |x| / norm
        alone = sum(float(x.abs().sum() / x.norm()) for x in given)
        assert row["nonzero"][0] == pytest.approx(expected, abs=4 * math.sqrt(expected / 4))
        assert row["nonzero_qsgd"][0] == pytest.approx(alone, abs=4 * math.sqrt(alone / 4))
        assert expected < row["bound"]
    one, many = scales(options)["rows"]
    assert (one["block"], many["block"]) == (0, 64)
    assert all(a["nmse"] > 5 * b["nmse"] for a, b in zip(one["nmse"], many["nmse"], strict=True))


def test_the_limit_of_the_model_is_where_it_turns() -> None:
    adding = {"float_bytes_per_second": 8e9, "code_bytes_per_second": 1e9}
    limit = pays_below(adding)
    assert limit is not None
    assert limit == pytest.approx(12e9)
    assert global_qsgd_pays(link=0.99 * limit, reduction=8e9, slowdown=8)
    assert not global_qsgd_pays(link=1.01 * limit, reduction=8e9, slowdown=8)
    assert pays_below({"float_bytes_per_second": 3e9, "code_bytes_per_second": 1e9}) is None


def test_as_good_as_dense() -> None:
    def part(*losses: float | None) -> Parts:
        ends: dict[str, list[float | None]] = {"dense": [1.0, 1.1, 1.2], "x": list(losses)}
        return {
            "rows": [
                {"recipe": name, "held_out": [[9.0, loss, loss, loss] for loss in found]}
                for name, found in ends.items()
            ]
        }

    assert as_good(part(1.001, 1.101, 1.201), "x")  # surely worse, but by a thousandth
    assert as_good(part(1.2, 1.0, 1.3), "x")  # by chance
    assert not as_good(part(1.1, 1.21, 1.3), "x")
    assert not as_good(part(1.0, 1.1, None), "x")  # diverged
    assert (graded([True, True]), graded([True, False]), graded([False])) == (HOLDS, IN_PART, NOT)


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_builds_from_a_small_file(tmp_path: Path) -> None:
    found = run.load(SMALL)
    page = run.build(found)
    text = page.write(tmp_path).read_text()
    assert len(page.charts) == 7
    assert set(found["parts"]) == set(global_qsgd.PARTS)
    for name in page.charts:
        assert (tmp_path / name).read_text().startswith("<svg")
        assert f"({name})" in text
    assert text.count("not testable here**") == 2
    assert "the numbers on this page mean nothing" in text


def _verdict(parts: Parts, words: str) -> str:
    (found,) = [one for one in all_of(parts) if words in one.said]
    return found.verdict


def _bias(parts: Parts) -> None:
    for row in parts["bias"]:
        row["along"] = [50 * error for error in row["along_error"]]


def _bias_of_elements(parts: Parts) -> None:
    parts["bias"][0]["squares"] = [5.0 for _ in parts["bias"][0]["squares"]]


def _thetas(factor: float, where: Callable[[Parts], bool] = lambda row: True) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        for row in parts["variance"]:
            if where(row):
                row["theta"] = [factor * one for one in row["theta"]]

    return change


def _tree(row: Parts) -> bool:
    return bool(row["dither"] == "exponential" and row["addition"] == "network")


def _as_many(parts: Parts) -> None:
    for row in parts["sparsity"]:
        row["nonzero"] = row["nonzero_qsgd"]


def _losses(recipe: str, worse: float) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        for row in parts["training"]["rows"]:
            if row["recipe"] == recipe:
                row["held_out"] = [
                    [None if worse == math.inf else one + worse for one in curve] for curve in row["held_out"]
                ]

    return change


def _times(recipe: str, factor: float) -> Callable[[Parts], None]:
    """A recipe takes so many times as long as plain DDP."""

    def change(parts: Parts) -> None:
        for network in parts["payoff"]["networks"]:
            rows = {row["recipe"]: row for row in network["rows"]}
            rows[recipe]["measured_ms"] = [factor * one for one in rows["ddp"]["measured_ms"]]

    return change


def _slow_codes(parts: Parts) -> None:
    parts["payoff"]["adding"] = {"float_bytes_per_second": 1e9, "code_bytes_per_second": 1e6}


def _predicted(factor: float) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        for row in (row for network in parts["payoff"]["networks"] for row in network["rows"]):
            row["predicted_ms"] = factor * sum(row["measured_ms"]) / len(row["measured_ms"])

    return change


def _fine_buckets(parts: Parts) -> None:
    first, *others = parts["scales"]["rows"]
    first["nmse"] = copy.deepcopy(others[0]["nmse"])


@pytest.mark.parametrize(
    ("words", "changes", "verdict"),
    [
        ("are unbiased", [], HOLDS),
        ("are unbiased", [_bias], NOT),
        ("are unbiased", [_bias_of_elements], IN_PART),
        ("one vector of nd", [], HOLDS),
        ("one vector of nd", [_thetas(1e4)], NOT),
        ("one vector of nd", [_thetas(1e4, _tree)], HOLDS),  # of codes that are added exactly
        ("as a summary of the paper", [_thetas(20)], NOT),
        ("as a summary of the paper", [_thetas(0.1)], HOLDS),
        ("9/8 a level", [], HOLDS),
        ("9/8 a level", [_thetas(1e3, _tree)], NOT),
        ("about 1 / (8n)", [_thetas(0.01)], HOLDS),
        ("about 1 / (8n)", [_thetas(10)], NOT),
        ("√n times fewer", [_as_many], NOT),
        ("ends about where", [], HOLDS),
        ("ends about where", [_losses(LINEAR, 0.5)], IN_PART),
        ("ends about where", [_losses(LINEAR, 0.5), _losses(EXPONENTIAL, math.inf)], NOT),
        ("as well as QSGD", [], HOLDS),
        ("as well as QSGD", [_losses(QSGD, -0.5), _losses(POWERSGD, -0.5)], NOT),
        ("as well as QSGD", [_losses(QSGD, -0.5)], IN_PART),
        ("One scale for a whole bucket", [], IN_PART),
        ("One scale for a whole bucket", [_fine_buckets], HOLDS),
        ("One scale for a whole bucket", [_losses(BLOCKS, -0.5)], NOT),
        ("always pays", [_times(LINEAR, 0.5)], HOLDS),
        ("always pays", [_times(LINEAR, 2.0)], NOT),
        ("β < 6γ", [_times(EXPONENTIAL, 0.5)], HOLDS),
        ("β < 6γ", [_times(EXPONENTIAL, 2.0)], NOT),
        ("β < 6γ", [_times(EXPONENTIAL, 2.0), _slow_codes], HOLDS),
        ("predicts the step time", [_predicted(1.1)], HOLDS),
        ("predicts the step time", [_predicted(1.5)], NOT),
        ("times as fast over PCIe", [], NOT_TESTABLE),
        ("on NVLink", [], NOT_TESTABLE),
    ],
)
def test_verdicts_follow_the_numbers(
    parts: Parts, words: str, changes: list[Callable[[Parts], None]], verdict: str
) -> None:
    for change in changes:
        change(parts)
    assert _verdict(parts, words) == verdict
