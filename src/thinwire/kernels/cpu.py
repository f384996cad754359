"""The numba body of the kernels: same names, same arguments, same bits as `reference.py`, at the speed of memory.

Importing it needs numba. Whole messages are in `cpu_whole.py`. The loops are in `cpu_quantize.py`, `cpu_rotated.py`,
`cpu_rows.py`, `cpu_select.py` and `cpu_hash.py`, their vector instructions in `vectors.py` and `vector_codes.py`. Each
call runs in the calling thread with the GIL released, so that several lanes can compress at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError
from ..rng import Key
from . import checks, cpu_hash, cpu_quantize, cpu_select, reference
from .cpu_arrays import CODEBOOK_BITS, WIDTHS, codes_of, empty_packed, flat_array, floats, int_bits, scales, words
from .cpu_whole import abs_max_encode as abs_max_encode
from .cpu_whole import abs_max_encode_rows as abs_max_encode_rows
from .cpu_whole import rotated_add as rotated_add
from .cpu_whole import rotated_add_rows as rotated_add_rows
from .cpu_whole import rotated_encode as rotated_encode
from .cpu_whole import rotated_encode_rows as rotated_encode_rows
from .cpu_whole import rotated_mean_rows as rotated_mean_rows
from .layout import (
    CHUNK,
    CUT_SHIFT,
    FRACTION_BITS,
    ROTATION,
    Moments,
    Selection,
    blocks_of,
    magnitude_bits,
    rotated_numel,
)

random_bits = reference.random_bits  # drawn in small numbers only: the definition serves


def pack(codes: Tensor, *, bits: int) -> Tensor:
    out = empty_packed(codes.numel(), bits)
    cpu_quantize.pack(flat_array(codes.to(torch.uint8)), WIDTHS[bits], out.numpy())
    return out


def unpack(packed: Tensor, numel: int, *, bits: int) -> Tensor:
    codes = torch.empty(numel, dtype=torch.uint8)
    cpu_quantize.unpack(codes_of(packed, numel, bits), WIDTHS[bits], codes.numpy())
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
    numel = x.numel()
    packed = empty_packed(numel, bits, out)
    floor = np.float32(-offset << FRACTION_BITS)
    ceiling = np.float32((top - offset) << FRACTION_BITS)
    start = np.uint32(offset << FRACTION_BITS)
    grid = (scales(low, numel, block), scales(inverse_step, numel, block))
    ends = (floor, ceiling, start)
    cpu_quantize.quantize(floats(x), *grid, packed.numpy(), WIDTHS[bits], block, *ends, *words(key))
    return packed


def dequantize_add(
    out: Tensor, packed: Tensor, low: Tensor, step: Tensor, *, bits: int, offset: int, block: int
) -> None:
    if not checks.writable(out):
        return reference.dequantize_add(out, packed, low, step, bits=bits, offset=offset, block=block)
    numel = out.numel()
    grid = (scales(low, numel, block), scales(step, numel, block))
    codes = codes_of(packed, numel, bits)
    cpu_quantize.dequantize_add(flat_array(out), codes, *grid, WIDTHS[bits], np.int32(offset), block)
    return None


def exponential_encode(x: Tensor, inverse_scale: Tensor, *, top: int, block: int, key: Key) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.uint8)
    inverse = scales(inverse_scale, x.numel(), block)
    cpu_quantize.exponential_encode(floats(x), inverse, np.int32(top), block, *words(key), out.numpy())
    return out


def exponential_decode_add(out: Tensor, codes: Tensor, scale: Tensor, *, top: int, block: int) -> None:
    checks.same_length(out, codes)
    if not checks.writable(out):
        return reference.exponential_decode_add(out, codes, scale, top=top, block=block)
    factors = scales(scale, out.numel(), block)
    cpu_quantize.exponential_decode_add(flat_array(out), flat_array(codes), np.int32(top), factors, block)
    return None


def exponential_add(a: Tensor, b: Tensor, *, top: int, key: Key) -> Tensor:
    checks.same_length(a, b)
    out = torch.empty(a.numel(), dtype=torch.uint8)
    cpu_quantize.exponential_add(flat_array(a), flat_array(b), np.int32(top), *words(key), out.numpy())
    return out


def block_abs_max(x: Tensor, *, block: int) -> Tensor:
    out = torch.empty(blocks_of(x.numel(), block), dtype=torch.int32)
    cpu_select.block_abs_max(int_bits(x), block, out.numpy())
    return out.view(torch.float32)


def block_min_max(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    low = torch.empty(blocks_of(x.numel(), block), dtype=torch.int32)
    high = torch.empty_like(low)
    cpu_select.block_min_max(int_bits(x), block, low.numpy(), high.numpy())
    return low.view(torch.float32), high.view(torch.float32)


def block_square_sum(x: Tensor, *, block: int) -> Tensor:
    out = torch.empty(blocks_of(x.numel(), block), dtype=torch.float64)
    cpu_select.block_square_sum(floats(x), block, out.numpy())
    return out


def rotate(x: Tensor, *, key: Key, out: Tensor | None = None) -> Tensor:
    place = checks.float_out(out, rotated_numel(x.numel()), x)
    cpu_quantize.rotate(floats(x), place.numpy(), *words(key))
    return place


def unrotate(z: Tensor, numel: int, *, key: Key, out: Tensor | None = None) -> Tensor:
    if (z.numel() % ROTATION) & (z.numel() % ROTATION - 1) or 0 < z.numel() % ROTATION < CHUNK:
        raise OptionError(f"a rotated tensor has rotated_numel(n) elements for some n, not {z.numel()}")
    place = checks.float_out(out, min(numel, z.numel()), z)
    cpu_quantize.unrotate(floats(z), place.numpy(), *words(key))
    return place


def codebook_encode(
    z: Tensor, inverse_scale: Tensor, boundaries: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    if bits not in CODEBOOK_BITS or boundaries.numel() != (1 << bits) - 1:
        return reference.codebook_encode(z, inverse_scale, boundaries, bits=bits, block=block, out=out)
    packed = empty_packed(z.numel(), bits, out)
    inverse = scales(inverse_scale, z.numel(), block)
    cpu_quantize.codebook_encode(floats(z), inverse, floats(boundaries), WIDTHS[bits], block, packed.numpy())
    return packed


def codebook_decode(
    packed: Tensor, numel: int, scale: Tensor, codebook: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    if bits not in CODEBOOK_BITS or codebook.numel() != 1 << bits:
        return reference.codebook_decode(packed, numel, scale, codebook, bits=bits, block=block, out=out)
    place = checks.float_out(out, numel, packed)
    factors = scales(scale, numel, block)
    codes = codes_of(packed, numel, bits)
    cpu_quantize.codebook_decode(codes, factors, floats(codebook), WIDTHS[bits], block, place.numpy())
    return place


def threshold_count(x: Tensor, threshold: float) -> int:
    return int(cpu_select.threshold_count(int_bits(x), np.int32(magnitude_bits(threshold))))


def _select(loop: Any, arrays: tuple[Any, ...], threshold: float, capacity: int) -> Selection:
    values = torch.empty(capacity, dtype=torch.float32)
    indices = torch.empty(capacity, dtype=torch.int32)
    kept, count = loop(*arrays, np.int32(magnitude_bits(threshold)), values.numpy(), indices.numpy())
    return Selection(values[:kept], indices[:kept], count)


def select(x: Tensor, threshold: float, *, capacity: int) -> Selection:
    return _select(cpu_select.select, (floats(x),), threshold, capacity)


def select_ef(
    memory: Tensor,
    gradient: Tensor,
    threshold: float,
    *,
    capacity: int,
    out: Tensor | None = None,
    decay: float = 1.0,
) -> Selection:
    rest = checks.selection_out(memory, gradient, out)
    if not (checks.writable(rest) and checks.writable(memory)):
        return reference.select_ef(memory, gradient, threshold, capacity=capacity, out=rest, decay=decay)
    arrays = flat_array(memory), floats(gradient), flat_array(rest), np.float32(decay)
    return _select(cpu_select.select_ef, arrays, threshold, capacity)


def keep_largest(
    values: Tensor, indices: Tensor, *, k: int, threshold: float, memory: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    checks.same_length(values, indices)
    if memory is not None and not checks.writable(memory):
        return reference.keep_largest(values, indices, k=k, threshold=threshold, memory=memory)
    if values.numel() <= k:
        return values, indices, threshold
    low = magnitude_bits(threshold)
    kept_values, kept_indices = torch.empty(k, dtype=torch.float32), torch.empty(k, dtype=torch.int32)
    home = floats(values) if memory is None else flat_array(memory)
    restore = memory is not None
    outputs = (kept_values.numpy(), kept_indices.numpy())
    candidates = (floats(values), flat_array(indices))
    cut = cpu_select.keep_largest(*candidates, k, low, CUT_SHIFT, home, restore, *outputs)
    return kept_values, kept_indices, float(np.int32(low + (cut << CUT_SHIFT)).view(np.float32))


def scatter_add(out: Tensor, indices: Tensor, values: Tensor) -> None:
    checks.same_length(indices, values)
    if not checks.writable(out):
        return reference.scatter_add(out, indices, values)
    if not cpu_select.scatter_add(flat_array(out), flat_array(indices), floats(values)):
        raise OptionError(f"a position lies outside the {out.numel()} elements")
    return None


def moments(x: Tensor) -> Moments:
    total, squares, largest = cpu_select.moments(floats(x))
    return Moments(float(total), float(squares), float(np.int32(largest).view(np.float32)))


def all_finite(x: Tensor) -> bool:
    return bool(cpu_select.all_finite(int_bits(x)))


def finite(x: Tensor) -> Tensor:
    if x.dtype in (torch.bfloat16, torch.float16):  # a copy in float32 would cost more
        return x.detach().isfinite().all()
    return torch.tensor(all_finite(x))


def hash64(x: Tensor) -> Tensor:
    data, length = checks.words(x)
    return torch.tensor(cpu_hash.hash64(data.numpy().view(np.uint32), length), dtype=torch.int64)


def checksum(data: Tensor) -> int:
    return int(cpu_select.checksum(flat_array(data).view(np.uint32)))
