"""One rank of `benchmarks.scripts.gossip --parts faults`: trains on images, may lose messages, may kill itself."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from thinwire.comm.peers import GlooTransport, peers_at
from thinwire.lab.compare.workloads import Workload, workload


class Lossy:
    """Drops a share of the messages that a rank sends, while `begun` is true."""

    def __init__(self, transport: GlooTransport, share: float, seed: int) -> None:
        self._send, self._share, self.begun = transport.send, share, False
        self._random = random.Random(f"{seed}/{transport.rank}")
        transport.send = self.send  # type: ignore[method-assign]  # nothing else loses messages on purpose

    def send(self, peer: int, message: Tensor) -> None:
        if not (self.begun and self._random.random() < self._share):
            self._send(peer, message)


def main(
    data: str, algorithm: str, codec: str, seed: int, loss: float, steps: int, address: str, rank: int, ranks: int,
    die_at: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Train, and give the longest step, how many ranks are alive, and on rank 0 the accuracy of the average model."""
    torch.set_num_threads(1)
    work = workload("cnn", data=data)
    net = work.model(seed=seed)
    transport = peers_at(address, rank=rank, world_size=ranks)
    lossy = Lossy(transport, loss, seed)
    base = work.optimizer(net)
    rates = [group["lr"] for group in base.param_groups]
    opt = tw.decentralize(
        net, base, algorithm=algorithm, codec=codec, topology=tw.topology.ring(), transport=transport, seed=seed
    )
    lossy.begun = True
    taken = []
    for step in range(steps):
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.perf_counter()
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate * work.rate(step) * decay(step, steps)
        opt.zero_grad()
        net(*work.batch(step, seed=seed, rank=rank, world_size=ranks)).backward()
        opt.step()
        taken.append(time.perf_counter() - begin)
    lossy.begun = False
    found: dict[str, Any] = {"gap_seconds": max(taken[5:]), "alive": opt.stats()["gossip/alive"]}
    with opt.averaged(), torch.no_grad():
        if rank == 0:  # all ranks have the same average
            found["accuracy"] = accuracy(work, net)
    opt.close()
    return found


def decay(step: int, steps: int) -> float:
    """Down to zero over the second half: at a constant rate the last step alone moves accuracy by a point."""
    return min(1.0, 2.0 * (steps - step) / steps)


def accuracy(work: Workload, net: torch.nn.Module) -> float:
    """The share of held-out images that are classified right."""
    net.eval()
    batches = work.held_out(rank=0, world_size=1, batches=160)
    right = [(work.correct(net, batch) or 0, len(batch[1])) for batch in batches]
    return sum(count for count, _ in right) / sum(size for _, size in right)


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))), flush=True)
