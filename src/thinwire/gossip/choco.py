"""CHOCO-SGD: any contractive codec, by taking only a part of what neighbours' copies say."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..codecs.base import Codec
from .absolute import gaussian_noise
from .node import Node


class Choco(Node):
    """With x^_j the copies of what the neighbours told, its own among them, and the consensus step size gamma:

        x_i   <- x_i + update(x_i) + gamma sum_j W_ij (x^_j - x^_i)
        q      = C(x_i - x^_i)
        x^_j  <- x^_j + q_j

    What C leaves out stays in x_i - x^_i and is sent later. C must be contractive: an unbiased one with variance v is
    given its input divided by 1 + v.
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
        """Go on from a node of dcd, whose messages mean the same to neighbours."""
        made = cls.__new__(cls)
        made.__dict__.update(node.__dict__)
        made._prepare()
        return made

    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        self.x += update
        self.x += mixed.sub_(self.own)
        return (self.x - self.own).mul_(self._shrink)


def default_consensus_step(codec: Codec, numel: int) -> float:
    """The square of what the codec keeps of normal numbers: about 1 for 4 bits, 0.4 for signs, 0.007 for the top 1 %.

    Close to what was found best by search for the first two; for the top 1 % a search found 0.2 better
    (docs/reproductions/decentralized.md). The proven step sizes are many times smaller.

    >>> from thinwire.codecs import min_max, sign
    >>> round(default_consensus_step(min_max(4), 1 << 16), 2), round(default_consensus_step(sign(512), 1 << 16), 2)
    (0.95, 0.41)
    """
    noise = gaussian_noise(codec, numel)
    return _consensus_step(1.0 / (1.0 + noise) if codec.unbiased else 1.0 - noise)


def _consensus_step(kept: float) -> float:
    return max(1e-4, kept * kept)
