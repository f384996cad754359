"""The numba body of the kernels: same names, same arguments, same bits as `reference.py`, at the speed of memory.

Importing it needs numba; the loops are in `cpu_quantize.py` and `cpu_select.py`, their vector instructions in
`vectors.py` and `vector_codes.py`. Each call runs in the calling thread with the GIL released, so that several lanes
can compress at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import OptionError
from ..rng import Key
from . import checks, cpu_quantize, cpu_rotated, cpu_select, reference
from .fused import Keys
from .layout import (
    CHUNK,
    CUT_SHIFT,
    FRACTION_BITS,
    ROTATION,
    Moments,
    Selection,
    blocks_of,
    magnitude_bits,
    packed_bytes,
    rotated_numel,
)

random_bits = reference.random_bits  # drawn in small numbers only: the definition serves
_CODEBOOK_BITS = (1, 2, 3, 4)  # wider codebooks are rare and run in torch
_WIDTHS = tuple((True,) * bits for bits in range(9))  # see vector_codes.py
_Array = npt.NDArray[Any]


def _floats(x: Tensor) -> _Array:
    array: _Array = checks.flat32(x).numpy()
    return array


def _bits(x: Tensor) -> _Array:
    return _floats(x).view(np.int32)


def _scales(values: Tensor, numel: int, block: int) -> _Array:
    """Exactly one scale per block, because the loops run over them."""
    array: _Array = checks.scales(values, numel, block)[: blocks_of(numel, block)].numpy()
    return array


def _codes(packed: Tensor, numel: int, bits: int) -> _Array:
    array: _Array = checks.packed_codes(packed, numel, bits).numpy()
    return array


def _bytes(x: Tensor) -> _Array:
    flat = x if x.dim() == 1 and x.is_contiguous() else x.reshape(-1).contiguous()
    array: _Array = flat.detach().numpy()
    return array


def _empty_packed(numel: int, bits: int, out: Tensor | None = None) -> Tensor:
    checks.check_bits(bits)
    if out is not None:
        return checks.packed_out(out, numel, bits)
    return torch.empty(packed_bytes(numel, bits), dtype=torch.uint8)


def _words(key: Key) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key.k0), np.uint32(key.k1)


def pack(codes: Tensor, *, bits: int) -> Tensor:
    out = _empty_packed(codes.numel(), bits)
    cpu_quantize.pack(_bytes(codes.to(torch.uint8)), _WIDTHS[bits], out.numpy())
    return out


def unpack(packed: Tensor, numel: int, *, bits: int) -> Tensor:
    codes = torch.empty(numel, dtype=torch.uint8)
    cpu_quantize.unpack(_codes(packed, numel, bits), _WIDTHS[bits], codes.numpy())
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
    packed = _empty_packed(numel, bits, out)
    floor = np.float32(-offset << FRACTION_BITS)
    ceiling = np.float32((top - offset) << FRACTION_BITS)
    start = np.uint32(offset << FRACTION_BITS)
    grid = (_scales(low, numel, block), _scales(inverse_step, numel, block))
    ends = (floor, ceiling, start)
    cpu_quantize.quantize(_floats(x), *grid, packed.numpy(), _WIDTHS[bits], block, *ends, *_words(key))
    return packed


def abs_max_encode(x: Tensor, step: Tensor, out: Tensor, *, levels: int, bits: int, block: int, key: Key) -> None:
    numel = x.numel()
    if not checks.writable(step) or step.numel() != blocks_of(numel, block):
        return reference.abs_max_encode(x, step, out, levels=levels, bits=bits, block=block, key=key)
    codes, floats = _empty_packed(numel, bits, out).numpy(), _floats(x)
    options = (_WIDTHS[bits], block, np.int32(levels), *_words(key))
    cpu_quantize.abs_max_encode(floats, floats.view(np.int32), step.numpy(), codes, *options)
    return None


def dequantize_add(
    out: Tensor, packed: Tensor, low: Tensor, step: Tensor, *, bits: int, offset: int, block: int
) -> None:
    if not checks.writable(out):
        return reference.dequantize_add(out, packed, low, step, bits=bits, offset=offset, block=block)
    numel = out.numel()
    grid = (_scales(low, numel, block), _scales(step, numel, block))
    codes = _codes(packed, numel, bits)
    cpu_quantize.dequantize_add(_bytes(out), codes, *grid, _WIDTHS[bits], np.int32(offset), block)
    return None


def exponential_encode(x: Tensor, inverse_scale: Tensor, *, top: int, block: int, key: Key) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.uint8)
    inverse = _scales(inverse_scale, x.numel(), block)
    cpu_quantize.exponential_encode(_floats(x), inverse, np.int32(top), block, *_words(key), out.numpy())
    return out


def exponential_decode_add(out: Tensor, codes: Tensor, scale: Tensor, *, top: int, block: int) -> None:
    checks.same_length(out, codes)
    if not checks.writable(out):
        return reference.exponential_decode_add(out, codes, scale, top=top, block=block)
    factors = _scales(scale, out.numel(), block)
    cpu_quantize.exponential_decode_add(_bytes(out), _bytes(codes), np.int32(top), factors, block)
    return None


def exponential_add(a: Tensor, b: Tensor, *, top: int, key: Key) -> Tensor:
    checks.same_length(a, b)
    out = torch.empty(a.numel(), dtype=torch.uint8)
    cpu_quantize.exponential_add(_bytes(a), _bytes(b), np.int32(top), *_words(key), out.numpy())
    return out


def block_abs_max(x: Tensor, *, block: int) -> Tensor:
    out = torch.empty(blocks_of(x.numel(), block), dtype=torch.int32)
    cpu_select.block_abs_max(_bits(x), block, out.numpy())
    return out.view(torch.float32)


def block_min_max(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    low = torch.empty(blocks_of(x.numel(), block), dtype=torch.int32)
    high = torch.empty_like(low)
    cpu_select.block_min_max(_bits(x), block, low.numpy(), high.numpy())
    return low.view(torch.float32), high.view(torch.float32)


def block_square_sum(x: Tensor, *, block: int) -> Tensor:
    out = torch.empty(blocks_of(x.numel(), block), dtype=torch.float64)
    cpu_select.block_square_sum(_floats(x), block, out.numpy())
    return out


def rotate(x: Tensor, *, key: Key, out: Tensor | None = None) -> Tensor:
    place = checks.float_out(out, rotated_numel(x.numel()), x)
    cpu_quantize.rotate(_floats(x), place.numpy(), *_words(key))
    return place


def unrotate(z: Tensor, numel: int, *, key: Key, out: Tensor | None = None) -> Tensor:
    if (z.numel() % ROTATION) & (z.numel() % ROTATION - 1) or 0 < z.numel() % ROTATION < CHUNK:
        raise OptionError(f"a rotated tensor has rotated_numel(n) elements for some n, not {z.numel()}")
    place = checks.float_out(out, min(numel, z.numel()), z)
    cpu_quantize.unrotate(_floats(z), place.numpy(), *_words(key))
    return place


def codebook_encode(
    z: Tensor, inverse_scale: Tensor, boundaries: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    if bits not in _CODEBOOK_BITS or boundaries.numel() != (1 << bits) - 1:
        return reference.codebook_encode(z, inverse_scale, boundaries, bits=bits, block=block, out=out)
    packed = _empty_packed(z.numel(), bits, out)
    inverse = _scales(inverse_scale, z.numel(), block)
    cpu_quantize.codebook_encode(_floats(z), inverse, _floats(boundaries), _WIDTHS[bits], block, packed.numpy())
    return packed


def codebook_decode(
    packed: Tensor, numel: int, scale: Tensor, codebook: Tensor, *, bits: int, block: int, out: Tensor | None = None
) -> Tensor:
    if bits not in _CODEBOOK_BITS or codebook.numel() != 1 << bits:
        return reference.codebook_decode(packed, numel, scale, codebook, bits=bits, block=block, out=out)
    place = checks.float_out(out, numel, packed)
    factors = _scales(scale, numel, block)
    codes = _codes(packed, numel, bits)
    cpu_quantize.codebook_decode(codes, factors, _floats(codebook), _WIDTHS[bits], block, place.numpy())
    return place


def rotated_encode(
    x: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, boundaries: Tensor, bits: int
) -> None:
    numel = rotated_numel(x.numel())
    if bits not in _CODEBOOK_BITS or not checks.writable(scale) or scale.numel() != blocks_of(numel, ROTATION):
        return reference.rotated_encode(x, scale, out, keys=keys, codebook=codebook, boundaries=boundaries, bits=bits)
    codes = _empty_packed(numel, bits, out).numpy()
    first, second = (_words(key) for key in keys)
    tables = _floats(boundaries), _floats(codebook)
    cpu_rotated.rotated_encode(_floats(x), numel, first, second, *tables, _WIDTHS[bits], scale.numpy(), codes)


def rotated_add(
    packed: Tensor, scale: Tensor, out: Tensor, *, keys: Keys, codebook: Tensor, bits: int, fresh: bool = False
) -> None:
    numel = rotated_numel(out.numel())
    if bits not in _CODEBOOK_BITS or not checks.writable(out):
        return reference.rotated_add(packed, scale, out, keys=keys, codebook=codebook, bits=bits, fresh=fresh)
    codes, factors = _codes(packed, numel, bits), _scales(scale, numel, ROTATION)
    first, second = (_words(key) for key in keys)
    place = out.view(-1).numpy()
    cpu_rotated.rotated_add(codes, numel, first, second, _floats(codebook), _WIDTHS[bits], factors, place, fresh)


def threshold_count(x: Tensor, threshold: float) -> int:
    return int(cpu_select.threshold_count(_bits(x), np.int32(magnitude_bits(threshold))))


def _select(loop: Any, arrays: tuple[_Array, ...], threshold: float, capacity: int) -> Selection:
    values = torch.empty(capacity, dtype=torch.float32)
    indices = torch.empty(capacity, dtype=torch.int32)
    kept, count = loop(*arrays, np.int32(magnitude_bits(threshold)), values.numpy(), indices.numpy())
    return Selection(values[:kept], indices[:kept], count)


def select(x: Tensor, threshold: float, *, capacity: int) -> Selection:
    return _select(cpu_select.select, (_floats(x),), threshold, capacity)


def select_ef(memory: Tensor, gradient: Tensor, threshold: float, *, capacity: int) -> Selection:
    checks.same_length(memory, gradient)
    if not checks.writable(memory):
        return reference.select_ef(memory, gradient, threshold, capacity=capacity)
    return _select(cpu_select.select_ef, (_bytes(memory), _floats(gradient)), threshold, capacity)


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
    home = _floats(values) if memory is None else _bytes(memory)
    restore = memory is not None
    outputs = (kept_values.numpy(), kept_indices.numpy())
    candidates = (_floats(values), _bytes(indices))
    cut = cpu_select.keep_largest(*candidates, k, low, CUT_SHIFT, home, restore, *outputs)
    return kept_values, kept_indices, float(np.int32(low + (cut << CUT_SHIFT)).view(np.float32))


def scatter_add(out: Tensor, indices: Tensor, values: Tensor) -> None:
    checks.same_length(indices, values)
    if not checks.writable(out):
        return reference.scatter_add(out, indices, values)
    if not cpu_select.scatter_add(_bytes(out), _bytes(indices), _floats(values)):
        raise OptionError(f"a position lies outside the {out.numel()} elements")
    return None


def moments(x: Tensor) -> Moments:
    total, squares, largest = cpu_select.moments(_floats(x))
    return Moments(float(total), float(squares), float(np.int32(largest).view(np.float32)))


def all_finite(x: Tensor) -> bool:
    return bool(cpu_select.all_finite(_bits(x)))


def checksum(data: Tensor) -> int:
    return int(cpu_select.checksum(_bytes(data).view(np.uint32)))
