"""A soak with `auto` on a changing network, as benchmarks/scripts/soak.py runs it: nothing grows."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.scripts import soak

ROOT = Path(__file__).parents[2]


def soaked(tmp_path: Path, steps: int) -> dict[str, Any]:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.scripts.soak", "--steps", str(steps), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    print(found["counts"], found["ranks"])
    return found


def test_some_hundred_steps(tmp_path: Path) -> None:
    found = soaked(tmp_path, 400)
    assert found["broken"] == []
    assert found["settings"]["buckets"] >= 3


@pytest.mark.slow
def test_twenty_thousand_steps(tmp_path: Path) -> None:
    found = soaked(tmp_path, soak.STEPS)
    assert found["broken"] == []
    assert found["counts"]["network_changes"] >= 20


def samples(*, leak: int = 0, thread_at: int = -1, late_step: int = 0) -> list[dict[str, int]]:
    """Of a run of 20,000 steps: memory that leaks so many bytes a step, one more thread, pages touched late."""
    return [
        {
            "step": step,
            "rss": 500_000_000 + leak * step + (late_step if step > 10_000 else 0),
            "threads": 16 + (0 <= thread_at < step),
            "descriptors": 37,
        }
        for step in range(0, 20_001, 500)
    ]


def test_growth_is_seen_and_a_single_jump_is_not() -> None:
    assert soak.judged(samples(), 20_000)["grows"] == []
    assert soak.judged(samples(leak=1024), 20_000)["grows"] == ["memory"]
    assert soak.judged(samples(late_step=4_000_000), 20_000)["grows"] == []
    assert soak.judged(samples(thread_at=1000), 20_000)["grows"] == []  # that early is setting up
    assert soak.judged(samples(thread_at=9000), 20_000)["grows"] == ["threads"]


def test_the_network_changes_with_every_minute() -> None:
    phases = soak.schedule(0).split(";")
    rates = [phase.partition("@")[0] for phase in phases]
    assert all(rate != following for rate, following in pairwise(rates))
    assert set(rates) == set(soak.RATES)
