"""Ctrl-C while another rank hangs: KeyboardInterrupt reaches the program at once, and the process ends soon after.

Not after the timeout of the group: the main thread is never inside torch for long, lanes share one limit of 5 s, and no
group is freed that still waits for the other rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TIMEOUT = 120  # of the group: whoever waits for it is far too late
REACHED, ENDED = 5.0, 6.0  # seconds after the signal; leaving Python with torch loaded takes one more
MARGIN = 20.0  # machines are busy with other things
STUCK = 1.5  # seconds after which the rank surely waits for the one that is stopped

PROGRAM = """
import sys, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
import torch, torch.distributed as dist, thinwire as tw
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP
rank, store, recipe, timeout, how = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1); torch.manual_seed(0)
limit = timedelta(seconds=int(timeout))
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.02)
link = tw.attach(model, recipe)
try:
    while True:
        model.zero_grad(); model(torch.randn(2, 64)).sum().backward()
        if link.step == 20: print("trains", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if how == "raise": raise
    if how == "close": link.close()
"""


@contextlib.contextmanager
def two_ranks(store: Path, recipe: str, how: str) -> Iterator[list[subprocess.Popen[str]]]:
    """In training; both are ended in every case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store), recipe, str(TIMEOUT), how],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "trains\n", rank.communicate(timeout=60)[1][-2000:]
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("two-shot-2-ef", "return"),
        ("auto", "raise"),
        ("dense", "return"),
        ("auto", "close"),
        pytest.param("threshold-k", "raise", marks=pytest.mark.slow),
        pytest.param("powersgd-4", "close", marks=pytest.mark.slow),
        pytest.param("dense", "raise", marks=pytest.mark.slow),
        pytest.param("auto", "return", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_a_rank_whose_peer_hangs(tmp_path: Path, recipe: str, how: str) -> None:
    with two_ranks(tmp_path / "store", recipe, how) as (rank, peer):
        peer.send_signal(signal.SIGSTOP)
        time.sleep(STUCK)
        begin = time.monotonic()
        rank.send_signal(signal.SIGINT)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "interrupted\n"
        reached = time.monotonic() - begin
        rank.wait(TIMEOUT + 30)
        ended = time.monotonic() - begin
        assert rank.stderr is not None
        errors = rank.stderr.read()
        print(f"{recipe}, {how}: reached after {reached:.2f} s, ended after {ended:.2f} s")
    assert reached < REACHED + MARGIN
    assert ended < ENDED + MARGIN
    assert rank.returncode == (-signal.SIGINT if how == "raise" else 0), errors[-2000:]
    assert ("KeyboardInterrupt" in errors) == (how == "raise")
