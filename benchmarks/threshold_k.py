"""How well threshold_k holds its target under error feedback: counts and passes over 300 steps, as JSON.

.venv/bin/python benchmarks/threshold_k.py        writes benchmarks/threshold_k.json, about two minutes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw

STEPS, WARM_UP, JUMP = 300, 10, 150
NUMEL = 400_000
KINDS = ("gaussian", "laplace", "heterogeneous", "drifting")
CHANGES = {"none": 1.0, "drop 10x": 0.1, "rise 10x": 10.0}


def gradients(kind: str, seed: int) -> Callable[[int], Tensor]:
    """The gradient of each step: noise of the kind, with scales and means fixed per coordinate where it has them."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(NUMEL, generator=generator).exp() if kind == "heterogeneous" else torch.ones(NUMEL)
    means = 0.1 * torch.randn(NUMEL, generator=generator) if kind == "drifting" else torch.zeros(NUMEL)

    def at(step: int) -> Tensor:
        noise = torch.randn(NUMEL, generator=generator)
        if kind == "laplace":
            noise *= torch.rand(NUMEL, generator=generator).clamp_min(1e-7).log().mul(-2).sqrt()
        return (noise + means) * scales

    return at


def measure(kind: str, ratio: float, change: str, seed: int) -> dict[str, object]:
    codec, memory, at = tw.threshold_k(ratio), tw.error_feedback().start(), gradients(kind, seed)
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
    rows = [
        measure(kind, ratio, change, seed)
        for kind in KINDS
        for ratio in (0.001, 0.01)
        for change in CHANGES
        for seed in ((0, 1) if change == "none" else (0,))
    ]
    Path(__file__).with_suffix(".json").write_text(json.dumps({"steps": STEPS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
