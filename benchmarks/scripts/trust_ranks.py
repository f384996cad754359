"""One rank of benchmarks.scripts.trust: trains with a recipe or by gossip, and tells what it saw and what is left.

`python -m benchmarks.scripts.trust_ranks RANK MEET_AT CONTENDER PIPE_FD PLAN` is the same for a rank in a namespace.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm.network import Pending
from thinwire.comm.peers import peers_at
from thinwire.gossip.rounds import PATIENCE

RANKS, TIMEOUT, CHECK_EVERY = 3, 6, 5
DEADLINE = TIMEOUT / PATIENCE  # gossip gives a silent neighbour up after PATIENCE rounds: after the timeout as well
WARM = 8  # steps before anything is done to a rank
SLOWER = 3  # times as long as the others' steps
GOSSIP = {
    "gossip:dpsgd": "fp32",
    "gossip:naive": "min_max:8,block=64",
    "gossip:dcd": "min_max:4,block=64",
    "gossip:ecd": "absolute:8,step=0.02",
    "gossip:choco": "sign:64",
    "gossip:auto": "min_max:4,block=64",
    "gossip:allreduce": "fp32",
}


class Attached:
    """DDP with a recipe. All ranks hold the same model."""

    def __init__(self, recipe: str, rank: int, meet_at: str) -> None:
        _join_group(rank, meet_at)
        self.net = _network()
        self.model: nn.Module = DistributedDataParallel(self.net, bucket_cap_mb=0.05)
        self.sockets_before = sockets()  # those of the group, which belongs to the program
        self._link = tw.attach(self.model, recipe, check_every=CHECK_EVERY)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.close: Callable[[], None] = self._link.close

    def facts(self) -> dict[str, Any]:
        return {"steps": self._link.step, "bits": _bits(self.net)}


class Gossiping:
    """`decentralize`. Every rank holds a model of its own, and their average has the same bits on all ranks."""

    def __init__(self, contender: str, rank: int, meet_at: str) -> None:
        algorithm, transport = contender.removeprefix("gossip:"), None
        self.sockets_before = sockets()
        if algorithm == "allreduce":
            _join_group(rank, meet_at)
            self.sockets_before = sockets()
        else:
            transport = peers_at(meet_at, rank=rank, world_size=RANKS, seconds=60)
        self.net = self.model = _network()
        self.optimizer: torch.optim.Optimizer = tw.decentralize(
            self.net, torch.optim.SGD(self.net.parameters(), lr=0.01), algorithm=algorithm,
            codec=GOSSIP[contender], transport=transport, deadline=DEADLINE, start_seconds=60,
        )  # fmt: skip
        self._gossip: Any = self.optimizer
        self.close: Callable[[], None] = self._gossip.close

    def facts(self) -> dict[str, Any]:
        with self._gossip.averaged():
            bits = _bits(self.net)
        stats = self._gossip.stats()
        return {"steps": int(stats["gossip/round"]), "alive": int(stats.get("gossip/alive", RANKS)), "bits": bits}


def train(rank: int, meet_at: str, contender: str, plan: dict[str, Any], pipe: Any) -> None:
    """Train until something is raised, or for the steps of the plan, tell of it, and end the process."""
    torch.set_num_threads(1)
    training: Any = (Gossiping if contender in GOSSIP else Attached)(contender, rank, meet_at)
    number, ends = 0, [time.monotonic()]

    def step(rest: float) -> None:
        nonlocal number
        time.sleep(rest)
        numbers = torch.Generator().manual_seed(1000 * number + rank)
        training.optimizer.zero_grad()
        training.model(torch.randn(4, 96, generator=numbers)).square().mean().backward()
        training.optimizer.step()
        number += 1
        ends.append(time.monotonic())

    for _ in range(WARM):  # DDP arranges its buckets in forward, with a collective of its own
        step(plan["pause"])
    usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends[3:]))
    hit, rest = rank == plan["victim"], plan["pause"]
    if hit and plan["slow"]:
        rest += (SLOWER - 1) * usual
    told: dict[str, Any] = {"raised": "", "again": "", "wrong": "", "usual": usual}
    with _damaged(plan["damage"] if hit else None) as told["damaged"]:
        ends[:] = [time.monotonic()]
        pipe.send("ready")
        with _failures(told, "raised"):
            for _ in range(plan["steps"]):
                step(rest)
            told["ends"] = ends
            told |= training.facts()
        told["seconds"] = time.monotonic() - ends[-1]
    if told["raised"]:
        with _failures(told, "again"):
            step(0.0)
    told["threads"] = _threads() if told["raised"] else []  # an error ends them, without a close
    told["finite"] = all(bool(parameter.isfinite().all()) for parameter in training.net.parameters())
    told["packets"] = _packets()
    with _failures(told, "wrong"):
        training.close()
    before, training = training.sockets_before, None  # a transport listens until nobody holds it
    told |= _left(before)
    pipe.send(told)
    pipe.close()
    os._exit(0)


def _join_group(rank: int, meet_at: str) -> None:
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=RANKS, timeout=limit)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 96) for _ in range(5)))


def _bits(net: nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


@contextlib.contextmanager
def _failures(told: dict[str, Any], key: str) -> Iterator[None]:
    """Note a ThinwireError under `key`. Any other error breaks a promise."""
    try:
        yield
    except tw.ThinwireError as failure:
        told[key] = f"{type(failure).__name__}: {failure}"
    except Exception as failure:
        told["wrong"] = f"{type(failure).__name__}: {failure}"


@contextlib.contextmanager
def _damaged(plan: dict[str, Any] | None) -> Iterator[list[str]]:
    """Flip one bit of the n-th message as it arrives; what ranks compare is left alone. Without a plan, none.

    Gives the collective whose message it was, once that has happened.
    """
    receive, left, done = Pending._received, [0 if plan is None else plan["message"]], list[str]()

    def damaging(self: Pending) -> Any:
        received = receive(self)
        if received.dtype not in (torch.int64, torch.float64) and received.numel():
            left[0] -= 1
            if left[0] == 0 and plan is not None:
                flat = received.view(-1).view(torch.uint8)
                flat[int(plan["at"] * (flat.numel() - 1))] ^= 1 << plan["bit"]
                done.append(self._kind)
        return received

    Pending._received = damaging  # type: ignore[method-assign]
    try:
        yield done
    finally:
        Pending._received = receive  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------ what is left


def sockets() -> int:
    """The sockets that this process has open."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is gone already
            found += os.readlink(entry).startswith("socket:")
    return found


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]


def _left(before: int) -> dict[str, Any]:
    """Threads and sockets after a close. gloo closes sockets in a thread of its own, so they get a second."""
    until = time.monotonic() + 1
    gc.collect()
    while (_threads() or sockets() > before) and time.monotonic() < until:
        time.sleep(0.05)
    return {"threads_left": _threads(), "sockets_left": max(0, sockets() - before)}


def _packets() -> int:
    """The packets that this rank has sent through the interface of its namespace."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(counts.split()[9]) for interface, counts in lines if interface.strip() == name)


if __name__ == "__main__":
    _, _rank, _meet_at, _contender, _fd, _plan = sys.argv
    _pipe = Connection(int(_fd))
    _pipe.send("imported")  # ranks that start together differ by seconds, and the group's timeout is short
    _pipe.recv()
    train(int(_rank), _meet_at, _contender, json.loads(_plan), _pipe)
