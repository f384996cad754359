"""Global-QSGD at 8 bits: error of the mean gradient with one scale per bucket and with one scale per block.

    OMP_NUM_THREADS=1 python -m benchmarks.scripts.global_qsgd_blocks
                        about eight minutes; writes benchmarks/results/global_qsgd_blocks.json, prints its summary

The gradients are those of a small byte-level GPT that learns the sources of Python's standard library. Blocks gain most
where an embedding shares a bucket with the layers, and least in a bucket of one matrix. So the file has the ratio over
all buckets together and the ratio in each bucket.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from benchmarks.scripts import results
from thinwire.codecs.global_qsgd import GlobalQsgd
from thinwire.lab.compare.machine import describe_machine
from thinwire.lab.compare.models import Gpt

SCHEMA = 1
OUT = results.RESULTS / "global_qsgd_blocks.json"
Row = dict[str, Any]
WORLD_SIZES = (4, 8)
BLOCKS = (0, 64, 128, 256, 512, 1024)  # 0: one scale a bucket, as published
RECORDED = (0, 20, 100)
DRAWS = (0, 1, 2, 3, 4)
MODEL_SEED, DATA_SEED = 0, 0
TARGET = 1 / 50

CONTEXT = 128
BATCH = 8  # sequences of a worker
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP, WARM_UP = 1e-3, (0.9, 0.95), 0.1, 1.0, 10
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, as DDP has them


# ------------------------------------------------------------------------------------------ model and data


def sources() -> bytes:
    """The modules at the top of the standard library, by name."""
    return b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


def buckets_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Buckets as DDP makes them: parameters last first, a bucket closes when it reaches its limit.

    Only parameters with two or more dimensions: a recipe leaves biases and norms uncompressed.
    """
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in reversed([p for p in model.parameters() if p.dim() >= 2]):
        if size >= (FIRST_BUCKET if len(buckets) == 1 else BUCKET):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


# --------------------------------------------------------------------------------------------- measurement


