"""What the tests of the emulator need of the machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from thinwire.lab.emulate.hosts import Hosts
from thinwire.predict.spec import parse_network


def _need(way: str, network: str) -> None:
    hosts = Hosts(2, parse_network(network))
    try:
        reason = hosts.build(way)
    finally:
        hosts.close()
    if reason is not None:
        pytest.skip(f"this machine has no network by {way}: {reason}")


@pytest.fixture(scope="session")
def tun() -> str:
    _need("tun", "100mbit,1ms")
    return "tun"


@pytest.fixture(scope="session")
def packet() -> str:
    _need("packet", "100mbit,1ms")
    return "packet"


@pytest.fixture(scope="session")
def kernel() -> str:
    _need("kernel", "100mbit")
    return "kernel"


@pytest.fixture(scope="session")
def netem() -> str:
    _need("kernel", "100mbit,1ms")
    return "kernel"


@pytest.fixture(scope="session", params=["tun", "packet"])
def switched(request: pytest.FixtureRequest) -> str:
    way: str = request.getfixturevalue(request.param)
    return way
