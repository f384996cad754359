"""`auto` when things go wrong: a rank is lost at any moment, a program ends without close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.pool import run_fresh

TIMEOUT = 15


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]


def lose_a_rank(rank: int, world_size: int, moment: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), bucket_cap_mb=0.05)
    link = tw.attach(model, "auto")
    policy: Any = link.reducer.policy

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    last = rank == world_size - 1
    if last and moment == "round":  # its messages have arrived, its report of the round has not
        start = policy._start_round
        policy._start_round = lambda step: die() if step >= 4 else start(step)

    def step(number: int) -> None:
        model.zero_grad()
        loss = model(torch.randn(2, 128)).sum()
        if last and ((moment == "first" and number == 0) or (moment == "forward" and number == 4)):
            die()
        loss.backward()

    told: dict[str, Any] = {"texts": [], "seconds": []}
    for _ in range(2):
        begin = time.monotonic()
        try:
            for number in range(12):
                step(number)
        except tw.ThinwireError as failure:
            told["texts"].append(f"{type(failure).__name__}: {failure}")
        told["seconds"].append(time.monotonic() - begin)
    return told | {"lanes": lanes()}


@pytest.mark.parametrize("moment", ["first", "round", "forward"])
def test_a_lost_rank_is_told_with_step_and_recipe(moment: str) -> None:
    *others, lost = run_fresh(3, lose_a_rank, moment, timeout=TIMEOUT, deadline=4 * TIMEOUT, expect_death=[2])
    assert lost == ("died", -signal.SIGKILL)
    for outcome in others:
        assert outcome[0] == "returned", outcome
        told = outcome[1]
        assert len(told["texts"]) == 2, told
        first, again = told["texts"]
        assert first.startswith("ExchangeError: "), first
        assert "step" in first
        assert "|" in first  # the recipe
        assert again == first
        assert told["lanes"] == []
        assert told["seconds"][0] < TIMEOUT + 5
        assert told["seconds"][1] < 2


ENDS = """
import sys, time, torch, torch.distributed as dist, thinwire as tw
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1); torch.manual_seed(0)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
class Slow:
    def log(self, metrics, step):
        if step == 9 and rank == 1:
            time.sleep(0.3)
    def close(self): pass
link = tw.attach(model, tw.auto(allow=["bf16"]), sinks=[Slow()])
for n in range(10):
    model.zero_grad(); model(torch.randn(2, 64)).sum().backward()
"""


@pytest.mark.parametrize("attempt", [0, *(pytest.param(more, marks=pytest.mark.slow) for more in range(1, 10))])
def test_a_program_that_ends_without_close_does_not_abort(tmp_path: Any, attempt: int) -> None:
    """Rank 1 is still in its last step when rank 0 leaves, and a round is under way."""
    command = [sys.executable, "-c", ENDS]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-2000:]
