"""The hot loops as Triton kernels: the functions of `reference.py`, with the same signatures and the same bits.

Checked in Triton's interpreter only (on the CPU, with TRITON_INTERPRET=1): no GPU has run this yet, and its speed on
one has not been measured. Sums in float64 (`block_square_sum`, `moments`) add in another order than the reference, so
they agree to rounding; everything else is equal bit for bit, except for the sign and payload of NaN.

Device code is in `gpu_quantize.py`, `gpu_select.py` and `gpu_encode.py`. Lengths are checked in the functions that
launch it (here, `gpu_reduce.py`, `gpu_whole.py`), because a kernel cannot notice a short buffer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import OptionError
from ..rng import Key
from . import checks, gpu_quantize, reference
from .gpu_launch import empty_packed, launch, launch_tiles, per_block, words
from .gpu_reduce import (
    all_finite as all_finite,
)
from .gpu_reduce import (
    block_abs_max as block_abs_max,
)
from .gpu_reduce import (
    block_min_max as block_min_max,
)
from .gpu_reduce import (
    block_square_sum as block_square_sum,
)
from .gpu_reduce import (
    checksum as checksum,
)
from .gpu_reduce import (
    finite as finite,
)
from .gpu_reduce import (
    hash64 as hash64,
)
from .gpu_reduce import (
    moments as moments,
)
from .gpu_reduce import (
    scatter_add as scatter_add,
)
from .gpu_reduce import (
    select as select,
)
from .gpu_reduce import (
    select_ef as select_ef,
)
from .gpu_reduce import (
    threshold_count as threshold_count,
)
from .gpu_whole import abs_max_encode as abs_max_encode
from .gpu_whole import rotated_add as rotated_add
from .gpu_whole import rotated_encode as rotated_encode
from .layout import ROTATION, rotated_numel
from .rows import abs_max_encode_rows as abs_max_encode_rows
from .rows import rotated_add_rows as rotated_add_rows
from .rows import rotated_encode_rows as rotated_encode_rows
from .rows import rotated_mean_rows as rotated_mean_rows

keep_largest = reference.keep_largest  # stays in plain torch: the candidates are few


def random_bits(numel: int, key: Key, *, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits per element, in an int64 tensor."""
    out = torch.empty(numel, dtype=torch.int64, device=device)
    launch_tiles(gpu_quantize.random_bits_kernel, numel, out, numel, *words(key))
    return out


# --------------------------------------------------------------------------------------------- packing and quantising


def pack(codes: Tensor, *, bits: int) -> Tensor:
    """uint8 codes below 2**bits -> packed bytes."""
    codes, packed = codes.contiguous(), empty_packed(codes, bits)
    launch_tiles(gpu_quantize.pack_kernel, codes.numel(), packed, codes, codes.numel(), BITS=bits)
    return packed


def unpack(packed: Tensor, numel: int, *, bits: int) -> Tensor:
    """The inverse of `pack`: packed bytes -> `numel` uint8 codes."""
    packed = checks.packed_codes(packed, numel, bits)
    codes = torch.empty(numel, dtype=torch.uint8, device=packed.device)
    launch_tiles(gpu_quantize.unpack_kernel, numel, codes, packed, numel, BITS=bits)
    return codes


def quantize(
    x: Tensor,
    low: Tensor,
    inverse_step: Tensor,
    *,
    bits: int,
    top: int,
    offset: int,
    block: int,
    key: Key,
    out: Tensor | None = None,
) -> Tensor:
    """Unbiased rounding to a uniform grid, packed: code c in 0..top stands for low + (c - offset) * step."""
    x = checks.flat32(x)
    packed = empty_packed(x, bits, out)
    low, block_chunks = per_block(low, x.numel(), block)
    inverse_step, _ = per_block(inverse_step, x.numel(), block)
    launch_tiles(
        gpu_quantize.quantize_kernel, x.numel(), packed, x, low, inverse_step, x.numel(), block_chunks, *words(key),
        BITS=bits, TOP=top, OFFSET=offset,
    )  # fmt: skip
    return packed


def dequantize_add(
    out: Tensor, packed: Tensor, low: Tensor, step: Tensor, *, bits: int, offset: int, block: int
) -> None:
    """out += low + (code - offset) * step, in place; `out` is flat float32."""
    if not checks.writable(out):
        return reference.dequantize_add(out, packed, low, step, bits=bits, offset=offset, block=block)
    numel, packed = out.numel(), checks.packed_codes(packed, out.numel(), bits)
    low, block_chunks = per_block(low, numel, block)
    step, _ = per_block(step, numel, block)
    launch_tiles(
        gpu_quantize.dequantize_add_kernel, numel, out, packed, low, step, numel, block_chunks,
        BITS=bits, OFFSET=offset,
    )  # fmt: skip
    return None


