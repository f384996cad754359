"""Rounds of gossip: send, receive, and decide which edges a round uses, so that both ends of an edge agree.

A round uses an edge if both of its messages arrived in time and both ends have a valid view of the other. A rank that
missed a message says so in its next one, and the other end undoes its flow. The weight of an edge follows from the
degrees in its two messages of the round. So it is the same on both ends, even if other ranks have died meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..comm.peers import PeerGoneError, PeerTransport
from ..errors import ExchangeError, MessageError
from .edge import Counts, Edge
from .finite import only_finite
from .membership import Membership
from .message import Flag, GossipMessage, Kind, RefusedMessageError
from .node import Node
from .topology import Topology, metropolis
from .validate import MessageLimits, check_view

_log = logging.getLogger(__name__)
PATIENCE = 3  # consecutive rounds without a message after which a neighbour is removed
CHECK_EVERY = 16  # rounds between two comparisons of views with their originals


class Rounds:
    """Exchanges the messages of one node with its neighbours.

    `deadline`: seconds to wait for the messages of a round; None waits for ever and permits one running sum as views.
    `resync_every`: rounds between two snapshots to every neighbour; None sends snapshots only on request.
    """

    def __init__(
        self,
        node: Node,
        transport: PeerTransport,
        topology: Topology,
        *,
        deadline: float | None,
        resync_every: int | None = None,
        buffers: Tensor | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.node, self.transport, self.topology = node, transport, topology
        self.deadline, self.resync_every = deadline, resync_every
        self.buffers = torch.empty(0) if buffers is None else buffers
        self.membership = membership or Membership(
            transport.world_size, rank=transport.rank, incarnation=transport.incarnation
        )
        self.edges = {peer: Edge(peer) for peer in topology.all_neighbours(transport.rank)}
        self.round = 0  # of the messages sent last; those of the neighbours may be in flight
        self.received = True  # no messages are in flight before the first step
        self.coefficients: dict[int, float] = {}
        self.correction: Tensor | None = None  # undoes flows of one direction only; part of the next update
        self.switched = False  # this node has switched to CHOCO
        self.neighbour_switched = False
        self.counts = Counts()
        self._limits = MessageLimits(
            codec=node.codec, numel=node.own.numel(), buffers=self.buffers.numel(), ranks=transport.world_size
        )
        transport.limit(self._limits.most_bytes)
        self._unpack = transport.parse_once(GossipMessage.unpack)
        self._mixed_buffers: Tensor | None = None
        self._absent: set[int] = set()

    # ------------------------------------------------------------------------------------------------------- starting

    def start(self, model: Tensor, buffers: Tensor) -> None:
        """All ranks start from this model."""
        self.node.reset_all(model)
        self.buffers = buffers

    def start_from(self, peer: int, message: GossipMessage) -> Tensor | None:
        """Start from a neighbour's message with a snapshot. Returns the model; None if the message is not usable."""
        if message.kind != Kind.ROUND or not message.snapshot.numel():
            return None
        edge = self.edges[peer]
        self.node.views.put(peer, message.snapshot)
        if not self._apply_payload(peer, message.payload, message.round):
            return None
        self.round, self.received = message.round, True
        model = self.node.views.of(peer).clone()
        self.node.reset_own(model)
        edge.last, edge.valid, edge.snapshot_due = message.round, True, True
        self.membership.merge(message.updates)
        self.membership.mark_alive(peer, message.incarnation)
        return model

    # -------------------------------------------------------------------------------------------------------- sending

    def send(self, payload: Tensor, buffers: Tensor) -> None:
        """End a step: send the messages of the next round to its neighbours."""
        self.admit()
        self.round += 1
        self.received = False
        self.buffers = buffers = only_finite(buffers)  # neighbours refuse others
        edges = self._active_edges()
        check = self.node.views.per_peer and self.node.tracks and self.round % CHECK_EVERY == 0
        view_checksum = kernels.checksum(self.node.own.view(torch.uint8)) if check and edges else 0
        resync = self.resync_every is not None and self.round % self.resync_every == 0 and self.node.tracks
        updates = self.membership.updates()
        packed: dict[tuple[Flag, bool], Tensor] = {}  # neighbours with equal contents share one message
        for edge in edges:
            edge.requested = self.node.tracks and not edge.valid
            edge.announced = len(edges)
            flags = Flag.NEEDS_SNAPSHOT if edge.requested else Flag(0)
            flags |= Flag.HAS_CHECKSUM if check else Flag(0)
            flags |= Flag.SWITCHED if self.switched else Flag(0)
            flags |= Flag.USED_LAST if edge.used[0] == self.round - 1 else Flag(0)
            whole = edge.snapshot_due or (resync and edge.valid)
            if (flags, whole) not in packed:
                packed[flags, whole] = GossipMessage(
                    self.round,
                    flags=flags,
                    degree=len(edges),
                    incarnation=self.transport.incarnation,
                    view_checksum=view_checksum,
                    scale=self.node.scale,
                    payload=payload,
                    buffers=buffers,
                    snapshot=self.node.own if whole else torch.empty(0),
                    updates=updates,
                ).pack()
            if whole:
                edge.snapshot_due, edge.snapshot_round = False, self.round
                self.counts.resyncs += 1
            self.transport.send(edge.peer, packed[flags, whole])

    def _active_edges(self) -> list[Edge]:
        """The edges of this round, in the order of ranks."""
        peers = self.topology.neighbours(self.transport.rank, self.round)
        return [self.edges[peer] for peer in peers if peer in self.edges]

    def admit(self) -> None:
        """Take in the ranks that have come back."""
        for peer in self.transport.rejoined():
            self.edges[peer] = Edge(peer, last=self.round, valid=not self.node.tracks, snapshot_due=True, joining=True)
            self._absent.discard(peer)
            _log.info("round %d: rank %d joins", self.round, peer)

    # ------------------------------------------------------------------------------------------------------ receiving

    def receive(self) -> None:
        """Receive the messages of this round, as many as arrive in time, and apply them to the views."""
        if self.received:
            return
        until = self.transport.now() + (float("inf") if self.deadline is None else self.deadline)
        edges = self._active_edges()
        messages = {edge.peer: found for edge in edges if (found := self._message_of_round(edge, until)) is not None}
        for edge in edges:
            self._undo_one_way_flow(edge, messages.get(edge.peer))
        payloads, usable = {}, []
        for edge in edges:
            message = messages.get(edge.peer)
            if message is None:
                self.counts.skipped += edge.peer in self.edges
                continue
            if self._can_apply(edge, message):
                payloads[edge.peer] = message.payload
            # The round that brings a snapshot is usable for the rank that asked. The sender of the snapshot knows that.
            known = edge.valid and (not edge.requested or message.snapshot.numel() > 0)
            if known and (Flag.NEEDS_SNAPSHOT not in message.flags or edge.snapshot_round == self.round):
                usable.append((edge, message))
            else:
                self.counts.skipped += 1
        self._apply(payloads)
        usable = [(edge, message) for edge, message in usable if edge.peer in self.edges]
        weights = {edge.peer: self._weight(edge, message) for edge, message in usable}
        scales = {edge.peer: min(self.node.scale, message.scale) for edge, message in usable}
        self.coefficients = {peer: weight * scales[peer] for peer, weight in weights.items()}
        self._mix_buffers({edge.peer: message.buffers for edge, message in usable}, weights)
        for edge, _ in usable:
            edge.used = (self.round, self.coefficients[edge.peer])
        self.received = True

    def next_message(self, edge: Edge, until: float) -> GossipMessage | None:
        """The next undamaged message of a neighbour; None if it is late or the neighbour is gone."""
        while True:
            try:
                edge.check_flood()
                packed = self.transport.receive(edge.peer, until=until)
                if packed is None:
                    return None
                message = self._unpack(packed)
                joined = self.round > 0 or self.transport.incarnation == 1
                after = max(edge.last, self.round) if joined else None
                self._limits.check(message, after=after, known=self.membership, own=self.node.own)
                return message
            except PeerGoneError as gone:
                self.remove(edge.peer, str(gone))
                return None
            except RefusedMessageError as refusal:
                self._refuse(edge.peer, refusal)
                return None
            except MessageError as damage:
                self.counts.damaged += 1
                edge.unused += 1
                _log.warning("round %d: dropped a message of rank %d: %s", self.round, edge.peer, damage)

    def _refuse(self, peer: int, refusal: MessageError) -> None:
        """Bad bytes cost their sender the edge. This rank goes on."""
        self.counts.refused += 1
        self.remove(peer, f"its message is refused: {refusal}")

    def _apply(self, payloads: Mapping[int, Tensor]) -> None:
        """Apply the payloads of this round. A payload that leaves no usable view costs its sender the edge."""
        if not self.node.views.per_peer:
            missing = [edge.peer for edge in self._active_edges() if edge.peer not in payloads]
            try:
                if missing:
                    raise MessageError(f"the message of rank {missing[0]} is missing")
                self.node.apply(payloads, self.round)
            except MessageError as problem:
                raise ExchangeError(
                    f"one running sum cannot leave out a neighbour: {problem}: give a deadline"
                ) from None
            return
        for peer, payload in payloads.items():
            self._apply_payload(peer, payload, self.round)
        self.node.apply({}, self.round)  # the own payload

    def _apply_payload(self, peer: int, payload: Tensor, number: int) -> bool:
        """Whether the payload of round `number` fits the view of its sender, to which it is applied."""
        views = self.node.views
        try:
            views.apply({peer: payload}, self.node.codec, *self.node.blend(number))
            check_view(views.of(peer), self.node.own)
        except MessageError as refusal:
            self._refuse(peer, refusal)
            return False
        return True

    def _message_of_round(self, edge: Edge, until: float) -> GossipMessage | None:
        """The neighbour's message of this round, or None. Late messages of earlier rounds are applied on the way."""
        if edge.joining:
            until = self.transport.now()
        while True:
            message = edge.early.pop(0) if edge.early else self.next_message(edge, until)
            if message is None:
                self._missed(edge)
                return None
            if message.kind != Kind.ROUND and message.round >= self.round:  # it averages already: its message is lost
                edge.early.insert(0, message)
                self.counts.lost += 1
                return None
            if message.kind != Kind.ROUND or message.round <= edge.last:
                edge.unused += 1  # of an abandoned average, or a duplicate
                continue
            self.membership.merge(message.updates)
            self.neighbour_switched |= Flag.SWITCHED in message.flags
            if edge.joining:
                edge.joining, edge.last = False, message.round - 1
                self.membership.mark_alive(edge.peer, message.incarnation)
            edge.missed = edge.unused = 0
            if message.round == self.round:
                return message
            if message.round > self.round:  # the message of this round is lost
                edge.early.insert(0, message)
                self.counts.lost += 1
                if self.node.tracks and self.node.views.per_peer:
                    edge.valid = False  # its content is unknown: request a snapshot now, not one message later
                return None
            # Late for its round, but its payload still belongs to the view.
            if self._can_apply(edge, message) and not self._apply_payload(edge.peer, message.payload, message.round):
                return None

    def _can_apply(self, edge: Edge, message: GossipMessage) -> bool:
        """Whether the payload of this message fits the view of the neighbour; takes its snapshot, if there is one."""
        # A message sent before our last snapshot arrived may still ask for one.
        edge.snapshot_due |= Flag.NEEDS_SNAPSHOT in message.flags and message.round > edge.snapshot_round
        views = self.node.views
        if not self.node.tracks:
            edge.last = message.round
            return True
        if message.snapshot.numel():
            views.put(edge.peer, message.snapshot)
            edge.valid = True
        elif message.round != edge.last + 1:
            if not views.per_peer:
                views.remove(edge.peer)  # raises: a running sum cannot leave anyone out
            edge.valid = False
        elif edge.valid and self._view_differs(edge, message):
            self.counts.mismatches += 1
            edge.valid = False
            _log.warning("round %d: the copy of the model of rank %d differs from it", self.round, edge.peer)
        edge.last = message.round
        return edge.valid

    def _view_differs(self, edge: Edge, message: GossipMessage) -> bool:
        if Flag.HAS_CHECKSUM not in message.flags or not self.node.views.per_peer:
            return False
        return kernels.checksum(self.node.views.of(edge.peer).view(torch.uint8)) != message.view_checksum

    def _undo_one_way_flow(self, edge: Edge, message: GossipMessage | None) -> None:
        """Undo the flow of the last round if the neighbour did not use it. The views are still those of that round."""
        used, coefficient = edge.used
        if message is None or used != self.round - 1 or used == 0 or Flag.USED_LAST in message.flags:
            return
        if edge.last != self.round - 1 or not self.topology.static or not self.node.views.per_peer:
            return
        flow = self.node.flow_from(edge.peer, coefficient)
        self.correction = flow.neg_() if self.correction is None else self.correction.sub_(flow)
        self.counts.undone += 1

    def _weight(self, edge: Edge, message: GossipMessage) -> float:
        if self.topology.weights == "uniform":
            return self.topology.weight(self.transport.rank, edge.peer, self.round)
        return metropolis(edge.announced, message.degree)

    def _mix_buffers(self, theirs: Mapping[int, Tensor], weights: Mapping[int, float]) -> None:
        self._mixed_buffers = None
        if not self.buffers.numel():
            return
        total = self.buffers * (1.0 - sum(weights.values()))
        for peer, buffers in sorted(theirs.items()):
            total.add_(buffers, alpha=weights[peer])
        self._mixed_buffers = total

    def take_buffers(self) -> Tensor | None:
        """The change of the buffers by this round's average. A second call returns None."""
        mixed, self._mixed_buffers = self._mixed_buffers, None
        return None if mixed is None else mixed.sub_(self.buffers)

    def take_correction(self) -> Tensor | None:
        """What to add to the next update. A second call returns None."""
        correction, self.correction = self.correction, None
        return correction

    # ------------------------------------------------------------------------------------------- removing a neighbour

    def _missed(self, edge: Edge) -> None:
        if edge.joining or edge.peer not in self.edges:
            return
        edge.missed += 1
        _log.warning("round %d: no message from rank %d within %s s", self.round, edge.peer, self.deadline)
        if edge.missed >= PATIENCE:
            self.remove(edge.peer, f"no message in {edge.missed} rounds")

    def remove(self, peer: int, reason: str) -> None:
        """Continue without a neighbour. The weights follow from the new degrees."""
        self.node.views.remove(peer)
        self.edges.pop(peer, None)
        self.membership.mark_dead(peer)
        self.transport.disconnect(peer)
        self._absent.add(peer)
        self.transport.watch_for(self._absent)
        _log.warning("round %d: rank %d continues without rank %d: %s", self.round, self.transport.rank, peer, reason)

    # ---------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """The state between two rounds: no message of this round is in flight."""
        return {
            "round": self.round,
            "coefficients": dict(self.coefficients),
            "correction": None if self.correction is None else self.correction.clone(),
            "buffers": self.buffers.clone(),
            "mixed_buffers": None if self._mixed_buffers is None else self._mixed_buffers.clone(),
            "switched": self.switched,
            "edges": {peer: {"last": e.last, "valid": e.valid, "used": e.used} for peer, e in self.edges.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.round, self.received = state["round"], True
        self.coefficients = dict(state["coefficients"])
        self.correction, self.buffers = state["correction"], state["buffers"].clone()
        self._mixed_buffers, self.switched = state["mixed_buffers"], state["switched"]
        for peer, saved in state["edges"].items():
            if peer in self.edges:
                self.edges[peer].last, self.edges[peer].valid = saved["last"], saved["valid"]
                self.edges[peer].used = tuple(saved["used"])
