"""The Reducer: named tensors of all ranks become their mean; meters count what that costs, sinks write it down."""

from .local_group import LocalGroup
from .meters import BucketRecord, Meter
from .reducer import Reducer
from .sinks import JsonLines, Records, Sink, TensorBoard
from .step import Work

__all__ = [
    "BucketRecord",
    "JsonLines",
    "LocalGroup",
    "Meter",
    "Records",
    "Reducer",
    "Sink",
    "TensorBoard",
    "Work",
]
