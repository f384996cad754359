"""Codecs make one tensor smaller and back. Lower-case names build them: `qsgd(4, block=512)`.

Every module of this folder is imported, so that a codec in a new file is found without naming it anywhere.
"""

import importlib
import pkgutil
from typing import Any

from ..recipe.registry import STAGES, register, unregister
from .base import Codec, Rounds, Shape, State
from .bin_mean import bin_mean
from .cast import bf16, fp8, fp16, fp32
from .chunked import chunked_top_k
from .global_qsgd import global_qsgd
from .low_rank import low_rank
from .quantize import abs_max, min_max, natural, qsgd, sign, terngrad
from .rotated import rotated
from .sparsify import dgc_k, gaussian_k, random_k, top_k, trimmed_k
from .stages import Round, RoundCost, Work
from .threshold_k import threshold_k

__all__ = [
    "Codec",
    "Round",
    "RoundCost",
    "Rounds",
    "Shape",
    "State",
    "Work",
    "abs_max",
    "bf16",
    "bin_mean",
    "chunked_top_k",
    "dgc_k",
    "fp8",
    "fp16",
    "fp32",
    "gaussian_k",
    "global_qsgd",
    "low_rank",
    "min_max",
    "natural",
    "qsgd",
    "random_k",
    "register",
    "rotated",
    "sign",
    "terngrad",
    "threshold_k",
    "top_k",
    "trimmed_k",
    "unregister",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> Any:
    """A codec that was registered later, by its name."""
    stage = STAGES.get(name)
    if stage is not None and issubclass(stage, Codec):
        return stage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
