"""`thinwire doctor` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from thinwire.lab.emulate.doctor import Finding, best_method

COMMAND = [sys.executable, "-c", "from thinwire.cli.main import main; main()", "doctor"]


def test_doctor_says_it_in_lines_and_in_json(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    done = subprocess.run([*COMMAND, "--json", str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    names = {row["name"] for row in told["findings"]}
    assert {"root", "user namespaces", "/dev/net/tun", "iproute2 (ip, tc)", "network paced inside the process"} <= names
    lines = done.stdout.splitlines()
    assert len(lines) == len(told["findings"]) + 1
    assert lines[-1] == told["best"]
    assert all(line.startswith(("yes ", "no  ")) for line in lines[:-1])


def test_what_is_missing_comes_with_its_fix() -> None:
    assert str(Finding("sun", False, "it rains", "wait")) == "no  sun: it rains -> wait"
    assert str(Finding("sun", True, "", "wait")) == "yes sun"


def test_the_best_way_is_named() -> None:
    switch = Finding("network by our switch, over veth", True)
    netem = Finding("network by the kernel: rate, delay, jitter, loss", True)
    assert "by our switch" in best_method([switch])
    assert "by the kernel" in best_method([switch, netem])
    assert "paced" in best_method([])
