"""`thinwire compare` as a user runs it, on a real emulated network with real processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Whoever started the tests may have SIGINT ignored, which would be inherited.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from thinwire.cli.main import main
main()
"""
COMMAND = [sys.executable, "-c", PROGRAM, "compare"]
SMALL = ["--workload", "mlp", "--workers", "2", "--network", "200mbit,1ms", "--lap", "5", "--probe-seconds", "0"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
ROW = {
    *("recipe", "step_ms", "predicted_ms", "fraction_of_no_communication", "cpu_ms", "bytes_per_step", "final_loss"),
    *("seconds_to_target", "speedup_over_ddp", "speedup_to_target", "breakdown", "curve", "repeats", "status"),
    *("problem", "note", "about"),
}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def children_of(parent: int) -> dict[int, str]:
    """All descendants by id, with their command lines."""
    found: dict[int, str] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for process in parents:
        above = process
        while above in parents and above != parent:
            above = parents[above]
        if above == parent and process != parent:
            try:
                found[process] = (Path("/proc") / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def is_alive(process: int) -> bool:
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_end(processes: dict[int, str]) -> None:
    deadline = time.monotonic() + 20
    while left := [command for process, command in processes.items() if is_alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("compare")
    recipes = "ddp,torch-fp16,torch-powersgd:1,two-shot-4,ef|top_k:0.05|bf16|all_gather"
    files = ["--json", str(folder / "run.json"), "--report", str(folder / "run.html")]
    return run(*SMALL, "--probe-seconds", "4", "--steps", "20", "--recipes", recipes, *files), folder


def test_it_ends_well_and_prints_a_table(whole_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = whole_run
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["recipe", "step", "ms"]
    assert [line.split()[0] for line in lines[1:6]] == [
        *("ddp", "torch-fp16", "torch-powersgd:1", "two-shot-4", "ef|top_k:0.05|bf16|all_gather")
    ]
    assert "torch-powersgd:1: one bucket: with more it aborts on gloo" in lines
    assert "\x1b" not in done.stdout + done.stderr  # plain when not a terminal
    assert f"report: {folder / 'run.html'}" in done.stderr


def test_the_json_has_everything_and_agrees_with_itself(
    whole_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    result = json.loads((whole_run[1] / "run.json").read_text())
    assert result["schema"] == 1
    assert result["problem"] is None
    assert {"settings", "machine", "network", "command", "created", "headline"} <= result.keys()
    assert result["settings"]["seeds"] == [0]
    assert result["network"]["asked"] == "200mbit,1ms"
    alone, rows = result["no_communication"]["step_ms"], {row["recipe"]: row for row in result["rows"]}
    dense = 4 * result["settings"]["parameters"]  # bytes: of two ranks each sends the whole once
    for row in rows.values():
        assert row.keys() >= ROW
        assert row["status"] == "finished"
        assert row["fraction_of_no_communication"] == pytest.approx(alone / row["step_ms"])
        assert row["speedup_over_ddp"] == pytest.approx(rows["ddp"]["step_ms"] / row["step_ms"])
        steps = [point["step"] for point in row["curve"]]
        assert steps[:4] == [5, 10, 15, 20]
        assert row["final_loss"] == row["curve"][3]["held_out"]
        assert row["curve"][3]["held_out"] < row["curve"][0]["held_out"]
    assert rows["ddp"]["bytes_per_step"] == pytest.approx(dense, rel=0.05)
    assert rows["torch-fp16"]["bytes_per_step"] == pytest.approx(dense / 2, rel=0.05)
    assert rows["two-shot-4"]["bytes_per_step"] == pytest.approx(dense / 8, rel=0.1)
    assert rows["ddp"]["final_loss"] == pytest.approx(rows["torch-fp16"]["final_loss"], rel=0.01)
    for name, row in rows.items():
        assert (row["predicted_ms"] is None) == (name == "torch-powersgd:1")
        assert row["predicted_ms"] is None or 0 < row["predicted_ms"] < math.inf
    assert rows["two-shot-4"]["predicted_ms"] < rows["ddp"]["predicted_ms"]
    assert result["forecast"]["network"]["ranks"] == 2
    assert rows["ddp"]["seconds_to_target"] == pytest.approx(rows["ddp"]["curve"][3]["seconds"])


def test_the_report_is_there(whole_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    page = (whole_run[1] / "run.html").read_text()
    result = json.loads((whole_run[1] / "run.json").read_text())
    assert page.lower().startswith("<!doctype html>")
    assert result["headline"] in page
    assert all(recipe in page for recipe in result["settings"]["recipes"])


@pytest.mark.slow
def test_losses_repeat_with_the_seed_and_a_dash_prints_json(
    whole_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    """Also with fewer recipes, other laps and another network: none of it may change what is learnt."""
    again = run(
        *SMALL[:4], "--network", "unshaped", "--lap", "4", "--steps", "20", "--recipes", "two-shot-4", "--json", "-"
    )
    assert again.returncode == 0, again.stderr
    [row] = json.loads(again.stdout)["rows"]
    before = json.loads((whole_run[1] / "run.json").read_text())["rows"][3]
    assert row["final_loss"] == before["final_loss"]
    assert row["seconds_to_target"] is None  # nothing said what the target is


@pytest.mark.slow
def test_a_target_ends_a_run_early() -> None:
    options = ["--steps", "60", "--recipes", "ddp", "--target-loss", "2.1", "--json", "-", "--quiet"]
    done = run(*SMALL[:4], "--network", "unshaped", "--lap", "5", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    [row] = result["rows"]
    assert row["curve"][-1]["held_out"] <= 2.1 < row["curve"][-2]["held_out"]
    assert row["curve"][-1]["step"] < 60
    assert 0 < row["seconds_to_target"] <= row["curve"][-1]["seconds"]


MISTAKES = [
    ["--recipes", "two-shots-2"],
    ["--recipes", "top_k:0.01|all_reduce"],
    ["--workload", "gtp"],
    ["--network", "100mbits"],
    ["--network", "100mbit,5"],
    ["--workload", "cnn"],
    ["--workload", "cnn", "--data", "/nowhere"],
    ["--workers", "0"],
    ["--workers", "many"],
    ["--method", "magic"],
    ["--steps", "0"],
    ["--json", "/nowhere/run.json"],
    ["--report", "/nowhere/run.html"],
]
# Importing torch takes longer than being refused: one process makes all the mistakes, each as if it were alone.
MAKE_MISTAKES = """
import contextlib, io, json, sys
from thinwire.cli.main import main

results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["thinwire", "compare", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            results.append([stop.code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def test_a_mistake_is_one_line() -> None:
    made = subprocess.run(
        [sys.executable, "-c", MAKE_MISTAKES, json.dumps(MISTAKES)],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
        check=True,
    )
    for arguments, (code, out, errors) in zip(MISTAKES, json.loads(made.stdout), strict=True):
        assert (code, out) == (2, ""), arguments
        assert errors.startswith("thinwire: "), arguments
        assert errors.count("\n") == 1, arguments


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, dict[int, str]]]:
    """A run in the middle of its training, and its processes."""
    file = tmp_path / "run.json"
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--steps", "5000", "--recipes", "ddp,two-shot-4", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("two-shot-4: step"):
            break
    yield process, file, children_of(process.pid)
    process.kill()
    process.wait()


def test_a_worker_that_dies(long_run: tuple[subprocess.Popen[str], Path, dict[int, str]]) -> None:
    process, file, family = long_run
    victim = next(number for number, command in family.items() if '"rank": 1' in command)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    said = [line for line in errors.splitlines() if line.startswith("thinwire: ")]
    assert len(said) == 1
    assert "worker " in said[0]
    assert "the results so far are kept" in said[0]
    kept = json.loads(file.read_text())
    assert kept["problem"]
    assert kept["rows"][0]["status"] == "stopped"
    assert kept["rows"][0]["curve"]
    assert_all_end(family)


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_running(
    long_run: tuple[subprocess.Popen[str], Path, dict[int, str]], how: signal.Signals
) -> None:
    process, file, family = long_run
    assert any("thinwire.lab.compare.worker" in command for command in family.values())
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert_all_end(family)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert json.loads(file.read_text())["rows"][0]["curve"]
