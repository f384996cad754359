"""The page on decentralised training: its simulations against theory, and verdicts that turn round with the numbers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.papers import decentralized
from benchmarks.papers.decentralized import claims, facts, runs
from benchmarks.papers.page import HOLDS, IN_PART, NOT, NOT_TESTABLE
from benchmarks.papers.run import Options

from thinwire.gossip.topology import Topology, exponential, ring, star, torus

SMALL = Path(__file__).parent / "small" / "decentralized.json"
Parts = dict[str, Any]


@pytest.fixture
def found() -> Parts:
    made: Parts = json.loads(SMALL.read_text())
    return made


@pytest.fixture
def parts(found: Parts) -> Parts:
    return copy.deepcopy(found["parts"])


# ------------------------------------------------------------------------------------------------------- simulations


@pytest.mark.parametrize("graph", [ring(8), torus(16), exponential(8), star(8), star(5)], ids=str)
def test_disagreement_neither_grows_nor_shrinks_at_the_noise_limit(graph: Topology) -> None:
    growth = runs.predicted_growth(graph, graph.noise_limit(), rounds=4000)
    assert growth == pytest.approx(1.0, abs=2e-3)
    assert runs.predicted_growth(graph, 1.2 * graph.noise_limit()) > 1.0


@pytest.mark.parametrize("share", [0.5, 1.6])
def test_workers_that_only_talk_follow_the_prediction(share: float) -> None:
    graph = ring(8)
    codec = f"random_k:{1 / (1 + share * graph.noise_limit()):.4f},shared=false"
    with runs.quietly():
        told = runs.drifting(graph, codec=codec, numel=2048, steps=20, seed=0)
    assert told["noise"] == pytest.approx(share * graph.noise_limit(), rel=0.05)
    assert told["growth"] == pytest.approx(runs.predicted_growth(graph, told["noise"]), rel=0.1)
    assert (told["growth"] > 1) == (share > 1)


def test_positions_that_all_workers_share_are_worse_than_the_noise_limit_says() -> None:
    graph, density = ring(8), 0.6
    with runs.quietly():
        told = runs.drifting(graph, codec=f"random_k:{density}", numel=2048, steps=20, seed=0)
    # All move together: a mode is multiplied by 1 - (1 - lambda) / p where it was drawn, and stays as it is elsewhere.
    modes = 1 - torch.linalg.eigvalsh(graph.matrix())[:-1]
    expected = float((density * (1 - modes / density) ** 2 + 1 - density).max())
    assert told["noise"] < graph.noise_limit()
    assert told["growth"] == pytest.approx(expected, rel=0.03)
    assert expected > 1


def test_exact_messages_train_as_dpsgd_does() -> None:
    work = runs.images(None)
    found = [
        runs.trained(work, ring(4), algorithm=algorithm, codec="fp32", steps=20, seed=3)
        for algorithm in ("dpsgd", "dcd", "naive")
    ]
    begun = runs.trained(work, ring(4), algorithm="dpsgd", steps=1, seed=3)
    assert found[0]["loss"] < begun["loss"] - 0.01
    assert all(run["diverged_at"] is None for run in found)
    for run in found[1:]:
        assert run["loss"] == pytest.approx(found[0]["loss"], rel=1e-4)
        assert run["apart"] == pytest.approx(found[0]["apart"], rel=1e-3)
    assert found[1]["noise"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_that_explodes_is_stopped() -> None:
    work = runs.images(None)
    with runs.quietly():
        run = runs.trained(work, ring(4), algorithm="dcd", codec="qsgd:2,block=0", steps=40, seed=0)
    assert run["diverged_at"] is not None
    assert run["noise"] > ring(4).noise_limit()


def test_more_workers_are_better_and_compression_of_four_bits_is_harmless() -> None:
    how: dict[str, Any] = {"steps": 64, "repetitions": 6, "seed": 0}
    one = runs.logistic(ring(1), algorithm="dpsgd", **how)
    eight = runs.logistic(ring(8), algorithm="dpsgd", **how)
    coded = runs.logistic(ring(8), algorithm="dcd", codec="min_max:4,block=64", **how)
    assert len(one) == 6
    assert sum(eight) < 0.6 * sum(one)
    assert sum(coded) == pytest.approx(sum(eight), rel=0.1)
    assert coded != eight


def test_parts_without_training_have_what_the_page_needs() -> None:
    told = decentralized.measure("networks", Options(seeds=1, quick=True))
    slow = next(c for c in told["grids"][0]["cells"] if (c["megabits"], c["latency_ms"]) == (5, 20))
    assert slow["step_ms"]["dcd:4@ring"] < slow["step_ms"]["dcd:8@ring"] < slow["step_ms"]["dpsgd@ring"]
    assert facts.gain(slow["step_ms"], 4) > 1


# ------------------------------------------------------------------------------------------------------------- facts


def test_slopes_of_power_laws_are_their_powers() -> None:
    points = [{"n": n, "values": [3.0 * n**-0.5, 0.1 * n**-1.0]} for n in (1, 2, 8, 64)]
    assert facts.slopes(points, "n") == pytest.approx([-0.5, -1.0])


def test_gain_is_over_the_quickest_way_with_as_many_bits() -> None:
    times = {"ddp": 9.0, "dpsgd@ring": 6.0, "two-shot-8": 5.0, "global-qsgd-8": 4.0, "dcd:8@ring": 2.0}
    assert facts.gain(times, 8) == 2.0
    assert facts.gain(times | {"two-shot-4": 3.0, "dcd:4@ring": 1.0}, 4) == 3.0


# -------------------------------------------------------------------------------------------------- page and verdicts


def test_the_page_builds_with_all_its_charts(found: Parts, tmp_path: Path) -> None:
    page = decentralized.page(found)
    page.write(tmp_path)
    text = (tmp_path / "decentralized.md").read_text()
    for name in page.charts:
        ElementTree.fromstring((tmp_path / name).read_text())
        assert f"({name})" in text
    assert len(page.charts) >= 7
    assert "nan" not in text.lower().replace("finance", "")
    assert text.count("| **") == 14


def _row(parts: Parts, algorithm: str, codec: str, points: float) -> None:
    """Let a row be so many points behind D-PSGD, on all shards; made if it was not run."""
    rows = parts["convergence"]["rows"]
    for skew in (0.0, 0.9):
        dense = facts.row_of(rows, "dpsgd", "fp32", skew)
        assert dense is not None
        row = facts.row_of(rows, algorithm, codec, skew)
        if row is None:
            row = copy.deepcopy(dense) | {"algorithm": algorithm, "codec": codec}
            rows.append(row)
        for run, other in zip(row["runs"], dense["runs"], strict=True):
            run["accuracy"] = other["accuracy"] - points


@pytest.mark.parametrize(
    ("judge", "good", "bad"),
    [
        (claims.eight_bits, [("dcd", "min_max:8,block=512", 0.2), ("ecd", "absolute:8", 0.9)],
         [("dcd", "min_max:8,block=512", 3.0), ("ecd", "absolute:8", 3.0)]),
        (claims.few_bits_ecd, [("ecd", "absolute:4", 1.0), ("ecd", "absolute:2", 4.0)],
         [("ecd", "absolute:4", 9.0), ("ecd", "absolute:2", 60.0)]),
    ],
)  # fmt: skip
def test_verdicts_on_convergence_turn_round(parts: Parts, judge: Callable[..., Any], good: Any, bad: Any) -> None:
    rows = parts["convergence"]["rows"]
    for one in good:
        _row(parts, *one)
    assert judge(rows).verdict == HOLDS
    _row(parts, *bad[0])
    assert judge(rows).verdict == IN_PART
    for one in bad:
        _row(parts, *one)
    assert judge(rows).verdict == NOT
    assert judge([row for row in rows if row["algorithm"] == "dpsgd"]).verdict == NOT_TESTABLE


def test_the_verdict_on_four_bits_names_the_quantiser_only_where_that_is_so(parts: Parts) -> None:
    rows = parts["convergence"]["rows"]
    for codec in ("qsgd:4,block=0", "qsgd:2,block=0"):
        _row(parts, "dcd", codec, 60.0)
    for codec in ("min_max:4,block=512", "min_max:2,block=512", "min_max:4,block=0", "min_max:2,block=0"):
        _row(parts, "dcd", codec, 0.0)
    claim = claims.four_bits_dcd(rows)
    assert (claim.verdict, "not DCD" in claim.why) == (IN_PART, True)
    _row(parts, "dcd", "min_max:2,block=0", 30.0)
    claim = claims.four_bits_dcd(rows)
    assert (claim.verdict, "not DCD" in claim.why) == (IN_PART, False)


def _learned(noise: float, loss: float, *, limit: float = 1.0, published: float = 0.01) -> dict[str, Any]:
    row = {"topology": "ring(8)", "codec": "qsgd:8", "limit": limit, "published": published, "noise": [noise]}
    return row | {"loss": [loss], "dense_loss": [0.5], "diverged_at": [None], "alone": {"noise": [noise]}}


def test_verdicts_on_the_noise_limit_turn_round(parts: Parts) -> None:
    part = {"talking": [], "learning": [_learned(0.005, 0.5), _learned(0.9, 0.5), _learned(1.2, 3.0)]}
    assert claims.limit(part).verdict == HOLDS
    assert claims.sufficient(part["learning"]).verdict == HOLDS
    part["learning"] += [_learned(0.002, 3.0)]
    assert claims.limit(part).verdict == NOT  # three of four
    assert claims.sufficient(part["learning"]).verdict == IN_PART
    part["learning"] = [_learned(0.9, 0.5)] * 8 + [_learned(1.5, 0.5)]
    assert claims.limit(part).verdict == IN_PART
    assert claims.sufficient(part["learning"]).verdict == NOT_TESTABLE


def test_verdicts_on_the_speed_up_turn_round(parts: Parts) -> None:
    part = parts["speedup"]
    alone = {point["n"]: point["values"] for point in part["alone"]}
    for row in part["series"]:
        for point in row["points"]:
            point["values"] = [1.02 * value for value in alone[point["n"]]]
    assert claims.linear(part, "dcd").verdict == HOLDS
    for point in part["series"][-1]["points"]:
        point["values"] = [2.0 * value for value in alone[point["n"]]]
    assert claims.linear(part, part["series"][-1]["algorithm"]).verdict in (NOT, IN_PART)


def test_verdicts_on_networks_turn_round(parts: Parts) -> None:
    part = parts["networks"]
    part["measured"] = None
    for grid in part["grids"]:
        for cell in grid["cells"]:
            both = cell["megabits"] == 5 and cell["latency_ms"] == 20
            cell["step_ms"] = {"ddp": 9.0, "dpsgd@ring": 4.0, "two-shot-4": 4.0, "dcd:4@ring": 2.0 if both else 4.0}
    assert claims.both(part).verdict == HOLDS
    assert claims.one_alone(part).verdict == HOLDS
    for cell in part["grids"][0]["cells"]:
        cell["step_ms"]["dcd:4@ring"] = 1.0 if cell["latency_ms"] != 20 else 4.0
    assert claims.both(part).verdict == IN_PART
    assert claims.one_alone(part).verdict == IN_PART
