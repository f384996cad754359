"""`thinwire study gradients` as a user types it, and its page in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import browser as browser_module
from thinwire.cli.main import main
from thinwire.errors import OptionError
from thinwire.lab.compare.workloads import workload
from thinwire.lab.study.gradients import Settings, Training, study_gradients
from thinwire.lab.study.page import render_page, write_page
from thinwire.lab.study.portrait import Lens, look
from thinwire.lab.study.result import result_of

HOSTILE = '</script><img src=x onerror="document.title=1"><b>'
RECIPE = "ef|top_k:0.01|all_gather"


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    """Exit code, standard output and standard error of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["thinwire", "study", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr()
    return end.value.code, told.out, told.err


# ----------------------------------------------------------------------------------------------------------- the run


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    lens = Lens(elements=2000, densities=(0.001, 0.01, 0.1), draws=2)
    settings = Settings(("dense", RECIPE), workload="mlp-100k", workers=2, steps=6, at=(0, 3, 5), lens=lens)
    return study_gradients(settings)


def test_all_start_alike_and_only_a_memory_changes_u(found: dict[str, Any]) -> None:
    dense, fed = found["rows"]
    assert [sample["step"] for sample in fed["samples"]] == [0, 3, 5]
    assert dense["samples"][0] == fed["samples"][0]
    assert all(sample["whole"]["gradient"] is None for sample in dense["samples"])
    for sample in fed["samples"][1:]:
        whole = sample["whole"]
        assert whole["memory_share"] > 0.1
        assert whole["gradient"]["kurtosis"] != whole["kurtosis"]
        assert sample["layers"]["layers.0.weight"]["gradient"] is not None
    assert len(dense["loss"]) == 6
    assert dense["loss"][0] == fed["loss"][0]
    assert dense["loss"][-1] != fed["loss"][-1]


def test_u_is_what_the_first_worker_of_the_group_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a second memory that is fed by hand, bucket by bucket."""
    import thinwire as tw

    settings = Settings((RECIPE,), workload="mlp-100k", workers=2, steps=3, at=(0, 1, 2), lens=Lens(elements=500))
    training = Training(settings, RECIPE, workload("mlp-100k"))
    offered: list[dict[str, torch.Tensor]] = []

    def keep(tensors: list[tuple[str, torch.Tensor, object]], **options: object) -> dict[str, object]:
        offered.append({name: u.clone() for name, u, _ in tensors})
        return {}

    monkeypatch.setattr(sys.modules["thinwire.lab.study.gradients"], "look", keep)
    codec = tw.codecs.top_k(0.01)
    residual: dict[str, torch.Tensor] = {}
    for step in range(3):
        model = training.work.model(seed=0)
        model.load_state_dict(training.model.state_dict())
        model(*training.work.batch(step, seed=0, rank=0, world_size=2)).backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        training.step()
        for bucket in training.layout.buckets:
            u = torch.cat([grads[part.name].reshape(-1) for part in bucket.parts]) + residual.get(bucket.name, 0.0)
            residual[bucket.name] = u - codec.decode(codec.encode(u))
            for part in bucket.parts:
                torch.testing.assert_close(offered[step][part.name], part.of(u))
            for part in bucket.exact:
                assert torch.equal(offered[step][part.name], grads[part.name].reshape(-1))


def test_the_dense_recipe_is_training_with_the_mean() -> None:
    settings = Settings(("dense",), workload="mlp-100k", workers=3, steps=2, at=(1,), lens=Lens(elements=500))
    work = workload("mlp-100k")
    training = Training(settings, "dense", work)
    model = work.model(seed=0)
    optimizer = work.optimizer(model)
    for step in range(2):
        training.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * work.rate(step)
        optimizer.zero_grad()
        for rank in range(3):
            (model(*work.batch(step, seed=0, rank=rank, world_size=3)) / 3).backward()
        optimizer.step()
    for mine, theirs in zip(training.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_settings_are_checked() -> None:
    for options, word in [
        ({"recipes": ()}, "nothing to study"),
        ({"recipes": ("dense", "dense")}, "twice"),
        ({"workers": 0}, "--workers"),
        ({"steps": 0}, "--steps"),
        ({"at": (200,)}, "--at"),
        ({"at": ()}, "--at"),
        ({"bucket_mb": 0.0}, "--bucket-mb"),
    ]:
        with pytest.raises(OptionError, match=word):
            Settings(**options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- the command


def test_a_run_tells_a_table_json_and_a_page(tmp_path: Path) -> None:
    out, page = tmp_path / "s.json", tmp_path / "s.html"
    options = [
        "gradients", "--workload", "mlp-100k", "--recipe", f"dense,{RECIPE}", "--workers", "2", "--steps", "3",
        "--at", "0,2", "--densities", "0.01,0.1", "--elements", "1000", "--json", str(out), "--report", str(page),
    ]  # fmt: skip
    command = [sys.executable, "-m", "thinwire", "study", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    told = json.loads(out.read_text())
    assert (told["schema"], told["kind"]) == (1, "study")
    assert [row["recipe"] for row in told["rows"]] == ["dense", RECIPE]
    assert told["settings"]["parameters"] == 99_690
    assert told["settings"]["densities"] == [0.01, 0.1]
    assert told["command"].startswith("thinwire study gradients")
    last = told["rows"][1]["samples"][1]["whole"]
    assert last["memory_share"] > 0
    assert f"{last['contraction'][0]['top_k']:.4f}" in run.stdout
    assert str(last["kurtosis"]) in page.read_text()


def test_nonsense_is_one_line_and_a_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in [
        (["--recipe", "nonsense"], "nonsense"),
        (["--at", "1,x"], "--at"),
        (["--at", "7", "--steps", "3"], "--at"),
        (["--densities", "2"], "densities"),
        (["--workload", "moon"], "moon"),
        (["--report", "/nowhere/x.html"], "/nowhere"),
        (["--nope"], "--nope"),
    ]:
        code, _, problem = said(monkeypatch, capsys, "gradients", *options)
        assert code == 2, options
        assert len(problem.strip().splitlines()) == 1
        assert word in problem


def test_help_is_there_for_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, bare, _ = said(monkeypatch, capsys)
    assert code == 0
    assert "gradients" in bare
    assert "selectors" in bare
    for command, word in (("gradients", "--densities"), ("selectors", "--sizes")):
        code, told, _ = said(monkeypatch, capsys, command, "--help")
        assert code == 0
        assert word in told
    code, _, problem = said(monkeypatch, capsys, "moon")
    assert code == 2
    assert "moon" in problem


# ---------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if browser_module.MISSING:
        pytest.skip(browser_module.MISSING)
    opened = browser_module.Browser()
    yield opened
    opened.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_is_complete_and_quiet(
    found: dict[str, Any], browser: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    browser.log()
    browser.scheme(scheme)
    browser.window(width)
    browser.open(write_page(found, tmp_path / "study.html"))
    browser.settle()
    assert browser.log() == []
    assert browser.script("return performance.getEntriesByType('resource').length") == 0
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.script("return document.querySelectorAll('#shapes figure').length") == 6  # recipes times looks
    assert browser.script("return document.querySelectorAll('#training figure').length") == 3
    assert browser.script("return document.querySelectorAll('#feedback figure').length") == 1
    assert browser.script("return document.querySelectorAll('#contraction figure').length") == 3
    assert browser.script("return document.querySelectorAll('#layers details').length") == 2
    assert "NaN" not in browser.script("return document.querySelector('main').innerHTML")
    shown = browser.script(
        "return [...document.querySelectorAll('#whole tbody tr')].map((row) => row.cells[7].dataset.value)"
    )
    told = [
        next(one for one in sample["whole"]["contraction"] if one["density"] == 0.01)["top_k"]
        for row in found["rows"]
        for sample in row["samples"]
    ]
    assert [float(value) for value in shown] == told
    assert browser.script("return JSON.parse(document.getElementById('result').textContent).kind") == "study"


def test_every_drawn_place_is_inside_its_drawing(found: dict[str, Any], browser: Any, tmp_path: Path) -> None:
    browser.window(1280)
    browser.open(write_page(found, tmp_path / "study.html"))
    outside = browser.script("""
        const found = [];
        for (const svg of document.querySelectorAll("figure > svg")) {
          const box = svg.getBoundingClientRect();
          for (const one of svg.querySelectorAll("polyline, polygon, path, circle, rect, text")) {
            const place = one.getBoundingClientRect();
            if (place.left < box.left - 3 || place.right > box.right + 12 || place.top < box.top - 3
                || place.bottom > box.bottom + 3)
              found.push([svg.getAttribute("aria-label"), one.outerHTML.slice(0, 80)]);
          }
        }
        return found""")
    assert outside == []


def test_text_stays_text_and_one_look_is_enough(browser: Any, tmp_path: Path) -> None:
    u = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    sample = look([(HOSTILE, u, None)], step=0, lens=Lens(elements=500))
    result = result_of([{"recipe": HOSTILE, "samples": [sample]}], settings={"model": HOSTILE})
    browser.log()
    browser.open(write_page(result, tmp_path / "study.html"))
    assert browser.log() == []
    assert browser.script("return document.querySelectorAll('img').length") == 0
    assert browser.script("return document.querySelector('#layers tbody th').textContent") == HOSTILE


def test_other_files_are_refused() -> None:
    with pytest.raises(OptionError, match="study"):
        render_page({"schema": 1, "kind": "compare", "rows": []})
