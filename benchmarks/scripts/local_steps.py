"""What local steps cost in loss: averaging and the presets, in full precision and with one bit, at 5 and 30 steps.

    python -m benchmarks.scripts.local_steps run NAME [--seed 0]     one run of 600 steps; NAME as in --list
    python -m benchmarks.scripts.local_steps collect                 writes benchmarks/results and docs/local-steps.md

The workload is gpt; 4 ranks are threads of one process. tests/distributed/test_local_steps.py shows that they end with
the bits of real processes. `run` writes a file to --parts, so that a long measurement can be made in pieces. Losses are
of held-out text, with the parameters that all ranks hold after a round.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from benchmarks.scripts import losses, pages, results
from thinwire.comm.local import LocalNetwork, on_all_ranks
from thinwire.lab.compare.machine import describe_machine
from thinwire.lab.compare.workloads import Workload, workload

RANKS, STEPS = 4, 600
MOMENTS = (210, 600)  # both are the end of a round of 5 and of 30 steps
PAGE = pages.DOCS / "local-steps.md"
FP32 = "fp32|two_shot"  # added in rank order, so that threads give the bits of processes


@dataclass(frozen=True)
class Run:
    """Settings of `local_steps`; without a preset a recipe that is sent in every step."""

    preset: str | None
    every: int = 1
    recipe: str | None = None
    outer: str | None = None


RUNS = {
    "every-step": Run(None, recipe="dense"),
    "every-step-1": Run(None, recipe="two-shot-1"),
    "average-5": Run("average", 5, FP32),
    "average-5-1": Run("average", 5, "two-shot-1"),
    "average-30": Run("average", 30, FP32),
    "average-30-1": Run("average", 30, "two-shot-1"),
    "diloco-5": Run("diloco", 5, FP32),
    "diloco-5-1": Run("diloco-1", 5),
    "diloco-30": Run("diloco", 30, FP32),
    "diloco-30-1": Run("diloco-1", 30),
    "sparseloco-5": Run("sparseloco", 5),
    "sparseloco-30": Run("sparseloco", 30),
    "muloco-5": Run("muloco", 5),
    "muloco-30": Run("muloco", 30),
    "muloco-30-32": Run("muloco", 30, FP32),
    "streaming-30-1": Run("streaming-diloco", 30, "two-shot-1", "nesterov:0.7,0.9"),
}


def inner(work: Workload, model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    """AdamW of the workload; for muloco Muon takes the matrices of the blocks, scaled to AdamW's steps."""
    if run.preset != "muloco":
        return [work.optimizer(model)]
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("layers.")]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)]


def held_out(model: nn.Module, work: Workload) -> float:
    with torch.no_grad():
        found = [float(model(*batch)) for batch in work.held_out(rank=0, world_size=1, batches=64)]
    return statistics.fmean(found)


def train(run: Run, work: Workload, *, seed: int, steps: int) -> dict[str, Any]:
    """Held-out loss after some steps, and what a rank has sent."""
    first = work.model(seed=seed)
    options = {"every": run.every, "recipe": run.recipe, "outer": run.outer}
    found: dict[str, float] = {}
    turn = threading.Lock()  # one rank computes at a time: timing is not measured, and threads would wait for the GIL

    def of_rank(network: LocalNetwork) -> dict[str, float]:
        model = copy.deepcopy(first)
        optimizers = inner(work, model, run)
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        local = tw.local_steps(model, optimizers, str(run.preset), group=network, seed=seed, check_every=1, **options)  # type: ignore[arg-type]
        for step in range(steps):
            for optimizer, of_group in zip(optimizers, rates, strict=True):
                for group, rate in zip(optimizer.param_groups, of_group, strict=True):
                    group["lr"] = rate * work.rate(step)
            with turn:
                model.zero_grad()
                model(*work.batch(step, seed=seed, rank=network.rank, world_size=RANKS)).backward()
                if work.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), work.clip)
                for optimizer in optimizers[:-1]:
                    optimizer.step()
            optimizers[-1].step()  # the last step of a round meets the other ranks
            if network.rank == 0 and step + 1 in MOMENTS and step + 1 < steps:
                found[str(step + 1)] = held_out(model, work)
        local.finish()
        if network.rank == 0:
            found[str(steps)] = held_out(model, work)
        return local.stats()

    stats = on_all_ranks(LocalNetwork.of(RANKS), of_rank)[0]
    return {"losses": found, "bits": stats["local/bits_per_parameter_and_step"]}


