"""Emulated networks are what was asked for: rate, delay, jitter, loss, order, schedule."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.lean import eventually
from thinwire.errors import EmulationError, OptionError
from thinwire.lab.emulate import prove
from thinwire.lab.emulate.hosts import Hosts, emulated_hosts
from thinwire.lab.emulate.prove import Prober
from thinwire.predict.spec import parse_network

PYTHON = [sys.executable, "-I", "-S", "-c"]


@contextmanager
def network(way: str, count: int, text: str) -> Iterator[Hosts]:
    hosts = Hosts(count, parse_network(text))
    try:
        assert hosts.build(way) is None
        yield hosts
    finally:
        hosts.close()


def about(asked: float, share: float = 0.05) -> tuple[float, float]:
    return asked * (1 - share), asked * (1 + share)


def rate_is(prober: Prober, mbit: float, **how: object) -> None:
    low, high = about(mbit * 1e6)
    eventually(
        lambda: prober.rates(seconds=1.0, skip=0.4, **how),  # type: ignore[arg-type]
        lambda found: all(low <= rate <= high for rate in found),
    )


def delay_is(prober: Prober, ms: float) -> None:
    tolerance = max(0.1 * ms, 0.3)
    eventually(lambda: prober.delay(0, 1)["seconds"] * 1e3, lambda found: abs(found - ms) <= tolerance)


def test_rate_and_delay_of_a_switched_network(switched: str) -> None:
    with network(switched, 3, "50mbit,5ms") as hosts, Prober(hosts) as prober:
        delay_is(prober, 5)
        rate_is(prober, 50)


def test_a_host_receives_no_faster_than_it_sends(tun: str) -> None:
    with network(tun, 3, "40mbit,1ms") as hosts, Prober(hosts) as prober:
        low, high = about(40e6, 0.08)
        eventually(
            lambda: sum(prober.rates(seconds=1.2, skip=0.4, pairs=[(0, 2), (1, 2)])), lambda both: low <= both <= high
        )


def test_rate_by_the_kernel(kernel: str) -> None:
    with network(kernel, 3, "50mbit") as hosts, Prober(hosts) as prober:
        delay_is(prober, 0)
        rate_is(prober, 50)


def test_delay_by_the_kernel(netem: str) -> None:
    with network(netem, 2, "50mbit,5ms") as hosts, Prober(hosts) as prober:
        delay_is(prober, 5)
        rate_is(prober, 50, pairs=[(0, 1)])


def test_jitter_spreads_and_keeps_the_mean(tun: str) -> None:
    with network(tun, 2, "5ms,jitter=4ms") as hosts, Prober(hosts) as prober:
        eventually(
            lambda: prober.delay(0, 1, count=60),
            lambda found: found["low"] < 0.0045 and 0.004 < found["seconds"] < 0.006 and found["high"] > 0.0055,
        )


SEND = """
import socket, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(2000):
    link.sendto(number.to_bytes(4, "big"), (sys.argv[1], 5000))
    if number % 20 == 19:
        time.sleep(0.002)
time.sleep(0.3)
for _ in range(50):
    link.sendto(b"end", (sys.argv[1], 5000))
"""
RECEIVE = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
link.bind(("0.0.0.0", 5000))
print("ready", flush=True)
found = []
while len(data := link.recv(64)) == 4:
    found.append(int.from_bytes(data, "big"))
print(len(found), found == sorted(found))
"""


def test_loss_has_its_frequency_and_jitter_keeps_the_order(tun: str) -> None:
    with network(tun, 2, "10ms,jitter=5ms,loss=10%") as hosts:
        receiver = hosts.start(1, [*PYTHON, RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        hosts.start(0, [*PYTHON, SEND, hosts.address(1)]).wait(60)
        count, ordered = receiver.communicate(timeout=60)[0].split()
        assert abs(int(count) - 1800) < 5 * (2000 * 0.1 * 0.9) ** 0.5 + 1  # five standard deviations
        assert ordered == "True"


def test_a_schedule_waits_for_its_clock_and_then_changes(tun: str) -> None:
    with network(tun, 2, "100mbit,1ms;20mbit,10ms@0.3s") as hosts, Prober(hosts) as prober:
        time.sleep(0.5)
        delay_is(prober, 1)  # no clock yet
        hosts.start_clock()
        time.sleep(0.5)
        delay_is(prober, 10)
        rate_is(prober, 20, pairs=[(0, 1)])


def test_a_schedule_by_the_kernel(kernel: str) -> None:
    with network(kernel, 2, "100mbit;20mbit@0.1s") as hosts, Prober(hosts) as prober:
        rate_is(prober, 100, pairs=[(0, 1)])
        hosts.start_clock()
        time.sleep(0.5)
        rate_is(prober, 20, pairs=[(0, 1)])


ANSWER = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
link, _ = server.accept()
link.sendall(sys.argv[1].encode())
"""
ASK = """
import socket, sys
link = socket.create_connection((sys.argv[1], 5001), 30)
print(link.recv(100).decode(), socket.if_nameindex())
"""


def test_two_networks_at_once_do_not_meet(switched: str) -> None:
    with network(switched, 2, "100mbit,1ms") as first, network(switched, 2, "50mbit,2ms") as second:
        assert first.address(1) == second.address(1)
        servers = []
        for name, hosts in (("first", first), ("second", second)):
            servers.append(hosts.start(1, [*PYTHON, ANSWER, name], stdout=subprocess.PIPE, text=True))
            assert servers[-1].stdout is not None
            assert servers[-1].stdout.readline() == "ready\n"
        for name, hosts in (("first", first), ("second", second)):
            asked = hosts.start(0, [*PYTHON, ASK, hosts.address(1)], stdout=subprocess.PIPE, text=True)
            said = asked.communicate(timeout=60)[0]
            assert said.startswith(name)
            assert "'tw0'" in said
            assert "'lo'" in said
        for server in servers:
            server.communicate(timeout=60)


def test_the_proof_is_made_on_entry(tun: str) -> None:
    def proof() -> dict[str, float] | None:
        try:
            with emulated_hosts(2, network="100mbit,2ms", method="switch") as hosts:
                assert hosts.notice is None
                return hosts.measured
        except EmulationError:  # all attempts failed on a very busy machine
            return None

    measured = eventually(proof, lambda found: found is not None)
    assert measured is not None
    assert abs(measured["mbit"] - 100) <= 5
    assert abs(measured["ring_mbit"] - 100) <= 5
    assert abs(measured["delay_ms"] - 2) <= 0.3


def test_a_network_that_is_not_what_was_asked_for_is_refused(tun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine passes 100 Gbit/s through the kernel in one stream, and none through Python."""
    monkeypatch.setattr(prove, "ATTEMPTS", 2)
    with pytest.raises(EmulationError) as caught, emulated_hosts(2, network="100gbit"):
        pass
    assert "the emulated network is not 100gbit: measured " in str(caught.value)
    assert "were asked for, in the last of 2 attempts" in str(caught.value)


def test_bad_input_is_one_sentence() -> None:
    for count, how in ((0, {}), (65, {}), (2, {"network": "slow"}), (2, {"method": "magic"})):
        with pytest.raises(OptionError), emulated_hosts(count, **how):  # type: ignore[arg-type]
            pass
    with emulated_hosts(2, method="paced") as hosts, pytest.raises(OptionError, match="hosts 0 to 1, not 2"):
        hosts.address(2)
