"""Exchanges turn the tensors of n ranks into their mean. Lower-case names build them: `two_shot(4)`."""

from .all_gather import AllGather, all_gather
from .all_reduce import AllReduce, all_reduce
from .base import Exchange
from .first_shot import shards
from .local import Local, local
from .shared_top_k import SharedTopK, shared_top_k
from .two_shot import TwoShot, two_shot

__all__ = [
    "AllGather",
    "AllReduce",
    "Exchange",
    "Local",
    "SharedTopK",
    "TwoShot",
    "all_gather",
    "all_reduce",
    "local",
    "shards",
    "shared_top_k",
    "two_shot",
]
