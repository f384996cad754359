"""Arrival times of messages: all that workers send to their neighbours in one round, computed together.

The messages that a worker sends at one instant share its uplink and finish together. Several workers of one host use
its uplink in turn. The route adds its latency. An overloaded downlink delays all messages of the round equally.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .links import Floats, Links, Occupied, Whole


class Routes:
    """The source and the target of each message, with everything that is the same in all rounds."""

    def __init__(self, links: Links, source: Whole, target: Whole) -> None:
        self.links, self.source, self.target = links, source, target
        here, there = links.host[source], links.host[target]
        self.outside = here != there
        self.all_outside = bool(self.outside.all())
        self._latency = links.latency(source, target) if not links.changes else None
        # Routes in the order of their target host, so that a reduction over each host is one pass.
        sorted_already = bool((there[1:] >= there[:-1]).all())
        self._order = None if sorted_already else np.argsort(there, kind="stable")
        self.to, self._first = np.unique(there if sorted_already else there[self._order], return_index=True)

    def latency(self, sent: Floats) -> Floats:
        if self._latency is not None:
            return self._latency
        return self.links.latency(self.source, self.target, seconds=sent[self.source])

    def least(self, values: Floats) -> Floats:
        """The smallest value of the routes to each host of `to`."""
        found: Floats = np.minimum.reduceat(values if self._order is None else values[self._order], self._first)
        return found

    def most(self, values: Floats) -> Floats:
        found: Floats = np.maximum.reduceat(values if self._order is None else values[self._order], self._first)
        return found

    def total(self, values: Floats) -> Floats:
        found: Floats = np.add.reduceat(values if self._order is None else values[self._order], self._first)
        return found


@dataclass(frozen=True)
class Arrivals:
    """When the last byte of each message arrives, and where it spent its time."""

    at: Floats
    routes: Routes
    _sent: Floats  # of each worker
    _started: Floats  # of each message
    _latency: Floats
    _downlink: Floats

    def phases(self, messages: Whole) -> Floats:
        """Seconds in the uplink queue, of transfer, of latency and of downlink delay: one row for each message."""
        queue = self._started[messages] - self._sent[self.routes.source[messages]]
        latency, downlink = self._latency[messages], self._downlink[messages]
        transfer = self.at[messages] - downlink - latency - self._started[messages]
        return np.stack([queue, transfer, latency, downlink], axis=1)


def deliver(occupied: Occupied, routes: Routes, size: Floats, sent: Floats) -> Arrivals:
    """Arrival times of the messages of one round. `sent` is the time at which each worker sent all of its own.

    >>> links = Links.named("8mbit,10ms", workers=3)  # a million bytes per second
    >>> routes = Routes(links, np.array([0, 0]), np.array([1, 2]))
    >>> deliver(Occupied.none(links), routes, np.array([5e5, 5e5]), np.zeros(3)).at.tolist()
    [1.01, 1.01]
    """
    links, source, outside = routes.links, routes.source, routes.outside
    latency = routes.latency(sent)
    sizes = np.bincount(source, weights=size, minlength=links.workers)
    occupied.sent += sizes
    passing = size if routes.all_outside else np.where(outside, size, 0.0)
    leaving: Floats = np.bincount(source, weights=passing, minlength=links.workers).astype(np.float64)
    begin, end = _uplinks(links, occupied, leaving, sent)
    started, at = begin[source], end[source] + latency
    if not routes.all_outside:
        started = np.where(outside, started, sent[source])
        at = np.where(outside, at, started + size / links.inner[1] + latency)
    # A downlink that is slower than the incoming traffic ends when it has delivered all of it.
    first = np.maximum(routes.least(np.where(outside, started + latency, np.inf)), occupied.down[routes.to])
    last = routes.most(np.where(outside, at, 0.0))
    reached = np.isfinite(first)
    first = np.where(reached, first, 0.0)
    done = first + routes.total(passing) / (links.down[routes.to] * links.factor(first))
    occupied.down[routes.to] = np.where(reached, np.maximum(done, occupied.down[routes.to]), occupied.down[routes.to])
    extra = np.zeros(links.hosts)
    extra[routes.to] = np.maximum(0.0, done - last) * reached
    downlink = np.where(outside, extra[links.host[routes.target]], 0.0)
    return Arrivals(at + downlink, routes, sent.copy(), started, latency, downlink)


def _uplinks(links: Links, occupied: Occupied, out_bytes: Floats, sent: Floats) -> tuple[Floats, Floats]:
    """When the messages of each worker start to leave its host, and when they have left."""
    begin, end, factor = sent.copy(), sent.copy(), links.factor(sent)
    senders = np.flatnonzero(out_bytes)
    order = senders[np.lexsort((senders, sent[senders], links.host[senders]))]
    host = links.host[order]
    place = np.arange(len(order)) - np.searchsorted(host, host, side="left")  # among the senders of its host
    for turn in range(int(place.max()) + 1 if len(place) else 0):
        now = order[place == turn]
        at = links.host[now]
        begin[now] = np.maximum(sent[now], occupied.up[at])
        end[now] = begin[now] + out_bytes[now] / (links.up[at] * factor[now])
        occupied.up[at] = end[now]
    return begin, end
