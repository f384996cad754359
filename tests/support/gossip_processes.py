"""Ranks of decentralised training as processes, and an address at which they find each other."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.gossip_threads import goals

RANK = Path(__file__).parent / "gossip_rank.py"


class Process:
    """A rank as a process, and what it has reported."""

    def __init__(self, **options: Any) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment["PYTHONPATH"] = str(RANK.parents[1])
        self.process = subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(options)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read_reports, daemon=True).start()
        self.errors: list[str] = []
        self._error_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._error_reader.start()

    def _read_reports(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.reports.put(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def all_errors(self) -> str:
        """What it wrote to stderr until its end."""
        self.process.wait(60)
        self._error_reader.join(10)
        return "".join(self.errors)

    def until(self, key: str, *, least: float = 0, seconds: float = 120) -> Any:
        """Wait for a report with `key`, and with a value of at least `least` if that is a number."""
        end = time.monotonic() + seconds
        while True:
            try:
                report = self.reports.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"it never reported {key}: {''.join(self.errors[-5:])}")
            value = report.get(key)
            if value is not None and (not isinstance(value, int | float) or value >= least):
                return report


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def killed_and_returned(start: Callable[..., Process], rank: int, other: int, **options: Any) -> None:
    """A rank is killed in a run and started again: it takes part again, and the run ends as if nothing was."""
    ranks = options["ranks"]
    options = {"pause": 0.02, "deadline": 20.0, **options}
    processes = [start(rank=number, **options) for number in range(ranks)]
    processes[rank].until("step", least=30)
    processes[rank].process.send_signal(signal.SIGKILL)
    processes[rank].process.wait()
    processes[other].until("step", least=60)
    processes[rank] = start(rank=rank, **options)
    again = processes[rank].until("incarnation")
    assert again["incarnation"] == 2
    assert again["round"] > 40
    reports = [one.until("own") for one in processes]
    for one in reports:
        assert one["stats"]["gossip/neighbours"] == 2
        assert one["stats"]["gossip/alive"] == ranks
        assert one["mean"] == reports[0]["mean"]
    goal = torch.stack(goals(ranks, 256)).mean(0)
    assert (torch.tensor(reports[0]["mean"]) - goal).norm() < 0.35 * goal.norm()