def every_step(run: Run, work: Workload, *, seed: int, steps: int) -> dict[str, Any]:
    """Data parallel training, for comparison."""
    recipe = str(run.recipe)
    loss = losses.train(losses.Setting(recipe), work, steps=steps, ranks=RANKS, seed=seed)[1]
    numel = 1 << 20
    sent = tw.parse(recipe).exchange.sent_bytes(tw.parse(recipe).codec, numel, world_size=RANKS)
    return {"losses": {str(steps): loss}, "bits": 8 * sent / numel}


def rows_of(parts: Path) -> list[dict[str, Any]]:
    """Means over the seeds that were run."""
    rows = []
    for name, run in RUNS.items():
        found = [results.read(path) for path in sorted(parts.glob(f"{name}.seed*.json"))]
        if not found:
            continue
        moments = sorted(found[0]["losses"], key=int)
        rows.append(
            {
                "name": name,
                **asdict(run),
                "recipe": run.recipe or tw.LOCAL_PRESETS[str(run.preset)].recipe,
                "seeds": [part["seed"] for part in found],
                "loss": {moment: statistics.fmean(part["losses"][moment] for part in found) for moment in moments},
                "by_seed": {str(part["seed"]): part["losses"][moments[-1]] for part in found},
                "bits": found[0]["bits"],
            }
        )
    return rows


def table(found: dict[str, Any]) -> str:
    """One row a run; the last column compares with rounds of the same preset and length in full precision."""
    rows = {row["name"]: row for row in found["rows"]}
    lines = [
        "| preset | every | recipe | bits | loss after 210 | after 600 | seeds | over fp32 rounds |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows.values():
        full = rows.get(_in_full_precision(row["name"]))
        compared = full is not None and full is not row
        shared = sorted(set(row["by_seed"]) & set(full["by_seed"])) if compared and full else []
        over = "-"
        if shared and full is not None:
            ratio = statistics.fmean(row["by_seed"][seed] / full["by_seed"][seed] - 1 for seed in shared)
            over = f"{ratio:+.1%}"
        recipe = row["recipe"].replace("|", "\\|")
        early = row["loss"].get("210")
        cells = [
            row["preset"] or "none",
            str(row["every"]),
            f"`{recipe}`",
            f"{row['bits']:.3f}",
            "-" if early is None else f"{early:.3f}",
            f"{row['loss'][str(found['steps'])]:.3f}",
            str(len(row["seeds"])),
            over,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["", *lines, "", ""])


def _in_full_precision(name: str) -> str:
    if name.startswith("muloco-"):
        return f"{name.removesuffix('-32')}-32"
    if name.startswith("streaming-"):
        return "diloco-30"
    if name.startswith("sparseloco-"):
        return name.replace("sparseloco", "diloco")
    return name.removesuffix("-1")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "collect"], help="one run, or the results file of all that were made")
    parser.add_argument("name", nargs="?", choices=list(RUNS), help="which run")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and draws (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a run (default: %(default)s)")
    parser.add_argument("--parts", type=Path, default=Path("local-steps-parts"), help="a folder (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the results file (default: one of today)")
    options = parser.parse_args(arguments)
    if options.what == "collect":
        rows = rows_of(options.parts)
        settings = {"kind": "local-steps", "workload": "gpt", "ranks": RANKS, "steps": options.steps}
        found = {**settings, "machine": describe_machine(), "rows": rows}
        results.write(options.out or results.path_of_today("local-steps"), found)
        pages.replace_block(PAGE, "local steps table", table(found))
        return
    if options.name is None:
        parser.error("run needs a name")
    torch.set_num_threads(1)
    run, work = RUNS[options.name], workload("gpt")
    how = every_step if run.preset is None else train
    found = how(run, work, seed=options.seed, steps=options.steps)
    options.parts.mkdir(parents=True, exist_ok=True)
    results.write(options.parts / f"{options.name}.seed{options.seed}.json", {"seed": options.seed, **found})


if __name__ == "__main__":
    main()
