"""Ranks as processes, ended after each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.gossip_processes import Process


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Process] = []

    def start_one(**options: Any) -> Process:
        started.append(Process(**options))
        return started[-1]

    yield start_one
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
