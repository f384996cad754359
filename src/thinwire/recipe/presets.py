"""Recipes by name, each with one sentence for tables and reports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TABLE = (
    ("dense", "fp32|all_reduce", "What DDP does, through thinwire."),
    ("bf16", "bf16|all_reduce", "Half the bytes, 8 bits of mantissa."),
    # A scale per block: at most 1/177 of the error of one scale per bucket, see
    # benchmarks/results/global_qsgd_blocks.json.
    (
        "global-qsgd-8",
        "global_qsgd:8,block=128|all_reduce",
        "Integers that the network adds, on one scale a block that all ranks agree on first.",
    ),
    (
        "global-qsgd-exp",
        "global_qsgd:8,dither=exponential|all_reduce",
        "Signs and powers of two on one scale, added in a tree.",
    ),
    ("qsgd-4", "qsgd:4,block=512|all_gather", "4 bits an element, unbiased; traffic grows with the ranks."),
    ("two-shot-8", "abs_max:8,block=128|two_shot", "8 bits both ways, unbiased; traffic hardly grows with the ranks."),
    ("two-shot-4", "rotated:4|two_shot", "4 bits both ways, after a random rotation."),
    ("two-shot-3", "rotated:3|two_shot:4", "3 bits there and 4 back, where errors do not average out."),
    ("two-shot-2", "rotated:2|two_shot:3", "2 bits there and 3 back, after a random rotation."),
    (
        "two-shot-2-ef",
        "ef|rotated:2|two_shot:3,feedback=true",
        "2 bits there and 3 back; what either shot rounded away is sent later.",
    ),
    (
        "two-shot-1-2",
        "rotated:1|two_shot:2",
        "1 bit there and 2 back, where errors do not average out; unbiased, without a memory.",
    ),
    ("two-shot-1", "rotated:1|two_shot:1", "1 bit both ways, after a random rotation: the fewest without a memory."),
    (
        "gaussian-k",
        "ef|gaussian_k:0.01|bf16|all_gather",
        "What exceeds a Gaussian threshold, meant to be 1 %, with error feedback.",
    ),
    (
        "threshold-k",
        "ef|threshold_k:0.01|bf16|all_gather",
        "The largest 0.8 to 1 %, found in one pass, with error feedback.",
    ),
    ("top-k", "ef|top_k:0.01|bf16|all_gather", "The largest 1 %, with error feedback."),
    (
        "two-shot-top-k",
        "ef|top_k:0.01|bf16|two_shot:feedback=true",
        "The largest 1 % there and, of their sum, back; the rest is sent later.",
    ),
    (
        "ar-top-k",
        "ef|top_k:0.01|shared_top_k",
        "1 % at positions that every rank chooses in turn, so that the network adds the values.",
    ),
    (
        "ar-top-k-var",
        "ef|top_k:0.01|shared_top_k:norm",
        "1 % at positions chosen by the rank with the largest gradient.",
    ),
    (
        "dgc",
        "momentum_correction|dgc_k:0.01|bf16|all_gather",
        "0.8 to 1 % of the velocity instead of the gradient.",
    ),
    (
        "powersgd-4",
        "ef|low_rank:4|all_reduce",
        "Every matrix as two factors of rank 4, which the network adds, with error feedback.",
    ),
)
PRESETS: Mapping[str, str] = MappingProxyType({name: text for name, text, _ in _TABLE})
ABOUT: Mapping[str, str] = MappingProxyType({name: sentence for name, _, sentence in _TABLE})
