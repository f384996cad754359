"""The process that holds the namespaces of an emulated network: when it ends, the network is gone.

    python -I -S launch.py thinwire.lab.emulate.holder PARENT_PID CONTROL_FD WAY COUNT NETWORK

It builds the hosts, sends the file descriptors of their namespaces through the control socket, and forwards packets
until that socket is closed. It dies with its parent and leaves no file, name or interface behind.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import time

from ...predict.spec import parse_network
from . import system
from .fabric import INTERFACE, Fabric, KernelNetwork
from .switch import Switch


def main(arguments: list[str]) -> None:
    parent, control_fd, way, count, text = arguments
    system.die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what to do
    control = socket.socket(fileno=int(control_fd))
    network = parse_network(text)
    try:
        fabric = Fabric(int(count), network)
        system.die_with_parent(int(parent))  # again: a new user namespace resets it
        forwarder: Switch | KernelNetwork = getattr(fabric, way)()
    except OSError as problem:
        control.send(json.dumps({"error": problem.strerror or str(problem)}).encode())
        return
    user = [] if fabric.user is None else [fabric.user]
    reply = {"interface": INTERFACE, "user": bool(user), "priority": ""}
    if way != "kernel":
        reply["priority"] = system.be_prompt(2)
    socket.send_fds(control, [json.dumps(reply).encode()], [*fabric.hosts, *user])

    def on_control() -> bool:
        order = control.recv(64)
        if order == b"clock":
            forwarder.start_clock()
        if order == b"facts":
            used = resource.getrusage(resource.RUSAGE_SELF)
            facts = {"cpu_seconds": used.ru_utime + used.ru_stime, "at": time.monotonic(), "late": forwarder.late}
            facts |= {"dropped": forwarder.dropped, "lost": forwarder.lost}
            control.send(json.dumps(facts).encode())
        return bool(order)

    forwarder.run(control.fileno(), on_control)


if __name__ == "__main__":
    main(sys.argv[1:])
