"""What the hook costs: step time of an attached model against plain DDP, interleaved within one run, as JSON.

Unshaped loopback, gloo. Three questions: `dense` against plain DDP with 4 processes (target 1.03), `dense` against
plain DDP alone in its group (target 1.02), and a recipe with sinks against the same recipe without (target 1.01).
The other recipes are there to be seen; without a slow network they have nothing to gain.

OMP_NUM_THREADS=1 .venv/bin/python benchmarks/ddp_overhead.py
                                writes benchmarks/ddp_overhead.json and prints it, about five minutes; run nothing else
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from global_qsgd_blocks import sources
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.lab.compare.machine import describe_machine
from thinwire.lab.compare.models import Gpt
from thinwire.reduce import JsonLines

SCHEMA = 1
TARGETS = {"dense / plain, 4 processes": 1.03, "dense / plain, 1 process": 1.02, "threshold-k observed / not": 1.01}
OTHERS = ("bf16", "global-qsgd-8", "two-shot-4", "two-shot-2", "threshold-k", "ar-top-k", "powersgd-4")


def variant(name: str, rank: int, folder: str) -> Callable[[Tensor], None]:
    """One training step of a model of its own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(), bucket_cap_mb=4)
    observed = name.endswith("+sink")
    if name != "plain":
        sinks = [JsonLines(Path(folder) / f"{name}-{rank}.jsonl")] if observed else []
        model.link = tw.attach(model, name.removesuffix("+sink"), sinks=sinks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(sequences: Tensor) -> None:
        optimizer.zero_grad()
        model(sequences[:, :-1], sequences[:, 1:]).backward()
        optimizer.step()

    return step


def work(rank: int, world_size: int, names: list[str], rounds: int, steps: int, folder: str, results: object) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5))
    text = torch.frombuffer(bytearray(sources()[:1_000_000]), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - 129, (64, 2), generator=torch.Generator().manual_seed(rank))
    batches = [torch.stack([text[start : start + 129] for start in pair.tolist()]) for pair in starts]
    variants = {name: variant(name, rank, folder) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):  # the first is for compiling and for DDP to rebuild its buckets
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            for number in range(steps if turn >= 0 else 5):
                variants[name](batches[number % len(batches)])
            dist.barrier()
            if turn >= 0:
                seconds[name].append((time.perf_counter() - begin) / steps)
    if rank == 0:
        results.put(seconds)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def measure(world_size: int, names: list[str], *, rounds: int, steps: int) -> dict[str, list[float]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, names, rounds, steps, folder, results)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world_size)]
        for process in processes:
            process.start()
        seconds: dict[str, list[float]] = results.get(timeout=1800)
        for process in processes:
            process.join()
    return seconds


def ratios(seconds: dict[str, list[float]], name: str, against: str) -> dict[str, object]:
    """Paired by round: what one round shares (other load on the machine) cancels."""
    pairs = [a / b for a, b in zip(seconds[name], seconds[against], strict=True)]
    return {
        "median": statistics.median(pairs),
        "best_of_each": min(seconds[name]) / min(seconds[against]),
        "quartiles": statistics.quantiles(pairs, n=4)[::2],
        "step_ms": 1000 * statistics.median(seconds[name]),
        "against_step_ms": 1000 * statistics.median(seconds[against]),
        "rounds": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    sizes = {"rounds": options.rounds, "steps": options.steps}
    four = measure(4, ["plain", "dense"], **sizes)
    one = measure(1, ["plain", "dense", "threshold-k", "threshold-k+sink"], **sizes)
    recipes = measure(4, ["plain", *OTHERS], rounds=max(3, options.rounds // 4), steps=options.steps)
    measured = {
        "dense / plain, 4 processes": ratios(four, "dense", "plain"),
        "dense / plain, 1 process": ratios(one, "dense", "plain"),
        "threshold-k observed / not": ratios(one, "threshold-k+sink", "threshold-k"),
        "recipes / plain, 4 processes": {name: ratios(recipes, name, "plain") for name in OTHERS},
    }
    reached = {name: measured[name]["median"] <= target for name, target in TARGETS.items()}  # type: ignore[operator]
    written = {"schema": SCHEMA, "machine": describe_machine(), "targets": TARGETS, "reached": reached, **measured}
    options.out.write_text(json.dumps(written, indent=1) + "\n")
    for name, row in measured.items():
        print(name, json.dumps(row, indent=1))
    print(reached)


if __name__ == "__main__":
    main()
