"""Selectors are compared on the same data: counts and energies against brute force, the command against its rows."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from thinwire.cli.selectors import selectors
from thinwire.errors import OptionError
from thinwire.lab.study.passes import Passes
from thinwire.lab.study.selector_data import DRAWN, Drawn, FromFile, Recorded, sources
from thinwire.lab.study.selectors import Row, all_selectors, check, count_passes, one_tensor, with_feedback

_SIZE = 20_000


def _by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.selector: row for row in rows}


@pytest.fixture(params=DRAWN)
def x(request: pytest.FixtureRequest) -> Tensor:
    return Drawn(request.param).one(_SIZE, seed=3)


def _published_gaussian_count(x: Tensor, k: int, ratio: float) -> int:
    """The rule of the paper, in plain torch: what it finds in the last of up to three evaluations."""
    x = x.double()
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - ratio, dtype=torch.float64)))
    threshold = float(x.mean() + z * x.std())
    for evaluation in (1, 2, 3):
        count = int((x.abs() > threshold).sum())
        if evaluation == 3 or 2 / 3 * k <= count <= 4 / 3 * k:
            break
        threshold *= 0.5 if count < 2 / 3 * k else 1.5
    return count


def test_what_is_chosen_agrees_with_brute_force(x: Tensor) -> None:
    ratio = 0.01
    k = round(ratio * _SIZE)
    best = float(x.double().square().sort(descending=True).values[:k].sum())
    rows = _by_name(one_tensor(x, ratio, rounds=1))
    for name in ("top_k", "torch.topk", "trimmed_k"):
        assert rows[name].selected_over_k == 1.0
        assert rows[name].energy == pytest.approx(best / float(x.double().square().sum()), rel=1e-9)
        assert rows[name].energy_over_top_k == pytest.approx(1.0, rel=1e-9)
    assert rows["gaussian_k"].selected_over_k * k == min(_published_gaussian_count(x, k, ratio), math.ceil(4 * k / 3))
    assert 0.8 <= rows["dgc_k"].selected_over_k <= 1.0
    assert rows["threshold_k"].energy_over_top_k == pytest.approx(1.0, abs=1e-3)
    assert rows["random_k"].energy_over_top_k < 0.5


def test_no_choice_of_k_beats_the_exact_one(x: Tensor) -> None:
    for row in one_tensor(x, 0.02, rounds=1):
        assert 0 <= row.energy <= 1
        assert row.energy_over_top_k <= max(1.0, row.selected_over_k) + 1e-9


def test_passes_are_those_that_the_definition_needs() -> None:
    x = Drawn("gaussian").one(100_000, seed=0)
    counted = {s.name: count_passes(s, x) for s in all_selectors(0.01) if s.name != "torch.topk"}
    assert 1 < counted["top_k"] < 1.1  # a sample of every 63rd, then one pass
    assert counted["gaussian_k"] == 2.0  # moments, then one evaluation, which fits Gaussian data
    assert 1 < counted["dgc_k"] < 1.1
    assert counted["trimmed_k"] >= 5.0  # maximum, magnitude and mean, one or more counts, the choice
    assert counted["random_k"] == 1.0  # only to see whether all is finite


def test_three_evaluations_are_three_passes_more() -> None:
    two_values = torch.ones(1000)
    two_values[:20] = 0.5  # at every threshold nearly all or nothing
    gaussian = next(s for s in all_selectors(0.01) if s.name == "gaussian_k")
    assert count_passes(gaussian, two_values) >= 4.0


def test_other_tensors_are_not_counted() -> None:
    x, other = torch.ones(100), torch.ones(100)
    with Passes(x) as passes:
        _ = other.sum(), x.view(10, 10), x[3], x.numel()
        assert passes.count == 0
        x += other
    assert passes.count == 1


def test_with_feedback_everything_is_sent_or_owed() -> None:
    steps, ratio = 40, 0.01
    gradients = [g for g, _ in zip(Drawn("laplace").stream(5000, seed=1), range(steps), strict=False)]
    for selector in all_selectors(ratio):
        memory, sent = torch.zeros(5000), torch.zeros(5000)
        for step, gradient in enumerate(gradients):
            found = selector.select_remembering(memory, gradient, step=step)
            sent.index_add_(0, found.indices.to(torch.int64), found.values)
        torch.testing.assert_close(sent + memory, torch.stack(gradients).sum(0), rtol=1e-4, atol=1e-4)


def test_feedback_shows_what_threshold_k_keeps_and_gaussian_k_does_not() -> None:
    rows = _by_name(with_feedback(Drawn("layers"), _SIZE, 0.01, steps=60, seed=0))
    assert rows["top_k"].selected_over_k == 1.0
    assert rows["top_k"].outside == 0.0
    assert rows["threshold_k"].selected_over_k == pytest.approx(1.0, abs=0.05)
    assert rows["threshold_k"].passes == pytest.approx(1.0, abs=0.3)
    assert rows["gaussian_k"].outside > 0.8  # heterogeneous layers and a memory: the rule sends far from k
    left_over = rows["random_k"].memory_over_top_k
    assert left_over is not None
    assert left_over > 1.5
    assert all(row.energy_over_top_k <= max(1.0, row.high) + 1e-6 for row in rows.values())


def _without_times(rows: list[Row]) -> list[dict[str, object]]:
    timed = ("seconds", "median_seconds", "x_top_k", "x_add")
    return [{key: value for key, value in asdict(row).items() if key not in timed} for row in rows]


def test_the_same_seed_finds_the_same() -> None:
    first, again, other = (
        _without_times(with_feedback(Drawn("student_t"), 5000, 0.01, steps=20, seed=seed)) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_drawn_data_have_the_shape_they_are_named_for() -> None:
    from scipy import stats

    drawn = {kind: Drawn(kind).one(200_000, seed=0).double().numpy() for kind in DRAWN}
    assert stats.kstest(drawn["gaussian"], "norm").pvalue > 1e-3
    assert stats.kstest(drawn["laplace"], "laplace").pvalue > 1e-3
    assert stats.kstest(drawn["student_t"], "t", args=(3,)).pvalue > 1e-3
    spread = torch.from_numpy(drawn["layers"]).view(8, -1).std(1)
    torch.testing.assert_close(spread, torch.logspace(0, -3, 8, dtype=torch.float64), rtol=0.02, atol=0)


def test_recorded_gradients_are_those_of_training() -> None:
    stream = Recorded("mlp").stream(0, seed=0)
    first, second = next(stream), next(stream)
    assert first.numel() == second.numel() == 1_126_410
    assert not torch.equal(first, second)
    assert torch.equal(first, next(Recorded("mlp").stream(0, seed=0)))


# ------------------------------------------------------------------------------------------------------------- files


def test_own_gradients_come_from_a_tensor_a_dict_or_a_list(tmp_path: Path) -> None:
    weight, bias = torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.float16)
    file = str(tmp_path / "own.pt")
    torch.save({"weight": weight, "bias": bias}, file)
    assert FromFile(file).one(0, seed=0).tolist() == [0, 1, 2, 3, 4, 5, 1, 1]
    torch.save([weight, 2 * weight], file)
    stream = FromFile(file).stream(0, seed=0)
    assert [next(stream)[1].item() for _ in range(3)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.ones(2), torch.ones(3)], "of one length"),
        ([], "of one length"),
        (torch.arange(3), "floating-point"),
        (torch.tensor([1.0, math.nan]), "not finite"),
        ({}, "floating-point"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: object, said: str) -> None:
    file = str(tmp_path / "bad.pt")
    torch.save(content, file)
    with pytest.raises(OptionError, match=said):
        FromFile(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no tensors")
    for name in ("text.pt", "missing.pt"):
        with pytest.raises(OptionError, match="cannot read"):
            sources([], file=str(tmp_path / name))


# ----------------------------------------------------------------------------------------------------------- command


def _run(*options: str) -> tuple[str, str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(selectors)
    result = CliRunner().invoke(app, list(options), catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout, result.stderr


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    own = str(tmp_path / "own.pt")
    torch.save(torch.randn(3000), own)
    small = ["--sizes", "2e3,4e3", "--densities", "0.01", "--rounds", "1", "--feedback-steps", "10"]
    printed, _ = _run(*small, "--data", "gaussian", "--gradients", own, "--feedback-size", "2e3", "--json", "-")
    found = json.loads(printed)
    assert {"machine", "rows", "rounds", "feedback_steps", "seed"} <= found.keys()
    tensors = {(row["data"], row["numel"], row["steps"]) for row in found["rows"]}
    assert tensors == {
        *(("gaussian", 2000, 0), ("gaussian", 4000, 0), ("gaussian", 2000, 10)),
        *(("own.pt", 3000, 0), ("own.pt", 3000, 10)),
    }
    assert len(found["rows"]) == 7 * len(tensors)
    assert found["rows"][0].keys() == asdict(one_tensor(torch.randn(2000), 0.01, rounds=1)[0]).keys()


def test_the_command_prints_a_table() -> None:
    printed, _ = _run(
        "--sizes", "2e3", "--densities", "0.01", "--data", "laplace", "--rounds", "1", "--feedback-steps", "0"
    )
    assert "laplace, 2,000 elements, k/d = 0.01, one tensor" in printed
    heads = [line.split()[0] for line in printed.splitlines() if line]
    assert heads[2:-1] == [selector.name for selector in all_selectors(0.01)]


def test_what_does_not_fit_into_memory_is_refused_before_it_is_made() -> None:
    with pytest.raises(OptionError, match="GB, here are"):
        check(10**13, 0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sizes", "many"], "--sizes takes positive numbers"),
        (["--sizes", "10"], "too few"),
        (["--densities", "2"], "between 0 and 1"),
        (["--data", "cauchy"], "there is no data cauchy"),
        (["--data", ""], "nothing to choose from"),
        (["--rounds", "0"], "--rounds starts at 1"),
        (["--feedback-steps", "3"], "0 or at least 10"),
        (["--json", "/no/such/folder/file"], "choose another --json"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said) as problem:
        _run(*options)
    assert "\n" not in str(problem.value)
