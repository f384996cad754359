"""The hot loops under one name each. The tensor's device picks the body: numba on CPU, Triton on GPU, else plain torch.

`reference.py` defines what every loop computes; `cpu.py` and `gpu.py` give the same bits faster.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

from torch import Tensor

from . import reference
from .fused import TwoRounds
from .layout import CHUNK, ROTATION, Moments, Selection, blocks_of, checksum_term, packed_bytes, rotated_numel
from .spread import Spread

_log = logging.getLogger(__name__)
_loading = threading.Lock()
_P = ParamSpec("_P")
_R = TypeVar("_R")
_BODIES = {"cpu": ("cpu", "numba"), "cuda": ("gpu", "triton")}


def body_for(device_type: str) -> ModuleType:
    """The module whose functions run on this kind of device; imported on first use, because numba is slow to import.

    >>> body_for("meta").__name__
    'thinwire.kernels.reference'
    """
    with _loading:  # several threads may compress their first tensor at once
        return _load(device_type)


@functools.cache
def _load(device_type: str) -> ModuleType:
    module, needs = _BODIES.get(device_type, ("reference", ""))
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except ImportError as problem:
        message = "%s is missing (%s): kernels on %s run in plain torch, several times slower"
        _log.warning(message, needs, problem, device_type)
        return reference


def _dispatch(definition: Callable[_P, _R]) -> Callable[_P, _R]:
    found: dict[str, Callable[_P, _R]] = {}  # a message costs a dozen calls, most of them of short tensors

    @functools.wraps(definition)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensor = args[0]
        assert isinstance(tensor, Tensor | Spread)
        device = tensor.device.type
        if device not in found:
            found[device] = getattr(body_for(device), definition.__name__)
        return found[device](*args, **kwargs)

    return run


all_finite = _dispatch(reference.all_finite)
block_abs_max = _dispatch(reference.block_abs_max)
block_min_max = _dispatch(reference.block_min_max)
block_square_sum = _dispatch(reference.block_square_sum)
checksum = _dispatch(reference.checksum)
codebook_decode = _dispatch(reference.codebook_decode)
codebook_encode = _dispatch(reference.codebook_encode)
dequantize_add = _dispatch(reference.dequantize_add)
exponential_add = _dispatch(reference.exponential_add)
exponential_decode_add = _dispatch(reference.exponential_decode_add)
exponential_encode = _dispatch(reference.exponential_encode)
finite = _dispatch(reference.finite)
hash64 = _dispatch(reference.hash64)
keep_largest = _dispatch(reference.keep_largest)
moments = _dispatch(reference.moments)
pack = _dispatch(reference.pack)
quantize = _dispatch(reference.quantize)
random_bits = reference.random_bits
rotate = _dispatch(reference.rotate)
rotated_add = _dispatch(reference.rotated_add)
abs_max_encode = _dispatch(reference.abs_max_encode)
abs_max_encode_rows = _dispatch(reference.abs_max_encode_rows)
rotated_encode = _dispatch(reference.rotated_encode)
rotated_add_rows = _dispatch(reference.rotated_add_rows)
rotated_encode_rows = _dispatch(reference.rotated_encode_rows)
rotated_mean_rows = _dispatch(reference.rotated_mean_rows)
scatter_add = _dispatch(reference.scatter_add)
select = _dispatch(reference.select)
select_ef = _dispatch(reference.select_ef)
threshold_count = _dispatch(reference.threshold_count)
unpack = _dispatch(reference.unpack)
unrotate = _dispatch(reference.unrotate)

__all__ = [
    "CHUNK",
    "ROTATION",
    "Moments",
    "Selection",
    "Spread",
    "TwoRounds",
    "abs_max_encode",
    "abs_max_encode_rows",
    "all_finite",
    "block_abs_max",
    "block_min_max",
    "block_square_sum",
    "blocks_of",
    "body_for",
    "checksum",
    "checksum_term",
    "codebook_decode",
    "codebook_encode",
    "dequantize_add",
    "exponential_add",
    "exponential_decode_add",
    "exponential_encode",
    "finite",
    "hash64",
    "keep_largest",
    "moments",
    "pack",
    "packed_bytes",
    "quantize",
    "random_bits",
    "rotate",
    "rotated_add",
    "rotated_add_rows",
    "rotated_encode",
    "rotated_encode_rows",
    "rotated_mean_rows",
    "rotated_numel",
    "scatter_add",
    "select",
    "select_ef",
    "threshold_count",
    "unpack",
    "unrotate",
]
