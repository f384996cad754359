"""A trial of benchmarks.scripts.trust on links that lose packets: each rank has a network namespace of its own.

The switch of thinwire.lab.emulate joins the namespaces and drops 1 % of the packets that carry data. It needs no netem.
Pure acknowledgements always arrive.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.scripts.trust_ranks import RANKS
from benchmarks.scripts.trust_trials import Trial
from thinwire.lab.emulate.hosts import Hosts, emulated_hosts

ROOT = Path(__file__).parents[2]
NETWORK = "100mbit,1ms,loss=1%"


class LossTrial(Trial):
    """Three processes in namespaces. None of them may be left at the end, nor a namespace or an interface."""

    def run(self) -> str:
        descriptors, self._namespaces = _descriptors(), list[int]()
        try:
            word = super().run()
            if word.startswith("bad"):
                return word
            if not self.packets_lost:
                return "bad: no packet was lost"
            left = any(_in_use(namespace) for namespace in self._namespaces)
        finally:
            for namespace in self._namespaces:
                os.close(namespace)
        return "bad: namespaces are left" if left or _descriptors() > descriptors else word

    @contextlib.contextmanager
    def started(self, plan: dict[str, Any], mark: str = "") -> Iterator[list[tuple[int, Any]]]:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(emulated_hosts(RANKS, network=NETWORK, method="switch", prove=False))
            ranks = [self._start(stack, hosts, rank, plan) for rank in range(RANKS)]
            for pid, pipe in ranks:
                if pipe.poll(120):
                    pipe.recv()
                # Open, its number cannot pass to a namespace of somebody else before we looked for what is left.
                self._namespaces.append(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
            for _, pipe in ranks:
                pipe.send("go")
            yield ranks
            self.packets_lost = int(hosts.facts()["lost"])

    def _start(self, stack: contextlib.ExitStack, hosts: Hosts, rank: int, plan: dict[str, Any]) -> tuple[int, Any]:
        mine, theirs = multiprocessing.Pipe()
        stack.callback(mine.close)
        with theirs:
            command = [sys.executable, "-m", "benchmarks.scripts.trust_ranks", str(rank), self.meet_at, self.contender]
            started = hosts.start(
                rank, [*command, str(theirs.fileno()), json.dumps(plan)], pass_fds=[theirs.fileno()], cwd=ROOT,
                env={"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        return started.pid, mine


def _in_use(namespace: int) -> bool:
    """Whether a process is in this namespace, or a name in the file system keeps it."""
    number = os.fstat(namespace).st_ino
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.stat(process / "ns" / "net").st_ino == number:
                return True
    return f"net:[{number}]" in Path("/proc/self/mountinfo").read_text()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
