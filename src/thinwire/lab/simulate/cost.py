"""Simulation of time and bytes only: the clocks of a training simulation, with sizes instead of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...exchange.script import Script, Send
from ...gossip.topology import Topology
from .arrivals import Arrivals, Routes, deliver
from .collectives import ends
from .links import Floats, Links, Occupied
from .pace import Pace
from .path import Path


@dataclass
class Costed:
    """Time and bytes of a run."""

    now: Floats
    computed: Floats
    sent: Floats
    phases: dict[str, float]
    links: list[dict[str, Any]]
    step_ends: list[float]

    @property
    def virtual_seconds(self) -> float:
        return float(self.now.max())


def edges_of(topology: Topology, turn: int = 0) -> tuple[Any, Any]:
    """All edges of a round as sources and targets, in the order of the targets.

    >>> from thinwire.gossip.topology import ring
    >>> [side.tolist() for side in edges_of(ring(3))]
    [[1, 2, 0, 2, 0, 1], [0, 0, 1, 1, 2, 2]]
    """
    peers = [topology.neighbours(rank, turn) for rank in range(topology.size)]
    degrees = np.fromiter((len(one) for one in peers), dtype=np.int64, count=len(peers))
    source = np.fromiter((peer for one in peers for peer in one), dtype=np.int64, count=int(degrees.sum()))
    return source, np.repeat(np.arange(topology.size), degrees)


def gossip_cost(
    links: Links,
    pace: Pace,
    topology: Topology,
    *,
    message_bytes: int,
    coding: Callable[[int], float],
    steps: int,
    on_step: Callable[[int], None] = lambda done: None,
) -> Costed:
    """Rounds of messages of one size, all of which are waited for."""
    n, occupied, path = links.workers, Occupied.none(links), Path(links.workers, steps=steps)
    now, computed, before = np.zeros(n), np.zeros(n), None
    turns: dict[int, tuple[Routes, Floats, Floats, Any]] = {}
    everyone, step_ends = np.arange(n), []
    for step in range(steps):
        seconds = pace.seconds(step, workers=n)
        now += seconds
        computed += seconds
        path.begin()
        path.computed(seconds, everyone)
        if before is not None:
            _wait(path, now, *before)
        turn = (step + 1) % topology.period
        if turn not in turns:
            source, target = edges_of(topology, turn)
            degrees = np.bincount(target, minlength=n)
            starts = np.concatenate([[0], np.cumsum(degrees)[:-1]])
            cost = np.array([coding(degree) for degree in range(int(degrees.max(initial=0)) + 1)])[degrees]
            listening = np.flatnonzero(degrees)
            turns[turn] = (Routes(links, source, target), np.full(len(source), float(message_bytes)), cost,
                           (listening, starts[listening]))  # fmt: skip
        routes, size, cost, listening = turns[turn]
        now += cost
        path.coded(cost, everyone)
        path.post()
        before = (deliver(occupied, routes, size, now), *listening) if len(routes.source) else None
        step_ends.append(float(now.max()))
    slowest = int(now.argmax())
    return Costed(now, computed, occupied.sent, path.of(slowest), path.links(slowest), step_ends)


def _wait(path: Path, now: Floats, arrivals: Arrivals, listening: Any, starts: Any) -> None:
    """Every worker continues when its last message has arrived."""
    latest = np.maximum.reduceat(arrivals.at, starts)
    late = latest > now[listening]
    workers = listening[late]
    if not len(workers):
        return
    # For each worker that waited: the first of the messages that arrived last.
    is_last = np.flatnonzero(arrivals.at == np.repeat(latest, np.diff([*starts, len(arrivals.at)])))
    causes = is_last[np.searchsorted(is_last, starts[late])]
    now[workers] = latest[late]
    path.waited(workers, arrivals.routes.source[causes], arrivals.phases(causes))


def recipe_cost(
    links: Links,
    pace: Pace,
    scripts: Sequence[Script],
    *,
    coding: Sequence[float],
    ready: Sequence[float],
    steps: int,
) -> Costed:
    """Steps in which every bucket passes through the collectives of its script."""
    n = links.workers
    now, computed, step_ends = np.zeros(n), np.zeros(n), []
    phases = {"compute": 0.0, "coding": 0.0, "straggling": 0.0}
    sent = sum(op.sent(n) for script in scripts for op in script if isinstance(op, Send))
    for step in range(steps):
        seconds, begin = pace.seconds(step, workers=n), now.copy()
        computed += seconds
        for script, share, work in zip(scripts, ready, coding, strict=True):
            now = np.maximum(now, begin + share * seconds) + work
            now = _through(links, script, now, phases)
        now = np.maximum(now, begin + seconds)
        median = float(np.median(seconds))
        phases["compute"] += median
        phases["straggling"] += float((begin + seconds).max() - begin.max()) - median
        phases["coding"] += sum(coding)
        step_ends.append(float(now.max()))
    return Costed(now, computed, np.full(n, float(sent * steps)), phases, [], step_ends)


def _through(links: Links, script: Script, now: Floats, phases: dict[str, float]) -> Floats:
    under_way: dict[str, Floats] = {}
    for op in script:
        if isinstance(op, Send):
            done = ends(links, op.collective, op.size, now)
            phases[op.collective] = phases.get(op.collective, 0.0) + float(done.max() - now.max())
            under_way[op.tag] = done
        elif hasattr(op, "tag"):
            now = np.maximum(now, under_way[op.tag])
    return now
