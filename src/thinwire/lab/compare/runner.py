"""Runs `thinwire compare`: starts workers on an emulated network, collects their events, ends them in every case."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from ...errors import OptionError, ThinwireError
from ...predict.spec import parse_network
from ...recipe.compose import parse
from ..emulate.hosts import METHODS, Hosts, Method, emulated_hosts
from ..emulate.processes import process_events, rendezvous
from .contenders import Contender
from .forecast import predictions
from .machine import describe_machine
from .results import SCHEMA, Results
from .worker import Task
from .workloads import workload

_MOST_WORKERS = 64


@dataclass(frozen=True)
class Settings:
    """The settings of a comparison. Bad values raise OptionError before anything starts.

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
    skew: float = 0.0
    probe_seconds: float = 12.0  # of measuring the network before the first step, for predictions; 0 makes none

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise OptionError(f"compare needs 1 to {_MOST_WORKERS} workers, not {self.workers}")
        for name, least in (("steps", 1), ("repeats", 1), ("lap", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"--{name} is a number of {least} or more, not {getattr(self, name)}")
        if not self.extra >= 0:
            raise OptionError(f"--extra is a share of the steps, 0 or more, not {self.extra}")
        if not 0 <= self.probe_seconds < 600:
            raise OptionError(f"--probe-seconds is from 0 to 600, not {self.probe_seconds}")
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
            if contender.is_recipe and (refusal := parse(contender.spelled).refusal(self.workers)):
                raise OptionError(refusal)

    @property
    def seeds(self) -> list[int]:
        return [self.seed + number for number in range(self.repeats)]


def split_recipes(text: str) -> tuple[str, ...]:
    """The recipes of a list with commas. Some commas belong to the options of a recipe.

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
    """Train every recipe on the emulated network, and call `keep` with all results.

    If a worker dies, or on Ctrl-C, `keep` gets the results so far, and the error is raised afterwards.
    """
    work = workload(
        settings.workload, data=settings.data, skew=settings.skew
    )  # reads the data: an error costs nothing yet
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
    predicts = settings.probe_seconds > 0 and len(parse_network(settings.network).phases) == 1
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
            for event in _events(settings, hosts, predicts=predicts):
                if event["event"] == "measured":
                    head["forecast"] = {key: event[key] for key in ("network", "profile", "device")}
                    results.predicted = predictions(event, settings.recipes, workers=settings.workers)
                    event = {"event": "predicted", "ms": results.predicted}
                results.take(event)
                on_event(event)
    except (KeyboardInterrupt, ThinwireError) as problem:
        keep(_whole(head, results, str(problem) or "stopped"))
        raise
    keep(_whole(head, results, None))


def _whole(head: dict[str, Any], results: Results, problem: str | None) -> dict[str, Any]:
    targets = results.targets.values()
    if targets:  # the loss that ddp reached, mean over seeds
        head["settings"]["target_loss"] = statistics.fmean(targets)
    return {**head, "problem": problem, **results.as_dict()}


def _events(settings: Settings, hosts: Hosts, *, predicts: bool) -> Iterator[dict[str, Any]]:
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
        meet_at=rendezvous(hosts),
        world_size=settings.workers,
        interface=hosts.interface,
        probe_seconds=settings.probe_seconds if predicts else 0.0,
        skew=settings.skew,
    )
    yield from process_events(hosts, "thinwire.lab.compare.worker", lambda rank: replace(task, rank=rank).as_text())
