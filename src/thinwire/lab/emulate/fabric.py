"""Builds the hosts and their network inside the holder process: three ways to join network namespaces.

`kernel`: veth pairs on a bridge, tbf for the rate, netem for the rest. `tun`: a TUN device in each host, served by our
switch. `packet`: veth pairs whose outer ends our switch reads and writes as frames, for users without access to TUN.
None of them has a name in the file system. All end with the holder process.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable

from ...predict.spec import NetworkSpec, Phase
from . import system
from .switch import Switch

INTERFACE = "tw0"
MASK = "255.255.0.0"
_ETHERNET = 14
# The same for all hosts: without ARP a host sends frames to its own address, so every other host must have it too.
_HARDWARE = "02:00:00:00:00:01"


def address(rank: int) -> str:
    """The IPv4 address of a host.

    >>> address(0), address(255)
    ('10.77.0.1', '10.77.1.0')
    """
    return f"10.77.{(rank + 1) // 256}.{(rank + 1) % 256}"


class Fabric:
    """The namespaces of `count` hosts; this process stays in one more, the hub."""

    def __init__(self, count: int, network: NetworkSpec) -> None:
        self.network = network
        self.hub, self.user = system.new_network()
        self.hosts: list[int] = []
        self._inside: list[system.Interfaces] = []
        for _ in range(count):
            system.unshare(system.CLONE_NEWNET)
            self.hosts.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            self._inside.append(system.Interfaces())
            self._inside[-1].up("lo")
            self._widen_buffers()
        self._go(self.hub)
        self._outside = system.Interfaces()

    def _go(self, namespace: int) -> None:
        system.setns(namespace, system.CLONE_NEWNET)

    def _widen_buffers(self) -> None:
        """Let one TCP stream fill a long fast link: the usual limit is 4 MB, of which half is under way."""
        under_way = max((phase.rate_bits or 10**9) / 4 * phase.delay_seconds for phase in self.network.phases)
        most = max(8 << 20, int(6 * under_way))
        for name, usual in (("tcp_wmem", 65536), ("tcp_rmem", 131072)):
            with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/{name}", "w") as file:
                file.write(f"4096 {usual} {most}")

    def _tool(self, name: str, *lines: str) -> None:
        """Run lines of `ip` or `tc` in the namespace this process is in."""
        path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
        if path is None:
            raise OSError(f"the command {name} is missing: install iproute2")
        done = subprocess.run(
            [path, "-batch", "-"], input="\n".join(lines) + "\n", text=True, capture_output=True, pass_fds=self.hosts
        )
        if done.returncode:
            raise OSError(f"{name} failed: {' '.join(done.stderr.split())}")

    def _start_inside(self, rank: int) -> None:
        inside = self._inside[rank]
        inside.mtu(INTERFACE, self.network.mtu)
        inside.address(INTERFACE, address(rank), MASK)
        inside.up(INTERFACE)

    def _join_by_veth(self) -> None:
        self._tool(
            "ip",
            *(
                f"link add p{rank} mtu {self.network.mtu} type veth peer name {INTERFACE} netns /proc/self/fd/{fd}"
                for rank, fd in enumerate(self.hosts)
            ),
        )

    # ----------------------------------------------------------------------------------------------- the three ways

    def tun(self) -> Switch:
        """A TUN device in each host."""
        ports = []
        for rank, namespace in enumerate(self.hosts):
            self._go(namespace)
            ports.append(system.open_tun(INTERFACE))
            with contextlib.suppress(OSError):  # for root only; the usual 500 packets are enough at moderate rates
                self._inside[rank].queue(INTERFACE, 2000)
            self._start_inside(rank)
        self._go(self.hub)
        return Switch(ports, self.network)

    def packet(self) -> Switch:
        """A veth pair for each host, the outer end open as a packet socket."""
        self._join_by_veth()
        links: list[socket.socket] = []
        for rank, namespace in enumerate(self.hosts):
            self._go(namespace)
            self._tool("ip", f"link set {INTERFACE} address {_HARDWARE} arp off")
            self._inside[rank].without_offloads(INTERFACE)
            self._start_inside(rank)
        self._go(self.hub)
        for rank in range(len(self.hosts)):
            self._outside.up(f"p{rank}")
            links.append(system.open_packet_socket(f"p{rank}"))
        return Switch([link.detach() for link in links], self.network, offset=_ETHERNET)

    def kernel(self) -> KernelNetwork:
        """veth pairs on a bridge, shaped by the kernel."""
        if any(phase.jitter_seconds for phase in self.network.phases):
            raise OSError("netem lets packets overtake each other under jitter, which TCP takes for loss")
        self._join_by_veth()
        bridge = [f"link add hub mtu {self.network.mtu} type bridge", "link set hub up"]
        bridge += [f"link set p{rank} master hub up" for rank in range(len(self.hosts))]
        self._tool("ip", *bridge)
        for rank in range(len(self.hosts)):
            self._start_inside(rank)
        shaped = KernelNetwork(self)
        shaped.apply(self.network.phases[0])
        return shaped

    def shape(self, inner: list[str], outer: list[str]) -> None:
        """Run lines of tc: `inner` in every host, `outer` for the hub's side of every host ({port} is its name)."""
        for namespace in self.hosts if inner else []:
            self._go(namespace)
            self._tool("tc", *inner)
        self._go(self.hub)
        lines = [line.replace("{port}", f"p{rank}") for rank in range(len(self.hosts)) for line in outer]
        if lines:
            self._tool("tc", *lines)


class KernelNetwork:
    """Applies the phases of a schedule by tc; the kernel does the rest."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._epoch: float | None = None
        self.dropped = self.lost = 0
        self.late = 0.0

    def start_clock(self) -> None:
        """The schedule counts from here."""
        self._epoch = time.monotonic()

    def apply(self, phase: Phase) -> None:
        """Sending is limited inside the host; receiving, delay and loss at the hub's side of it."""
        mtu = self._fabric.network.mtu + _ETHERNET
        inner, outer = f"qdisc replace dev {INTERFACE} root pfifo", ["qdisc replace dev {port} root pfifo"]
        where = "root"
        if not phase.rate_only:
            where = "parent 2:1"  # packets are delayed first and then wait for the link, as on a real path
            netem = f"netem limit 100000 delay {phase.delay_seconds * 1e6:.0f}us loss {phase.loss_fraction:.8%}"
            outer = [f"qdisc replace dev {{port}} root handle 2: {netem}"]
        if phase.rate_bits is not None:
            burst = max(int(phase.rate_bits / 8 * 2e-3), 2 * mtu)
            limit = max(int(phase.rate_bits / 8 * max(0.2, 8 * phase.delay_seconds)), 64 * mtu)
            tbf = f"handle 1: tbf rate {phase.rate_bits}bit burst {burst} limit {limit}"
            inner = f"qdisc replace dev {INTERFACE} root {tbf}"
            outer = [*(outer if where != "root" else []), f"qdisc replace dev {{port}} {where} {tbf}"]
        self._fabric.shape([inner], outer)

    def run(self, control: int, on_control: Callable[[], bool]) -> None:
        """Change phases until `on_control`, called when the file descriptor `control` is readable, returns False."""
        left = list(self._fabric.network.phases[1:])
        while True:
            timeout = None
            if self._epoch is not None and left:
                timeout = max(0.0, self._epoch + left[0].at_seconds - time.monotonic())
                if not timeout:
                    self.apply(left.pop(0))
                    continue
            if select.select([control], (), (), timeout)[0] and not on_control():
                return
