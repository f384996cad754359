"""Many gloo groups, one thread that wakes up for them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import torch, torch.distributed as dist
from thinwire.lab.compare.one_loop import one_loop_backend
from thinwire.comm.communicator import Communicator

def loops():
    # Every loop waits on an epoll descriptor, which is there as soon as the group is. Its thread names itself later.
    return sum("eventpoll" in os.path.realpath(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd"))

dist.init_process_group({backend}, store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(5)]
for group in groups:
    assert Communicator(group).all_reduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    dist.all_reduce(torch.ones(3), group=group)
print(loops())
"""


def loops(backend: str) -> int:
    program = PROGRAM.format(backend=backend)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_groups_share_one_event_loop() -> None:
    assert loops("one_loop_backend()") == 1
    assert loops("'gloo'") >= 6  # what it is there for
