"""ECD-PSGD: neighbours exchange a compressed extrapolation, from which noise is averaged out over time."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .node import Node


class Ecd(Node):
    """Extrapolation compression. With x~_j the estimates of all models, of its own too, and t = 1, 2, 3, ...:

        x_new  = sum_j W_ij x~_j + update(x_i)
        z      = (1 - t/2) x_i + (t/2) x_new          (as x_new + (t/2 - 1) (x_new - x_i), which does not cancel)
        x~_j  <- (1 - 2/t) x~_j + (2/t) C(z_j)
        x_i   <- x_new

    The estimates' error falls as 1/t if the noise of C is bounded whatever z is (`absolute:8,step=0.01`). Quantisers
    that scale with z have noise that grows with t, and ECD then gets worse with larger learning rates.
    Reference: Tang et al. 2018, arXiv 1803.06443, algorithm 2.
    """

    name: ClassVar[str] = "ecd"

    def blend(self, letter: int) -> tuple[float, float]:
        return 1.0 - 2.0 / letter, 2.0 / letter  # letters count from 1, as t does

    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        new, t = mixed.add_(update), step + 1
        extrapolated = new.clone().add_(new - self.x, alpha=t / 2 - 1)
        self.x = new
        return extrapolated
