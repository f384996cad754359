"""One rank's side of an algorithm, without a network: its copies of neighbours' models, its payloads, its steps.

All algorithms share one frame. Steps are k = 0, 1, 2, ...; step k - 1 makes the payload of round k.

    apply    the payloads of round k, the rank's own included, change the views     view <- keep view + take C
    step     mixed <- the weighted sum of the views; the algorithm forms the new model from `mixed` and the local
             update, and makes the payload of round k + 1

Algorithms differ in three places: the effect of a payload on a view (`blend`), the new model (`_advance`), and the
tensor that is encoded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..errors import ExchangeError
from ..rng import Draw
from .views import Replicas, RunningSum, apply_payload


class Node(ABC):
    """The model `x` of one rank as a flat float32 tensor, and its views of the neighbours' models.

    `weights`: if given, the views are one running sum with these weights instead of a copy of each neighbour.
    """

    name: ClassVar[str]
    tracks: ClassVar[bool] = True  # a view is the sum of all payloads, so that a lost one makes it wrong
    measures: ClassVar[bool] = True  # the noise of its payloads, which costs a decode
    scale: float = 1.0  # of the flow from neighbours

    def __init__(
        self,
        start: Tensor,
        *,
        rank: int,
        peers: Iterable[int],
        codec: Codec,
        seed: int = 0,
        weights: Mapping[int, float] | None = None,
        consensus_step: float | None = None,
    ) -> None:
        self.consensus_step = consensus_step  # as given by the user; only choco uses it
        self.x = start.detach().to(torch.float32, copy=True)
        self.rank, self.codec, self.seed = rank, codec, seed
        self.own = self.x.clone()  # this model as the neighbours know it
        self.views: Replicas | RunningSum
        self.views = Replicas(self.x, peers) if weights is None else RunningSum(self.x, weights)
        self.codec_state: dict[str, Any] = codec.new_state()
        self.noise: float | None = None  # |C(z) - z|^2 / |z|^2 of the last payload
        self._unapplied: Tensor | None = None  # the own payload, until the next round applies it
        self._prepare()

    def reset_all(self, model: Tensor) -> None:
        """All ranks have this model now."""
        self.reset_own(model)
        self.views.reset(model)

    def reset_own(self, model: Tensor) -> None:
        """This rank has this model now; the neighbours learn it from a snapshot."""
        self.x.copy_(model)
        self.own.copy_(model)

    # ------------------------------------------------------------------------------------------- what algorithms define

    def blend(self, number: int) -> tuple[float, float]:
        """keep and take for the payloads of round `number`."""
        return 1.0, 1.0

    @abstractmethod
    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        """Set the new model and return the tensor to encode. If noise is measured, encoding overwrites that tensor."""

    def _prepare(self) -> None:  # noqa: B027 (optional)
        """Called at the end of the constructor."""

    def _after_encode(self, payload: Tensor) -> None:  # noqa: B027 (optional)
        """Called with the payload of this step."""

    def _apply_own(self, payload: Tensor, number: int) -> None:
        apply_payload(self.own, payload, self.codec, *self.blend(number))

    # ---------------------------------------------------------------------------------------------------------- a step

    def apply(self, payloads: Mapping[int, Tensor], number: int) -> None:
        """Apply the payloads of round `number` to the views, and the rank's own payload to its own view."""
        keep, take = self.blend(number)
        self.views.apply(payloads, self.codec, keep, take)
        if self._unapplied is not None:
            self._apply_own(self._unapplied, number)
            self._unapplied = None

    def step(self, update: Tensor, coefficients: Mapping[int, float], step: int) -> Tensor:
        """Move by the local update and towards the neighbours with a coefficient. Returns the next payload."""
        mixed = self.views.mixed(self.own, self.rank, coefficients)
        source = self._advance(mixed, update, step)
        draw = Draw(seed=self.seed, step=step + 1, stream="gossip", rank=self.rank)
        if self.measures:
            size = float(torch.dot(source, source))
            payload = self.codec.encode_taking(source, draw=draw, state=self.codec_state)
            self.noise = float(torch.dot(source, source)) / size if size else 0.0
            if not math.isfinite(self.noise):  # it is not sent, and the model is not changed by it
                raise ExchangeError(
                    f"step {step}: {self.codec.spec()} cannot encode the change of the model in finite numbers: choose "
                    "a codec with a larger range, or a smaller learning rate"
                )
        else:
            payload = self.codec.encode(source, draw=draw, state=self.codec_state)
        self._after_encode(payload)
        self._unapplied = payload
        return payload

    def flow_from(self, peer: int, coefficient: float) -> Tensor:
        """What this rank took from a neighbour with this coefficient, by the current views."""
        return (self.views.of(peer) - self.own).mul_(coefficient)

    # ----------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """The keys are those of 0.1, so that its checkpoints load."""
        unapplied = None if self._unapplied is None else self._unapplied.clone()
        return {
            "x": self.x.clone(),
            "own": self.own.clone(),
            "views": self.views.state(),
            "codec": self.codec_state,
            "said": unapplied,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.x.copy_(state["x"])
        self.own.copy_(state["own"])
        self.views.load(state["views"])
        self.codec_state = state["codec"]
        self._unapplied = state["said"]
