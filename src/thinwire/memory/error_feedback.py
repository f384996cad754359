"""Error feedback: what was not sent this time is added to the gradient next time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, State
from ..rng import Draw
from .base import Kept, Memory, RunningMemory


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Memory):
    """u = g + decay * e, send C(u), keep e = u - C(u) (Seide et al. 2014, Karimireddy et al. 2019, arXiv 1901.09847).

    With `decay=1` nothing is ever lost: the sum of all that was sent and the residual is the sum of all gradients.
    A decay below 1 forgets old errors, which helps when they are stale by the time they are sent.

    >>> import torch
    >>> from thinwire import top_k
    >>> memory = ErrorFeedback().start()
    >>> codec = top_k(0.25)
    >>> codec.decode(memory.encode(codec, torch.tensor([3.0, 2.0, 0.0, 0.0]), name="weight"))
    tensor([3., 0., 0., 0.])
    >>> memory.residual("weight")
    tensor([0., 2., 0., 0.])
    >>> codec.decode(memory.encode(codec, torch.tensor([3.0, 2.0, 0.0, 0.0]), name="weight"))
    tensor([0., 4., 0., 0.])
    """

    name = "error_feedback"

    decay: float = 1.0

    def __post_init__(self) -> None:
        number = isinstance(self.decay, (int, float))
        self._require(number and 0.0 < self.decay <= 1.0, f"decay must be above 0 and at most 1, got {self.decay}")

    def start(self) -> ErrorFeedbackMemory:
        return ErrorFeedbackMemory(decay=self.decay)


class ErrorFeedbackMemory(RunningMemory):
    """The residuals of one training run.

    >>> import torch
    >>> memory = ErrorFeedback().start()
    >>> u = memory.compensate(torch.tensor([1.0, 2.0]), name="bias")
    >>> memory.remember(u, torch.tensor([0.0, 2.0]), name="bias")
    >>> memory.residual("bias")
    tensor([1., 0.])
    """

    kind = ErrorFeedback.name
    keeps = ("residual",)

    def __init__(self, *, decay: float = 1.0) -> None:
        super().__init__()
        self.decay = decay

    def _encode_finite(self, codec: Codec, gradient: Tensor, kept: Kept, state: State, draw: Draw | None) -> Tensor:
        residual = kept["residual"]
        if self.decay != 1.0:
            residual *= self.decay
        return codec.encode_remembering(residual, gradient, draw=draw, state=state)

    def compensate(self, gradient: Tensor, *, name: str, out: Tensor | None = None) -> Tensor:
        residual = self._kept_of(name, gradient)["residual"]
        return torch.add(gradient.detach().to(torch.float32), residual, alpha=self.decay, out=out)

    def remember(self, u: Tensor, sent: Tensor, *, name: str) -> None:
        rest = (u - sent).detach()
        kept = self._kept_of(name, rest)
        if kernels.all_finite(rest):
            kept["residual"].copy_(rest)


error_feedback = ErrorFeedback
