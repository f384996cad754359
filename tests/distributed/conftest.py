"""The pools of processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """`pools(n)` is the pool of n processes, started by the first test that asks for it."""
    started: dict[int, Pool] = {}

    def pool_of(world_size: int) -> Pool:
        if world_size not in started:
            started[world_size] = Pool(world_size)
        return started[world_size]

    yield pool_of
    for pool in started.values():
        pool.close()
