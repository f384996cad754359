"""Overhead of the DDP hook: step time of an attached model over plain DDP, interleaved within one run.

    OMP_NUM_THREADS=1 python -m benchmarks.scripts.ddp_overhead
                            about five minutes; writes benchmarks/results/ddp_overhead.json and prints it

Unshaped loopback, gloo. Three questions have a target: `dense` over plain DDP with 4 processes (1.03), `dense` over
plain DDP with a group of 1 (1.02), and a recipe with a sink over the same recipe without (1.01). The other recipes are
shown for reference: without a slow network they have nothing to gain. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from benchmarks.scripts import results
from benchmarks.scripts.global_qsgd_blocks import sources
from thinwire.lab.compare.machine import describe_machine
from thinwire.lab.compare.models import Gpt
from thinwire.reduce import JsonLines

SCHEMA = 1
OUT = results.RESULTS / "ddp_overhead.json"
TARGETS = {"dense / plain, 4 processes": 1.03, "dense / plain, 1 process": 1.02, "threshold-k observed / not": 1.01}
Seconds = dict[str, list[float]]  # of a step, by variant
OTHERS = ("bf16", "global-qsgd-8", "two-shot-4", "two-shot-2", "threshold-k", "ar-top-k", "powersgd-4")


@dataclass
class Variant:
    """A model of its own under DDP: plain, or attached to a recipe, with or without a sink."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    link: tw.Link | None  # held, so that it lives as long as the model

    @classmethod
    def of(cls, name: str, rank: int, folder: str) -> Variant:
        torch.manual_seed(0)
        model, link = DistributedDataParallel(Gpt(), bucket_cap_mb=4), None
        if name != "plain":
            sinks = [JsonLines(Path(folder) / f"{name}-{rank}.jsonl")] if name.endswith("+sink") else []
            link = tw.attach(model, name.removesuffix("+sink"), sinks=sinks)
        return cls(model, torch.optim.SGD(model.parameters(), lr=0.01), link)

    def step(self, sequences: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(sequences[:, :-1], sequences[:, 1:]).backward()
        self.optimizer.step()


def work(
    rank: int, world_size: int, names: list[str], rounds: int, steps: int, folder: str, sink: Queue[Seconds]
) -> None:
    """One rank: all variants take turns, in an order that changes from round to round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    place, timeout = f"file://{folder}/store", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size, timeout=timeout)
    text = torch.frombuffer(bytearray(sources()[:1_000_000]), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - 129, (64, 2), generator=torch.Generator().manual_seed(rank))
    batches = [torch.stack([text[start : start + 129] for start in pair.tolist()]) for pair in starts]
    variants = {name: Variant.of(name, rank, folder) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):  # round -1 compiles kernels and lets DDP rebuild its buckets
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            for number in range(steps if turn >= 0 else 5):
                variants[name].step(batches[number % len(batches)])
            dist.barrier()
            if turn >= 0:
                seconds[name].append((time.perf_counter() - begin) / steps)
    if rank == 0:
        sink.put(seconds)
    dist.destroy_process_group()


def measure(world_size: int, names: list[str], *, rounds: int, steps: int) -> Seconds:
    """Seconds per step of every variant, one figure per round."""
    context = multiprocessing.get_context("spawn")
    sink: Queue[Seconds] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, names, rounds, steps, folder, sink)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world_size)]
        for process in processes:
            process.start()
        seconds = sink.get(timeout=1800)
        for process in processes:
            process.join()
    return seconds


def ratios(seconds: Seconds, name: str, against: str) -> dict[str, Any]:
    """Step times over each other, paired by round: other load on the machine cancels."""
    pairs = [a / b for a, b in zip(seconds[name], seconds[against], strict=True)]
    return {
        **results.summary(pairs),
        "best_of_each": min(seconds[name]) / min(seconds[against]),
        "step_ms": 1000 * statistics.median(seconds[name]),
        "against_step_ms": 1000 * statistics.median(seconds[against]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write (default: in benchmarks/results)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn (default: %(default)s)")
    options = parser.parse_args()
    sizes = {"rounds": options.rounds, "steps": options.steps}
    four = measure(4, ["plain", "dense"], **sizes)
    one = measure(1, ["plain", "dense", "threshold-k", "threshold-k+sink"], **sizes)
    recipes = measure(4, ["plain", *OTHERS], rounds=max(3, options.rounds // 4), steps=options.steps)
    measured: dict[str, dict[str, Any]] = {
        "dense / plain, 4 processes": ratios(four, "dense", "plain"),
        "dense / plain, 1 process": ratios(one, "dense", "plain"),
        "threshold-k observed / not": ratios(one, "threshold-k+sink", "threshold-k"),
        "recipes / plain, 4 processes": {name: ratios(recipes, name, "plain") for name in OTHERS},
    }
    reached = {name: measured[name]["median"] <= target for name, target in TARGETS.items()}
    written = {"schema": SCHEMA, "machine": describe_machine(), "targets": TARGETS, "reached": reached, **measured}
    results.write(options.out, written)
    for name, row in measured.items():
        print(name, json.dumps(row, indent=1))
    print(reached)


if __name__ == "__main__":
    main()
