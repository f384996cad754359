"""What a run costs and gains: a `Meter` counts every step, sinks write the numbers where they are read."""

from .meters import BucketRecord, Meter
from .sinks import JsonLines, Records, Sink, TensorBoard

__all__ = [
    "BucketRecord",
    "JsonLines",
    "Meter",
    "Records",
    "Sink",
    "TensorBoard",
]
