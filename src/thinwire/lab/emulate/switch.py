"""A network switch in user space: holds every packet until its time.

Each host has a link to the switch with the same rate both ways. A packet leaves its host when the link is free, takes
size / rate to be sent, travels for the delay, and arrives when the link of the receiver is free too. Nothing is counted
in ticks: each link has the time at which it will be free, so lateness of this process does not add up.

A link that would be busy for longer than its queue drops new packets (tail drop). The queue holds 200 ms, eight times
the delay, or 64 of the largest packets, whichever is most: four times the bandwidth-delay product.

Pure TCP acknowledgements do not wait behind data, as with fair queueing on a real host. Otherwise they would arrive in
bunches when a host sends to one and receives from another, and TCP could not fill the link.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import time
from collections.abc import Callable

from ...predict.spec import NetworkSpec, Phase

# Time that a packet takes to get here and to be handed over, part of the delay (0.1 to 0.2 ms measured).
HANDLING = 0.1e-3
# A packet that is read this soon after the link became free was waiting for it, and this process was late.
PAUSE = 2e-3
BURST = 16  # packets read from one host before the others have a turn
_ACK_ONLY = 0x10  # the flags of a TCP segment that only acknowledges


class Switch:
    """Forwards packets between ports: file descriptors that read and write one IPv4 packet a call.

    `offset` is where the IP header begins. Hosts have the addresses x.x.h.l with 256 * h + l = rank + 1.
    """

    def __init__(self, ports: list[int], network: NetworkSpec, *, offset: int = 0) -> None:
        self._ports = ports
        self._network = network
        self._offset = offset
        self._room = network.mtu + offset + 64
        self._random = random.Random(0)
        count = len(ports)
        self._out_free = [0.0] * count
        self._in_free = [0.0] * count
        self._last = [[0.0] * count for _ in range(count)]  # of each pair, to keep the order under jitter
        self._due: list[tuple[float, int, int, bytes, bool]] = []
        self._number = 0
        self._epoch: float | None = None
        self.dropped = 0
        self.lost = 0
        self.late = 0.0  # the worst lateness of a delivery
        self._set_phase(network.phases[0])

    def start_clock(self) -> None:
        """The schedule counts from here."""
        self._epoch = time.monotonic()

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._delay = max(0.0, phase.delay_seconds - HANDLING)
        self._byte_seconds = 0.0 if phase.rate_bits is None else 8.0 / phase.rate_bits
        self._queue_seconds = max(0.2, 8 * phase.delay_seconds, 64 * self._network.mtu * self._byte_seconds)

    def _next_phase(self) -> float | None:
        """When the phase changes, by time.monotonic()."""
        if self._epoch is None:
            return None
        later = (phase.at_seconds for phase in self._network.phases if phase.at_seconds > self._phase.at_seconds)
        first = next(later, None)
        return None if first is None else self._epoch + first

    def run(self, control: int, on_control: Callable[[], bool]) -> None:
        """Forward packets until `on_control` returns False; it is called when file descriptor `control` is readable."""
        inputs = [*self._ports, control]
        rank_of = {fd: rank for rank, fd in enumerate(self._ports)}
        due = self._due
        now = time.monotonic()
        while True:
            change = self._next_phase()
            if change is not None and now >= change and self._epoch is not None:
                self._set_phase(self._network.at(now - self._epoch))
                change = self._next_phase()
            until = due[0][0] if due else None
            if change is not None and (until is None or change < until):
                until = change
            # select, not epoll: its timeout has microseconds where epoll in Python rounds up to milliseconds.
            ready = select.select(inputs, (), (), None if until is None else max(0.0, until - now))[0]
            now = time.monotonic()
            for fd in ready:
                if fd != control:
                    self._take(rank_of[fd], fd, now)
                elif not on_control():
                    return
            if due and due[0][0] <= now:
                self._deliver(now)
            now = time.monotonic()

    def _take(self, source: int, fd: int, now: float) -> None:
        """Read the packets of a host and compute when each reaches the other end."""
        phase, offset, byte_seconds = self._phase, self._offset, self._byte_seconds
        free = self._out_free[source]
        last = self._last[source]
        for _ in range(BURST):
            try:
                packet = os.read(fd, self._room)
            except OSError:  # nothing left to read, or the interface is down
                break
            if len(packet) < offset + 20 or packet[offset] >> 4 != 4:
                continue  # not IPv4
            target = 256 * packet[offset + 18] + packet[offset + 19] - 1
            if not 0 <= target < len(last):
                continue
            begin = free if free > now - PAUSE else now
            if len(packet) < offset + 100 and packet[offset + 9] == 6 and _acknowledges(packet, offset):
                free = begin + (len(packet) - offset) * byte_seconds
                self._push(now + self._delay, target, packet, True)
                continue
            if begin - now > self._queue_seconds:
                self.dropped += 1
                continue
            free = begin + (len(packet) - offset) * byte_seconds
            if phase.loss_fraction and self._random.random() < phase.loss_fraction:
                self.lost += 1  # it has used the link of the sender
                continue
            arrival = (free if free > now else now) + self._delay
            if phase.jitter_seconds:
                arrival += self._random.uniform(-phase.jitter_seconds, phase.jitter_seconds)
            if arrival < last[target]:
                arrival = last[target]
            last[target] = arrival
            self._push(arrival, target, packet, False)
        self._out_free[source] = free

    def _push(self, at: float, target: int, packet: bytes, passed: bool) -> None:
        self._number += 1  # packets of the same time stay in order
        heapq.heappush(self._due, (at, self._number, target, packet, passed))

    def _deliver(self, now: float) -> None:
        """Hand over every packet whose time has come."""
        due, in_free, ports = self._due, self._in_free, self._ports
        while due and due[0][0] <= now:
            at, _, target, packet, passed = heapq.heappop(due)
            if not passed:
                # The link of the receiver carries one packet at a time. If it was free, the packet passed through it
                # while it was being sent, and has arrived now.
                ready = in_free[target] + (len(packet) - self._offset) * self._byte_seconds
                if ready > at:
                    if ready - at > self._queue_seconds:
                        self.dropped += 1
                        continue
                    in_free[target] = ready
                    self._push(ready, target, packet, True)
                    continue
                in_free[target] = at
            try:
                os.write(ports[target], packet)
            except OSError:
                self.dropped += 1
            if now - at > self.late:
                self.late = now - at


def _acknowledges(packet: bytes, offset: int) -> bool:
    """Whether a TCP packet has no data and only the flag ACK: then it may overtake others."""
    tcp = offset + 4 * (packet[offset] & 15)
    size = offset + 256 * packet[offset + 2] + packet[offset + 3]
    return len(packet) > tcp + 13 and packet[tcp + 13] == _ACK_ONLY and tcp + 4 * (packet[tcp + 12] >> 4) == size
