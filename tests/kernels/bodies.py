"""The bodies that must agree, the inputs to try them on, and the comparison bit for bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import blocks_of, reference
from thinwire.rng import Key

cpu = pytest.importorskip("thinwire.kernels.cpu", exc_type=ImportError)
gpu = pytest.importorskip("thinwire.kernels.gpu", exc_type=ImportError)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BODIES = ((cpu, "cpu"), (gpu, "cpu" if INTERPRETED else "cuda"))
INTERPRETABLE = 25_000  # elements; beyond that the interpreter is too slow

SIZES = (0, 1, 63, 64, 65, 1000, 1025, 3001)
LARGE = (2048, 2049, 4096 + 63, 20_000, 100_003)  # the tile of a Triton program is 2048
BLOCKS = (0, 64, 1024)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TINY = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -1.1754944e-38, 1.1754944e-38)
BIG = (1.0, -1.0, 65504.0, -3e38, 3.4028235e38)
ODD = (float("inf"), float("-inf"), float("nan"))

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.sampled_from(SIZES)
blocks = st.sampled_from(BLOCKS)
dtypes = st.sampled_from(DTYPES)
words = st.integers(0, 2**32 - 1)
keys = st.builds(Key, words, words)
specials = st.sampled_from((TINY, TINY + BIG, TINY + BIG + ODD))


def mixed(numel: int, seed: int, special: tuple[float, ...] = TINY, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of many magnitudes, a fifth of them replaced by special values."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw) * 10.0 ** torch.randint(-3, 3, (numel,), generator=draw)
    values = torch.tensor(special)[torch.randint(len(special), (numel,), generator=draw)]
    return torch.where(torch.rand(numel, generator=draw) < 0.2, values, x).to(dtype)


def scales(numel: int, block: int, seed: int, special: tuple[float, ...]) -> Tensor:
    """One non-negative number per block."""
    return mixed(blocks_of(numel, block), seed + 1, special).abs()


def random_codes(numel: int, bits: int, seed: int) -> Tensor:
    return torch.randint(1 << bits, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def assert_same(expected: Any, found: Any) -> None:
    """Equal types, shapes and bits; NaN matches any NaN."""
    if isinstance(expected, tuple):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        found = found.cpu()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if expected.is_floating_point():
            assert torch.equal(expected.isnan(), found.isnan())
            expected, found = (
                expected.nan_to_num(0.0, torch.inf, -torch.inf),
                found.nan_to_num(0.0, torch.inf, -torch.inf),
            )
            assert torch.equal(expected.signbit(), found.signbit())
        assert torch.equal(expected, found)
    else:
        assert (type(found), found) == (type(expected), expected)


def check(name: str, *args: Any, **options: Any) -> Any:
    """Call all bodies on copies; results, and arguments changed in place, must agree. Returns the definition's."""
    ours = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    expected = getattr(reference, name)(*ours, **options)
    for body, device in BODIES if args[0].numel() <= INTERPRETABLE else BODIES[:1]:
        theirs = [arg.clone().to(device) if isinstance(arg, Tensor) else arg for arg in args]
        assert_same(expected, getattr(body, name)(*theirs, **options))
        assert_same(tuple(ours), tuple(theirs))
    return expected
