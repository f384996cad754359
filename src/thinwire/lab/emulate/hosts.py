"""Emulated hosts on one machine, joined by a slow network: where `compare` runs its workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from ...errors import EmulationError, OptionError
from ...predict.spec import NetworkSpec, parse_network
from .fabric import address

Method = Literal["kernel", "switch", "paced"]
METHODS: tuple[Method, ...] = ("kernel", "switch", "paced")
MOST_HOSTS = 64

# What the holder process is asked to build for each method, in order of preference.
WAYS: dict[Method, tuple[str, ...]] = {"kernel": ("kernel",), "switch": ("tun", "packet"), "paced": ()}

_log = logging.getLogger(__name__)
_LAUNCH = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py"))]


def isolated(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package without loading torch."""
    return [*_LAUNCH, f"thinwire.lab.emulate.{module}", *arguments]


class Hosts:
    """Emulated hosts; made by `emulated_hosts`."""

    def __init__(self, count: int, network: NetworkSpec) -> None:
        self.count = count
        self.network = network
        self.method: Method = "paced"
        self.way: str | None = None
        self.notice: str | None = None
        self.measured: dict[str, float] | None = None
        self.interface = "lo"
        self._control: socket.socket | None = None
        self._holder: subprocess.Popen[bytes] | None = None
        self._namespaces: list[int] = []
        self._user: int | None = None
        self._clock: int | None = None
        self._started: list[subprocess.Popen[Any]] = []
        # Linux kills a child when the *thread* that started it ends. So one thread starts all, and ends with us.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="thinwire-hosts")

    # ----------------------------------------------------------------------------------------------------- building

    def build(self, way: str) -> str | None:
        """Start a holder process; returns the reason if this machine does not allow it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = isolated("holder", str(os.getpid()), str(theirs.fileno()), way, str(self.count), str(self.network))
        with theirs:
            holder = self._popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        ours.settimeout(20)
        try:
            message, fds, _, _ = socket.recv_fds(ours, 65536, self.count + 1)
        except TimeoutError:
            message, fds = json.dumps({"error": "no answer within 20 s"}).encode(), []
        reply = json.loads(message) if message else {}
        if "interface" not in reply:
            ours.close()
            holder.kill()
            said = (holder.communicate()[1] or b"").decode(errors="replace").strip().splitlines()
            return str(reply.get("error") or (said[-1] if said else "the holder process gave no reason"))
        ours.settimeout(None)
        self._control, self._holder, self.way = ours, holder, way
        self.method = "kernel" if way == "kernel" else "switch"
        self.interface = reply["interface"]
        self._namespaces = fds[: self.count]
        self._user = fds[self.count] if reply["user"] else None
        _log.debug("network %s by %s, priority %s", self.network, way, reply["priority"])
        return None

    def build_paced(self) -> None:
        """No network is emulated: workers pace their own collectives."""
        self._clock = os.memfd_create("thinwire-clock")
        self.notice = (
            "The network is not emulated but computed inside each worker: collectives end when a link of this rate and "
            "delay would have ended them. Loss, jitter and TCP are not modelled."
        )

    def _popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return self._starter.submit(lambda: subprocess.Popen(command, **options)).result()

    # -------------------------------------------------------------------------------------------------------- using

    def address(self, rank: int) -> str:
        """The IPv4 address of a host, as the other hosts see it."""
        self._check(rank)
        return "127.0.0.1" if self.method == "paced" else address(rank)

    def start(
        self,
        rank: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Run a command inside a host, as `subprocess.Popen` does; it is killed when this program ends.

        Unlike with Popen, `env` is added to the environment of this program. The name of the interface for gloo is
        added too.
        """
        self._check(rank)
        inherited = {**os.environ, **self._environment(), **(env or {})}
        network = self._namespaces[rank] if self._namespaces else None
        kept = [fd for fd in (network, self._user, self._clock) if fd is not None]
        entry = isolated(
            "enter", str(os.getpid()), *("-" if fd is None else str(fd) for fd in (network, self._user)), "--", *command
        )
        started = self._popen(entry, env=inherited, pass_fds=[*kept, *pass_fds], **options)
        self._started.append(started)
        return started

    def _environment(self) -> dict[str, str]:
        names = {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface}
        if self.method == "paced":
            names |= {"THINWIRE_PACED": str(self.network), "THINWIRE_PACED_CLOCK": str(self._clock)}
        return names

    def start_clock(self) -> None:
        """The times of a schedule count from here; until then the first phase holds."""
        if self._control is not None:
            self._control.send(b"clock")
        if self._clock is not None:
            os.pwrite(self._clock, repr(time.monotonic()).encode(), 0)

    def facts(self) -> dict[str, float]:
        """Facts of the holder process: processor seconds, packets dropped and lost, the worst lateness."""
        if self._control is None:
            return {}
        self._control.send(b"facts")
        told: dict[str, float] = json.loads(self._control.recv(65536))
        return told

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.count:
            raise OptionError(f"there are hosts 0 to {self.count - 1}, not {rank}")

    # ------------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Kill all processes in the hosts and end the network; closing again does nothing."""
        self.end_network()
        self._starter.shutdown()

    def end_network(self) -> None:
        """The same, but another network can be built afterwards."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for process in self._started:
            process.wait()
        self._started.clear()
        if self._control is not None:
            self._control.close()  # the holder process ends then
            self._control = None
        if self._holder is not None:
            try:
                self._holder.wait(2)
            except subprocess.TimeoutExpired:
                self._holder.kill()
                self._holder.wait()
            if self._holder.stderr is not None:
                self._holder.stderr.close()
            self._holder = None
        for fd in (*self._namespaces, self._user, self._clock):
            if fd is not None:
                os.close(fd)
        self._namespaces, self._user, self._clock = [], None, None
        self.notice = None


@contextlib.contextmanager
def emulated_hosts(
    count: int, *, network: str | NetworkSpec = "lan-100m", method: Method | None = None, prove: bool = True
) -> Iterator[Hosts]:
    """Hosts 0 to count - 1 with a network between them, until the end of the block.

    Without a `method`, the best that this machine allows is used: `kernel` (veth, bridge, tbf, netem), `switch` (our
    user-space switch) or `paced` (nothing emulated; see `hosts.notice`). With `prove`, the network is measured first.
    EmulationError is raised if it is not what was asked for.

    >>> with emulated_hosts(2, network="lan-100m", method="paced") as hosts:
    ...     hosts.method, hosts.address(1), hosts.start(1, ["true"]).wait()
    ('paced', '127.0.0.1', 0)
    """
    if not 1 <= count <= MOST_HOSTS:
        raise OptionError(f"an emulated network has 1 to {MOST_HOSTS} hosts, got {count}")
    if method is not None and method not in METHODS:
        raise OptionError(f"{method!r} is no method to emulate a network: choose {', '.join(METHODS)}")
    spec = parse_network(network) if isinstance(network, str) else network
    hosts = Hosts(count, spec)
    try:
        _build(hosts, method, prove=prove)
        yield hosts
    finally:
        hosts.close()


def _build(hosts: Hosts, method: Method | None, *, prove: bool) -> None:
    from .prove import prove_network  # it imports this module

    reasons: list[str] = []
    for candidate in METHODS if method is None else (method,):
        if candidate == "paced":
            hosts.build_paced()
            if reasons:
                hosts.notice = f"{hosts.notice} (Not allowed here: {'; '.join(reasons)}.)"
            return
        for way in WAYS[candidate]:
            reason = hosts.build(way)
            if reason is not None:
                reasons.append(f"{way}: {reason}")
                continue
            try:
                hosts.measured = prove_network(hosts) if prove else None
                return
            except EmulationError as problem:
                # Kernels differ in precision: the switch may do better. After it nothing is left to try.
                if method is not None or candidate == "switch":
                    raise
                _log.info("by %s: %s", way, problem)
                hosts.end_network()
                reasons.append(f"{way}: {problem}")
    raise EmulationError(
        f"this machine cannot emulate {hosts.network} with the method {method} ({'; '.join(reasons)}): "
        "see thinwire doctor, or give no method"
    )
