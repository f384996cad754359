"""DCD-PSGD: each rank sends the compressed change of its model, and changes its model by the decoded payload."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .node import Node


class Dcd(Node):
    """Difference compression. x^_j are the copies of the neighbours' models, always equal to them:

        x_half = sum_j W_ij x^_j + update(x_i)        (i itself among the j)
        z      = x_half - x_i
        x_i   <- x_i + C(z),   x^_j <- x^_j + C(z_j)

    There is no residual. The neighbours' part of the error is still in the next difference. The gradient's part is
    lost, which is harmless if C is unbiased. The ranks drift apart if |C(z) - z|^2 / |z|^2 exceeds the topology's
    `noise_limit()`.
    Reference: Tang et al. 2018, Communication Compression for Decentralized Training, arXiv 1803.06443, algorithm 1.
    """

    name: ClassVar[str] = "dcd"

    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        return mixed.add_(update).sub_(self.x)

    def _after_encode(self, payload: Tensor) -> None:
        self.codec.add(payload, self.x)
