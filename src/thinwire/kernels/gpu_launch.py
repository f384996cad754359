"""How Triton kernels are launched: tiles, keys and scales in the form that device code takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rng import Key
from . import checks
from .layout import CHUNK, packed_bytes

ROWS = 32  # chunks per program; a guess until a GPU says otherwise
TILE = ROWS * CHUNK


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run a kernel on its first argument's device; multiplications and additions stay apart, or the bits change."""
    if programs:
        with torch.cuda.device(args[0].get_device()):  # -1 on the CPU, which changes nothing
            kernel[(programs,)](*args, **constants, enable_fp_fusion=False)


def tiles_of(numel: int) -> int:
    return -(-numel // TILE)


def launch_tiles(kernel: Any, numel: int, *args: Any, **constants: Any) -> None:
    """Run a kernel whose programs take `ROWS` chunks each."""
    launch(kernel, tiles_of(numel), *args, **constants, ROWS=ROWS)


def words(key: Key) -> tuple[int, int]:
    """The key as signed integers: Triton picks int32 for them whatever the value, so nothing is compiled twice."""
    k0, k1 = (word - (1 << 32) if word >= 1 << 31 else word for word in key)
    return k0, k1


def per_block(values: Tensor, numel: int, block: int) -> tuple[Tensor, int]:
    """The scales, and how many chunks share one."""
    return checks.scales(values, numel, block), block // CHUNK or max(1, -(-numel // CHUNK))


def empty_packed(like: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """A place for the codes of as many elements: the one given if it fits, else a new one."""
    checks.check_bits(bits)
    if out is not None:
        return checks.packed_out(out, like.numel(), bits)
    return torch.empty(packed_bytes(like.numel(), bits), dtype=torch.uint8, device=like.device)
