"""The performance model of a training: link, workload and measured steps, shared by observing and deciding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..predict.devices import Device
from .candidates import Candidate
from .choices import Choice, Choices
from .estimator import LinkEstimate, LinkEstimator
from .history import StepHistory
from .predictor import StepPredictor


class PerformanceModel:
    """Everything that predictions use. Observations update it, decisions read it.

    >>> from thinwire.auto.candidates import candidate
    >>> estimator = LinkEstimator(latency=0.001, byte_seconds=8e-8)
    >>> performance = PerformanceModel([candidate("dense")], Device.named("a100"), estimator, workers=4)
    >>> performance.link((0, 0, 0)).latency
    0.001
    """

    def __init__(
        self, candidates: Sequence[Candidate], device: Device, estimator: LinkEstimator, *, workers: int
    ) -> None:
        self.choices = Choices(candidates)
        self.predictor = StepPredictor(self.choices, device, workers=workers)
        self.estimator = estimator
        self.history = StepHistory()

    def link(self, choice: Choice) -> LinkEstimate:
        """The link with the factor of the choice's main candidate."""
        candidate = self.choices.main(choice)
        return self.estimator.link(candidate.name, candidate.family)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and text under the keys of 0.1, so that its checkpoints load."""
        return {
            "learner": self.estimator.state_dict(),
            "outlook": self.predictor.state_dict(),
            **self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.estimator.load_state_dict(state["learner"])
        self.predictor.load_state_dict(state["outlook"])
        self.history.load_state_dict(state)
