"""Codecs make one tensor smaller and back. Lower-case names build them: `qsgd(4, block=512)`."""

from .base import Codec
from .cast import bf16, fp8, fp16, fp32
from .global_qsgd import global_qsgd
from .low_rank import low_rank
from .quantize import abs_max, min_max, natural, qsgd, sign, terngrad
from .rotated import rotated
from .sparsify import dgc_k, gaussian_k, random_k, top_k, trimmed_k
from .threshold_k import threshold_k

__all__ = [
    "Codec",
    "abs_max",
    "bf16",
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
    "rotated",
    "sign",
    "terngrad",
    "threshold_k",
    "top_k",
    "trimmed_k",
]
