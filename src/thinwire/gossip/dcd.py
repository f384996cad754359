"""DCD-PSGD: neighbours exchange the compressed difference between two models, and everyone moves by what it sent."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .node import Node


class Dcd(Node):
    """Difference compression. With x^_j the copies of the neighbours' models, which equal them always:

        x_half = sum_j W_ij x^_j + update(x_i)        (i itself among the j)
        z      = x_half - x_i
        x_i   <- x_i + C(z),   x^_j <- x^_j + C(z_j)

    What C leaves out is not kept: the part that came from neighbours is still there in the next difference, and the
    gradient's part is lost, which does no harm if C is unbiased. The ranks drift apart if |C(z) - z|^2 / |z|^2 is above
    the topology's `noise_limit()`.
    Reference: Tang et al. 2018, Communication Compression for Decentralized Training, arXiv 1803.06443, algorithm 1.
    """

    name: ClassVar[str] = "dcd"

    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        return mixed.add_(update).sub_(self.x)

    def _after(self, message: Tensor) -> None:
        self.codec.add(message, self.x)
