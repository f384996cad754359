"""The hot loops as Triton kernels: the functions of `reference.py`, with the same signatures and the same bits.

Checked in Triton's interpreter only (on the CPU, with TRITON_INTERPRET=1): no GPU has run this yet, and its speed on
one has not been measured. Sums in float64 (`block_square_sum`, `moments`) add in another order than the reference, so
they agree to rounding; everything else is equal bit for bit, except for the sign and payload of NaN. The device code is
in `gpu_quantize.py` and `gpu_select.py`; here the lengths are checked, because a kernel cannot notice a short buffer.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
import triton
from torch import Tensor

from ..errors import OptionError
from ..rng import Key
from . import checks, fused, gpu_quantize, gpu_select, reference
from .layout import CHUNK, ROTATION, Moments, Selection, blocks_of, magnitude_bits, packed_bytes, rotated_numel

abs_max_encode = functools.partial(fused.abs_max_encode, sys.modules[__name__])
rotated_encode = functools.partial(fused.rotated_encode, sys.modules[__name__])
rotated_add = functools.partial(fused.rotated_add, sys.modules[__name__])
keep_largest = reference.keep_largest  # stays in plain torch: the candidates are few
_ROWS = 32  # chunks per program; a guess until a GPU says otherwise
_TILE = _ROWS * CHUNK


def _launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run a kernel on its first argument's device; multiplications and additions stay apart, or the bits change."""
    if programs:
        with torch.cuda.device(args[0].get_device()):  # -1 on the CPU, which changes nothing
            kernel[(programs,)](*args, **constants, enable_fp_fusion=False)


