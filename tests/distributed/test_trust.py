"""Failures by the hundred, as benchmarks/scripts/trust.py counts them: no promise is broken in any trial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.scripts.trust_ranks import GOSSIP
from benchmarks.scripts.trust_trials import contenders

from thinwire.gossip.optimizer import ALGORITHMS

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
    trials = tallies(tmp_path, kills=2, stops=0, slow=0, losses=0, damages=2)
    assert trials["kill"] == {"raised": 2}
    assert sum(trials["damage"].values()) == 2


def test_gossip_survives_a_kill_and_a_slow_rank(tmp_path: Path) -> None:
    seed = contenders("kill").index("gossip:dcd")
    trials = tallies(tmp_path, kills=1, stops=0, slow=1, losses=0, damages=0, seed=seed)
    assert trials["kill"] == {"trained on": 1}
    assert trials["slow"] == {"trained on": 1}


def test_a_link_that_loses_packets_changes_no_bit(tmp_path: Path) -> None:
    trials = tallies(tmp_path, kills=0, stops=0, slow=0, losses=1, damages=0)
    assert trials["loss"] == {"replicas equal": 1}


def test_damage_is_done_to_messages_of_recipes_only() -> None:
    assert set(contenders("kill")) - set(contenders("damage")) == set(GOSSIP)
    assert {f"gossip:{name}" for name in ALGORITHMS} == set(GOSSIP)


@pytest.mark.slow
def test_failures_by_the_hundred(tmp_path: Path) -> None:
    ranks_that_are_lost = {"kill": 200, "long stop": 28}
    trials = tallies(tmp_path, kills=200, stops=28, slow=28, losses=28, damages=100)
    for kind, count in ranks_that_are_lost.items():
        assert set(trials[kind]) == {"raised", "trained on"}
        assert sum(trials[kind].values()) == count
    for kind in ("short stop", "slow", "loss"):
        assert trials[kind] == {"replicas equal": 22, "trained on": 6}
    assert trials["damage"]["raised"] > 50
