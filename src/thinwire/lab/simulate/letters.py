"""When letters arrive: all that workers send to neighbours in one round, timed at once.

Letters that a worker sends at one instant share its uplink and are through together; letters of several workers of one
host follow each other. The way adds its latency. An overloaded downlink delays all letters of the round alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .links import Floats, Links, Occupied, Whole


class Ways:
    """Who sends to whom, with all that does not change from round to round."""

    def __init__(self, links: Links, source: Whole, target: Whole) -> None:
        self.links, self.source, self.target = links, source, target
        here, there = links.host[source], links.host[target]
        self.outside = here != there
        self.all_outside = bool(self.outside.all())
        self._latency = links.latency(source, target) if not links.changes else None
        # Edges in the order of the host they lead to, so that a reduction over each host is one pass.
        sorted_already = bool((there[1:] >= there[:-1]).all())
        self._order = None if sorted_already else np.argsort(there, kind="stable")
        self.to, self._first = np.unique(there if sorted_already else there[self._order], return_index=True)

    def latency(self, sent: Floats) -> Floats:
        if self._latency is not None:
            return self._latency
        return self.links.latency(self.source, self.target, seconds=sent[self.source])

    def least(self, values: Floats) -> Floats:
        """The smallest value of the edges that lead to each host of `to`."""
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
    """When the last byte of each letter is there, and what it waited for on the way."""

    at: Floats
    ways: Ways
    _sent: Floats  # of each worker
    _started: Floats  # of each letter
    _latency: Floats
    _downlink: Floats

    def phases(self, letters: Whole) -> Floats:
        """Seconds in the queue of the uplink, of the transfer, of the latency and of the downlink, a row a letter."""
        queue = self._started[letters] - self._sent[self.ways.source[letters]]
        latency, downlink = self._latency[letters], self._downlink[letters]
        transfer = self.at[letters] - downlink - latency - self._started[letters]
        return np.stack([queue, transfer, latency, downlink], axis=1)


def deliver(occupied: Occupied, ways: Ways, size: Floats, sent: Floats) -> Arrivals:
    """Times of the letters of one round; `sent` is when each worker sent all of its own.

    >>> links = Links.named("8mbit,10ms", workers=3)  # a million bytes a second
    >>> ways = Ways(links, np.array([0, 0]), np.array([1, 2]))
    >>> deliver(Occupied.none(links), ways, np.array([5e5, 5e5]), np.zeros(3)).at.tolist()
    [1.01, 1.01]
    """
    links, source, outside = ways.links, ways.source, ways.outside
    latency = ways.latency(sent)
    sizes = np.bincount(source, weights=size, minlength=links.workers)
    occupied.sent += sizes
    passing = size if ways.all_outside else np.where(outside, size, 0.0)
    leaving: Floats = np.bincount(source, weights=passing, minlength=links.workers).astype(np.float64)
    begin, end = _uplinks(links, occupied, leaving, sent)
    started, at = begin[source], end[source] + latency
    if not ways.all_outside:
        started = np.where(outside, started, sent[source])
        at = np.where(outside, at, started + size / links.inner[1] + latency)
    # A downlink that is slower than what comes in is done when it has passed all of it on.
    first = np.maximum(ways.least(np.where(outside, started + latency, np.inf)), occupied.down[ways.to])
    last = ways.most(np.where(outside, at, 0.0))
    heard = np.isfinite(first)
    first = np.where(heard, first, 0.0)
    done = first + ways.total(passing) / (links.down[ways.to] * links.factor(first))
    occupied.down[ways.to] = np.where(heard, np.maximum(done, occupied.down[ways.to]), occupied.down[ways.to])
    extra = np.zeros(links.hosts)
    extra[ways.to] = np.maximum(0.0, done - last) * heard
    downlink = np.where(outside, extra[links.host[ways.target]], 0.0)
    return Arrivals(at + downlink, ways, sent.copy(), started, latency, downlink)


def _uplinks(links: Links, occupied: Occupied, out_bytes: Floats, sent: Floats) -> tuple[Floats, Floats]:
    """When each worker's letters begin to leave its host, and when they have left."""
    begin, end, factor = sent.copy(), sent.copy(), links.factor(sent)
    speaking = np.flatnonzero(out_bytes)
    order = speaking[np.lexsort((speaking, sent[speaking], links.host[speaking]))]
    host = links.host[order]
    place = np.arange(len(order)) - np.searchsorted(host, host, side="left")  # among those of its host
    for turn in range(int(place.max()) + 1 if len(place) else 0):
        now = order[place == turn]
        at = links.host[now]
        begin[now] = np.maximum(sent[now], occupied.up[at])
        end[now] = begin[now] + out_bytes[now] / (links.up[at] * factor[now])
        occupied.up[at] = end[now]
    return begin, end
