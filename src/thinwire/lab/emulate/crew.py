"""One process on each host: started, listened to, and ended in every case.

A process is a module of this package that takes its task as JSON and tells what happens in lines of JSON.
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
_QUIET = 420.0  # seconds without a word of anyone; longer than what their collectives wait for each other


def meeting_point(hosts: Hosts) -> str:
    """Where the processes of all hosts find each other, for `init_process_group`."""
    return f"tcp://{hosts.address(0)}:{_free_port() if hosts.method == 'paced' else _PORT}"


def crew_events(
    hosts: Hosts, module: str, task_of: Callable[[int], str], *, after: str = "the results so far are kept"
) -> Iterator[dict[str, Any]]:
    """What the processes tell, until all have ended; raises if one ends badly or all fall silent."""
    with _crew(hosts, module, task_of) as (processes, told, logs):
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
                continue  # all that was said before it ended counts
            for rank, process in list(running.items()):
                if process.poll() is not None:
                    del running[rank]
                    if process.returncode:
                        raise ExchangeError(f"{_death(rank, process.returncode, errors, told, logs)}: {after}")
            if time.monotonic() - heard > _QUIET:
                raise ExchangeError(f"no worker has said anything for {_QUIET:.0f} s: all were ended")


def _death(rank: int, code: int, errors: dict[int, str], told: Any, logs: Sequence[Path]) -> str:
    time.sleep(0.5)  # what others say of it may be on its way; those that died say nothing
    while not told.empty():
        event = told.get()
        if event["event"] == "error":
            errors[event["rank"]] = event["problem"]
    if code < 0:
        return f"worker {rank} was ended by signal {-code}"
    lines = logs[rank].read_text(errors="replace").strip().splitlines()
    said = errors.get(rank) or (lines[-1] if lines else "it said nothing")
    return f"worker {rank} ended with exit code {code} ({said})"


@contextmanager
def _crew(
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
                threading.Thread(target=_listen, args=(process.stdout, told), daemon=True).start()
            hosts.start_clock()
            yield processes, told, logs
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            for process in processes:
                process.wait()


def _listen(lines: IO[str], told: queue.Queue[dict[str, Any]]) -> None:
    for line in lines:
        told.put(json.loads(line))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def speaker(rank: int) -> Callable[[dict[str, Any]], None]:
    """For the process itself: tells an event if this is rank 0, or if something went wrong.

    Whatever a library prints to standard output goes to the log from here on: it must not get between the events.
    """
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(event: dict[str, Any]) -> None:
        if rank == 0 or event["event"] == "error":
            events.write(json.dumps(event) + "\n")
            events.flush()

    return tell
