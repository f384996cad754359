"""How well threshold_k keeps its target count under error feedback: counts and passes over 300 steps.

    python -m benchmarks.scripts.threshold_k        about two minutes; writes benchmarks/results/threshold_k.json

A step is within range if it selects 0.75 k to 1.3 k elements. Half of the runs change the gradient's scale by ten half
way through. The first ten steps do not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.scripts import results

OUT = results.RESULTS / "threshold_k.json"
STEPS, WARM_UP, JUMP = 300, 10, 150
NUMEL = 400_000
KINDS = ("gaussian", "laplace", "heterogeneous", "drifting")
CHANGES = {"none": 1.0, "drop 10x": 0.1, "rise 10x": 10.0}


def gradients(kind: str, seed: int) -> Callable[[int], Tensor]:
    """The gradient of each step: noise of a kind; scales and means, where it has them, are fixed per coordinate."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(NUMEL, generator=generator).exp() if kind == "heterogeneous" else torch.ones(NUMEL)
    means = 0.1 * torch.randn(NUMEL, generator=generator) if kind == "drifting" else torch.zeros(NUMEL)

    def at(step: int) -> Tensor:
        noise = torch.randn(NUMEL, generator=generator)
        if kind == "laplace":
            noise *= torch.rand(NUMEL, generator=generator).clamp_min(1e-7).log().mul(-2).sqrt()
        return (noise + means) * scales

    return at


def measure(kind: str, ratio: float, change: str, seed: int) -> dict[str, Any]:
    """One training run of made-up gradients with error feedback, and how far counts were from k."""
    codec, memory, at = tw.codecs.threshold_k(ratio), tw.memory.error_feedback().start(), gradients(kind, seed)
    k, counts = codec.k(NUMEL), []
    for step in range(STEPS):
        gradient = at(step) * (CHANGES[change] if step >= JUMP else 1.0)
        message = memory.encode(codec, gradient, name="w", draw=tw.Draw(seed=seed, step=step))
        counts.append(codec.decode_sparse(message)[0].numel() / k)
    within = [0.75 <= count <= 1.3 for count in counts]
    state = memory.codec_state(codec, name="w")
    return {
        "gradient": kind,
        "ratio": ratio,
        "change": change,
        "seed": seed,
        "numel": NUMEL,
        "within_range": sum(within[WARM_UP:]) / len(within[WARM_UP:]),
        "smallest_count_over_k": min(counts[WARM_UP:]),
        "largest_count_over_k": max(counts[WARM_UP:]),
        "steps_out_of_range_after_change": sum(not ok for ok in within[JUMP:]),
        "passes_per_step": state["passes"] / state["steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write (default: in benchmarks/results)")
    options = parser.parse_args()
    rows = [
        measure(kind, ratio, change, seed)
        for kind in KINDS
        for ratio in (0.001, 0.01)
        for change in CHANGES
        for seed in ((0, 1) if change == "none" else (0,))
    ]
    results.write(options.out, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
