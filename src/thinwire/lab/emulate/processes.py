"""Runs one process on each emulated host, reads its events, and ends it in every case.

A process is a module of this package. It takes its task as JSON and writes its events as lines of JSON.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ...errors import ExchangeError
from .hosts import Hosts

_PORT = 29500
_SILENCE = 420.0  # seconds without any event; longer than the timeout of their collectives


def rendezvous(hosts: Hosts) -> str:
    """The address at which the processes of all hosts meet, for `init_process_group`."""
    return f"tcp://{hosts.address(0)}:{_free_port() if hosts.method == 'paced' else _PORT}"


def process_events(
    hosts: Hosts, module: str, task_of: Callable[[int], str], *, after: str = "the results so far are kept"
) -> Iterator[dict[str, Any]]:
    """The events of the processes, until all have ended. Raises if one fails or if all are silent for too long."""
    with _started(hosts, module, task_of) as (processes, told, logs):
        running = dict(enumerate(processes))
        errors: dict[int, str] = {}
        heard = time.monotonic()
        while running:
            try:
                event = told.get(timeout=0.2)
            except queue.Empty:
                event = None
            if event is not None:
                heard = time.monotonic()
                if event["event"] == "error":
                    errors[event["rank"]] = event["problem"]
                else:
                    yield event
                continue  # events from before the end of a process count
            for rank, process in list(running.items()):
                if process.poll() is not None:
                    del running[rank]
                    if process.returncode:
                        raise ExchangeError(f"{_death(rank, process.returncode, errors, told, logs)}: {after}")
            if time.monotonic() - heard > _SILENCE:
                raise ExchangeError(f"no worker sent an event for {_SILENCE:.0f} s: all were ended")


def _death(rank: int, code: int, errors: dict[int, str], told: Any, logs: Sequence[Path]) -> str:
    time.sleep(0.5)  # events of others about it may be under way; a process that died sends none
    while not told.empty():
        event = told.get()
        if event["event"] == "error":
            errors[event["rank"]] = event["problem"]
    if code < 0:
        return f"worker {rank} was ended by signal {-code}"
    lines = logs[rank].read_text(errors="replace").strip().splitlines()
    said = errors.get(rank) or (lines[-1] if lines else "it gave no reason")
    return f"worker {rank} ended with exit code {code} ({said})"


@contextmanager
def _started(
    hosts: Hosts, module: str, task_of: Callable[[int], str]
) -> Iterator[tuple[list[subprocess.Popen[str]], Any, list[Path]]]:
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        logs = [Path(folder) / f"worker-{rank}.log" for rank in range(hosts.count)]
        try:
            for rank, log in enumerate(logs):
                with log.open("w") as errors:
                    process = hosts.start(
                        rank,
                        [sys.executable, "-m", module, task_of(rank)],
                        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                processes.append(process)
                threading.Thread(target=_read_events, args=(process.stdout, told), daemon=True).start()
            hosts.start_clock()
            yield processes, told, logs
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            for process in processes:
                process.wait()


def _read_events(lines: IO[str], told: queue.Queue[dict[str, Any]]) -> None:
    for line in lines:
        told.put(json.loads(line))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def event_writer(rank: int) -> Callable[[dict[str, Any]], None]:
    """For the process itself: a function that writes an event, on rank 0 or if it is an error.

    From here on, output that libraries print goes to the log, so that it does not mix with the events.
    """
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(event: dict[str, Any]) -> None:
        if rank == 0 or event["event"] == "error":
            events.write(json.dumps(event) + "\n")
            events.flush()

    return tell
