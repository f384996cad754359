"""One rank of `benchmarks.scripts.soak`: trains with `auto`, and samples its memory, threads and descriptors."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.lab.emulate.paced import backend_here
from thinwire.lab.emulate.processes import event_writer

WIDTH, LAYERS, CAP_MB, BATCH = 256, 4, 0.2, 8  # 1 MB of gradients in several buckets


def resident() -> int:
    """Bytes of memory that this process has in use now."""
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Rss:"))


def sample(step: int) -> dict[str, int]:
    """What must not grow."""
    threads, descriptors = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    return {"step": step, "rss": resident(), "threads": threads, "descriptors": descriptors}


class Teacher:
    """Batches to learn from, drawn anew at every step: a training that does not end."""

    def __init__(self, seed: int, rank: int) -> None:
        self._numbers = torch.Generator().manual_seed(1000 * seed + rank)
        self._weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(BATCH, WIDTH, generator=self._numbers)
        return inputs, torch.tanh(inputs @ self._weight)


def train(steps: int, every: int, seed: int, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All steps of this rank; its samples, the number of buckets, and a digest of the weights at the end."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    model = DistributedDataParallel(net, bucket_cap_mb=CAP_MB)
    link = tw.attach(model, "auto", seed=seed)
    optimizer, teacher = torch.optim.SGD(net.parameters(), lr=0.02), Teacher(seed, rank)
    samples, begin = [sample(0)], time.monotonic()
    for step in range(1, steps + 1):
        inputs, targets = teacher.batch()
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        if step % every == 0:
            samples.append(sample(step))
            stats = link.stats()
            fields = {"seconds": time.monotonic() - begin, "switches": int(stats["auto/changes"])}
            tell(
                {"event": "sample", **samples[-1], **fields, "mbit": stats.get("auto/mbit"), "recipe": str(link.recipe)}
            )
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    found = {
        "samples": samples,
        "seconds": time.monotonic() - begin,
        "buckets": len(link.layout.buckets),
        "weights": hashlib.sha256(bits).hexdigest(),
        "finite": all(bool(parameter.isfinite().all()) for parameter in net.parameters()),
    }
    link.close()
    return found


def main(meet_at: str, rank: int, ranks: int, steps: int, every: int, seed: int) -> None:
    tell = event_writer(rank)
    torch.set_num_threads(1)
    limit = timedelta(minutes=5)
    dist.init_process_group(backend_here(), init_method=meet_at, rank=rank, world_size=ranks, timeout=limit)
    try:
        found = train(steps, every, seed, tell)
    except tw.ThinwireError as problem:
        tell({"event": "error", "rank": rank, "problem": f"{type(problem).__name__}: {problem}"})
        raise
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    tell({"event": "end", "ranks": everyone})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
