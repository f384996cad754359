"""Global-QSGD in training: convergence beside others, step times beside predictions, one scale beside many."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.scripts import results
from benchmarks.scripts.global_qsgd_blocks import quantized_mean, square_sum
from thinwire.lab.compare.runner import Settings, compare
from thinwire.lab.compare.workloads import Workload, workload
from thinwire.lab.simulate.learners import held_out, set_rates
from thinwire.lab.simulate.links import Links
from thinwire.lab.simulate.network import SimNetwork
from thinwire.lab.simulate.pace import Pace
from thinwire.lab.simulate.recipe_run import RecipeRun, layout_of
from thinwire.reduce.buckets import one_dimensional_or_tiny

from ..run import Options

WORKERS = 4
LINEAR, EXPONENTIAL = "global_qsgd:8|all_reduce", "global_qsgd:8,dither=exponential|all_reduce"
QSGD, POWERSGD, BLOCKS = "qsgd:8|all_gather", "ef|low_rank:4|all_reduce", "global_qsgd:8,block=128|all_reduce"
RECIPES = ("dense", LINEAR, EXPONENTIAL, BLOCKS, QSGD, "qsgd:4,block=512|all_gather", POWERSGD)
NETWORKS = ("100mbit,1ms", "1gbit,0.1ms", "unshaped")
PAID = ("ddp", LINEAR, EXPONENTIAL, QSGD)
GPT_BLOCKS = results.RESULTS / "global_qsgd_blocks.json"


def _workload(options: Options) -> str:
    return "mlp-100k" if options.quick else "cnn" if options.data else "mlp"


# ---------------------------------------------------------------------------------------------------------- convergence


def training(options: Options) -> dict[str, Any]:
    """Every recipe with every seed: held-out loss while it trains, accuracy at the end, bytes a step."""
    name, steps = _workload(options), 12 if options.quick else 150
    work = workload(name, data=options.data)
    # At a constant rate of 0.1 the loss of two seeds differs by more than any recipe adds.
    rate = work.rate
    work.rate = lambda step: 0.5 * rate(step) * (1 - step / steps)  # type: ignore[method-assign]
    rows = []
    for recipe in RECIPES:
        runs = [_trained(work, recipe, steps=steps, seed=seed) for seed in options.all_seeds]
        rows.append(
            {
                "recipe": recipe,
                "steps": [point["step"] for point in runs[0]["curve"]],
                "held_out": [[point["held_out"] for point in one["curve"]] for one in runs],
                "accuracy": [one["curve"][-1]["accuracy"] for one in runs],
                "bytes_per_step": runs[0]["bytes_per_step"],
            }
        )
        ends = [curve[-1] for curve in rows[-1]["held_out"]]
        print(f"  {recipe}: {ends}, right {rows[-1]['accuracy']}", flush=True)
    about = {"workload": name, "about": work.about, "optimizer": work.optimizer_text, "batch": work.batch_per_worker}
    return {**about, "workers": WORKERS, "steps": steps, "rows": rows}


def _trained(work: Workload, recipe: str, *, steps: int, seed: int) -> dict[str, Any]:
    """One run of all workers in this process; what time it would take on a network is of no interest here."""
    networks = SimNetwork.on(Links.named("data-centre", workers=WORKERS))
    buckets = layout_of(work.model(seed=seed)).buckets
    run = RecipeRun(work, networks, Pace(0.1), tw.parse(recipe), coding=[0.0] * len(buckets), seed=seed)
    curve = []
    for step in range(1, steps + 1):
        run.step()
        if step % max(1, steps // 10) == 0:
            loss, accuracy = held_out(work, run.model)
            curve.append({"step": step, "held_out": loss, "accuracy": accuracy})
    sent = sum(network.traffic.bytes for network in networks)
    return {"curve": curve, "bytes_per_step": sent / steps / WORKERS}


# -------------------------------------------------------------------------------------------------------------- pay-off


def payoff(options: Options) -> dict[str, Any]:
    """Step times as predicted and as measured on emulated networks, and the speeds that the paper's model asks for."""
    sizes: dict[str, Any] = {"steps": 12, "lap": 4, "probe_seconds": 8.0}
    networks: tuple[str, ...] = NETWORKS
    name = "mlp"
    if options.quick:
        sizes, networks, name = {"steps": 2, "lap": 1, "probe_seconds": 1.0}, NETWORKS[1:2], "mlp-100k"
    found = []
    for network in networks:
        kept: list[dict[str, Any]] = []
        settings = Settings(
            PAID, workload=name, workers=2 if options.quick else WORKERS, network=network, extra=0.0,
            seed=options.first_seed, repeats=options.seeds, **sizes,
        )  # fmt: skip
        compare(settings, keep=kept.append)
        told = kept[0]
        found.append(
            {
                "network": network,
                "mbit": told["forecast"]["network"]["mbit"],
                "alone_ms": told["no_communication"]["step_ms"],
                "rows": [
                    {
                        "recipe": row["recipe"],
                        "predicted_ms": row["predicted_ms"],
                        "measured_ms": [one["step_ms"] for one in row["repeats"]],
                        "bytes_per_step": row["bytes_per_step"],
                    }
                    for row in told["rows"]
                ],
            }
        )
        print(f"  {network}: {found[-1]['rows']}", flush=True)
    about = {"workload": name, "about": workload(name).about, "workers": settings.workers, "steps": settings.steps}
    return {**about, "networks": found, "adding": _adding(1 << (16 if options.quick else 24)), "plan": _planned()}


