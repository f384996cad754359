"""Tensors as the numpy arrays that the numba loops take; few operations, because a short message costs no more."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..rng import Key, Keys
from . import checks, cpu_keys
from .fused import TwoRounds
from .layout import blocks_of, packed_bytes

CODEBOOK_BITS = (1, 2, 3, 4)  # wider codebooks are rare and run in torch
WIDTHS = tuple((True,) * bits for bits in range(9))  # see vector_codes.py
Array = npt.NDArray[Any]


def floats(x: Tensor) -> Array:
    array: Array = checks.flat32(x).numpy()
    return array


def int_bits(x: Tensor) -> Array:
    return floats(x).view(np.int32)


def scales(values: Tensor, numel: int, block: int) -> Array:
    """Exactly one scale per block, because the loops run over them."""
    array: Array = checks.scales(values, numel, block).numpy()
    return array[: blocks_of(numel, block)]


def codes_of(packed: Tensor, numel: int, bits: int) -> Array:
    array: Array = checks.packed_codes(packed, numel, bits).numpy()
    return array


def flat_array(x: Tensor) -> Array:
    flat = x if x.dim() == 1 and x.is_contiguous() else x.reshape(-1).contiguous()
    array: Array = flat.detach().numpy() if flat.requires_grad else flat.numpy()
    return array


def empty_packed(numel: int, bits: int, out: Tensor | None = None) -> Tensor:
    checks.check_bits(bits)
    if out is not None:
        return checks.packed_out(out, numel, bits)
    return torch.empty(packed_bytes(numel, bits), dtype=torch.uint8)


def words(key: Key) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key.k0), np.uint32(key.k1)


def four_words(keys: Sequence[Key]) -> Array:
    """Of the keys of two rounds."""
    return np.array((*keys[0], *keys[1]), np.uint32)


def key_words(keys: Sequence[Any]) -> Array:
    """The words of keys, or of pairs of keys, one line each."""
    if isinstance(keys, Keys):
        return _folded(keys, cpu_keys.folded)
    if isinstance(keys, TwoRounds) and isinstance(keys.keys, Keys):
        return _folded(keys.keys, cpu_keys.folded_twice)
    return np.array([key for key in keys], np.uint32).reshape(len(keys), -1)


def _folded(keys: Keys, fold: Any) -> Array:
    found: Array = fold(np.uint64(keys.base.packed), _purposes(keys.purposes))
    return found


@functools.lru_cache(maxsize=1024)  # a training step has the same ones each time
def _purposes(purposes: tuple[int, ...]) -> Array:
    return np.array(purposes, np.uint64)
