"""What the page decentralized measures: networks, convergence, where DCD breaks, the speed-up in workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.scripts import results
from thinwire.gossip.topology import Topology, exponential, ring, star, torus
from thinwire.lab.compare.models import Cnn
from thinwire.lab.simulate import Settings, simulate

from ..run import Options
from .runs import bytes_of, drifting, images, logistic, predicted_growth, trained

WORKERS, BATCH, EXAMPLES = 8, 64, 60_000
MEGABITS, LATENCIES = (5, 20, 50, 200, 1000), (0.1, 1, 5, 20)
COMPUTE_MS = (150, 10)
ALGORITHMS, RECIPES = (
    ("dpsgd", "dcd:8", "dcd:4", "dcd:2", "ecd:8"),
    ("ddp", "global-qsgd-8", "two-shot-8", "two-shot-4"),
)

CODECS = {  # what is tried with each algorithm; the blocks have a scale each, 0 is one for the whole model
    "dpsgd": ("fp32",),
    "dcd": (
        *(
            "min_max:8,block=512",
            "min_max:4,block=512",
            "min_max:2,block=512",
            "min_max:4,block=0",
            "min_max:2,block=0",
        ),
        *("qsgd:8,block=0", "qsgd:4,block=0", "qsgd:2,block=0", "sign:512", "top_k:0.01"),
    ),
    "ecd": (
        *("absolute:8", "absolute:4", "absolute:2", "min_max:8,block=512", "min_max:4,block=512"),
        *("min_max:2,block=512", "qsgd:8,block=0"),
    ),
    "naive": (
        *(
            "min_max:8,block=512",
            "min_max:4,block=512",
            "min_max:2,block=512",
            "min_max:4,block=0",
            "min_max:2,block=0",
        ),
        "qsgd:8,block=0",
    ),
    "choco": (
        *("min_max:8,block=512", "min_max:4,block=512", "min_max:2,block=512", "min_max:2,block=0", "qsgd:4,block=0"),
        *("sign:512", "sign:0", "top_k:0.01"),
    ),
}
STEPS_TRIED = (0.05, 0.2, 0.5, 1.0)  # of consensus, for codecs of which the default keeps less than half
GRIDS_TRIED = {8: (0.005, 0.02, 0.08), 4: (0.04, 0.08, 0.16), 2: (0.05, 0.15, 0.5)}  # steps of absolute, by bits

GRAPHS = (ring(8), torus(16), exponential(8), star(8))
FACTORS = (0.5, 0.9, 1.1, 1.5, 2.0)  # of the noise limit, by random_k of such a density
TALKING = ("min_max:2,block=512", "qsgd:8,block=0", "qsgd:4,block=0")
SHARED = "random_k:0.6"  # positions are the same on all workers unless it is told otherwise
LEARNING = (
    *("min_max:8,block=512", "min_max:2,block=512", "min_max:2,block=0", "qsgd:8,block=0", "qsgd:6,block=0"),
    *("qsgd:5,block=0", "qsgd:4,block=0", "qsgd:3,block=512"),
)
SERIES = (
    ("dpsgd", "fp32", "exponential"),
    ("dpsgd", "fp32", "ring"),
    ("dcd", "min_max:4,block=64", "ring"),
    ("dcd", "min_max:2,block=64", "ring"),
    ("choco", "sign:64", "ring"),
    ("ecd", "absolute:8,step=0.1", "ring"),
)


# ------------------------------------------------------------------------------------------------- bits and networks


def networks(options: Options) -> dict[str, Any]:
    """Simulated step times, and what `benchmarks.scripts.gossip` measured on emulated networks."""
    parameters = sum(one.numel() for one in Cnn(1, 28).parameters())
    grids = []
    for compute_ms in COMPUTE_MS:
        cells = []
        for megabits in MEGABITS[::4] if options.quick else MEGABITS:
            for latency in LATENCIES[::3] if options.quick else LATENCIES:
                told = simulate(
                    Settings(
                        workers=WORKERS, algorithms=ALGORITHMS, recipes=RECIPES, topology="ring", steps=20,
                        network=f"{megabits}mbit,{latency}ms", cost_only=True, parameters=parameters,
                        compute_ms=compute_ms, growth=False,
                    )
                )  # fmt: skip
                step_ms = {row["recipe"]: row["step_ms"] for row in told["rows"]}
                cells.append({"megabits": megabits, "latency_ms": latency, "step_ms": step_ms})
        grids.append({"compute_ms": compute_ms, "cells": cells})
    shape = {"workers": WORKERS, "parameters": parameters, "steps_an_epoch": EXAMPLES / (WORKERS * BATCH)}
    return {
        **shape,
        "grids": grids,
        "measured": measured_times(),
        "accuracy": measured_accuracy(),
        "faithful": faithful(),
    }


def measured_times() -> dict[str, Any] | None:
    """Seconds per epoch on emulated networks, from the newest file that has them."""
    found = _newest("gossip", "networks")
    if found is None:
        return None
    cells = [
        {"network": one["network"], "epoch_seconds": {row["recipe"]: row["epoch_seconds"] for row in one["rows"]}}
        for one in found["networks"]
    ]
    return {"file": found["file"], "cells": cells}


def measured_accuracy() -> dict[str, Any] | None:
    """Accuracies of a convolutional network, trained by eight processes, from the newest file that has them."""
    found = _newest("gossip", "accuracy")
    if found is None:
        return None
    cells = [
        {"skew": one["skew"], "accuracies": {row["recipe"]: row["accuracies"] for row in one["rows"]}}
        for one in found["accuracy"]
    ]
    return {"file": found["file"], "cells": cells}


def faithful() -> dict[str, Any] | None:
    """How well simulated step times match measured ones, from the newest file that has both."""
    found = _newest("simulate", "faithful")
    if found is None:
        return None
    ratios = [row["ratio"] for row in found["faithful"]]
    return {"file": found["file"], "within_20_per_cent": sum(0.8 <= one <= 1.2 for one in ratios), "of": len(ratios)}


def _newest(kind: str, part: str) -> dict[str, Any] | None:
    for file in sorted(results.RESULTS.glob(f"*-{kind}.json"), reverse=True):
        found = results.read(file)
        if found.get(part):
            return {**found, "file": file.name}
    return None


# ----------------------------------------------------------------------------------------------------- convergence


def convergence(options: Options) -> dict[str, Any]:
    """All algorithms with all their codecs, on iid and on skewed shards."""
    steps = 4 if options.quick else 150
    even, skewed = images(options.data), images(options.data, skew=0.9)
    numel = sum(one.numel() for one in even.model(seed=0).parameters())
    tuned = _tuned(even, steps=steps, seed=options.first_seed + 1000, quick=options.quick)
    rows = []
    for algorithm, codecs in CODECS.items():
        for codec in codecs[::4] if options.quick else codecs:
            chosen = next((one for one in tuned if (one["algorithm"], one["codec"]) == (algorithm, codec)), None)
            spelled, consensus_step = codec, None
            if chosen is not None and algorithm == "choco":
                consensus_step = chosen["chosen"]
            elif chosen is not None:
                spelled = f"{codec},step={chosen['chosen']}"
            for work in (even, skewed):
                runs = [
                    trained(
                        work, ring(WORKERS), algorithm=algorithm, codec=spelled, consensus_step=consensus_step,
                        steps=steps, seed=seed,
                    )
                    for seed in options.all_seeds
                ]  # fmt: skip
                row = {"algorithm": algorithm, "codec": codec, "spelled": spelled, "skew": work.skew, "runs": runs}
                rows.append(row | {"bits": 8 * bytes_of(spelled, numel) / numel})
                said = ", ".join(f"{run['accuracy']:.1f}" for run in runs)
                print(f"  {algorithm} {spelled} skew {work.skew}: {said}", flush=True)
    shape = {"about": even.about, "optimizer": even.optimizer_text, "parameters": numel, "workers": WORKERS}
    shape |= {"steps": steps, "batch": even.batch_per_worker, "held_out": even.count(held_out=True)}
    return {**shape, "tuned": tuned, "rows": rows}


def _tuned(work: Any, *, steps: int, seed: int, quick: bool) -> list[dict[str, Any]]:
    """The consensus step of choco and the grid of ecd, chosen by the loss of a seed that is not reported."""
    found: list[dict[str, Any]] = []

    def tries(algorithm: str, codec: str, settings: dict[float | None, dict[str, Any]]) -> None:
        losses = [
            [setting, trained(work, ring(WORKERS), algorithm=algorithm, steps=steps, seed=seed, **how)["loss"]]
            for setting, how in settings.items()
        ]
        chosen = min(losses, key=lambda one: one[1] if one[1] == one[1] else float("inf"))[0]
        found.append({"algorithm": algorithm, "codec": codec, "tried": losses, "chosen": chosen})
        print(f"  tuning {algorithm} {codec}: {losses}", flush=True)

    for codec in CODECS["choco"][2::5] if quick else CODECS["choco"][2:]:
        tries("choco", codec, {step: {"codec": codec, "consensus_step": step} for step in (None, *STEPS_TRIED)})
    for bits, grids in ((8, GRIDS_TRIED[8]),) if quick else GRIDS_TRIED.items():
        name = f"absolute:{bits}"
        tries("ecd", name, {grid: {"codec": f"{name},step={grid}"} for grid in grids})
    return found


# ------------------------------------------------------------------------------------------------ where DCD breaks


def noise(options: Options) -> dict[str, Any]:
    """Noise of DCD against what the graph bears: without any gradient, and while learning."""
    graphs = (ring(8),) if options.quick else GRAPHS
    talking = [_talking(graph, codec, options) for graph in graphs for codec in _talkative(graph, options.quick)]
    steps, talks = (4, 4) if options.quick else (150, 20)
    work = images(options.data)
    numel = sum(one.numel() for one in work.model(seed=0).parameters())
    learning: list[dict[str, Any]] = []
    for graph in (ring(8),) if options.quick else (ring(8), star(8)):
        dense = [trained(work, graph, algorithm="dpsgd", steps=steps, seed=seed) for seed in options.all_seeds]
        sparse = [_random_k(graph, factor) for factor in FACTORS]
        for codec in (*LEARNING, *sparse)[:: 5 if options.quick else 1]:
            runs = [
                trained(work, graph, algorithm="dcd", codec=codec, steps=steps, seed=seed) for seed in options.all_seeds
            ]
            kept = ("noise", "loss", "diverged_at")
            row = _facts(graph, codec) | {key: [run[key] for run in runs] for key in kept}
            alone = [drifting(graph, codec=codec, numel=numel, steps=talks, seed=seed) for seed in options.all_seeds]
            row["alone"] = {"noise": [one["noise"] for one in alone]}
            learning.append(row | {"dense_loss": [run["loss"] for run in dense]})
            print(f"  learning {graph} {codec}: noise {row['noise']}, loss {row['loss']}", flush=True)
    return {"talking": talking, "learning": learning, "steps": steps}


def _talkative(graph: Topology, quick: bool) -> list[str]:
    factors = FACTORS[2:4] if quick else FACTORS
    return [*(_random_k(graph, factor) for factor in factors), *(() if quick else TALKING), SHARED]


def _talking(graph: Topology, codec: str, options: Options) -> dict[str, Any]:
    numel, steps = (512, 10) if options.quick else (2048, 40)
    runs = [drifting(graph, codec=codec, numel=numel, steps=steps, seed=seed) for seed in options.all_seeds]
    row = _facts(graph, codec) | {key: [run[key] for run in runs] for key in ("noise", "growth")}
    row["predicted"] = [predicted_growth(graph, one) for one in row["noise"]]
    print(f"  talking {graph} {codec}: {row['noise']} {row['growth']} {row['predicted']}", flush=True)
    return row


def _random_k(graph: Topology, factor: float) -> str:
    """Random sparsification, drawn by each worker for itself, whose noise is the limit times this factor."""
    return f"random_k:{1 / (1 + factor * graph.noise_limit()):.4f},shared=false"


def _facts(graph: Topology, codec: str) -> dict[str, Any]:
    limits = {"limit": graph.noise_limit(), "published": graph.published_noise_limit()}
    return {"topology": str(graph), "codec": codec, **limits}


# -------------------------------------------------------------------------------------------------------- speed-up


def speed_up(options: Options) -> dict[str, Any]:
    """The noise-dominated problem for n workers and T steps; the same with one worker and n T steps."""
    steps, repetitions = (16, 2) if options.quick else (512, 4 * options.seeds)
    numbers, few = ([1, 2, 4], 2) if options.quick else ([1, 2, 4, 8, 16, 32, 64], 8)
    graphs: dict[str, Topology] = {"ring": ring(), "exponential": exponential()}

    def point(n: int, taken: int, algorithm: str, codec: str, graph: str) -> dict[str, Any]:
        how: dict[str, Any] = {"algorithm": algorithm, "codec": codec, "steps": taken, "repetitions": repetitions}
        return {"n": n, "steps": taken, "values": logistic(graphs[graph].of(n), seed=options.first_seed, **how)}

    def row(algorithm: str, codec: str, graph: str, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
        points = [point(n, taken, algorithm, codec, graph) for n, taken in sizes]
        print(f"  {algorithm} {codec} {graph}: {[sum(one['values']) / repetitions for one in points]}", flush=True)
        return {"algorithm": algorithm, "codec": codec, "topology": graph, "points": points}

    longer = [(few, int(factor * steps)) for factor in (0.25, 1, 4, 8)]
    return {
        "steps": steps,
        "repetitions": repetitions,
        "series": [row(*one, [(n, steps) for n in numbers]) for one in SERIES],
        "alone": [{**point(1, n * steps, "dpsgd", "fp32", "ring"), "n": n} for n in numbers],
        "longer": [row(algorithm, codec, "ring", longer) for algorithm, codec, _ in SERIES[1:3]],
    }
