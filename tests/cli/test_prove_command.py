"""`thinwire prove` in real processes: what it writes, what it says, and how it ends."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire.cli.prove import prove

ON_GPUS = ("kernels on a GPU", "DDP contract over NCCL", "benchmark over NCCL")


def run(*arguments: str, cwd: Path, script: str = "") -> subprocess.CompletedProcess[str]:
    program = ["-c", script] if script else ["-m", "thinwire"]
    return subprocess.run(
        [sys.executable, *program, "prove", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # also where there are GPUs, this is the CPU part
    )


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """With some recipes only: all presets take half a minute."""
    folder = tmp_path_factory.mktemp("prove")
    done = run("--quick", "--steps", "10", "--recipes", "dense,two-shot-4,ef|top_k:0.05|all_gather", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, folder


def test_the_result_has_every_field(proved: tuple[Any, Path]) -> None:
    found = json.loads((proved[1] / "prove.json").read_text())
    assert found["thinwire"] == thinwire.__version__
    assert found["device"] == "cpu"
    assert found["proved"] is True
    assert found["machine"]["gpus"] is None
    assert {"torch", "processor", "cores", "cuda", "nccl"} <= found["machine"].keys()
    assert all(part.keys() == {"name", "verdict", "seconds", "reason", "details"} for part in found["parts"])
    verdicts = {part["name"]: part["verdict"] for part in found["parts"]}
    assert verdicts["kernels on the CPU"] == verdicts["DDP contract over gloo"] == "proved"
    assert verdicts["benchmark over gloo"] == "proved"
    assert {verdicts[name] for name in ON_GPUS} == {"not here"}
    assert [line.partition(":")[0] for line in found["missing"]][: len(ON_GPUS)] == list(ON_GPUS)


def test_kernels_checks_and_laps_are_all_there(proved: tuple[Any, Path]) -> None:
    parts = {part["name"]: part["details"] for part in json.loads((proved[1] / "prove.json").read_text())["parts"]}
    kernels = parts["kernels on the CPU"]
    assert len(kernels["kernels"]) >= 31
    assert all(row["cases"] > 0 and row["body"] == "cpu" for row in kernels["kernels"])
    contract = parts["DDP contract over gloo"]
    assert list(contract["recipes"]) == ["dense", "two-shot-4", "ef|top_k:0.05|all_gather"]
    assert {words for checks in contract["recipes"].values() for words in checks.values()} == {"holds"}
    assert contract["processes"] == 2
    rows = {row["contender"]: row for row in parts["benchmark over gloo"]["rows"]}
    assert list(rows)[:3] == ["ddp", "no-communication", "torch-fp16"]
    assert {row["rounds"] for row in rows.values()} == {2}
    assert rows["ddp"]["times_ddp"]["median"] == 1.0
    assert rows["two-shot-4"]["bytes_per_step"] < rows["dense"]["bytes_per_step"]


def test_it_says_what_is_not_proved(proved: tuple[Any, Path]) -> None:
    done, folder = proved
    assert "no GPU here" in done.stdout
    assert "kernels on a GPU, DDP contract over NCCL, benchmark over NCCL" in done.stdout
    assert ": not proved" in done.stdout
    assert done.stdout.strip().endswith("The CPU part is proved; nothing was proved on a GPU")
    assert "DDP contract over gloo: starting" in done.stderr  # plain lines: this is no terminal
    page = (folder / "prove.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "nothing was proved on a GPU" in page
    assert sorted(path.name for path in folder.iterdir()) == ["prove.html", "prove.json"]


FAILING = """
import sys
from thinwire.cli.main import main
from thinwire.lab.prove import run
from thinwire.lab.prove.part import Found, Plan

def plans(settings, **machine):
    return [Plan("kernels on the CPU", lambda tell: Found({"cases": 1}, "pack differs"))]

run.plans = plans
main()
"""


def test_a_failed_proof_ends_with_code_1(tmp_path: Path) -> None:
    done = run("--json", "-", script=FAILING, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["proved"] is False
    assert found["parts"][1]["verdict"] == "failed"
    assert found["parts"][1]["reason"] == "pack differs"
    assert "Not proved: kernels on the CPU failed" in (tmp_path / "prove.html").read_text()
    assert not (tmp_path / "prove.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "giant"], "there is no model giant"),
        (["--steps", "1"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--processes", "1"], "--processes"),
        (["--recipes", "two-shot-5"], "two-shot-5"),
        (["--recipes", ""], "--recipes is empty"),
        (["--timeout", "1"], "--timeout"),
        (["--json", "missing/prove.json"], "--json"),
        (["--report", "missing/prove.html"], "--report"),
        (["--report", "-"], "--report"),
        (["--bogus"], "--bogus"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from thinwire.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["thinwire", "prove", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert words in said.err
    assert list(tmp_path.iterdir()) == []


def test_help_suffices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from thinwire.cli.main import main

    monkeypatch.setattr(sys, "argv", ["thinwire", "prove", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for option in ("--quick", "--steps", "--model", "--recipes", "--processes", "--json", "--report", "--timeout"):
        assert option in said
    assert "exit code" in said


def test_the_docs_list_every_option_and_field(proved: tuple[Any, Path]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    _, _, rest = page.partition("## Options")
    options, _, fields = rest.partition("## The result")
    told = re.findall(r"^\| `--([a-z]+)` ", options, re.MULTILINE)
    real = inspect.signature(prove).parameters
    assert sorted(told) == sorted("json" if name == "json_file" else name for name in real)
    found = json.loads((proved[1] / "prove.json").read_text())
    cells = re.findall(r"^\| (`.*?`) \|", fields, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == found.keys()
    for part in found["parts"][1:]:
        for key in part["details"]:
            assert f"`{key}`" in fields, key