def _programs(numel: int) -> int:
    return -(-numel // _TILE)


def _launch_tiles(kernel: Any, numel: int, *args: Any, **constants: Any) -> None:
    """Run a kernel whose programs take `_ROWS` chunks each."""
    _launch(kernel, _programs(numel), *args, **constants, ROWS=_ROWS)


def _words(key: Key) -> tuple[int, int]:
    """The key as signed integers: Triton picks int32 for them whatever the value, so nothing is compiled twice."""
    k0, k1 = (word - (1 << 32) if word >= 1 << 31 else word for word in key)
    return k0, k1


def _per_block(values: Tensor, numel: int, block: int) -> tuple[Tensor, int]:
    """The scales, and how many chunks share one."""
    return checks.scales(values, numel, block), block // CHUNK or max(1, -(-numel // CHUNK))


def random_bits(numel: int, key: Key, *, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits per element, in an int64 tensor."""
    out = torch.empty(numel, dtype=torch.int64, device=device)
    _launch_tiles(gpu_quantize.random_bits_kernel, numel, out, numel, *_words(key))
    return out


# --------------------------------------------------------------------------------------------- packing and quantising


def _empty_packed(like: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    checks.check_bits(bits)
    if out is not None:
        return checks.packed_out(out, like.numel(), bits)
    return torch.empty(packed_bytes(like.numel(), bits), dtype=torch.uint8, device=like.device)


def pack(codes: Tensor, *, bits: int) -> Tensor:
    """uint8 codes below 2**bits -> packed bytes."""
    codes, packed = codes.contiguous(), _empty_packed(codes, bits)
    _launch_tiles(gpu_quantize.pack_kernel, codes.numel(), packed, codes, codes.numel(), BITS=bits)
    return packed


def unpack(packed: Tensor, numel: int, *, bits: int) -> Tensor:
    """The inverse of `pack`: packed bytes -> `numel` uint8 codes."""
    packed = checks.packed_codes(packed, numel, bits)
    codes = torch.empty(numel, dtype=torch.uint8, device=packed.device)
    _launch_tiles(gpu_quantize.unpack_kernel, numel, codes, packed, numel, BITS=bits)
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
    packed = _empty_packed(x, bits, out)
    low, block_chunks = _per_block(low, x.numel(), block)
    inverse_step, _ = _per_block(inverse_step, x.numel(), block)
    _launch_tiles(
        gpu_quantize.quantize_kernel, x.numel(), packed, x, low, inverse_step, x.numel(), block_chunks, *_words(key),
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
    low, block_chunks = _per_block(low, numel, block)
    step, _ = _per_block(step, numel, block)
    _launch_tiles(
        gpu_quantize.dequantize_add_kernel, numel, out, packed, low, step, numel, block_chunks,
        BITS=bits, OFFSET=offset,
    )  # fmt: skip
    return None


# --------------------------------------------------------------------------------------------- exponential dithering


def exponential_encode(x: Tensor, inverse_scale: Tensor, *, top: int, block: int, key: Key) -> Tensor:
    """Unbiased rounding of x / scale to a signed power of two; one byte per element, sign bit 0x80."""
    x = checks.flat32(x)
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    inverse_scale, block_chunks = _per_block(inverse_scale, x.numel(), block)
    _launch_tiles(
        gpu_quantize.exponential_encode_kernel, x.numel(), codes, x, inverse_scale, x.numel(), block_chunks,
        *_words(key), TOP=top,
    )  # fmt: skip
    return codes


def exponential_decode_add(out: Tensor, codes: Tensor, scale: Tensor, *, top: int, block: int) -> None:
    """out += sign * 2**(code - top) * scale, in place."""
    checks.same_length(out, codes)
    if not checks.writable(out):
        return reference.exponential_decode_add(out, codes, scale, top=top, block=block)
    numel, codes = out.numel(), codes.contiguous()
    scale, block_chunks = _per_block(scale, numel, block)
    _launch_tiles(gpu_quantize.exponential_decode_add_kernel, numel, out, codes, scale, numel, block_chunks, TOP=top)
    return None


def exponential_add(a: Tensor, b: Tensor, *, top: int, key: Key) -> Tensor:
    """The sum of two exponential codes, as a code: E[value(result)] = value(a) + value(b), integers only."""
    checks.same_length(a, b)
    out = torch.empty(a.numel(), dtype=torch.uint8, device=a.device)
    a, b = a.contiguous(), b.contiguous()
    _launch_tiles(gpu_quantize.exponential_add_kernel, a.numel(), out, a, b, a.numel(), *_words(key), TOP=top)
    return out


# ------------------------------------------------------------------------------------------------------ block scales


def _block_reduce(x: Tensor, block: int, kind: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Partial results (blocks, tiles of a block); the second tensor is the maxima of MIN_MAX."""
    x = checks.flat32(x)
    blocks, width = blocks_of(x.numel(), block), block or max(x.numel(), 1)
    tile = min(_TILE, max(CHUNK, triton.next_power_of_2(width)))
    tiles, rows = -(-width // tile), _TILE // tile
    out = torch.empty(blocks, tiles, dtype=dtype, device=x.device)
    high = torch.empty_like(out) if kind == gpu_select.MIN_MAX else out
    _launch(
        gpu_select.block_reduce_kernel, -(-blocks // rows) * tiles, x, out, high, x.numel(), width, tiles,
        KIND=kind, ROWS=rows, TILE=tile,
    )  # fmt: skip
    return out, high


def block_abs_max(x: Tensor, *, block: int) -> Tensor:
    """max |x| of each block, float32. Compared as integers, so inf and NaN come out as inf and NaN."""
    return _block_reduce(x, block, gpu_select.ABS_MAX, torch.int32)[0].amax(dim=1).view(torch.float32)


def block_min_max(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """min and max of each block, float32. A NaN in the block shows as NaN in one of the two."""
    low, high = _block_reduce(x, block, gpu_select.MIN_MAX, torch.int32)
    return reference._ordered(low.amin(dim=1)).view(torch.float32), reference._ordered(high.amax(dim=1)).view(
        torch.float32
    )


def block_square_sum(x: Tensor, *, block: int) -> Tensor:
    """sum of x**2 of each block, accumulated in float64, float64 out."""
    return _block_reduce(x, block, gpu_select.SQUARE_SUM, torch.float64)[0].sum(dim=1)


# ---------------------------------------------------------------------------------------------------------- rotation


def _rotation(x: Tensor, padded: int, out: Tensor, key: Key, *, forward: bool) -> Tensor:
    """Transform `padded` elements (x, then zeros) in blocks of 1024 and one shorter block; the start of it."""
    full, tail = divmod(padded, ROTATION)
    if tail & (tail - 1):
        raise OptionError(f"a rotated tensor has rotated_numel(n) elements for some n, not {padded}")
    for first, width, programs in ((0, ROTATION, full), (full * ROTATION, tail, 1)):
        if width:
            _launch(
                gpu_quantize.rotate_kernel, programs, out, x, first, x.numel(), out.numel(), 1.0 / math.sqrt(width),
                *_words(key), LOG_WIDTH=width.bit_length() - 1, FORWARD=forward,
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
    packed = _empty_packed(z, bits, out)
    inverse_scale, block_chunks = _per_block(inverse_scale, z.numel(), block)
    _launch_tiles(
        gpu_quantize.codebook_encode_kernel, z.numel(), packed, z, inverse_scale, boundaries, boundaries.numel(),
        z.numel(), block_chunks, BITS=bits,
    )  # fmt: skip
    return packed


def codebook_decode(
    packed: Tensor, numel: int, scale: Tensor, codebook: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    """codebook[code] * scale, float32; a code past the end of the codebook (damaged bytes) gives 0."""
    packed, codebook = checks.packed_codes(packed, numel, bits), checks.flat32(codebook)
    scale, block_chunks = _per_block(scale, numel, block)
    place = checks.float_out(out, numel, packed)
    _launch_tiles(
        gpu_quantize.codebook_decode_kernel, numel, place, packed, scale, codebook, codebook.numel(), numel,
        block_chunks, BITS=bits,
    )  # fmt: skip
    return place


# --------------------------------------------------------------------------------------------------------- selection


def _mark(x: Tensor, gradient: Tensor | None, threshold: float, *, mark: bool) -> tuple[Tensor, Tensor]:
    """One pass over flat float32 data: x += gradient, then (marks, counts per program)."""
    marks = torch.empty(packed_bytes(x.numel(), 1) if mark else 0, dtype=torch.uint8, device=x.device)
    counts = torch.empty(_programs(x.numel()), dtype=torch.int32, device=x.device)
    _launch_tiles(
        gpu_select.mark_kernel, x.numel(), x, x if gradient is None else gradient, marks, counts, x.numel(),
        magnitude_bits(threshold), ADD=gradient is not None, MARK=mark,
    )  # fmt: skip
    return marks, counts


def threshold_count(x: Tensor, threshold: float) -> int:
    """How many |x| exceed the threshold (inf and NaN exceed every finite one)."""
    return int(_mark(checks.flat32(x), None, threshold, mark=False)[1].sum())


def _take(x: Tensor, gradient: Tensor | None, threshold: float, capacity: int) -> Selection:
    """Select from flat float32 data; with a gradient it is added first and what is taken becomes zero."""
    marks, counts = _mark(x, gradient, threshold, mark=True)
    count = int(counts.sum())  # the one wait for the device: the output's size depends on it
    starts = counts.cumsum(dim=0) - counts
    values = torch.empty(min(count, capacity), dtype=torch.float32, device=x.device)
    indices = torch.empty(values.numel(), dtype=torch.int32, device=x.device)
    if values.numel():
        _launch_tiles(
            gpu_select.take_kernel, x.numel(), x, marks, starts, values, indices, x.numel(), capacity,
            ZERO=gradient is not None,
        )  # fmt: skip
    return Selection(values, indices, count)


def select(x: Tensor, threshold: float, *, capacity: int) -> Selection:
    """The first `capacity` elements with |x| > threshold, in order of position."""
    return _take(checks.flat32(x), None, threshold, capacity)


def select_ef(memory: Tensor, gradient: Tensor, threshold: float, *, capacity: int) -> Selection:
    """memory += gradient; take out the first `capacity` elements above the threshold; the rest stays in memory."""
    checks.same_length(memory, gradient)
    if not checks.writable(memory):
        return reference.select_ef(memory, gradient, threshold, capacity=capacity)
    return _take(memory, checks.flat32(gradient), threshold, capacity)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] += values, in place; indices (int32, unique, in range) come from a checked decoder."""
    checks.same_length(indices, values)
    if not checks.writable(out):
        return reference.scatter_add(out, indices, values)
    count, indices, values = values.numel(), indices.contiguous(), checks.flat32(values)
    _launch(gpu_select.scatter_add_kernel, _programs(count), out, indices, values, count, TILE=_TILE)
    return None


# -------------------------------------------------------------------------------------------------- sums and checks


def moments(x: Tensor) -> Moments:
    """Sum, sum of squares (both in float64) and max |x| (inf or NaN if there is one)."""
    if x.numel() == 0:
        return Moments(0.0, 0.0, 0.0)
    x, programs = checks.flat32(x), _programs(x.numel())
    sums = torch.empty(2, programs, dtype=torch.float64, device=x.device)
    peaks = torch.empty(programs, dtype=torch.int32, device=x.device)
    _launch(gpu_select.moments_kernel, programs, x, sums, peaks, x.numel(), TILE=_TILE)
    peak = peaks.amax().view(torch.float32).to(torch.float64)
    total, squares, max_abs = torch.cat((sums.sum(dim=1), peak.reshape(1))).tolist()  # one copy to the host
    return Moments(total, squares, max_abs)


def all_finite(x: Tensor) -> bool:
    """True if there is neither inf nor NaN."""
    return x.numel() == 0 or float(block_abs_max(x, block=0)[0]) < math.inf


def checksum(data: Tensor) -> int:
    """32-bit sum of the little-endian words of a byte tensor, each mixed with its position."""
    words = data.view(torch.int32)
    sums = torch.empty(_programs(words.numel()), dtype=torch.int32, device=data.device)
    _launch(gpu_select.checksum_kernel, sums.numel(), words, sums, words.numel(), TILE=_TILE)
    return int(sums.sum()) & 0xFFFFFFFF
