"""When collectives end: the schedules of the cost model, hop by hop, for workers that begin at different times.

Rounds and message sizes come from `predict/collectives.py`, which prices them for equal links. Rings of many workers
are not followed hop by hop: every hop waits for its neighbour, so the slowest transfer or the mean path around decides.
"""

from __future__ import annotations

import numpy as np

from ...exchange.script import Collective
from ...predict.collectives import levels, schedule_of
from .links import Floats, Links, Whole

_FOLLOWED = 1 << 21  # hops times workers that are followed one by one


def ends(links: Links, collective: Collective, size: float, begins: Floats) -> Floats:
    """When each worker has its result, if it begins at `begins` and gives `size` bytes.

    >>> links = Links.named("8mbit,10ms", workers=4)
    >>> ends(links, "all_to_all", 4e5, np.zeros(4)).round(3).tolist()
    [0.31, 0.31, 0.31, 0.31]
    >>> ends(links, "all_reduce", 4e5, np.zeros(4)).round(3).tolist()
    [0.66, 0.66, 0.66, 0.66]
    """
    n = len(begins)
    if n == 1 or size <= 0:
        return begins.copy()
    schedule = schedule_of(collective, size, n)
    message = size * schedule.message
    if schedule.algorithm == "ring":
        return _ring(links, message, schedule.rounds, begins)
    if schedule.algorithm == "tree":
        return _tree(links, message, begins)
    for _ in range(schedule.rounds):
        begins = _direct(links, message, begins)
    return begins


def _hop(links: Links, source: Whole, target: Whole, size: float, *, seconds: float) -> tuple[Floats, Floats]:
    """Latency and transfer of one message from each source to its target."""
    a, b = links.host[source], links.host[target]
    rate = np.where(a == b, links.inner[1], np.minimum(links.up[a], links.down[b]) * links.factor(np.array(seconds)))
    return links.latency(source, target, seconds=seconds), size / rate


def _ring(links: Links, size: float, hops: int, begins: Floats) -> Floats:
    n = len(begins)
    here = np.arange(n)
    latency, transfer = _hop(links, np.roll(here, 1), here, size, seconds=float(begins.max()))
    if hops * n > _FOLLOWED:
        slowest = hops * float(transfer.max()) + float(latency.max())
        around = hops / n * float((latency + transfer).sum())
        return np.full(n, float(begins.max()) + max(slowest, around))
    have = begins.copy()
    for _ in range(hops):
        have = np.maximum(have + transfer, np.roll(have, 1) + latency + transfer)
    return have


def _direct(links: Links, size: float, begins: Floats) -> Floats:
    """Everyone sends `size` bytes to everyone else at once."""
    n, host, now = len(begins), links.host, float(begins.max())
    there = np.bincount(host, minlength=links.hosts)  # workers of each host
    inner = begins.max() + links.inner[0] + size * (there - 1) / links.inner[1]
    if links.hosts == 1:
        alone: Floats = inner[host]
        return alone
    first, last = np.full(links.hosts, np.inf), np.zeros(links.hosts)
    np.minimum.at(first, host, begins)
    np.maximum.at(last, host, begins)
    outside, factor = size * (n - there) * there, links.factor(np.array(now))
    gone = last + outside / (links.up * factor)
    latest = np.full(links.between.shape[0], -np.inf)  # of what leaves each region
    np.maximum.at(latest, links.region, gone + links.mile)
    ways = links.ways(now)
    heard = (latest[:, None] + ways).max(axis=0)[links.region] + links.mile
    passed_on = float(first.min()) + ways.min() + links.mile + outside / (links.down * factor)
    done = np.maximum(np.maximum(heard, passed_on), np.where(there > 1, inner, 0.0))
    found: Floats = np.maximum(begins, done[host])
    return found


def _tree(links: Links, size: float, begins: Floats) -> Floats:
    """From worker 0 down a binary tree."""
    n = len(begins)
    have = begins.copy()
    for level in range(levels(n)):
        source = np.arange(min(1 << level, max(0, n - (1 << level))))
        target = source + (1 << level)
        latency, transfer = _hop(links, source, target, size, seconds=float(begins.max()))
        have[target] = np.maximum(have[target], have[source] + latency + transfer)
        have[source] += transfer
    return have
