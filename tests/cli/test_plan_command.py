"""`thinwire plan` and `thinwire probe` as users call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import thinwire_here
from thinwire.cli.main import main

GIVEN = ["--params", "25.6M", "--step-time", "120ms", "--device", "a100"]


def thinwire(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "thinwire", *arguments], capture_output=True, text=True, timeout=240, cwd=cwd
    )


def test_a_plan_of_given_numbers() -> None:
    done = thinwire_here("plan", *GIVEN, "--network", "1gbe", "--workers", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Compression pays")
    assert "How sure" in done.stdout
    assert done.stdout.count("\n* ") == 3


def test_json_has_all_rows(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = thinwire_here("plan", *GIVEN, "--network", "nvlink+10gbe", "--workers", "16", "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["advised"] in {row["recipe"] for row in found["rows"]}
    assert all(row["predicted_ms"] >= 120 - 1e-6 for row in found["rows"])
    assert "ddp" in {row["recipe"] for row in found["rows"]}


def test_a_map_in_the_terminal_and_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "map.html"
    done = thinwire_here(
        "plan", *GIVEN, "--network", "10mbit..1gbit", "--workers", "2..8", "--report", str(page), "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["cells"]) == 15
    assert page.read_text().count("<td") == 15


def test_a_model_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    net, x = torch.nn.Linear(256, 256), torch.randn(16, 256)\n"
        "    return net, lambda model: model(x).square().mean()\n"
    )
    done = thinwire(
        "plan", "--model", "mine:build", "--network", "10mbit,5ms", "--device", "t4", "--recipes", "two-shot-2",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "two-shot-2" in done.stdout
    assert "measured here" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "say what is trained"),
        (["plan", "--params", "0", "--step-time", "1ms"], "--params is such as 25.6M"),
        (["plan", "--params", "many", "--step-time", "1ms"], "--params is such as 25.6M"),
        (["plan", "--params", "1M"], "--step-time"),
        (["plan", "--params", "1M", "--step-time", "0ms"], "--step-time is such as 120ms"),
        (["plan", *GIVEN, "--network", "0mbit"], "a rate must be"),
        (["plan", *GIVEN, "--network", "100mbit,-5ms"], "neither a rate, a delay"),
        (["plan", *GIVEN, "--network", "none.json"], "cannot read"),
        (["plan", *GIVEN, "--workers", "1", "--network", "1gbe"], "one worker sends nothing"),
        (["plan", *GIVEN, "--network", "1gbe", "--recipes", "two-shots"], "there is no preset two-shots"),
        (["plan", *GIVEN, "--network", "1gbe", "--report", "x.html"], "--report draws a map"),
        (["plan", *GIVEN, "--network", "1gbe", "--device", "abacus"], "there is no device"),
        (["plan", *GIVEN, "--network", "1gbe", "--json", "/no/such/folder/x"], "cannot write"),
        (["plan", "--verify"], "--emulate"),
        (["plan", "--verify", "--emulate", "100mbit", "--network", "1gbe"], "--network does not go with --verify"),
        (["plan", "--verify", "--emulate", "100mbit", "--device", "a100"], "--device does not go with --verify"),
        (["plan", *GIVEN, "--network", "1gbe", "--steps", "20"], "--steps goes with --verify"),
        (["plan", *GIVEN, "--network", "1gbe", "--method", "paced"], "--method goes with --emulate"),
        (["plan", *GIVEN, "--network", "1gbe", "--emulate", "1gbit"], "--network does not go with --emulate"),
        (["probe", "--emulate", "1gbit", "--method", "magic"], "magic"),
        (["plan", "--verify", "--emulate", "100mbit", "--steps", "3"], "--steps"),
        (["probe"], "nothing to measure"),
        (["probe", "--emulate", "fast"], "network 'fast'"),
        (["probe", "--emulate", "1gbit", "--workers", "1"], "at least two ends"),
        (["probe", "--emulate", "1gbit", "--seconds", "0"], "--seconds"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["thinwire", *arguments])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert said in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert told.out == ""
