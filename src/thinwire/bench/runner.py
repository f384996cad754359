"""Runs `thinwire compare`: workers on an emulated network, told what to train, listened to, and ended in every case."""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

from ..attach.recipes import checked_recipe
from ..emulate.hosts import METHODS, Hosts, Method, emulated_hosts
from ..emulate.spec import parse_network
from ..errors import ExchangeError, OptionError, ThinwireError
from .contenders import Contender
from .machine import describe_machine
from .results import SCHEMA, Results
from .worker import Task
from .workloads import workload

_PORT = 29500
_QUIET = 420.0  # seconds without a word of any worker; longer than what their collectives wait for each other
_MOST_WORKERS = 64


@dataclass(frozen=True)
class Settings:
    """What to compare, checked. Bad values raise OptionError before anything is started.

    >>> Settings(("ddp",), workers=0)
    Traceback (most recent call last):
    thinwire.errors.OptionError: compare needs 1 to 64 workers, not 0
    """

    recipes: tuple[str, ...]
    workload: str = "gpt"
    workers: int = 4
    network: str = "lan-100m"
    steps: int = 200
    seed: int = 0
    repeats: int = 1
    lap: int = 10
    extra: float = 0.5
    bucket_mb: float = 25.0
    target_loss: float | None = None
    data: str | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise OptionError(f"compare needs 1 to {_MOST_WORKERS} workers, not {self.workers}")
        for name, least in (("steps", 1), ("repeats", 1), ("lap", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"--{name} is a number of {least} or more, not {getattr(self, name)}")
        if not self.extra >= 0:
            raise OptionError(f"--extra is a share of the steps, 0 or more, not {self.extra}")
        if not self.bucket_mb > 0:
            raise OptionError(f"--bucket-mb is a size in megabytes, above 0, not {self.bucket_mb}")
        if not self.recipes:
            raise OptionError("there is nothing to compare: give --recipes a list such as ddp,two-shot-2")
        if len(set(self.recipes)) < len(self.recipes):
            raise OptionError("a recipe is named twice in --recipes: name each once")
        if self.method is not None and self.method not in METHODS:
            raise OptionError(f"there is no method {self.method}: choose {', '.join(METHODS)}")
        parse_network(self.network)
        for name in self.recipes:
            contender = Contender.named(name)
            if not name.startswith(("ddp", "torch-")):
                checked_recipe(contender.spelled, self.workers)

    @property
    def seeds(self) -> list[int]:
        return [self.seed + number for number in range(self.repeats)]


def split_recipes(text: str) -> tuple[str, ...]:
    """The recipes of a list with commas, some of which belong to options.

    >>> split_recipes("ddp, global_qsgd:8,block=128|all_reduce,two-shot-2")
    ('ddp', 'global_qsgd:8,block=128|all_reduce', 'two-shot-2')
    """
    names: list[str] = []
    for piece in text.split(","):
        if names and re.match(r"\s*(\w+=|[\d.]+\b)", piece):
            names[-1] += f",{piece.strip()}"
        elif piece.strip():
            names.append(piece.strip())
    return tuple(names)


def compare(
    settings: Settings,
    *,
    keep: Callable[[dict[str, Any]], None],
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    command: str = "",
) -> None:
    """Train every recipe on the network asked for, and hand everything that was measured to `keep`.

    So it is if a worker dies, or on Ctrl-C, with the results so far; then what went wrong is raised.
    """
    work = workload(settings.workload, data=settings.data)  # reads the data: an error here costs nothing yet
    parameters = sum(p.numel() for p in work.model(seed=0).parameters())
    target = settings.target_loss
    results = Results(settings.recipes, settings.steps, settings.network, target)
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "compare",
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": command,
        "settings": {
            **asdict(settings),
            "recipes": list(settings.recipes),
            "seeds": settings.seeds,
            "target_from": "given" if target is not None else "ddp" if "ddp" in settings.recipes else None,
            "about": work.about,
            "parameters": parameters,
            "batch_per_worker": work.batch_per_worker,
            "optimizer": work.optimizer_text,
        },
        "machine": describe_machine(),
    }
    try:
        with emulated_hosts(
            settings.workers, network=settings.network, method=cast(Method | None, settings.method)
        ) as hosts:
            head["network"] = {
                "asked": settings.network,
                "method": hosts.method,
                "notice": hosts.notice,
                "measured": hosts.measured and {name: round(value, 3) for name, value in hosts.measured.items()},
            }
            on_event({"event": "network", **head["network"]})
            for event in _events(settings, hosts):
                results.take(event)
                on_event(event)
    except (KeyboardInterrupt, ThinwireError) as problem:
        keep(_whole(head, results, str(problem) or "stopped"))
        raise
    keep(_whole(head, results, None))


def _whole(head: dict[str, Any], results: Results, problem: str | None) -> dict[str, Any]:
    targets = results.targets.values()
    if targets:  # what ddp reached, mean over seeds
        head["settings"]["target_loss"] = statistics.fmean(targets)
    return {**head, "problem": problem, **results.as_dict()}


# --------------------------------------------------------------------------------------------------- the processes


def _events(settings: Settings, hosts: Hosts) -> Iterator[dict[str, Any]]:
    """What workers tell, until all have ended; raises if one ends badly or all fall silent."""
    with _workers(settings, hosts) as (processes, told, logs):
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
                        raise _death(rank, process.returncode, errors, told, logs)
            if time.monotonic() - heard > _QUIET:
                raise ExchangeError(f"no worker has said anything for {_QUIET:.0f} s: all were ended")


def _death(rank: int, code: int, errors: dict[int, str], told: Any, logs: Sequence[Path]) -> ExchangeError:
    time.sleep(0.5)  # what others say of it may be on its way; those that died say nothing
    while not told.empty():
        event = told.get()
        if event["event"] == "error":
            errors[event["rank"]] = event["problem"]
    if code < 0:
        return ExchangeError(f"worker {rank} was ended by signal {-code}: the results so far are kept")
    lines = logs[rank].read_text(errors="replace").strip().splitlines()
    said = errors.get(rank) or (lines[-1] if lines else "it said nothing")
    return ExchangeError(f"worker {rank} ended with exit code {code} ({said}): the results so far are kept")


@contextmanager
def _workers(settings: Settings, hosts: Hosts) -> Iterator[tuple[list[subprocess.Popen[str]], Any, list[Path]]]:
    port = _free_port() if hosts.method == "paced" else _PORT
    task = Task(
        workload=settings.workload,
        data=settings.data,
        recipes=list(settings.recipes),
        seeds=settings.seeds,
        steps=settings.steps,
        lap=settings.lap,
        extra=settings.extra,
        bucket_mb=settings.bucket_mb,
        target_loss=settings.target_loss,
        meet_at=f"tcp://{hosts.address(0)}:{port}",
        world_size=settings.workers,
        interface=hosts.interface,
    )
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        logs = [Path(folder) / f"worker-{rank}.log" for rank in range(settings.workers)]
        try:
            for rank, log in enumerate(logs):
                with log.open("w") as errors:
                    text = replace(task, rank=rank).as_text()
                    process = hosts.start(
                        rank,
                        [sys.executable, "-m", "thinwire.bench.worker", text],
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
