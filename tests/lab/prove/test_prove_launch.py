"""Processes of a part: their reports arrive, and every one is ended, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.prove.launch import run_processes

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), *sys.path])


def launched(**task: Any) -> tuple[str | None, list[dict[str, Any]], float]:
    told: list[dict[str, Any]] = []
    begin = time.monotonic()
    problem = run_processes(
        task,
        processes=2,
        timeout=task.get("patience", 60.0),
        on_event=told.append,
        environment={"PYTHONPATH": PATH},
        module="prove_process",
    )
    return problem, told, time.monotonic() - begin


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


def test_reports_of_all_ranks_arrive() -> None:
    problem, told, _ = launched(what="end", who=0)
    assert problem is None
    assert sorted(event["rank"] for event in told) == [0, 1]
    assert {event["word"] for event in told} == {"begun"}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "rank 1: ValueError: on purpose"),
        ("die", "rank 1 was ended by signal 9 (what a library prints)"),
        ("exit", "rank 1 ended with code 3 (the last words)"),
    ],
)
def test_a_rank_that_fails_ends_all(what: str, words: str) -> None:
    """The other one would hang for ten minutes."""
    problem, told, seconds = launched(what=what, who=1, others="hang")
    assert problem == words
    assert seconds < 60
    assert wait_until_gone([event["pid"] for event in told])


def test_silence_is_a_verdict() -> None:
    """What it waits for includes starting, which takes some seconds on a busy machine."""
    problem, told, seconds = launched(what="hang", who=0, patience=15.0)
    assert problem == "no process reported anything for 15 s, the last was: begun; all were ended"
    assert seconds < 60
    assert wait_until_gone([event["pid"] for event in told])


STARTER = """
import sys
from thinwire.lab.prove.launch import run_processes
run_processes({"what": "hang", "who": 0, "others": "hang"}, processes=2, timeout=60,
              on_event=lambda event: print(event["pid"], flush=True), module="prove_process")
"""


def test_processes_end_with_their_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": PATH}
    parent = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)  # no `finally` runs
        assert wait_until_gone(pids)
    finally:
        parent.kill()
        parent.wait()
