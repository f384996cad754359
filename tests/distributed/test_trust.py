"""Failures by the hundred, as benchmarks/scripts/trust.py counts them: no promise is broken in any trial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tallies(tmp_path: Path, **counts: int) -> dict[str, dict[str, int]]:
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    out = tmp_path / "trust.json"
    command = [sys.executable, "-m", "benchmarks.scripts.trust", *options, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    trials: dict[str, dict[str, int]] = json.loads(out.read_text())["trials"]
    print(trials)
    return trials


def test_some_failures(tmp_path: Path) -> None:
    trials = tallies(tmp_path, kills=2, stops=0, damages=2)
    assert trials["kill"] == {"raised": 2}
    assert sum(trials["damage"].values()) == 2


@pytest.mark.slow
def test_failures_by_the_hundred(tmp_path: Path) -> None:
    trials = tallies(tmp_path, kills=200, stops=10, damages=100)
    assert trials["kill"] == {"raised": 200}
    assert trials["long stop"] == {"raised": 10}
    assert trials["short stop"] == {"replicas equal": 10}
    assert trials["damage"]["raised"] > 50
