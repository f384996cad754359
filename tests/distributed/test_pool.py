"""The pool itself: ranks that meet, processes that stay, and failures that are told and then forgotten.

Few tests with many checks each, in an order that replaces processes seldom: starting one costs seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.pool import Pool, run_fresh

Pools = Callable[[int], Pool]
LONG = 1000.0


def summed(rank: int, world_size: int, factor: float = 1.0) -> Tensor:
    x = torch.full((3,), factor * (rank + 1))
    dist.all_reduce(x)
    return x


def process_and_noise(rank: int, world_size: int) -> tuple[int, float]:
    return os.getpid(), float(torch.rand(()))


def leave_groups(rank: int, world_size: int) -> bool:
    """A group of its own, and on one rank no default group any more: as rude as a test may be."""
    group = dist.new_group(range(world_size))
    dist.barrier(group)
    if rank == 0:
        dist.destroy_process_group()
    return True


def wrong_on_one(rank: int, world_size: int) -> None:
    """The others wait for a collective that never comes."""
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def sleep_on_last(rank: int, world_size: int) -> int:
    if rank == world_size - 1:
        time.sleep(LONG)
    return rank


def each_its_own_end(rank: int, world_size: int) -> str:
    match rank:
        case 1:
            os._exit(7)
        case 2:
            os.kill(os.getpid(), signal.SIGKILL)
        case 3:
            raise KeyError("a key")
        case 4:
            time.sleep(LONG)
    return "done"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_meet(pools: Pools, world_size: int) -> None:
    expected = 0.5 * world_size * (world_size + 1) / 2
    sums = pools(world_size).run(summed, factor=0.5)
    assert len(sums) == world_size
    for x in sums:
        assert torch.equal(x, torch.full((3,), expected))


def test_processes_are_reused_and_nothing_else(pools: Pools) -> None:
    first = pools(2).run(process_and_noise)
    assert pools(2).run(leave_groups) == [True, True]
    assert pools(2).run(process_and_noise) == first  # the same processes, the same seed
    assert len({process for process, _ in first} | {os.getpid()}) == 3
    assert torch.equal(pools(2).run(summed)[0], torch.full((3,), 3.0))


def test_what_cannot_be_sent_ends_nothing(pools: Pools) -> None:
    before = pools(2).run(process_and_noise)
    with pytest.raises(AttributeError, match="local object"):
        pools(2).run(lambda rank, world_size: None)
    assert pools(2).run(process_and_noise) == before


def test_a_failure_is_told_and_forgotten(pools: Pools) -> None:
    before = [process for process, _ in pools(2).run(process_and_noise)]
    with pytest.raises(AssertionError) as caught:
        pools(2).run(wrong_on_one)
    told = str(caught.value)
    assert told.startswith("rank 1 of 2 raised:\nTraceback")
    assert 'raise ValueError("only here")' in told
    assert "rank 0 of 2 had not finished" in told
    assert "in wrong_on_one" in told.partition("rank 0 of 2")[2]  # where it waited
    for process in before:
        assert_gone(process)
    assert torch.equal(pools(2).run(summed)[1], torch.full((3,), 3.0))


def test_a_hang_is_cut(pools: Pools) -> None:
    with pytest.raises(AssertionError) as caught:
        pools(2).run(sleep_on_last, deadline=2.0)
    told = str(caught.value)
    assert told.startswith("rank 1 of 2 had not finished after 2 s")
    assert "in sleep_on_last" in told
    assert "rank 0" not in told


def test_fresh_ranks_end_in_their_own_ways() -> None:
    """Where a hang is expected nobody waits for the deadline, or this test would never end."""
    outcomes = run_fresh(5, each_its_own_end, deadline=LONG, expect_death=[4])
    kind, name, message, trace = outcomes.pop(3)
    assert (kind, name, message) == ("raised", "KeyError", "'a key'")
    assert 'raise KeyError("a key")' in trace
    assert outcomes == [("returned", "done"), ("died", 7), ("died", -signal.SIGKILL), ("died", -signal.SIGKILL)]


def test_a_fresh_rank_that_hangs_shows_where() -> None:
    [(kind, stacks)] = run_fresh(1, sleep_on_last, deadline=0.5)
    assert kind == "hung"
    assert "in sleep_on_last" in stacks


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Also in the middle of a job."""
    note = tmp_path / "process"
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, time\n"
        "def sleep(rank, world_size, note):\n"
        "    pathlib.Path(note).write_text(f'{os.getpid()} ')\n"
        f"    time.sleep({LONG})\n"
    )
    script = f"import sleeper; from support.pool import Pool; Pool(1).run(sleeper.sleep, {str(note)!r})"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}  # a killed parent does not clear up
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as parent:
        wait_until(lambda: note.exists() and note.read_text().endswith(" "))
        parent.kill()
    assert_gone(int(note.read_text()))


def assert_gone(process: int) -> None:
    wait_until(lambda: not Path(f"/proc/{process}").exists())


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
