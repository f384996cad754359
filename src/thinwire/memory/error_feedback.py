"""Error feedback: the residual of this step is added to the gradient of the next one."""

from __future__ import annotations

from torch import Tensor

from ..recipe.registry import register
from .base import Compensation, Memory, RunningMemory


@register
class ErrorFeedback(Memory):
    """u = g + decay * e, send C(u), keep e = u - C(u) (Seide et al. 2014, Karimireddy et al. 2019, arXiv 1901.09847).

    With `decay=1` nothing is ever lost: the sum of all that was sent and the residual is the sum of all gradients.
    A decay below 1 forgets old errors, which helps when they are stale by the time they are sent.

    >>> import torch
    >>> from thinwire.codecs import top_k
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
    >>> gradient = torch.tensor([1.0, 2.0])
    >>> memory.begin(gradient, name="bias")
    Compensation(residual=tensor([0., 0.]), decay=1.0)
    >>> spare = memory.keep(torch.tensor([1.0, 0.0]), name="bias")
    >>> memory.residual("bias")
    tensor([1., 0.])
    """

    kind = ErrorFeedback.name
    keeps = ("residual",)

    def __init__(self, *, decay: float = 1.0) -> None:
        super().__init__()
        self.decay = decay

    def begin(self, gradient: Tensor, *, name: str) -> Compensation:
        return Compensation(self._kept_of(name, gradient)["residual"], self.decay)


error_feedback = ErrorFeedback
