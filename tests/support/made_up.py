"""Results of `thinwire compare` that nobody measured: made up from a seed, in the shape that the runner writes."""

from __future__ import annotations

import math
import random
from typing import Any

HOSTILE = "<!--<script></script ></script><img src=x onerror=\"document.title='broken'\">{{style}}&amp;'\u2028"

# recipe, spelling, sentence, step ms, bytes per step, loss lost, measured in parts
_RECIPES = [
    ("ddp", "DistributedDataParallel", "Plain DDP: 32-bit gradients in a ring.", 1898.4, 19_812_352, 0.0, False),
    ("torch-fp16", "fp16_compress_hook", "torch's hook: gradients as 16-bit floats.", 1013.2, 9_906_176, 0.0, False),
    ("torch-powersgd:4", "powerSGD_hook", "torch's PowerSGD with rank 4.", 243.1, 402_312, 0.176, False),
    ("global-qsgd-8", "global_qsgd:8,block=128|all_reduce",
     "One scale for all ranks, so that 8-bit codes can be added.", 601.7, 5_004_312, 0.001, True),
    ("two-shot-4", "rotated:4|two_shot", "A random rotation, then 4 bits out and 4 bits back.",
     302.9, 2_530_112, 0.002, True),
    ("two-shot-2", "rotated:2|two_shot:3", "A random rotation, then 2 bits out and 3 bits back.",
     203.8, 1_500_416, 0.004, True),
    ("threshold-k", "ef|threshold_k:0.01|bf16|all_gather",
     "The largest 1 % in one pass; what was not sent is added next time.", 187.3, 310_204, 0.262, True),
    ("ar-top-k", "ef|top_k:0.01|shared_top_k", "One rank chooses positions, all add values.",
     192.6, 265_040, 0.241, True),
    ("powersgd-4", "ef|low_rank:4|all_reduce", "Two thin factors instead of a matrix.", 215.5, 402_312, 0.171, True),
]  # fmt: skip
_LIMIT = 156.2


def made_up_result(*, seed: int = 0, recipes: int = 9, points: int = 40, failed: bool = True) -> dict[str, Any]:
    """A result with up to 30 recipes; with `failed`, the last one broke off in the middle."""
    random_ = random.Random(seed)
    rows = [_row(place, points, random_) for place in range(recipes)]
    target = 2.229
    dense = rows[0]["step_ms"] * 200 / 1000
    for row in rows:
        reached = [point["seconds"] for point in row["curve"] if point["loss"] <= target + 0.02]
        row["seconds_to_target"] = reached[0] if reached else None
        row["speedup_over_ddp"] = rows[0]["step_ms"] / row["step_ms"]
        row["speedup_to_target"] = dense / reached[0] if reached else None
    if failed:
        rows[-1].update(status="failed", problem="Worker 2 ended with signal 9 at step 57.", breakdown=None)
        rows[-1].update(dict.fromkeys(_NUMBERS), curve=rows[-1]["curve"][: points // 4])
    return {
        "schema": 1,
        "kind": "compare",
        "created": "2026-11-16T05:00:00Z",
        "command": "thinwire compare --workload gpt --workers 4 --network 100mbit,1ms --steps 200 --json made-up.json",
        "settings": {
            "workload": "gpt", "parameters": 3_300_000, "workers": 4, "network": "100mbit,1ms", "steps": 200,
            "rounds": 5, "seeds": [0], "target_loss": target, "target_from": "ddp", "batch_per_worker": 8,
            "optimizer": "adamw lr 1e-3", "made_up": True,
        },
        "machine": {
            "processor": "Imaginary CPU @ 2.50GHz", "cores": 2, "system": "Linux x86_64", "python": "3.11.2",
            "thinwire": "0.1.0", "torch": "2.13.0", "numba": "0.63.1", "numpy": "2.3.5",
        },
        "network": {
            "asked": "100mbit,1ms", "method": "switch", "notice": None, "measured": {"mbit": 99.1, "delay_ms": 1.04},
        },
        "no_communication": {"step_ms": _LIMIT, "repeats": [155.9, 156.2, 156.4]},
        "headline": "9.3x faster than DDP on 100 Mbit/s, same loss",
        "rows": rows,
    }  # fmt: skip


_NUMBERS = ("step_ms", "predicted_ms", "fraction_of_no_communication", "cpu_ms", "bytes_per_step", "final_loss",
            "seconds_to_target", "speedup_over_ddp", "speedup_to_target")  # fmt: skip


def _row(place: int, points: int, random_: random.Random) -> dict[str, Any]:
    name, spelled, about, step_ms, sent, lost, split = _RECIPES[place % len(_RECIPES)]
    if place >= len(_RECIPES):
        name, step_ms = f"{name}-{place}", step_ms * random_.uniform(0.8, 1.2)
    curve = []
    for order in range(points):
        step = (order + 1) * 200 / points
        loss = 2.229 + lost * step / 200 + 3.3 * math.exp(-step / 32) + random_.gauss(0, 0.02)
        held_out = loss + random_.uniform(0.01, 0.06)
        curve.append(
            {"step": math.ceil(step), "seconds": step * step_ms / 1000, "bytes": math.ceil(step * sent),
             "loss": loss, "held_out": held_out if order % 4 == 3 else None}
        )  # fmt: skip
    exposed = step_ms - _LIMIT
    encode, decode = random_.uniform(8, 20), random_.uniform(4, 12)
    exchange = exposed + random_.uniform(60, 90)
    parts = {"compute_ms": _LIMIT, "encode_ms": encode, "exchange_ms": exchange, "decode_ms": decode}
    return {
        "recipe": name, "spelled": spelled, "about": about,
        "note": "one bucket: it aborts with more on gloo" if name.startswith("torch-power") else None,
        "status": "finished", "problem": None, "step_ms": step_ms,
        "predicted_ms": 0.9 * step_ms, "fraction_of_no_communication": _LIMIT / step_ms,
        "cpu_ms": encode + decode, "bytes_per_step": sent, "final_loss": curve[-1]["loss"] if curve else None,
        "breakdown": {**parts, "exposed_ms": exposed} if split else None, "curve": curve,
        "repeats": [{"seed": 0, "step_ms": [step_ms * random_.uniform(0.98, 1.02) for _ in range(5)]}],
    }  # fmt: skip


def with_decisions(result: dict[str, Any]) -> dict[str, Any]:
    """The same with one of its rows as `auto`, which has decided twice."""
    row = result["rows"][5]
    row["recipe"] = "auto"
    row["decisions"] = [
        {"step": 0, "seconds": 0.0, "recipe": "two-shot-1", "text": f"step 0: {HOSTILE}"},
        {"step": 40, "seconds": 12.5, "recipe": "bf16", "text": "step 40: 940 Mbit/s now (was 94)"},
    ]
    row["front"] = [
        {"recipe": "ar-top-k 0.1 %", "predicted_ms": 150.0, "worth": 0.1},
        {"recipe": "bf16", "predicted_ms": 201.0, "worth": 1.0},
    ]
    row["deciding_share"] = 0.0049
    return result
