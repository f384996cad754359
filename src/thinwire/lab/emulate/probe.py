"""Measures a network from inside a host: TCP streams for bandwidth, small packets for latency.

    python -I -S launch.py thinwire.lab.emulate.probe

Reads orders from standard input as lines of JSON: {"id": 1, "role": "receive", "arguments": [...]}. Each runs in its
own thread, because a host may send and receive at once. Results go to standard output as lines of JSON. Standard
library only.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable

from .system import be_prompt

ANSWER_SECONDS = 15.0  # longer than any delay here: after it, something is broken
_TICK = 0.005


def receive(ready: Callable[[], None], port: int, seconds: float, skip: float) -> dict[str, float]:
    """Bytes a second of payload, after `skip` seconds in which TCP finds its speed."""
    with socket.create_server(("0.0.0.0", port)) as server:
        server.settimeout(ANSWER_SECONDS)
        ready()
        link, _ = server.accept()
    with link:
        link.settimeout(ANSWER_SECONDS)
        buffer = bytearray(1 << 20)
        link.recv_into(buffer)
        begin = time.monotonic()
        total = 0
        marks = []
        while got := link.recv_into(buffer):
            now = time.monotonic()
            total += got
            if now - begin >= skip:
                marks.append((now, total))
            if now - begin >= seconds:
                break
    # From one arrival to another: the bytes of the first one came before the interval.
    if len(marks) < 2:
        return {"bytes_per_second": 0.0, "stalled": 1.0}
    (first, before), (last, after) = marks[0], marks[-1]
    return {"bytes_per_second": (after - before) / (last - first)}


def send(ready: Callable[[], None], address: str, port: int, seconds: float) -> dict[str, float]:
    """Send as much as TCP takes, until the receiver has seen enough."""
    block = memoryview(bytes(1 << 18))
    total = 0
    with socket.create_connection((address, port), ANSWER_SECONDS) as link:
        end = time.monotonic() + 2 * seconds + ANSWER_SECONDS
        try:
            while time.monotonic() < end:
                total += link.send(block)
        except OSError:
            pass  # the receiver has closed: done
        return {"sent": total}


def echo(ready: Callable[[], None], port: int) -> dict[str, float]:
    """Return every packet to its sender, until an empty one comes."""
    answered = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.bind(("0.0.0.0", port))
        link.settimeout(ANSWER_SECONDS)
        ready()
        while True:
            data, sender = link.recvfrom(2048)
            if not data:
                return {"answered": answered}
            link.sendto(data, sender)
            answered += 1


def ping(ready: Callable[[], None], address: str, port: int, count: int) -> dict[str, float]:
    """Half the round trip: median, 10th and 90th percentile, and the number of answers."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((address, port))
        link.settimeout(0.3)
        for number in range(count):
            begin = time.monotonic()
            link.send(number.to_bytes(4, "big"))
            try:
                while int.from_bytes(link.recv(64), "big") != number:
                    pass  # a late answer to an earlier packet
            except TimeoutError:
                link.settimeout(2.0)  # lost, or a longer path than that
                continue
            found.append((time.monotonic() - begin) / 2)
            time.sleep(_TICK / 5)  # each on an idle link
        with contextlib.suppress(OSError):  # refused once the other side has closed
            for _ in range(5):  # the end may be lost too
                link.send(b"")
    found.sort()
    if not found:
        return {"answers": 0, "seconds": 0.0}
    low, middle, high = (found[int(len(found) * share)] for share in (0.1, 0.5, 0.9))
    return {"answers": len(found), "seconds": middle, "low": low, "high": high}


_ROLES: dict[str, Callable[..., dict[str, float]]] = {"receive": receive, "send": send, "echo": echo, "ping": ping}
_output = threading.Lock()


def _tell(number: int, **facts: object) -> None:
    with _output:
        sys.stdout.write(json.dumps({"id": number, **facts}) + "\n")
        sys.stdout.flush()


def _obey(number: int, role: str, arguments: list[str | float]) -> None:
    be_prompt(1)  # the network is measured, not the load of the machine; the switch still has priority
    try:
        found = _ROLES[role](lambda: _tell(number, ready=True), *arguments)
    except OSError as problem:
        _tell(number, error=f"{role}: {problem}")
    else:
        _tell(number, found=found)


if __name__ == "__main__":
    for line in sys.stdin:
        order = json.loads(line)
        threading.Thread(target=_obey, args=(order["id"], order["role"], order["arguments"]), daemon=True).start()