def _planned() -> dict[str, Any] | None:
    """What `scripts.plan` found for Global-QSGD with a scale per block: more cells than a page has time for."""
    file = results.newest("plan")
    if file is None:
        return None
    kept = ("recipe", "network", "workers", "predicted_ms", "measured_ms")
    rows = [row for row in results.read(file)["rows"] if row["recipe"] in ("ddp", "global-qsgd-8")]
    return {"file": file.name, "rows": [{key: row[key] for key in kept} for row in rows]}


def _adding(numel: int) -> dict[str, float]:
    """Bytes a second of adding two float32 messages, and of adding two of exponential codes; one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        codec = tw.codecs.global_qsgd(8, dither="exponential")
        x, y, out = torch.randn(numel), torch.randn(numel), torch.empty(numel)
        scale = codec.scale_from(codec.local_norm(x))
        first, second = (
            codec.codes(one, scale=scale, world_size=2, draw=tw.Draw(rank=rank)) for rank, one in enumerate((x, y))
        )
        floats = _best(lambda: torch.add(x, y, out=out))
        exponents = _best(lambda: codec.add_codes(first, second))
    finally:
        torch.set_num_threads(threads)
    return {"float_bytes_per_second": 4 * numel / floats, "code_bytes_per_second": numel / exponents}


def _best(work: Any, *, rounds: int = 7) -> float:
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


# ----------------------------------------------------------------------------------------------------------- one scale


def scales(options: Options) -> dict[str, Any]:
    """The error of the mean with one scale a bucket and with one a block, on gradients recorded while training."""
    recorded, blocks, draws = ((0, 2), (0, 64), 2) if options.quick else ((0, 20, 100), (0, 64, 128, 256, 512, 1024), 3)
    work = workload(_workload(options), data=options.data)
    rows: dict[int, dict[str, Any]] = {block: {"block": block, "nmse": []} for block in blocks}
    for seed in options.all_seeds:
        for step, workers in _recorded(work, recorded, seed=seed):
            exact = torch.stack(workers).mean(0)
            for block in blocks:
                codec = tw.codecs.global_qsgd(8, block=block)
                errors = [
                    square_sum(quantized_mean(codec, workers, tw.Draw(seed=seed * draws + draw, step=step)) - exact)
                    for draw in range(draws)
                ]
                nmse = sum(errors) / draws / square_sum(exact)
                rows[block]["nmse"].append({"seed": seed, "step": step, "nmse": nmse})
        print(f"  seed {seed}", flush=True)
    gpt = results.read(GPT_BLOCKS)
    kept = ("block", "median_nmse", "median_ratio", "worst_ratio", "wire_bytes_per_element")
    told = {"file": GPT_BLOCKS.name, "rows": [{key: row[key] for key in kept} for row in gpt["summary"]]}
    return {"workload": work.name, "about": work.about, "workers": WORKERS, "rows": list(rows.values()), "gpt": told}


def _recorded(work: Workload, steps: tuple[int, ...], *, seed: int) -> list[tuple[int, list[Tensor]]]:
    """Train on the exact mean; the gradients of every worker at these steps, without what travels exact anyway."""
    model = work.model(seed=seed)
    optimizer = work.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = list(model.parameters())
    sent = [place for place, named in enumerate(model.named_parameters()) if not one_dimensional_or_tiny(*named)]
    found = []
    for step in range(max(steps) + 1):
        dealt = [work.batch(step, seed=seed, rank=rank, world_size=WORKERS) for rank in range(WORKERS)]
        workers = [torch.autograd.grad(model(*batch), parameters) for batch in dealt]
        if step in steps:
            found.append((step, [torch.cat([own[place].flatten() for place in sent]) for own in workers]))
        for parameter, *own in zip(parameters, *workers, strict=True):
            parameter.grad = torch.stack(own).mean(0)
        set_rates(optimizer, rates, work.rate(step))
        optimizer.step()
    return found
