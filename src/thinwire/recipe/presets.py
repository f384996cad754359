"""Recipes by name. Each is a recipe that prints itself; what it does is in `docs/recipes.md`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "dense": "fp32|all_reduce",
        "bf16": "bf16|all_reduce",
        # A scale per block: at most 1/177 of the error of one scale per bucket (benchmarks/global_qsgd_blocks.json).
        "global-qsgd-8": "global_qsgd:8,block=128|all_reduce",
        "global-qsgd-exp": "global_qsgd:8,dither=exponential|all_reduce",
        "qsgd-4": "qsgd:4,block=512|all_gather",
        "two-shot-8": "abs_max:8,block=128|two_shot",
        "two-shot-4": "rotated:4|two_shot",
        "two-shot-3": "rotated:3|two_shot:4",
        "two-shot-2": "rotated:2|two_shot:3",
        "two-shot-2-ef": "ef|rotated:2|two_shot:3,feedback=true",
        "two-shot-1": "rotated:1|two_shot:1",
        "gaussian-k": "ef|gaussian_k:0.01|bf16|all_gather",
        "threshold-k": "ef|threshold_k:0.01|bf16|all_gather",
        "top-k": "ef|top_k:0.01|bf16|all_gather",
        "two-shot-top-k": "ef|top_k:0.01|bf16|two_shot:feedback=true",
        "ar-top-k": "ef|top_k:0.01|shared_top_k",
        "ar-top-k-var": "ef|top_k:0.01|shared_top_k:norm",
        "dgc": "momentum_correction|dgc_k:0.01|bf16|all_gather",
        "powersgd-4": "ef|low_rank:4|all_reduce",
    }
)
