"""One rank of a real run of the simulator's workload: `python simulated_process.py JSON`; writes models."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.gossip.tensors import Flat
from thinwire.lab.compare.workloads import workload


def train(net: Any, optimizer: Any, work: Any, *, steps: int, rank: int, ranks: int) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * work.rate(step)
        optimizer.zero_grad()
        net(*work.batch(step, seed=3, rank=rank, world_size=ranks)).backward()
        optimizer.step()


def main(store: str, rank: int, ranks: int, steps: int, out: str, algorithms: list[Any], recipes: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    work = workload("mlp-100k")
    models = {}
    for name, codec, deadline in algorithms:
        net = work.model(seed=3)
        optimizer = tw.decentralize(
            net,
            work.optimizer(net),
            algorithm=name,
            codec=codec,
            topology=tw.topology.ring(),
            deadline=deadline,
            seed=3,
        )
        train(net, optimizer, work, steps=steps, rank=rank, ranks=ranks)
        models[f"{name} {codec} {deadline}"] = Flat(list(net.parameters())).read()
        dist.barrier()
    for recipe in recipes:
        net = work.model(seed=3)
        ddp = DistributedDataParallel(net)
        link = tw.attach(ddp, recipe, exempt=(), seed=3)
        train(ddp, work.optimizer(ddp), work, steps=steps, rank=rank, ranks=ranks)
        models[recipe] = Flat(list(net.parameters())).read()
        link.close()
        dist.barrier()
    torch.save(models, f"{out}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
