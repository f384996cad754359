"""How n tensors become their mean. Lower-case names build exchanges: `two_shot(4)`."""

from .declared import (
    AllGather,
    AllReduce,
    Exchange,
    Local,
    SharedTopK,
    TwoShot,
    all_gather,
    all_reduce,
    local,
    shared_top_k,
    two_shot,
)

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
    "shared_top_k",
    "two_shot",
]