# --------------------------------------------------------------------------------------------- exponential dithering


def exponential_encode(x: Tensor, inverse_scale: Tensor, *, top: int, block: int, key: Key) -> Tensor:
    """Unbiased rounding of x / scale to a signed power of two; one byte per element, sign bit 0x80."""
    x = checks.flat32(x)
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    inverse_scale, block_chunks = per_block(inverse_scale, x.numel(), block)
    launch_tiles(
        gpu_quantize.exponential_encode_kernel, x.numel(), codes, x, inverse_scale, x.numel(), block_chunks,
        *words(key), TOP=top,
    )  # fmt: skip
    return codes


def exponential_decode_add(out: Tensor, codes: Tensor, scale: Tensor, *, top: int, block: int) -> None:
    """out += sign * 2**(code - top) * scale, in place."""
    checks.same_length(out, codes)
    if not checks.writable(out):
        return reference.exponential_decode_add(out, codes, scale, top=top, block=block)
    numel, codes = out.numel(), codes.contiguous()
    scale, block_chunks = per_block(scale, numel, block)
    launch_tiles(gpu_quantize.exponential_decode_add_kernel, numel, out, codes, scale, numel, block_chunks, TOP=top)
    return None


def exponential_add(a: Tensor, b: Tensor, *, top: int, key: Key) -> Tensor:
    """The sum of two exponential codes, as a code: E[value(result)] = value(a) + value(b), integers only."""
    checks.same_length(a, b)
    out = torch.empty(a.numel(), dtype=torch.uint8, device=a.device)
    a, b = a.contiguous(), b.contiguous()
    launch_tiles(gpu_quantize.exponential_add_kernel, a.numel(), out, a, b, a.numel(), *words(key), TOP=top)
    return out


# ---------------------------------------------------------------------------------------------------------- rotation


def _rotation(x: Tensor, padded: int, out: Tensor, key: Key, *, forward: bool) -> Tensor:
    """Transform `padded` elements (x, then zeros) in blocks of 1024 and one shorter block; the start of it."""
    full, tail = divmod(padded, ROTATION)
    if tail & (tail - 1):
        raise OptionError(f"a rotated tensor has rotated_numel(n) elements for some n, not {padded}")
    for first, width, programs in ((0, ROTATION, full), (full * ROTATION, tail, 1)):
        if width:
            launch(
                gpu_quantize.rotate_kernel, programs, out, x, first, x.numel(), out.numel(), 1.0 / math.sqrt(width),
                *words(key), LOG_WIDTH=width.bit_length() - 1, FORWARD=forward,
            )  # fmt: skip
    return out


def rotate(x: Tensor, *, key: Key, out: Tensor | None = None) -> Tensor:
    """Random signs, then a Hadamard transform in blocks of 1024; output of length `rotated_numel` (`out` may be x)."""
    x = checks.flat32(x)
    padded = rotated_numel(x.numel())
    return _rotation(x, padded, checks.float_out(out, padded, x), key, forward=True)


def unrotate(z: Tensor, numel: int, *, key: Key, out: Tensor | None = None) -> Tensor:
    """The inverse of `rotate`: Hadamard transform, then the same signs; `numel` elements (`out` may be z)."""
    place = checks.float_out(out, min(numel, z.numel()), z)
    return _rotation(checks.flat32(z), z.numel(), place, key, forward=False)


def codebook_encode(
    z: Tensor, inverse_scale: Tensor, boundaries: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    """Nearest codeword of a sorted codebook, packed: the code is the number of boundaries below z / scale."""
    z, boundaries = checks.flat32(z), checks.flat32(boundaries)
    packed = empty_packed(z, bits, out)
    inverse_scale, block_chunks = per_block(inverse_scale, z.numel(), block)
    launch_tiles(
        gpu_quantize.codebook_encode_kernel, z.numel(), packed, z, inverse_scale, boundaries, boundaries.numel(),
        z.numel(), block_chunks, BITS=bits,
    )  # fmt: skip
    return packed


def codebook_decode(
    packed: Tensor, numel: int, scale: Tensor, codebook: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    """codebook[code] * scale, float32; a code past the end of the codebook (damaged bytes) gives 0."""
    packed, codebook = checks.packed_codes(packed, numel, bits), checks.flat32(codebook)
    scale, block_chunks = per_block(scale, numel, block)
    place = checks.float_out(out, numel, packed)
    launch_tiles(
        gpu_quantize.codebook_decode_kernel, numel, place, packed, scale, codebook, codebook.numel(), numel,
        block_chunks, BITS=bits,
    )  # fmt: skip
    return place
