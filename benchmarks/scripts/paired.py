"""Two checkouts of thinwire against each other: the same steps by both, lap by lap in turns, in one run.

    python -m benchmarks.scripts.paired --old ../thinwire-0.1
                            about six minutes; writes benchmarks/results/<date>-paired.json and prints it

Unshaped loopback, gloo, 2 processes each. Old and new train the same transformer of 3.2 M parameters; while one set of
processes trains, the other waits. A ratio is that of two neighbouring laps, new over old; the result is the median over
all laps. `wall` is the time of a step, `cpu` the processor time of all processes. `ddp` is plain DDP in both sets: how
far apart two equal programs are on this machine. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

RANKS, WARM = 2, 6
PRESETS = (
    *("dense", "bf16", "global-qsgd-8", "global-qsgd-exp", "qsgd-4", "two-shot-8", "two-shot-4", "two-shot-2"),
    *("two-shot-2-ef", "two-shot-1", "gaussian-k", "threshold-k", "top-k", "two-shot-top-k", "ar-top-k", "dgc"),
    "powersgd-4",
)


def train(rank: int, meet_at: str) -> None:
    """One process: reads commands as JSON lines, trains, and answers with its times. Uses what 0.1 and 0.2 share."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=RANKS)
    model: Any = None
    link: Any = None
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "build":
            if link is not None:
                link.close()
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(256, 64))
            model = DistributedDataParallel(net, bucket_cap_mb=command["bucket_mb"])
            link = None if command["recipe"] == "ddp" else thinwire.attach(model, command["recipe"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
            told: dict[str, Any] = {"parameters": sum(p.numel() for p in net.parameters())}
        elif command["do"] == "train":
            inputs = torch.randn(2, 32, 256, generator=torch.Generator().manual_seed(rank))
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(command["steps"]):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            told = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        else:
            break
        print(json.dumps(told), flush=True)
    if link is not None:
        link.close()
    dist.destroy_process_group()


class Checkout:
    """The processes of one checkout."""

    def __init__(self, source: Path, folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
        meet_at = f"file://{folder}/meet-{len(os.listdir(folder))}-{abs(hash(str(source)))}"
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(rank), "--meet-at", meet_at],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        for process in self._processes:
            stream: IO[str] = process.stdin  # type: ignore[assignment]
            stream.write(json.dumps(command) + "\n")
            stream.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise SystemExit("a process of the benchmark ended: see its message above")
        return [json.loads(answer) for answer in answers]

    def lap(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and processor seconds of all processes."""
        told = self.ask(do="train", steps=steps)
        return max(one["wall"] for one in told) / steps, sum(one["cpu"] for one in told) / steps

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            process.wait(20)


def measure(old: Checkout, new: Checkout, recipe: str, *, bucket_mb: float, steps: int, laps: int) -> dict[str, Any]:
    """One recipe: laps in turns, the first of a pair changing with every lap."""
    from benchmarks.scripts.results import summary

    sides = {"old": old, "new": new}
    for side in sides.values():
        side.ask(do="build", recipe=recipe, bucket_mb=bucket_mb)
        side.lap(WARM)
    taken: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
    for lap in range(laps):
        for name in ("old", "new") if lap % 2 else ("new", "old"):
            taken[name].append(sides[name].lap(steps))
    found: dict[str, Any] = {"recipe": recipe, "bucket_mb": bucket_mb}
    for place, what in enumerate(("wall", "cpu")):
        ratios = [after[place] / before[place] for before, after in zip(taken["old"], taken["new"], strict=True)]
        found[f"{what}_ratio"] = summary(ratios)
        for name in taken:
            found[f"{what}_ms_{name}"] = 1e3 * statistics.median(times[place] for times in taken[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="the checkout to compare with, such as one of 0.1")
    parser.add_argument("--new", type=Path, default=Path(), help="the checkout to judge; default: this one")
    parser.add_argument("--recipes", default=",".join(("ddp", *PRESETS)), help="with commas")
    parser.add_argument("--buckets", default="25", help="MB of DDP's buckets, with commas")
    parser.add_argument("--steps", type=int, default=4, help="of a lap")
    parser.add_argument("--laps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(), help="default: benchmarks/results/<date>-paired.json")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meet-at", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker >= 0:
        train(options.worker, options.meet_at)
        return
    from benchmarks.scripts import results
    from thinwire.lab.compare.machine import describe_machine

    new = results.ROOT if options.new == Path() else options.new
    if options.old is None or not (options.old / "src" / "thinwire").is_dir():
        parser.error(f"--old must be a checkout of thinwire, not {options.old}")
    with tempfile.TemporaryDirectory() as folder:
        sides = [Checkout(source.resolve(), Path(folder)) for source in (options.old, new)]
        rows = []
        try:
            for bucket_mb in map(float, options.buckets.split(",")):
                for recipe in options.recipes.split(","):
                    row = measure(
                        sides[0], sides[1], recipe, bucket_mb=bucket_mb, steps=options.steps, laps=options.laps
                    )
                    rows.append(row)
                    wall, cpu = row["wall_ratio"]["median"], row["cpu_ratio"]["median"]
                    print(f"{recipe:16} {bucket_mb:4.0f} MB  step {wall:.3f}  cpu {cpu:.3f}", flush=True)
        finally:
            for side in sides:
                side.close()
    out = results.path_of_today("paired") if options.out == Path() else options.out
    settings = {"ranks": RANKS, "steps": options.steps, "laps": options.laps}
    results.write(out, {"schema": 1, "machine": describe_machine(), "settings": settings, "rows": rows})
    print(f"written to {out}")


if __name__ == "__main__":
    main()
