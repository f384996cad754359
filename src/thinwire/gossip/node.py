"""One rank's side of an algorithm, without any network: what it knows of its neighbours, what it says, how it moves.

All algorithms share a frame. Steps are k = 0, 1, 2, ...; letter k is what was said at the end of step k - 1.

    absorb   the letters k, its own among them: each view moves as its owner said     view <- keep view + take C
    step     mixed <- the weighted sum of the views; from it and the local update the algorithm forms the new model, and
             says something about it, which becomes letter k + 1

They differ in three places: what a message does to a view (`blend`), the new model (`_advance`), and what is said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..rng import Draw
from .views import Replicas, RunningSum, move


class Node(ABC):
    """The model `x` of one rank as a flat float32 tensor, and its views of the neighbours' models.

    `weights`: given, the sum of the neighbours' views is kept instead of each of them; then these are the weights.
    """

    name: ClassVar[str]
    tracks: ClassVar[bool] = True  # views are built up from all letters, so that a lost one matters
    measures: ClassVar[bool] = True  # the noise of its messages, which takes decoding them
    scale: float = 1.0  # of what flows from neighbours

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
        self.consensus_step = consensus_step  # as asked for; only choco has one
        self.x = start.detach().to(torch.float32, copy=True)
        self.rank, self.codec, self.seed = rank, codec, seed
        self.own = self.x.clone()  # as the neighbours see it
        self.views: Replicas | RunningSum
        self.views = Replicas(self.x, peers) if weights is None else RunningSum(self.x, weights)
        self.codec_state: dict[str, Any] = codec.new_state()
        self.noise: float | None = None  # |C(z) - z|^2 / |z|^2 of the last message
        self._said: Tensor | None = None  # the message of the coming letter
        self._prepare()

    def restart(self, model: Tensor) -> None:
        """Everyone has this model now."""
        self.stand_at(model)
        self.views.restart(model)

    def stand_at(self, model: Tensor) -> None:
        """This rank has this model now, and will tell."""
        self.x.copy_(model)
        self.own.copy_(model)

    # ------------------------------------------------------------------------------------------- what algorithms define

    def blend(self, letter: int) -> tuple[float, float]:
        """keep and take of letter number `letter`."""
        return 1.0, 1.0

    @abstractmethod
    def _advance(self, mixed: Tensor, update: Tensor, step: int) -> Tensor:
        """Set the new model and return what to encode; where noise is measured, a tensor that nobody else needs."""

    def _prepare(self) -> None:  # noqa: B027 (most have nothing to find out)
        """The node is made."""

    def _after(self, message: Tensor) -> None:  # noqa: B027 (most have nothing left to do)
        """The message is made."""

    def _absorb_own(self, message: Tensor, letter: int) -> None:
        self._move(self.own, message, letter)

    # ---------------------------------------------------------------------------------------------------------- a step

    def absorb(self, messages: Mapping[int, Tensor], letter: int) -> None:
        """Let the views follow the messages of letter number `letter`; the own one follows what was said."""
        keep, take = self.blend(letter)
        self.views.absorb(messages, self.codec, keep, take)
        if self._said is not None:
            self._absorb_own(self._said, letter)
            self._said = None

    def step(self, update: Tensor, coefficients: Mapping[int, float], step: int) -> Tensor:
        """Move by the local update and towards neighbours that have a coefficient; the message of letter step + 1."""
        mixed = self.views.mixed(self.own, self.rank, coefficients)
        spoken = self._advance(mixed, update, step)
        draw = Draw(seed=self.seed, step=step + 1, stream="gossip", rank=self.rank)
        if self.measures:
            size = float(torch.dot(spoken, spoken))
            message = self.codec.encode_taking(spoken, draw=draw, state=self.codec_state)
            self.noise = float(torch.dot(spoken, spoken)) / size if size else 0.0
        else:
            message = self.codec.encode(spoken, draw=draw, state=self.codec_state)
        self._after(message)
        self._said = message
        return message

    def _move(self, view: Tensor, message: Tensor, letter: int) -> None:
        keep, take = self.blend(letter)
        move(view, message, self.codec, keep, take)

    def flow_from(self, peer: int, coefficient: float) -> Tensor:
        """What came from a neighbour with such a coefficient, by the views as they are."""
        return (self.views.of(peer) - self.own).mul_(coefficient)

    # ----------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        said = None if self._said is None else self._said.clone()
        return {
            "x": self.x.clone(),
            "own": self.own.clone(),
            "views": self.views.state(),
            "codec": self.codec_state,
            "said": said,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.x.copy_(state["x"])
        self.own.copy_(state["own"])
        self.views.load(state["views"])
        self.codec_state = state["codec"]
        self._said = state["said"]
