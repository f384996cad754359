"""Measures an emulated network before it is used, and refuses it if it is not what was asked for."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import subprocess
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Self

from ...errors import EmulationError
from ...predict.spec import Phase
from .hosts import Hosts, isolated

RATE_TOLERANCE = 0.05
DELAY_TOLERANCE, DELAY_SLACK = 0.10, 0.3e-3  # whichever is larger; the slack is the time that processes need to wake up
ATTEMPTS = 12
_PAUSE, _LONGEST_PAUSE = 0.5, 5.0  # seconds, longer after every attempt: other load may pass
_LONGEST = 3  # times the first measurement
RING_LIMIT = 1000  # Mbit/s of all links together that any machine should manage
_PORT = 20_077
_HEADERS = 20 + 20 + 12  # IP, TCP, its time stamps
_log = logging.getLogger(__name__)


def prove_network(hosts: Hosts) -> dict[str, float]:
    """Measurements of the first phase of a network; EmulationError if they are not what was asked for.

    `delay_ms`: median of half the round trip of small packets on an idle link, from host 0 to host 1. `mbit`: one TCP
    stream from host 0 to host 1. `ring_mbit`: the slowest of one stream from each host to the next, all at once. Above
    1 Gbit/s in total, a ring that is too slow is a notice and not an error. With loss, the rate depends on TCP and
    chance and is not measured. Other programs can only slow a network down, so there are several attempts.
    """
    phase = hosts.network.phases[0]
    if hosts.count < 2 or not hosts.network.shaped:
        return {}
    found: dict[str, float] = {}
    with Prober(hosts) as prober:
        for attempt in range(1, ATTEMPTS + 1):
            problem = _attempt(hosts, prober, phase, found, longer=min(attempt, _LONGEST))
            if problem is None:
                return found
            _log.info("attempt %d of %d: %s", attempt, ATTEMPTS, problem)
            time.sleep(min(_PAUSE * attempt, _LONGEST_PAUSE))
    raise EmulationError(
        f"the emulated network is not {phase}: {problem}, in the last of {ATTEMPTS} attempts; "
        "end other programs, or ask for a slower network or fewer hosts"
    )


def _attempt(hosts: Hosts, prober: Prober, phase: Phase, found: dict[str, float], *, longer: int) -> str | None:
    """Measure what was not right before; returns what is wrong, if anything."""
    if "delay_ms" not in found:
        delay = prober.delay(0, 1)["seconds"]
        wrong = abs(delay - phase.delay_seconds) - max(DELAY_TOLERANCE * phase.delay_seconds, DELAY_SLACK)
        if wrong > phase.jitter_seconds:
            return f"measured a delay of {delay * 1e3:.2f} ms where {phase.delay_seconds * 1e3:.2f} ms were asked for"
        found["delay_ms"] = delay * 1e3
    if phase.rate_bits is None or phase.loss_fraction:
        return None
    skip = 0.2 + 16 * phase.delay_seconds  # start-up: TCP doubles its speed with every round trip
    seconds = skip + 0.2 + 0.2 * longer
    asked = phase.rate_bits / 1e6
    everyone = None if hosts.count > 2 else [(0, 1), (1, 0)]
    for name, pairs in (("mbit", [(0, 1)]), ("ring_mbit", everyone)):
        if name in found:
            continue
        mbit = min(prober.rates(pairs=pairs, seconds=seconds, skip=skip)) / 1e6
        if abs(mbit - asked) > RATE_TOLERANCE * asked:
            if name == "mbit" or hosts.count * asked <= RING_LIMIT:
                together = "" if name == "mbit" else " with all hosts sending"
                return f"measured {mbit:.1f} Mbit/s{together} where {asked:.1f} Mbit/s were asked for"
            hosts.notice = (
                f"With all {hosts.count} hosts sending at once this machine manages {mbit:.0f} Mbit/s for each, "
                f"where {asked:.0f} Mbit/s were asked for; a single stream has them."
            )
        found[name] = mbit
    return None


class Prober:
    """Measures between hosts, until the end of a `with` block."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._orders = itertools.count(1)
        pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._probes = [hosts.start(rank, isolated("probe"), text=True, **pipe) for rank in range(hosts.count)]
        self._heard: dict[tuple[int, str], Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for probe in self._probes:
            probe.kill()
            probe.communicate()

    def delay(self, source: int, target: int, *, count: int = 25) -> dict[str, float]:
        """Half the round trip of small packets: `seconds` (median), `low`, `high` and the number of `answers`."""
        port = _PORT + next(self._orders)
        self._hear(target, self._order(target, "echo", port), "ready")
        found = self._found(source, self._order(source, "ping", self._hosts.address(target), port, count))
        if not found["answers"]:
            raise EmulationError(
                f"no packet arrives from host {source} at host {target} of the emulated network: see thinwire doctor"
            )
        return found

    def rates(self, *, seconds: float, skip: float, pairs: Sequence[tuple[int, int]] | None = None) -> list[float]:
        """Bit/s on the link of one TCP stream for each pair of hosts, all at once (the ring, unless pairs are given).

        The payload is measured, after `skip` seconds. Headers are added as the full packets of a long stream have them.
        """
        if pairs is None:
            pairs = [(rank, (rank + 1) % self._hosts.count) for rank in range(self._hosts.count)]
        waiting = []
        for _, target in pairs:
            port = _PORT + next(self._orders)
            waiting.append((target, port, self._order(target, "receive", port, seconds, skip)))
        for target, _, number in waiting:
            self._hear(target, number, "ready")
        for (source, _), (target, port, _) in zip(pairs, waiting, strict=True):
            self._order(source, "send", self._hosts.address(target), port, seconds)
        payload = [self._found(target, number)["bytes_per_second"] for target, _, number in waiting]
        mtu = self._hosts.network.mtu
        frame = mtu + (14 if self._hosts.method == "kernel" else 0)
        return [8 * rate * frame / (mtu - _HEADERS) for rate in payload]

    def _order(self, rank: int, role: str, *arguments: str | float) -> int:
        number = next(self._orders)
        pipe = self._probes[rank].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: reported when its answer is missing
            pipe.write(json.dumps({"id": number, "role": role, "arguments": arguments}) + "\n")
            pipe.flush()
        return number

    def _hear(self, rank: int, number: int, what: str) -> Any:
        """Wait for one answer; others that come before it are kept."""
        pipe = self._probes[rank].stdout
        assert pipe is not None
        while (number, what) not in self._heard:
            line = pipe.readline()
            if not line:
                said = self._probes[rank].communicate()[1].strip().splitlines()
                self._fail(said[-1] if said else f"exit code {self._probes[rank].returncode}")
            answer = json.loads(line)
            if "error" in answer:
                self._fail(answer["error"])
            told = answer.pop("id")
            self._heard.update({(told, key): value for key, value in answer.items()})
        return self._heard.pop((number, what))

    def _found(self, rank: int, number: int) -> dict[str, float]:
        found: dict[str, float] = self._hear(rank, number, "found")
        return found

    @staticmethod
    def _fail(why: str) -> NoReturn:
        raise EmulationError(f"the emulated network could not be measured ({why}): see thinwire doctor")
