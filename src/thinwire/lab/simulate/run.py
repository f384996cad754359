"""Runs a simulation: every row by itself, then the step time over the number of workers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ...codecs.stages import Work
from ...exchange.script import Script
from ...gossip.absolute import gossip_codec
from ...predict.cost import carried_script
from ...predict.workload import BucketProfile, of_size
from ...recipe.compose import Recipe
from ..compare.gossips import Gossip
from ..compare.machine import describe_machine
from ..compare.workloads import Workload, workload
from .churn import read
from .cost import Costed, gossip_cost, recipe_cost
from .gossip_run import GossipRun
from .learners import held_out, learner
from .links import Floats
from .network import SimNetwork
from .recipe_run import FORWARD, RecipeRun, layout_of, ready_shares
from .settings import Coding, Settings, message_size
from .transport import SimTransport

SCHEMA = 1
_TOLD_EACH = 4096
_GROWTH_STEPS, _GROWTH_EDGES = 12, 2_000_000
Event = Callable[[dict[str, Any]], None]


def simulate(settings: Settings, *, on_event: Event = lambda event: None, command: str = "") -> dict[str, Any]:
    """Everything about a simulation, as `thinwire simulate --json` writes it.

    >>> found = simulate(Settings(workers=8, network="50mbit,20ms", steps=3, cost_only=True))
    >>> found["rows"][0]["recipe"], round(found["virtual_seconds"], 3)
    ('dcd@exponential', 0.301)
    """
    work = workload(settings.workload, data=settings.data, skew=settings.skew)
    rows = [_row(settings, name, work, on_event) for name in settings.names]
    baseline = next((row["step_ms"] for row in rows if row["recipe"] in ("ddp", "allreduce")), None)
    for row in rows:
        row["speedup_over_ddp"] = None if baseline is None else baseline / row["step_ms"]
    first = rows[0]
    return {
        "schema": SCHEMA,
        "kind": "simulate",
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": command,
        "settings": settings.told() | {"parameters": _numel(settings, work)},
        "network": {"asked": settings.network, "about": settings.links.about},
        "machine": describe_machine(),
        "headline": _headline(settings, rows),
        "virtual_seconds": first["virtual_seconds"],
        "real_seconds": first["real_seconds"],
        "bytes": first["bytes"],
        "loss": first["curve"],
        "peak_memory_bytes": first["peak_memory_bytes"],
        "rows": rows,
        "growth": _growth(settings, work) if settings.growth else [],
    }


def _headline(settings: Settings, rows: list[dict[str, Any]]) -> str:
    best = min(rows, key=lambda row: float(row["step_ms"]))
    return f"{best['step_ms']:,.0f} ms a step for {settings.workers:,} workers on {settings.network}: {best['recipe']}"


# --------------------------------------------------------------------------------------------------------------- rows


def _row(settings: Settings, name: str, work: Workload, on_event: Event) -> dict[str, Any]:
    begin, way = time.perf_counter(), settings.way(name)
    on_event({"event": "begins", "row": name})
    if settings.cost_only:
        told = _costs(settings, way, work)
    elif isinstance(way, Gossip):
        told = _learn_by_gossip(settings, name, way, work, on_event)
    else:
        told = _learn_by_recipe(settings, name, way, work, on_event)
    row = {
        "recipe": name,
        "spelled": way.spelled if isinstance(way, Gossip) else str(way),
        "about": way.about if isinstance(way, Gossip) else "A recipe by collectives of all workers.",
        "status": "finished",
        "problem": None,
        "mode": "cost-only" if settings.cost_only else "learn",
        "algorithm": way.algorithm if isinstance(way, Gossip) else None,
        "topology": way.topology if isinstance(way, Gossip) else None,
        "step_ms": 1e3 * told.seconds / settings.steps,
        "virtual_seconds": told.seconds,
        "real_seconds": time.perf_counter() - begin,
        "bytes": told.sent,
        "bytes_per_step": told.sent / settings.steps / settings.workers,
        "utilisation": _utilisation(told.computed, told.seconds),
        "critical_path": told.path,
        "curve": told.curve,
        "final_loss": told.curve[-1]["held_out"] if told.curve else None,
        "peak_memory_bytes": _peak_memory(),
        **told.more,
    }
    on_event({"event": "ends", "row": name, "result": row})
    return row


@dataclass
class _Told:
    seconds: float
    sent: float
    computed: Floats
    path: dict[str, Any]
    curve: list[dict[str, Any]]
    more: dict[str, Any]


def _learn_by_gossip(settings: Settings, name: str, way: Gossip, work: Workload, on_event: Event) -> _Told:
    codec = gossip_codec(way.codec)
    transport = SimTransport(settings.links, seed=settings.seed)
    group = learner(work, workers=settings.workers, seed=settings.seed, compute=settings.compute)
    coding = Coding(settings, [codec])
    until = 1e3 * settings.pace.median * settings.steps + 1e4  # later than any run ends
    trace = read(settings.churn, workers=settings.workers, until=until, seed=settings.seed) if settings.churn else []
    run = GossipRun(
        group,
        transport,
        settings.pace,
        settings.graph(way),
        algorithm=way.algorithm,
        codec=codec,
        coding=lambda neighbours: coding.messages(codec, group.numel, neighbours),
        deadline=settings.deadline,
        trace=trace,
        steps=settings.steps,
        seed=settings.seed,
    )
    curve = []
    for step in range(1, settings.steps + 1):
        loss = run.step()
        if step % settings.evaluated_every == 0 or step == settings.steps:
            sent = float(transport.occupied.sent.mean())
            here: dict[str, Any] = {"step": step, "seconds": run.virtual_seconds, "bytes": sent}
            curve.append(here | {"loss": loss, "workers": len(run.optimizers)} | run.look())
        on_event({"event": "step", "row": name, "step": step, "loss": loss, "seconds": run.virtual_seconds})
    slowest = int(transport.now.argmax())
    last = curve[-1]
    stats = [optimizer.stats() for optimizer in run.optimizers.values()]
    faults = ("skipped", "lost", "resyncs", "undone", "mismatches")
    more: dict[str, Any] = {key: last[key] for key in ("consensus_distance", "averaged_loss", "local_loss", "accuracy")}
    more["faults"] = {key: sum(one[f"gossip/{key}"] for one in stats) for key in faults}
    path = {"worker": slowest, "phases": run.path.of(slowest), "links": run.path.links(slowest)}
    return _Told(run.virtual_seconds, float(transport.occupied.sent.sum()), run.computed, path, curve, more)


def _learn_by_recipe(settings: Settings, name: str, way: Recipe, work: Workload, on_event: Event) -> _Told:
    networks = SimNetwork.on(settings.links)
    _, coding, _ = _bucket_work(settings, way, work)
    run = RecipeRun(
        work, networks, settings.pace, way,
        coding=coding, bucket_mb=settings.bucket_mb, compute=settings.compute, seed=settings.seed,
    )  # fmt: skip
    curve = []
    for step in range(1, settings.steps + 1):
        loss = run.step()
        if step % settings.evaluated_every == 0 or step == settings.steps:
            sent = float(np.mean([network.traffic.bytes for network in networks]))
            loss_there, accuracy = held_out(work, run.model)
            here: dict[str, Any] = {"step": step, "seconds": run.virtual_seconds, "bytes": sent, "loss": loss}
            curve.append(here | {"held_out": loss_there, "accuracy": accuracy})
        on_event({"event": "step", "row": name, "step": step, "loss": loss, "seconds": run.virtual_seconds})
    sent = float(sum(network.traffic.bytes for network in networks))
    path: dict[str, Any] = {"worker": None, "phases": run.phases | dict(run.clocks.waited), "links": []}
    return _Told(run.virtual_seconds, sent, run.computed, path, curve, {"accuracy": curve[-1]["accuracy"]})


def _costs(settings: Settings, way: Gossip | Recipe, work: Workload) -> _Told:
    numel = _numel(settings, work)
    found: Costed
    if isinstance(way, Gossip):
        codec = gossip_codec(way.codec)
        coding = Coding(settings, [codec])
        found = gossip_cost(
            settings.links,
            settings.pace,
            settings.graph(way),
            message_bytes=message_size(way, numel),
            coding=lambda neighbours: coding.messages(codec, numel, neighbours),
            steps=settings.steps,
        )
    else:
        scripts, seconds, ready = _bucket_work(settings, way, work)
        found = recipe_cost(settings.links, settings.pace, scripts, coding=seconds, ready=ready, steps=settings.steps)
    slowest = int(found.now.argmax()) if found.links else None
    path = {"worker": slowest, "phases": found.phases, "links": found.links}
    return _Told(found.virtual_seconds, float(found.sent.sum()), found.computed, path, [], {})


def _bucket_work(settings: Settings, way: Recipe, work: Workload) -> tuple[list[Script], list[float], list[float]]:
    """Of each bucket: its script, the seconds of its loops, and the share of computing after which it is ready."""
    if settings.parameters is not None:
        buckets = list(of_size(settings.parameters, settings.pace.median, bucket_mb=settings.bucket_mb).buckets)
        ready = [FORWARD + (1 - FORWARD) * bucket.ready for bucket in buckets]
    else:
        layout = layout_of(work.model(seed=0), bucket_mb=settings.bucket_mb)
        ready = ready_shares(layout)
        buckets = [BucketProfile.of(bucket, 1.0) for bucket in layout.buckets]
    coding = Coding(settings, [way.codec])
    scripts = [carried_script(way, bucket, settings.workers, last=bucket is buckets[-1]) for bucket in buckets]
    return scripts, [coding.seconds([op for op in one if isinstance(op, Work)]) for one in scripts], ready


def _numel(settings: Settings, work: Workload) -> int:
    return settings.parameters or sum(parameter.numel() for parameter in work.model(seed=0).parameters())


# -------------------------------------------------------------------------------------------------------------- facts


def _utilisation(computed: Floats, seconds: float) -> dict[str, Any]:
    """The share of the time that workers compute, and that of each if they are not too many for a file."""
    share = computed / max(seconds, 1e-12)
    told = {"mean": float(share.mean()), "least": float(share.min()), "most": float(share.max())}
    return told | {"workers": share.round(4).tolist() if len(share) <= _TOLD_EACH else None}


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _growth(settings: Settings, work: Workload) -> list[dict[str, Any]]:
    """Step time for other numbers of workers, without training."""
    numbers = [n for n in (8, 32, 128, 512, 2048, 8192) if n < 4 * settings.workers]
    found = []
    for workers in sorted({*numbers, settings.workers}):
        step_ms: dict[str, float | None] = {}
        for name in settings.names:
            step_ms[name] = _growth_cell(settings, name, workers, work)
        found.append({"workers": workers, "step_ms": step_ms})
    return found


def _growth_cell(settings: Settings, name: str, workers: int, work: Workload) -> float | None:
    few = settings.of(workers, steps=min(settings.steps, _GROWTH_STEPS))
    way = few.way(name)
    if isinstance(way, Gossip):
        if workers * few.graph(way).degree(0) > _GROWTH_EDGES:
            return None
    elif way.refusal(workers):
        return None
    return 1e3 * _costs(few, way, work).seconds / few.steps
