"""CHOCO-SGD: works with any contractive codec, because each round moves only part of the way to the neighbours."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..codecs.base import Codec
from .absolute import gaussian_noise
from .node import Node


class Choco(Node):
    """x^_j are the copies of the neighbours' models, the own one included; gamma is the consensus step size:

        x_i   <- x_i + update(x_i) + gamma sum_j W_ij (x^_j - x^_i)
        q      = C(x_i - x^_i)
        x^_j  <- x^_j + q_j

    The residual of C stays in x_i - x^_i and is sent later. C must be contractive: the input of an unbiased codec with
    variance v is divided by 1 + v.
    Reference: Koloskova et al. 2020, Decentralized Deep Learning with Arbitrary Communication Compression, arXiv
    1907.09356, algorithm 1 (gradient and exchange side by side); Koloskova et al. 2019, arXiv 1902.00340.
    """

    name: ClassVar[str] = "choco"

    def _prepare(self) -> None:
        noise = gaussian_noise(self.codec, self.x.numel())
        kept = 1.0 / (1.0 + noise) if self.codec.unbiased else 1.0 - noise
        self._shrink = kept if self.codec.unbiased else 1.0
        self.scale = _consensus_step(kept) if self.consensus_step is None else self.consensus_step

    @classmethod
    def instead_of(cls, node: Node) -> Choco:
        """Continue from a node of dcd. Its payloads have the same meaning for the neighbours."""
        new = cls.__new__(cls)
        new.__dict__.update(node.__dict__)
        new._prepare()
        return new

    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        self.x += update
        self.x += mixed.sub_(self.own)
        return (self.x - self.own).mul_(self._shrink)


def default_consensus_step(codec: Codec, numel: int) -> float:
    """The square of the energy share that the codec keeps of Gaussian noise.

    About 1 for 4 bits, 0.4 for signs, 0.007 for the top 1 %. A search found about the same for the first two, and 0.2
    for the top 1 % (docs/reproductions/decentralized.md). The proven step sizes are many times smaller.

    >>> from thinwire.codecs import min_max, sign
    >>> round(default_consensus_step(min_max(4), 1 << 16), 2), round(default_consensus_step(sign(512), 1 << 16), 2)
    (0.95, 0.41)
    """
    noise = gaussian_noise(codec, numel)
    return _consensus_step(1.0 / (1.0 + noise) if codec.unbiased else 1.0 - noise)


def _consensus_step(kept: float) -> float:
    return max(1e-4, kept * kept)
