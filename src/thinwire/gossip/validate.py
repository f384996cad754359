"""Checks a neighbour's message before anything uses it: sizes, round, scale, and values that a model can have.

`GossipMessage.unpack` says whether bytes are a message. Here a rank compares it with what it knows: the model, the
codec, the number of ranks, the round. A message that fails is refused, and its sender loses the edge. The checks bound
what a message can cost. They do not prove that its sender is honest: a shared secret does (secret.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..codecs.base import Codec
from ..codecs.frames import open_frame
from ..errors import MessageError
from .membership import Membership
from .message import MAC_BYTES, GossipMessage, Kind, RefusedMessageError, gossip_message_bytes

ROUNDS_AHEAD = 1024  # a neighbour drops out of the run long before it is this far ahead
RESTARTS_AHEAD = 1 << 16  # restarts of a rank between two updates about it
RATIO = 1e6  # largest value of a neighbour's model, relative to the largest one here (or to 1)
LARGEST = 1e30  # of any number: a weighted sum of such numbers is still finite
_LAST_ROUND = 1 << 48


@dataclass(frozen=True)
class MessageLimits:
    """What a message of this run can contain.

    >>> from thinwire.codecs import fp16
    >>> limits = MessageLimits(codec=fp16(), numel=4, buffers=0, ranks=2)
    >>> limits.check(GossipMessage(round=2**62), after=3, known=Membership(2, rank=0), own=Tensor([0.0] * 4))
    Traceback (most recent call last):
    thinwire.gossip.message.RefusedMessageError: its message is for round 4611686018427387904, and this rank is at 3
    """

    codec: Codec
    numel: int  # of the model
    buffers: int  # numbers of running statistics
    ranks: int

    @property
    def most_bytes(self) -> int:
        """The largest message: a round with a snapshot, or a sum over ranks, with updates about all ranks."""
        payload = self.codec.wire_bytes(self.numel)
        snapshot = 4 * (self.numel + self.buffers + 1)
        return gossip_message_bytes(payload, buffers=self.buffers) + snapshot + 12 * self.ranks + MAC_BYTES

    def check(self, message: GossipMessage, *, after: int | None, known: Membership, own: Tensor) -> None:
        """RefusedMessageError if no rank of this run sends this message.

        `after`: the last round that this rank knows of; None before it has joined. `own`: the model of this rank.
        """
        last = _LAST_ROUND if after is None else after + ROUNDS_AHEAD
        if message.round > last:
            raise RefusedMessageError(f"its message is for round {message.round}, and this rank is at {after}")
        if not 0.0 <= message.scale < math.inf:  # False for NaN too
            raise RefusedMessageError(f"its message has scale {message.scale}, which is not a finite number above 0")
        if message.degree >= self.ranks:
            raise RefusedMessageError(f"its message counts {message.degree} neighbours among {self.ranks} ranks")
        if message.incarnation < 1:
            raise RefusedMessageError("its message has incarnation 0, and the first one is 1")
        for rank, status in message.updates.items():
            if rank >= self.ranks or status.incarnation > known.status(rank).incarnation + RESTARTS_AHEAD:
                raise RefusedMessageError(f"its message says that rank {rank} has incarnation {status.incarnation}")
        if message.kind == Kind.ROUND:
            self._check_round(message, own)

    def _check_round(self, message: GossipMessage, own: Tensor) -> None:
        if message.round < 1:
            raise RefusedMessageError("its message is for round 0, and rounds count from 1")
        try:
            open_frame(self.codec, message.payload, None, self.numel)
        except MessageError as problem:  # the message is intact: its sender has another codec or another model
            raise RefusedMessageError(f"its payload is not one of this run: {problem}") from None
        if message.buffers.numel() != self.buffers:
            raise RefusedMessageError(f"it sent {message.buffers.numel()} buffer values, not {self.buffers}")
        if message.buffers.numel() and not within(message.buffers, LARGEST):
            raise RefusedMessageError("it sent buffers that are not finite")
        if message.snapshot.numel():
            if message.snapshot.numel() != self.numel:
                raise RefusedMessageError(
                    f"it sent a snapshot of {message.snapshot.numel()} parameters, and this model has {self.numel}: "
                    "start all ranks with the same model"
                )
            check_view(message.snapshot, own)


def within(values: Tensor, bound: float) -> bool:
    """Whether all values are finite and at most `bound` in size, in one pass.

    >>> within(Tensor([1.0, -3.0]), 3.0), within(Tensor([1.0, math.nan]), 3.0)
    (True, False)
    """
    low, high = values.aminmax()
    return -bound <= float(low) and float(high) <= bound  # False for NaN


def largest_value(own: Tensor) -> float:
    """The largest value that a neighbour's model may have, if this is the own model.

    >>> largest_value(Tensor([0.5, -20.0])), largest_value(Tensor([math.inf]))
    (20000000.0, 1000000.0)
    """
    low, high = own.aminmax()
    size = max(-float(low), float(high))
    return RATIO * max(1.0, size) if math.isfinite(size) else RATIO


def check_view(view: Tensor, own: Tensor) -> None:
    """RefusedMessageError if this cannot be a neighbour's model: then averaging with it would destroy the own one.

    >>> check_view(Tensor([1.0]), Tensor([2.0]))
    >>> check_view(Tensor([-1e30]), Tensor([2.0]))
    Traceback (most recent call last):
    thinwire.gossip.message.RefusedMessageError: its model has values that are not finite, or larger than 2e+06
    """
    bound = largest_value(own)
    if not within(view, bound):
        raise RefusedMessageError(f"its model has values that are not finite, or larger than {bound:g}")
