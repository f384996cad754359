"""D-PSGD: neighbours average their models in full precision."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .node import Node


class Dpsgd(Node):
    """x_i <- sum_j W_ij x_j + update(x_i): the gradient is computed before averaging and added after it.

    Reference: Lian et al. 2017, Can Decentralized Algorithms Outperform Centralized Algorithms?, arXiv 1705.09056,
    algorithm 1.
    """

    name: ClassVar[str] = "dpsgd"
    tracks: ClassVar[bool] = False
    measures: ClassVar[bool] = False

    def blend(self, number: int) -> tuple[float, float]:
        return 0.0, 1.0

    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        self.x = mixed.add_(update)
        return self.x

    def _apply_own(self, payload: Tensor, number: int) -> None:
        self.own.copy_(self.x)
