"""Whole messages on a GPU: each function is one launch where a block fits into a program, else several (`fused.py`)."""

from __future__ import annotations

import math
from types import ModuleType

import triton
from torch import Tensor

from ..rng import Key
from . import checks, fused, gpu_encode
from .fused import Keys
from .gpu_launch import TILE, empty_packed, launch, words
from .layout import CHUNK, ROTATION, blocks_of, rotated_numel

LARGEST_BLOCK = 8192  # elements that one program holds; a guess until a GPU says otherwise


def _loops() -> ModuleType:
    """The Triton body, of whose kernels `fused.py` makes the same in several launches."""
    from . import gpu  # it imports this module

    return gpu


def abs_max_encode(x: Tensor, step: Tensor, out: Tensor, *, levels: int, bits: int, block: int, key: Key) -> None:
    """Rounded at random to `levels` either side of zero: codes into `out`, a step for each block into `step`."""
    numel = x.numel()
    block = block or -(-numel // CHUNK) * CHUNK
    width = triton.next_power_of_2(max(block, CHUNK))
    blocks = blocks_of(numel, block)
    if width > LARGEST_BLOCK or not checks.writable(step) or step.numel() != blocks:
        return fused.abs_max_encode(_loops(), x, step, out, levels=levels, bits=bits, block=block, key=key)
    x = checks.flat32(x)
    checks.scales(step, numel, block)
    rows = max(1, TILE // width)
    launch(
        gpu_encode.abs_max_encode_kernel, -(-blocks // rows), empty_packed(x, bits, out), step, x, numel, block,
        *words(key), LEVELS=levels, BITS=bits, BLOCKS=rows, WIDTH=width, num_warps=4 if width <= TILE else 8,
    )  # fmt: skip
    return None


def _tail(numel: int) -> tuple[int, float, int]:
    """How many blocks of 1024 are full; of a shorter last block, the factor of its transform and log2 of its width."""
    full, rest = divmod(numel, ROTATION)
    return full, 1.0 / math.sqrt(rest or ROTATION), max(rest, 1).bit_length() - 1


def rotated_encode(
    x: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, boundaries: Tensor, bits: int
) -> None:
    """One or two rotations, then the nearest codewords into `out` and, for each block, |z|^2 / <c, z> into `scale`."""
    numel, blocks = rotated_numel(x.numel()), blocks_of(x.numel(), ROTATION)
    if not checks.writable(scale) or scale.numel() != blocks or codebook.numel() <= boundaries.numel():
        tables = {"codebook": codebook, "boundaries": boundaries}
        return fused.rotated_encode(_loops(), x, scale, out, keys=keys, **tables, bits=bits)
    x, boundaries, codebook = checks.flat32(x), checks.flat32(boundaries), checks.flat32(codebook)
    checks.check_bits(bits)
    full, tail_factor, log_tail = _tail(numel)
    launch(
        gpu_encode.rotated_encode_kernel, blocks, checks.packed_out(out, numel, bits), scale, x, boundaries, codebook,
        boundaries.numel(), x.numel(), full, tail_factor, *words(keys[0]), *words(keys[1]),
        LOG_TAIL=log_tail, BITS=bits,
    )  # fmt: skip
    return None


def rotated_add(
    packed: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, bits: int, fresh: bool = False
) -> None:
    """Add to `out` what `rotated_encode` stands for; `fresh`: as if it held zeros, without reading it."""
    numel = rotated_numel(out.numel())
    if not checks.writable(out):
        return fused.rotated_add(_loops(), packed, scale, out, keys=keys, codebook=codebook, bits=bits, fresh=fresh)
    packed, scale = checks.packed_codes(packed, numel, bits), checks.scales(scale, numel, ROTATION)
    codebook = checks.flat32(codebook)
    full, tail_factor, log_tail = _tail(numel)
    launch(
        gpu_encode.rotated_add_kernel, blocks_of(numel, ROTATION), out, packed, scale, codebook, codebook.numel(),
        out.numel(), full, tail_factor, *words(keys[0]), *words(keys[1]), LOG_TAIL=log_tail, BITS=bits, FRESH=fresh,
    )  # fmt: skip
    return None
