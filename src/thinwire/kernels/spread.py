"""A flat tensor whose elements lie in several places of one buffer, as the gradients of a bucket do beside others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Spread:
    """Elements `start` to `stop` of a flat tensor, which is spread over `base`, flat contiguous float32.

    `table` has a line for each run of elements: the first one, the one behind the last, and how much further on they
    lie in `base`. Loops that take a Spread read and write the buffer in place; `gather` and `scatter` copy.

    >>> spread = Spread.of(torch.arange(6.0), [(4, 2), (0, 1)])  # two elements from 4 on, then one from 0 on
    >>> spread.gather(torch.empty(3))
    tensor([4., 5., 0.])
    >>> spread[1:3].gather(torch.empty(2))
    tensor([5., 0.])
    """

    def __init__(self, base: Tensor, table: npt.NDArray[np.int64], start: int, stop: int) -> None:
        self.base, self.table, self.start, self.stop = base, table, start, stop

    @classmethod
    def of(cls, base: Tensor, runs: Sequence[tuple[int, int]]) -> Spread:
        """Of runs, each given by where it lies in `base` and by its length."""
        table, begin = np.empty((len(runs), 3), np.int64), 0
        for line, (place, length) in zip(table, runs, strict=True):
            line[:] = begin, begin + length, place - begin
            begin += length
        return cls(base, table, 0, begin)

    def numel(self) -> int:
        return self.stop - self.start

    @property
    def device(self) -> torch.device:
        return self.base.device

    def __getitem__(self, place: slice) -> Spread:
        return Spread(self.base, self.table, self.start + place.start, self.start + place.stop)

    def _runs(self) -> list[tuple[slice, slice]]:
        """Pairs of places, in the flat tensor and in the buffer."""
        found = []
        for first, behind, shift in self.table.tolist():
            begin, end = max(first, self.start), min(behind, self.stop)
            if begin < end:
                found.append((slice(begin - self.start, end - self.start), slice(begin + shift, end + shift)))
        return found

    def gather(self, out: Tensor) -> Tensor:
        """Copy to a flat tensor."""
        for here, there in self._runs():
            out[here] = self.base[there]
        return out

    def scatter(self, flat: Tensor) -> None:
        """Copy from a flat tensor."""
        for here, there in self._runs():
            self.base[there] = flat[here]
