"""torch on emulated hosts: gloo through real packets, and the paced backend where there are none."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.emulate.hosts import Method, emulated_hosts
from thinwire.lab.emulate.paced import PacedLink
from thinwire.predict.spec import parse_network

WORKER = Path(__file__).parents[2] / "support" / "ddp_worker.py"


def train(count: int, network: str, method: Method | None, *recipe: str) -> list[dict[str, Any]]:
    with emulated_hosts(count, network=network, method=method, prove=False) as hosts:
        port = "29500"
        if hosts.method == "paced":  # shares the loopback of the machine
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = str(server.getsockname()[1])
        workers = [
            hosts.start(
                rank,
                [sys.executable, str(WORKER), str(rank), str(count), hosts.address(0), port, *recipe],
                env={"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        found = []
        for worker in workers:
            out, err = worker.communicate(timeout=400)
            assert worker.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    return found


def check(found: list[dict[str, Any]], backend: str) -> None:
    for one in found:
        assert one["backend"] == backend
        assert one["collectives"]
        assert all(one["collectives"].values()), one


def test_gloo_between_hosts_takes_the_time_of_the_ring(tun: str) -> None:
    found = train(4, "100mbit,1ms", "switch")
    check(found, "gloo")
    ring = 2 * 2e6 * 3 / 4 * 8 / 100e6
    for one in found:
        assert one["apart"] < 1e-5
        assert ring * 0.9 < one["all_reduce_seconds"] < ring * 4  # above: a busy machine


def test_paced_training_is_right_and_takes_its_time() -> None:
    found = train(2, "100mbit,1ms", "paced")
    check(found, "paced")
    ring = 2e6 * 8 / 100e6 + 2e-3
    for one in found:
        assert one["apart"] < 1e-5
        assert ring <= one["all_reduce_seconds"] < ring * 4


@pytest.mark.slow
def test_paced_training_with_a_recipe() -> None:
    found = train(2, "100mbit,1ms", "paced", "two-shot-4")
    check(found, "paced")
    assert all(0 < one["apart"] < 1 for one in found)


def test_a_link_is_shared_and_follows_its_schedule(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.touch()
    with clock.open("rb") as file:
        link = PacedLink(parse_network("8mbit;80mbit,1s@10s"), clock=file.fileno())
        assert link.occupy(begin=100.0, sent=1e6, rounds=3) == 101.0  # no clock yet: the first phase
        assert link.occupy(begin=100.0, sent=1e6, rounds=0) == 102.0  # the line is busy
        assert link.occupy(begin=200.0, sent=1e6, rounds=0) == 201.0
        clock.write_text("190.0")
        assert link.occupy(begin=300.0, sent=1e6, rounds=3) == pytest.approx(303.1)
