"""Ranks of decentralised training as processes, and an address at which they find each other."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

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
