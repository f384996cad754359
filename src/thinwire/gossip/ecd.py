"""ECD-PSGD: each rank sends a compressed extrapolation; the estimates average its noise out over time."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .node import Node


class Ecd(Node):
    """Extrapolation compression. x~_j are the estimates of all models, the own one included; t = 1, 2, 3, ...:

        x_new  = sum_j W_ij x~_j + update(x_i)
        z      = (1 - t/2) x_i + (t/2) x_new          (as x_new + (t/2 - 1) (x_new - x_i), without cancellation)
        x~_j  <- (1 - 2/t) x~_j + (2/t) C(z_j)
        x_i   <- x_new

    The error of the estimates falls as 1/t if the noise of C has a bound that does not depend on z
    (`absolute:8,step=0.01`). The noise of a quantiser that scales with z grows with t. ECD then degrades with larger
    learning rates.
    Reference: Tang et al. 2018, arXiv 1803.06443, algorithm 2.
    """

    name: ClassVar[str] = "ecd"

    def blend(self, number: int) -> tuple[float, float]:
        return 1.0 - 2.0 / number, 2.0 / number  # rounds count from 1, as t does

    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        new, t = mixed.add_(update), step + 1
        extrapolated = new.clone().add_(new - self.x, alpha=t / 2 - 1)
        self.x = new
        return extrapolated
