"""Failures by the hundred, as benchmarks/scripts/trust.py counts them: no promise is broken in any trial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.scripts.trust import COUNTS, KINDS, merged
from benchmarks.scripts.trust_ranks import GOSSIP
from benchmarks.scripts.trust_trials import contenders

from thinwire.gossip.optimizer import ALGORITHMS

ROOT = Path(__file__).parents[2]


def tallies(tmp_path: Path, counts: dict[str, int], *, seed: int = 0) -> dict[str, dict[str, int]]:
    """Outcomes and their counts, of so many trials of each kind."""
    options = ["--seed", str(seed)]
    for kind, count in counts.items():
        options += ["--only", kind, f"--{KINDS[kind].replace('_', '-')}", str(count)]
    out = tmp_path / "trust.json"
    command = [sys.executable, "-m", "benchmarks.scripts.trust", *options, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    trials: dict[str, dict[str, int]] = json.loads(out.read_text())["trials"]
    print(trials)
    return trials


def test_some_failures(tmp_path: Path) -> None:
    """One of each kind that is quick, most of them with gossip: other tests lose ranks of recipes."""
    seed = contenders("kill").index("gossip:dcd")
    trials = tallies(tmp_path, {"kill": 1, "slow": 1, "loss": 1, "damage": 1}, seed=seed)
    assert sum(trials.pop("damage").values()) == 1
    assert trials == {kind: {"trained on": 1} for kind in ("kill", "slow", "loss")}


def test_damage_is_done_to_messages_of_recipes_only() -> None:
    assert set(contenders("kill")) - set(contenders("damage")) == set(GOSSIP)
    assert {f"gossip:{name}" for name in ALGORITHMS} == set(GOSSIP)


def test_a_results_file_is_continued_or_replaced() -> None:
    def found(commit: str, seeds: list[int], *broken: int) -> dict[str, Any]:
        words = {"raised": seeds[1] - seeds[0] + 1 - len(broken), "bad: late": len(broken)}
        measured = {"kill": {"commit": commit, "seeds": seeds}}
        return {
            "trials": {"kill": words},
            "measured": measured,
            "broken": [{"kind": "kill", "seed": n} for n in broken],
        }

    begun = found("a", [0, 9], 4)
    continued = merged(begun, found("a", [10, 19], 11))
    assert continued == found("a", [0, 19], 4, 11)
    for other in (found("b", [10, 19]), found("a", [0, 19]), found("a", [12, 13])):
        assert merged(begun, other) == other
    slow = {"trials": {"slow": {"replicas equal": 1}}, "broken": []}
    assert merged(begun, slow)["trials"] == begun["trials"] | slow["trials"]
    assert merged(begun, slow)["broken"] == begun["broken"]


@pytest.mark.slow
def test_failures_by_the_hundred(tmp_path: Path) -> None:
    trials = tallies(tmp_path, COUNTS)
    for kind in ("kill", "long stop"):
        assert set(trials[kind]) == {"raised", "trained on"}
        assert sum(trials[kind].values()) == COUNTS[kind]
    for kind in ("short stop", "slow", "loss"):
        assert trials[kind] == {"replicas equal": 22, "trained on": 6}
    assert trials["damage"]["raised"] > 60
