"""The floating-point buffers of a model between rounds, such as the statistics of batch norm: always finite ones."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from .finite import restore_finite
from .tensors import Flat, statistics

_log = logging.getLogger(__name__)


class Buffers(Flat):
    """The buffers as one flat tensor, and their last finite values.

    >>> norm = nn.BatchNorm1d(2)
    >>> buffers = Buffers(norm)
    >>> norm.running_mean.fill_(float("nan"))
    tensor([nan, nan])
    >>> buffers.restore()
    >>> norm.running_mean, buffers.restored
    (tensor([0., 0.]), 2)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(statistics(model))
        self.restored = 0  # values, so far
        self.keep()

    def keep(self) -> None:
        """Remember the values of now. They are finite, or meant not to be, as those of an attention mask."""
        self._kept = self.read().cpu()

    def restore(self) -> None:
        """Undo what a batch that is not finite did: a running mean would keep it for ever."""
        if not self.numel:
            return
        values, count = restore_finite(self.read().cpu(), self._kept)
        if count:
            self.write(values)
            self.restored += count
            _log.warning("%d buffer values are not finite: their last finite values are restored", count)

    def mix(self, change: Tensor | None) -> None:
        """Add what the average with the neighbours has changed."""
        self.restore()
        if change is not None:
            own = self.read().cpu()
            self.write(torch.where(torch.isfinite(own), own + change, own))
        self.keep()
