"""What a recipe costs in loss, with ranks simulated in one process, so no network is needed.

    python -m benchmarks.scripts.losses sparse       what helps sparse recipes under Adam?
    python -m benchmarks.scripts.losses quantized    are four bits and more within 1 % of dense? (three seeds)
    python -m benchmarks.scripts.losses bits --data /usr/share/datasets/fashion-mnist
                                                     what do one to three bits cost on three workloads? (three seeds)

Each writes benchmarks/results/losses_<which>.json. The workload is gpt; `bits` adds cnn, with SGD, and gru, with Adam,
which no recipe was tuned on. Adam divides by the recent size of a gradient element. With error
feedback an element is sent rarely, and its residual arrives in one step. That step moves the weight about as far as six
dense steps, however long the element waited. So `sparse` varies what could help: a larger learning rate for compressed
parameters, a longer average of sizes (beta2), dense steps first, a higher density.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.scripts import results
from benchmarks.scripts.gru import GruOnPackages
from thinwire import LocalGroup, parse
from thinwire.lab.compare.machine import describe_machine
from thinwire.lab.compare.workloads import Workload, workload
from thinwire.reduce.buckets import one_dimensional_or_tiny


@dataclass(frozen=True)
class Setting:
    """One run: a recipe, and Adam's settings for what the recipe compresses."""

    recipe: str
    rate: float = 1.0  # times the learning rate of the workload
    beta2: float = 0.95
    dense_steps: int = 0  # first, as `attach(..., warmup_steps=)` does
    workload: str = "gpt"


_ONE = "ef|threshold_k:0.01|bf16|all_gather"
_FIVE = "ef|threshold_k:0.05|bf16|all_gather"
SETTINGS = {
    "sparse": (
        Setting("dense"),
        Setting(_ONE),
        Setting(_ONE, rate=3.0),
        Setting(_ONE, rate=8.0),
        Setting(_ONE, beta2=0.999),
        Setting(_ONE, dense_steps=20),
        Setting(_ONE, beta2=0.999, dense_steps=20),
        Setting(_FIVE),
        Setting(_FIVE, rate=3.0),
        Setting("dense", rate=3.0),
    ),
    "quantized": tuple(
        Setting(recipe)
        for recipe in (
            *("dense", "global-qsgd-8", "global-qsgd-exp", "qsgd-4", "two-shot-8", "two-shot-4", "two-shot-3"),
            *("two-shot-2", "two-shot-1"),
        )
    ),
    "bits": tuple(
        Setting(recipe, workload=name)
        for name in ("gpt", "cnn", "gru")
        for recipe in (
            *("dense", "two-shot-2", "two-shot-1-2", "two-shot-1", "rotated:1|two_shot:2,feedback=true"),
            "ef|rotated:1,scale=mmse|two_shot:2,feedback=true",
        )
    ),
}
SEEDS = {"sparse": 1, "quantized": 3, "bits": 3}


def _optimizer(setting: Setting, work: Workload, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The workload's own; for gpt with the settings of Adam, for what the recipe compresses."""
    if setting.workload != "gpt":
        return work.optimizer(model)
    named = list(model.named_parameters())
    compressed = [p for name, p in named if not one_dimensional_or_tiny(name, p)]
    exact = [p for name, p in named if one_dimensional_or_tiny(name, p)]
    groups = [
        {"params": compressed, "lr": 1e-3 * setting.rate, "betas": (0.9, setting.beta2)},
        {"params": exact, "lr": 1e-3, "betas": (0.9, 0.95)},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.1, fused=True)


def train(setting: Setting, work: Workload, *, steps: int, ranks: int, seed: int) -> tuple[list[float], float]:
    """Training loss of every step, mean over ranks, and held-out loss at the end."""
    model = work.model(seed=seed)
    named = [(name, p) for name, p in model.named_parameters()]
    optimizer = _optimizer(setting, work, model)
    rates = [group["lr"] for group in optimizer.param_groups]
    group, plain = LocalGroup(parse(setting.recipe), ranks, seed=seed), LocalGroup(parse("dense"), ranks)
    losses = []
    for step in range(steps):
        for entry, rate in zip(optimizer.param_groups, rates, strict=True):
            entry["lr"] = rate * work.rate(step)
        total, gradients = 0.0, []
        for rank in range(ranks):
            optimizer.zero_grad()
            loss = model(*work.batch(step, seed=seed, rank=rank, world_size=ranks))
            loss.backward()
            total += float(loss.detach()) / ranks
            gradients.append([p.grad for _, p in named if p.grad is not None])
        whole = [torch.cat([g.reshape(-1) for g in of_rank]) for of_rank in gradients]
        mean = dict(zip([name for name, _ in named], _split(plain.mean(whole, step=step), named), strict=True))
        if step >= setting.dense_steps and setting.recipe != "dense":
            keep = [i for i, (name, p) in enumerate(named) if not one_dimensional_or_tiny(name, p)]
            flat = [torch.cat([of_rank[i].reshape(-1) for i in keep]) for of_rank in gradients]
            chosen = [named[i] for i in keep]
            for (name, _), part in zip(chosen, _split(group.mean(flat, step=step), chosen), strict=True):
                mean[name] = part
        for name, p in named:
            p.grad = mean[name]
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        losses.append(total)
    with torch.no_grad():
        held_out = [float(model(*batch)) for batch in work.held_out(rank=0, world_size=1, batches=64)]
    return losses, sum(held_out) / len(held_out)


def _held_out_at_the_end(run: tuple[Setting, int, int, int, str | None]) -> float:
    """Held-out loss of one run, in a process of its own."""
    setting, steps, ranks, seed, data = run
    torch.set_num_threads(1)
    work = GruOnPackages() if setting.workload == "gru" else workload(setting.workload, data=data)
    return train(setting, work, steps=steps, ranks=ranks, seed=seed)[1]


def _split(flat: torch.Tensor, named: list[tuple[str, torch.nn.Parameter]]) -> list[torch.Tensor]:
    parts = torch.split(flat, [p.numel() for _, p in named])
    return [part.view_as(p) for part, (_, p) in zip(parts, named, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=list(SETTINGS), help="the question to answer")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks (default: %(default)s)")
    parser.add_argument("--seeds", type=int, help=f"runs of each setting (default: {SEEDS})")
    parser.add_argument("--data", help="the folder of Fashion-MNIST, for the workload cnn; without it, cnn is left out")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, a thread each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the file to write (default: benchmarks/results/losses_<which>.json)")
    options = parser.parse_args()
    seeds = range(options.seeds or SEEDS[options.which])
    rows, dense = [], dict[str, float]()
    settings = [one for one in SETTINGS[options.which] if options.data or one.workload != "cnn"]
    runs = [(setting, options.steps, options.ranks, seed, options.data) for setting in settings for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        ends_of_all = pool.imap(_held_out_at_the_end, runs)
        for setting in settings:
            ends = [next(ends_of_all) for _ in seeds]
            mean = sum(ends) / len(ends)
            over = mean / dense.setdefault(setting.workload, mean)  # the first
            rows.append({**asdict(setting), "held_out": mean, "held_out_of_seeds": ends, "over_dense": over})
            print(f"{mean:.3f}  {over:.4f}  {setting}", flush=True)
    made = {"steps": options.steps, "ranks": options.ranks, "seeds": list(seeds)}
    found = {"machine": describe_machine(), "settings": made, "rows": rows}
    results.write(options.out or results.RESULTS / f"losses_{options.which}.json", found)


if __name__ == "__main__":
    main()
