"""`thinwire kernels` as a user runs it: the table, the JSON, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import thinwire
from support.command import thinwire_here

SCRIPT = Path(sys.executable).parent / "thinwire"
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-c", "from thinwire.cli.main import main; main()"]
FIELDS = {"name", "density", "seconds", "x_copy", "x_add", "x_torch"}
PLAIN = {"quantize_int8", "quantize_int4", "dequantize_add_int8"}

# Importing torch takes longer than being refused: one process makes all the mistakes, each as if it were alone.
MAKE_MISTAKES = """
import contextlib, io, json, sys
from thinwire.cli.main import main

results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["thinwire", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = "no exit"
        except SystemExit as stop:
            code = stop.code
        except BaseException as problem:
            code = repr(problem)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )


def assert_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["density"] is None or 0 < row["density"] < 1
        for field in ("seconds", "x_copy", "x_add", "x_torch"):
            assert isinstance(row[field], float)
            assert math.isfinite(row[field])
            assert row[field] > 0
    assert {row["name"] for row in rows if row["density"] is None} >= PLAIN
    select = {row["density"] for row in rows if row["name"] == "select_ef"}
    assert select == {0.01, 0.001}
    keys = [(row["name"], row["density"]) for row in rows]
    assert len(set(keys)) == len(keys)


# ------------------------------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path_factory.mktemp("kernels") / "rows.json"
    done = run("kernels", "--numel", "70000", "--rounds", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return done, json.loads(file.read_text())


def test_the_json_file_holds_every_row(measured: tuple[Any, dict[str, Any]]) -> None:
    _, payload = measured
    assert payload["numel"] == 70000
    assert payload["threads"] == 1
    assert_rows(payload["rows"])


def test_ratios_belong_together(measured: tuple[Any, dict[str, Any]]) -> None:
    """Rows of one group share the time of the copy and of the addition: seconds / x_copy is that time."""
    _, payload = measured
    for floor in ("x_copy", "x_add"):
        times = [row["seconds"] / row[floor] for row in payload["rows"]]
        assert all(time > 0 for time in times)
        assert len({f"{time:.6e}" for time in times}) < len(times) / 2


def test_the_table_shows_the_same_kernels(measured: tuple[Any, dict[str, Any]]) -> None:
    done, payload = measured
    lines = done.stdout.splitlines()
    for row in payload["rows"]:
        shown = [line.split() for line in lines if line.split()[:1] == [row["name"]]]
        if row["density"] is not None:
            shown = [line for line in shown if line[1] == f"{row['density']:.1%}"]
        assert len(shown) == 1, row["name"]
    assert max(len(line) for line in lines) <= 120


def test_a_dash_prints_json_and_nothing_else_and_threads_share_the_work() -> None:
    done = run("kernels", "--numel", "70001", "--rounds", "1", "--threads", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert payload["threads"] == 2
    assert_rows(payload["rows"])


def test_without_json_no_file_is_written(tmp_path: Path) -> None:
    done = thinwire_here("kernels", "--numel", "2048", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "select_ef" in done.stdout
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ mistakes


MISTAKES: list[tuple[list[str], str]] = [
    (["kernels", "--numel", "10"], "1024"),
    (["kernels", "--numel", "0"], "1024"),
    (["kernels", "--numel", "-5"], "1024"),
    (["kernels", "--numel", "abc"], "--numel"),
    (["kernels", "--numel", "1.5"], "--numel"),
    (["kernels", "--numel", "1e6"], "--numel"),
    (["kernels", "--numel", ""], "--numel"),
    (["kernels", "--numel"], "--numel"),
    (["kernels", "--numel", "1000000000000000"], "1000000000000000"),  # four petabytes
    (["kernels", "--numel", "5000", "--threads", "5"], "5120"),
    (["kernels", "--rounds", "0"], "rounds"),
    (["kernels", "--rounds", "-1"], "rounds"),
    (["kernels", "--threads", "0"], "threads"),
    (["kernels", "--threads", "-1"], "threads"),
    (["kernels", "--threads", "two"], "--threads"),
    (["kernels", "--bogus"], "--bogus"),
    (["kernels", "-x"], "-x"),
    (["kernels", "something"], "something"),
    (["kernels", "--json"], "--json"),
    (["kernels", "--numel", "2048", "--json", "{missing}/rows.json"], "rows.json"),
    (["kernels", "--numel", "2048", "--json", "{folder}"], "--json"),
    (["kernels", "--numel", "2048", "--json", "{file}/rows.json"], "rows.json"),
    (["kernels", "--numel", "2048", "--json", ""], "--json"),
    (["kernel"], "kernel"),
    (["--bogus"], "--bogus"),
    (["--numel", "2048"], "--numel"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, str, str]]:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "file").write_text("")
    places = {"missing": folder / "missing", "folder": folder, "file": folder / "file"}
    arguments = [[argument.format(**places) for argument in case] for case, _ in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", MAKE_MISTAKES, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["file"]
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


@pytest.mark.parametrize("case", range(len(MISTAKES)), ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(case: int, refusals: list[tuple[Any, str, str]]) -> None:
    code, out, err = refusals[case]
    assert code == 2, err
    assert out == ""
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("thinwire: ")
    assert MISTAKES[case][1] in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--numel", "10"], ["--bogus"]])
def test_the_process_itself_ends_so(arguments: list[str]) -> None:
    done = run("kernels", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------------- help


def test_help_and_version() -> None:
    script = MAKE_MISTAKES
    asked = [["--help"], ["kernels", "--help"], ["--version"], []]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(asked)], capture_output=True, text=True, timeout=300, check=True
    )
    (general, kernels, version, bare) = json.loads(done.stdout)
    for code, out, err in (general, kernels, version, bare):
        assert code == 0
        assert out
        assert err == ""
    assert "kernels" in general[1]
    for option in ("--numel", "--threads", "--rounds", "--json"):
        assert option in kernels[1]
    assert version[1].strip() == f"thinwire {thinwire.__version__}"


def test_the_installed_command_exists() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.strip() == f"thinwire {thinwire.__version__}"
    assert done.stderr == ""


OWN_CODEC = """
import torch
from thinwire.codecs import Codec, register

@register
class Halves(Codec):
    "Sends float16."
    name = "halves"
    def body_bytes(self, numel, *, shape=None):
        return 2 * numel
    def write(self, x, body, key, state):
        body.view(torch.float16).copy_(x.reshape(-1))
    def add_body(self, body, out, key, shape):
        out += body.view(torch.float16)
"""


def test_codecs_are_timed_also_those_of_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "own_codecs.py").write_text(OWN_CODEC)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    arguments = ["kernels", "--codecs", "--import", "own_codecs", "--numel", "4096", "--rounds", "1", "--json", "-"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["codecs"]
    assert {row["stage"] for row in rows if row["codec"] == "halves"} == {"encode", "add", "put"}
    assert {"bf16", "top_k:0.01", "rotated:1"} <= {row["codec"] for row in rows}
    assert all(row["ns_per_element"] > 0 and row["x_copy"] > 0 for row in rows)


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    done = thinwire_here("kernels", "--codecs", "--import", "no_such_module", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("No module named 'no_such_module'")
