"""Inputs that are hard for kernels: zeros of both signs, subnormals, the ends of float32, inf, NaN, odd lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import blocks_of

TINY = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -1.1754944e-38, 1.1754944e-38)
BIG = (1.0, -1.0, 65504.0, -3e38, 3.4028235e38)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
SPECIALS = {"subnormals": TINY, "extremes": TINY + BIG, "inf and NaN": TINY + BIG + NOT_FINITE}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BLOCKS = (0, 64, 1024)
SIZES = (0, 1, 63, 64, 65, 1000, 1025, 3001)  # around a chunk of 64 and a rotation of 1024
LARGE_SIZES = (2048, 2049, 4159, 20_000, 100_003)  # around the 2048 elements of a Triton program
LARGEST_SIZE = 1_000_003


def mixed(numel: int, seed: int, special: tuple[float, ...] = TINY, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of many magnitudes; a fifth of them are replaced by special values.

    >>> mixed(4, seed=0).shape
    torch.Size([4])
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw) * 10.0 ** torch.randint(-3, 3, (numel,), generator=draw)
    values = torch.tensor(special)[torch.randint(len(special), (numel,), generator=draw)]
    return torch.where(torch.rand(numel, generator=draw) < 0.2, values, x).to(dtype)


def scales(numel: int, block: int, seed: int, special: tuple[float, ...] = TINY) -> Tensor:
    """One non-negative number for each block.

    >>> scales(100, 64, seed=0).numel()
    2
    """
    return mixed(blocks_of(numel, block), seed + 1, special).abs()


def random_codes(numel: int, bits: int, seed: int) -> Tensor:
    """Codes below 2**bits, one in each byte.

    >>> int(random_codes(1000, 3, seed=0).max())
    7
    """
    return torch.randint(1 << bits, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
