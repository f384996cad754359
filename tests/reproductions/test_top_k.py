"""The page top-k builds from a small run, and its verdicts turn round when the numbers do."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.papers import run, top_k
from benchmarks.papers.page import HOLDS, IN_PART, NOT
from benchmarks.papers.top_k import claims, looks

_SMALL = Path(__file__).parent / "small" / "top-k.json"


@pytest.fixture
def found() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_SMALL.read_text())
    return copy.deepcopy(loaded)


def _verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {claim.said: claim.verdict for claim in claims.all_of(found["parts"])}


def _verdict(found: dict[str, Any], words: str) -> str:
    """Of the one claim that has these words."""
    (verdict,) = [verdict for said, verdict in _verdicts(found).items() if words in said]
    return verdict


def test_the_page_builds_with_its_charts(found: dict[str, Any], tmp_path: Path) -> None:
    made = run.build(found)
    place = made.write(tmp_path)
    text = place.read_text()
    for heading in ("Does it train?", "Which shape does u have?", "What does selection cost?", "How long is a step?"):
        assert f"## {heading}" in text
    charts = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert charts == sorted(made.charts)
    assert len(charts) >= 6
    for name in charts:
        assert f"]({name})" in text
        ElementTree.parse(tmp_path / name)
    assert text.rstrip().splitlines()[-1].startswith(f"Of {len(_verdicts(found))} claims:")
    assert "nan" not in text.lower()


def test_numbers_on_the_page_are_those_of_the_file(found: dict[str, Any]) -> None:
    for at, one in enumerate(found["parts"]["convergence"]["runs"]):
        one["accuracy"] = 0.4321 if one["selector"] == "threshold_k" else 0.1 + at / 1000
    assert "43.2" in run.build(found).markdown()


def _accuracy(found: dict[str, Any], accuracy: dict[str, float]) -> None:
    for one in found["parts"]["convergence"]["runs"]:
        one["accuracy"] = accuracy[one["selector"]]


def test_convergence_claims_follow_the_accuracies(found: dict[str, Any]) -> None:
    near = {"dense": 0.9, "top_k": 0.895, "gaussian_k": 0.89, "threshold_k": 0.895, "random_k": 0.3}
    _accuracy(found, near)
    assert _verdict(found, "about as well as dense") == HOLDS
    assert _verdict(found, "far behind TopK-SGD") == HOLDS
    assert _verdict(found, "about as well as TopK-SGD") == HOLDS
    _accuracy(found, near | {"top_k": 0.7, "random_k": 0.69, "gaussian_k": 0.5})
    assert _verdict(found, "about as well as dense") == NOT
    assert _verdict(found, "far behind TopK-SGD") == NOT
    assert _verdict(found, "about as well as TopK-SGD") == NOT


def test_one_density_of_two_is_in_part(found: dict[str, Any]) -> None:
    for one in found["parts"]["convergence"]["runs"]:
        one["accuracy"] = 0.5 if one["selector"] == "top_k" and one["density"] == 0.001 else 0.9
    assert _verdict(found, "about as well as dense") == IN_PART


def test_of_two_learning_rates_the_better_counts(found: dict[str, Any]) -> None:
    part = found["parts"]["convergence"]
    for one in part["runs"]:
        one["accuracy"] = one["rate"]
    kept = claims.runs_of(part, "random_k", 0.01)
    assert {one["rate"] for one in kept} == {max(one["rate"] for one in part["runs"])}
    assert len(kept) == len(found["seeds"])


def test_the_claims_on_shape_follow_the_looks(found: dict[str, Any]) -> None:
    words = ("bell-shaped during", "A Gaussian describes", "leaves out")
    samples = [sample for one in found["parts"]["shape"]["runs"] for sample in one["samples"]]
    for sample in samples:
        whole, layers = sample["whole"], sample["layers"]
        whole.update(one_hump=True, falls=True, best="gaussian", bell_holds=whole["tests"])
        every = layers["looks"]
        layers.update(one_hump=every, falls=every, best={"gaussian": every}, bell_holds=layers["tests"])
    assert [_verdict(found, one) for one in words] == [HOLDS] * 3
    for sample in samples:
        sample["whole"].update(one_hump=False, best="laplace", bell_holds=0)
        sample["layers"].update(one_hump=0, best={"laplace": sample["layers"]["looks"]}, bell_holds=0)
    assert [_verdict(found, one) for one in words] == [NOT] * 3


def test_counts_over_looks_are_those_of_each_look() -> None:
    look: dict[str, Any] = {
        "finite": True,
        "best": "laplace",
        "one_hump": True,
        "falls": False,
        "tests": 6,
        "bell_holds": 5,
    }
    seen = [look | {"classic_holds": 6}, look | {"classic_holds": 4, "best": None, "falls": True}, {"finite": False}]
    expected = {"looks": 2, "one_hump": 2, "falls": 1, "tests": 12, "bell_holds": 10, "classic_holds": 10}
    assert looks.counted(seen) == {**expected, "best": {"laplace": 1}}
    assert looks.added([looks.counted([one]) for one in seen]) == looks.counted(seen)


def test_only_the_histogram_that_is_drawn_is_kept(found: dict[str, Any]) -> None:
    shape = top_k.measure("shape", run.Options(seeds=2, quick=True))
    kept = {
        (one["seed"], place)
        for one in shape["runs"]
        for place, sample in enumerate(one["samples"])
        if "histogram" in sample["whole"]
    }
    assert kept == {(0, len(shape["runs"][0]["samples"]) - 1)}


def test_a_bound_that_is_far_away_explains_only_in_part(found: dict[str, Any]) -> None:
    rows = [
        row
        for one in found["parts"]["shape"]["runs"]
        for sample in one["samples"]
        for row in sample["whole"]["contraction"]
    ]
    for times, verdict in ((0.5, NOT), (1.5, HOLDS), (9.0, IN_PART)):
        for row in rows:
            row["top_k"] = 1 - times * (1 - row["bell"])
        assert _verdict(found, "tighter bound explains") == verdict


def test_the_claims_on_selectors_follow_the_rows(found: dict[str, Any]) -> None:
    rows = found["parts"]["selectors"]["rows"]
    for factor, outside, quick, near in ((0.2, 0.0, HOLDS, HOLDS), (2.0, 1.0, IN_PART, NOT), (9.0, 1.0, NOT, NOT)):
        for row in rows:
            row["x_top_k"] = {"gaussian_k": factor, "torch.topk": 5.0}.get(row["selector"], 1.0)
            row["outside"] = outside
        assert _verdict(found, "chooses much quicker") == quick
        assert _verdict(found, "chooses about k") == near


def test_published_factors_are_reached_or_not(found: dict[str, Any]) -> None:
    for network in found["parts"]["end_to_end"]["networks"]:
        for row in network["rows"]:
            slow = {"dense": 250.0, "top_k": 100.0, "dgc_k": 120.0}.get(row["name"], 100.0)
            row["step_ms"] = [slow for _ in row["step_ms"]]
    assert _verdict(found, "quick as Dense-SGD") == HOLDS
    assert _verdict(found, "quick as TopK-SGD") == NOT
    assert _verdict(found, "quick as DGC-SGD") == HOLDS


def test_what_was_not_finite_does_not_stop_the_page(found: dict[str, Any]) -> None:
    for one in found["parts"]["convergence"]["runs"]:
        if one["selector"] == "random_k":
            one["curve"] = [[step, None, accuracy] for step, _, accuracy in one["curve"]]
    found["parts"]["shape"]["runs"][-1]["samples"][-1].update(
        whole={"finite": False}, layers=looks.counted([{"finite": False}])
    )
    assert "not finite" in run.build(found).markdown()


@pytest.mark.parametrize("part", ["convergence", "shape", "selectors"])
def test_a_part_is_measured_as_the_page_reads_it(found: dict[str, Any], part: str) -> None:
    found["parts"][part] = json.loads(json.dumps(top_k.measure(part, run.Options(seeds=1, quick=True))))
    assert run.build(found).markdown()