def gradients(text: Tensor, n: int) -> Iterator[tuple[int, float, list[list[Tensor]]]]:
    """Train on the mean of n workers; yields step, loss and gradients[bucket][worker] of every recorded step."""
    torch.manual_seed(MODEL_SEED)
    model, generator = Gpt(context=CONTEXT), torch.Generator().manual_seed(DATA_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    buckets, window = buckets_of(model), torch.arange(CONTEXT + 1)
    for step in range(max(RECORDED) + 1):
        starts = torch.randint(text.numel() - CONTEXT, (n, BATCH, 1), generator=generator)
        recorded: list[list[Tensor]] = [[] for _ in buckets]
        losses, means = [], [torch.zeros_like(p) for p in model.parameters()]
        for worker in range(n):
            model.zero_grad()
            sequences = text[starts[worker] + window]
            loss = model(sequences[:, :-1], sequences[:, 1:])
            loss.backward()
            losses.append(loss.item())
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean.add_(_gradient(parameter), alpha=1 / n)
            if step in RECORDED:
                for of_bucket, bucket in zip(recorded, buckets, strict=True):
                    of_bucket.append(torch.cat([_gradient(p).flatten() for p in bucket]))
        if step in RECORDED:
            yield step, statistics.fmean(losses), recorded
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.grad = mean
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        optimizer.step()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "backward has run, and every parameter takes part"
    return parameter.grad


def quantized_mean(codec: GlobalQsgd, workers: list[Tensor], draw: tw.Draw) -> Tensor:
    """What ranks receive: one scale for all, codes with a draw per rank, the int8 sum decoded."""
    n = len(workers)
    scale = codec.scale_from(torch.stack([codec.local_norm(x) for x in workers]).amax(0))
    total = torch.zeros(workers[0].numel(), dtype=torch.int8)
    for rank, x in enumerate(workers):
        own = tw.Draw(seed=draw.seed, step=draw.step, stream=draw.stream, rank=rank)
        total += codec.codes(x, scale=scale, world_size=n, draw=own)
    return codec.values(total, scale=scale, world_size=n) / n


def square_sum(x: Tensor) -> float:
    return x.double().square().sum().item()


def measure(step: int, loss: float, recorded: list[list[Tensor]]) -> list[Row]:
    """One row per block size: error over the square of the exact mean, over all buckets and in each bucket."""
    n, rows = len(recorded[0]), list[Row]()
    exact = [torch.stack(workers).mean(0) for workers in recorded]
    squares, numels = [square_sum(mean) for mean in exact], [mean.numel() for mean in exact]
    per_bucket: list[float] = []
    for block in BLOCKS:
        codec = tw.codecs.global_qsgd(bits=8, norm="linf", block=block)
        errors = [  # [draw][bucket]
            [
                square_sum(quantized_mean(codec, workers, tw.Draw(seed=seed, step=step, stream=bucket)) - exact[bucket])
                for bucket, workers in enumerate(recorded)
            ]
            for seed in DRAWS
        ]
        nmse = [sum(draw) / sum(squares) for draw in errors]
        parts = [
            statistics.fmean(of_bucket) / square
            for of_bucket, square in zip(zip(*errors, strict=True), squares, strict=True)
        ]
        figures = [statistics.fmean(nmse), *parts]
        if block == 0:
            per_bucket = figures
        ratios = [figure / whole for figure, whole in zip(figures, per_bucket, strict=True)]
        scales = sum(math.ceil(numel / block) if block else 1 for numel in numels)
        rows.append(
            {
                "step": step,
                "loss": loss,
                "world_size": n,
                "levels": codec.levels(n),
                "norm": codec.norm,
                "block": block,
                "nmse": figures[0],
                "nmse_lowest_draw": min(nmse),
                "nmse_highest_draw": max(nmse),
                "ratio": ratios[0],
                "reached": None if block == 0 else ratios[0] <= TARGET,
                "reached_in_every_bucket": None if block == 0 else max(ratios[1:]) <= TARGET,
                "wire_bytes_per_element": 1 + 4 * scales / sum(numels),
                "nmse_of_buckets": figures[1:],
                "ratio_of_buckets": ratios[1:],
            }
        )
    return rows


def summary_of(rows: list[Row]) -> list[Row]:
    """One row per block size, over all steps and world sizes; the worst ratio is the largest."""
    summary = []
    for block in BLOCKS:
        own = [row for row in rows if row["block"] == block]
        of_buckets = list(zip(*(row["ratio_of_buckets"] for row in own), strict=True))
        summary.append(
            {
                "block": block,
                "wire_bytes_per_element": own[0]["wire_bytes_per_element"],
                "worst_nmse": max(row["nmse"] for row in own),
                "median_nmse": statistics.median(row["nmse"] for row in own),
                "worst_ratio": max(row["ratio"] for row in own),
                "median_ratio": statistics.median(row["ratio"] for row in own),
                "worst_ratio_of_buckets": [max(of_bucket) for of_bucket in of_buckets],
                "median_ratio_of_buckets": [statistics.median(of_bucket) for of_bucket in of_buckets],
                "rows_reached": None if block == 0 else sum(row["reached"] for row in own),
                "rows": len(own),
                "reached": None if block == 0 else all(row["reached"] for row in own),
                "reached_in_every_bucket": None if block == 0 else all(row["reached_in_every_bucket"] for row in own),
            }
        )
    return summary


def show(summary: list[Row]) -> None:
    print(f"{'':14}{'nmse':^20}{'ratio':^20}  worst ratio")
    print(
        f"{'block':>6}{'bytes':>8}{'worst':>10}{'median':>10}{'worst':>10}{'median':>10}  of each bucket   rows reached"
    )
    for line in summary:
        figures = "".join(f"{line[key]:10.4f}" for key in ("worst_nmse", "median_nmse", "worst_ratio", "median_ratio"))
        buckets = "  ".join(f"{worst:.4f}" for worst in line["worst_ratio_of_buckets"])
        reached = f"{line['rows_reached']} of {line['rows']}" if line["block"] else "-"
        print(f"{line['block']:>6}{line['wire_bytes_per_element']:>8.4f}{figures}  {buckets}   {reached}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write (default: in benchmarks/results)")
    options = parser.parse_args()
    data = sources()
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    rows = [row for n in WORLD_SIZES for recorded in gradients(text, n) for row in measure(*recorded)]
    summary, model = summary_of(rows), Gpt(context=CONTEXT)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        "schema": SCHEMA,
        "machine": describe_machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seeds": {"model": MODEL_SEED, "data": DATA_SEED, "draws": DRAWS},
        "data": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "batch_of_worker": [BATCH, CONTEXT]},
        "parameters": sum(p.numel() for p in model.parameters()),
        "buckets": [
            {"elements": sum(p.numel() for p in bucket), "parameters": [names[p] for p in bucket]}
            for bucket in buckets_of(model)
        ],
        "target": {"ratio_at_most": TARGET, "of": "mean-squared error of a block size over that of block 0"},
        "reached": {
            "all_buckets_together": {line["block"]: line["reached"] for line in summary[1:]},
            "every_bucket_alone": {line["block"]: line["reached_in_every_bucket"] for line in summary[1:]},
        },
        "summary": summary,
        "rows": rows,
    }
    results.write(options.out, found)
    show(summary)


if __name__ == "__main__":
    main()
