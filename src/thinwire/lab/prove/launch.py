"""Starts the processes of a part on this machine, listens to them, and ends them in every case."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from torch._C._distributed_c10d import TCPStore

Event = dict[str, Any]
_WORKER = "thinwire.lab.prove.worker"
_LAST_WORDS = 1.0  # seconds for the others to report after one process died


def run_processes(
    task: Mapping[str, Any],
    *,
    processes: int,
    timeout: float,
    on_event: Callable[[Event], None],
    environment: Mapping[str, str] | None = None,
    module: str = _WORKER,
) -> str | None:
    """Run one task in several processes; returns what went wrong, or None.

    A process is a module that takes its task as JSON and reports in lines of JSON, each with its rank. The processes
    meet at a store of this process, on a free port of the loopback. All are ended if one of them dies, or if all of
    them are silent for `timeout` seconds.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    whole = {**task, "port": store.port, "world_size": processes, "timeout": timeout}
    with tempfile.TemporaryDirectory(prefix="thinwire-prove-") as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(processes)]
        with _started(whole, logs, _environment(environment or {}), module) as (running, told):
            return _listen(running, told, logs, timeout=timeout, on_event=on_event)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """gloo is told to use the loopback: a host name that resolves to nothing would stop it."""
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **extra}


@contextmanager
def _started(
    task: Mapping[str, Any], logs: list[Path], environment: Mapping[str, str], module: str
) -> Iterator[tuple[dict[int, subprocess.Popen[str]], queue.Queue[Event]]]:
    told: queue.Queue[Event] = queue.Queue()
    running: dict[int, subprocess.Popen[str]] = {}
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", module, json.dumps({**task, "rank": rank})]
            with log.open("w") as errors:
                # Its standard input ends with this process, which is how a process knows that it is alone.
                running[rank] = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            threading.Thread(target=_read, args=(rank, running[rank].stdout, told), daemon=True).start()
        yield running, told
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
        for process in running.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _read(rank: int, lines: IO[str], told: queue.Queue[Event]) -> None:
    for line in lines:
        told.put({"rank": rank, **json.loads(line)})


def _listen(
    processes: Mapping[int, subprocess.Popen[str]],
    told: queue.Queue[Event],
    logs: list[Path],
    *,
    timeout: float,
    on_event: Callable[[Event], None],
) -> str | None:
    running = dict(processes)
    heard, last = time.monotonic(), "nothing"
    while running:
        try:
            event = told.get(timeout=0.1)
        except queue.Empty:
            event = None
        if event is not None:
            if event["event"] == "error":
                return f"rank {event['rank']}: {event['problem']}"  # the first to fail is the cause
            heard, last = time.monotonic(), str(event.get("word", event["event"]))
            on_event(event)
            continue  # what was reported before the end counts
        for rank, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[rank]
                if code:
                    return _death(rank, code, told, logs)
        if time.monotonic() - heard > timeout:
            return f"no process reported anything for {timeout:.0f} s, the last was: {last}; all were ended"
    while not told.empty():
        on_event(told.get())
    return None


def _death(rank: int, code: int, told: queue.Queue[Event], logs: list[Path]) -> str:
    """Why a process ended, in its own words if it had any."""
    end = time.monotonic() + _LAST_WORDS
    while (left := end - time.monotonic()) > 0:
        try:
            event = told.get(timeout=left)
        except queue.Empty:
            break
        if event["event"] == "error":
            return f"rank {event['rank']}: {event['problem']}"
    lines = logs[rank].read_text(errors="replace").strip().splitlines()
    said = f" ({lines[-1][:300]})" if lines else ""
    return f"rank {rank} was ended by signal {-code}{said}" if code < 0 else f"rank {rank} ended with code {code}{said}"
