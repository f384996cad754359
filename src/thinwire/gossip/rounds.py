"""Rounds: letters out, letters in, and which neighbours count in this round, so that both ends of an edge agree.

An edge counts in a round if both letters of it arrived in time and neither end has lost track of the other. The end
that did not get the letter says so in its next one, and the other end takes back what had flowed. Weights come from the
degrees that the two letters of the round name: the same on both ends, whoever has died meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..comm.peers import GoneError, Mail
from ..errors import ExchangeError, MessageError
from .letter import Flag, Kind, Letter
from .membership import Membership
from .node import Node
from .topology import Topology, metropolis

_log = logging.getLogger(__name__)
PATIENCE = 3  # rounds in a row without a letter after which a neighbour counts as gone
CHECK_EVERY = 16  # rounds between two comparisons of views with their originals


@dataclass
class Edge:
    """One neighbour: what came, what is owed, what was lost."""

    peer: int
    last: int = 0  # number of the last letter that its view has followed
    valid: bool = True  # our view of it is what it believes
    wants: bool = False  # we said in the letter of this round that it is not
    wanted: bool = False  # it said so: our next letter has a snapshot
    snapshot: int = -1  # number of the last letter that had one
    entering: bool = False  # it comes (back): nobody waits for it yet
    missed: int = 0  # letters in a row that did not come in time
    announced: int = 0  # our degree in the letter of this round
    used: tuple[int, float] = (0, 0.0)  # the last round that it counted in, with which coefficient
    held: list[Letter] = field(default_factory=list)  # letters that came before they were asked for


@dataclass
class Counts:
    """What happened so far."""

    skipped: int = 0  # edges that did not count in a round
    lost: int = 0
    damaged: int = 0
    resyncs: int = 0
    undone: int = 0
    mismatches: int = 0


class Rounds:
    """Exchanges the letters of one node with its neighbours.

    `deadline`: seconds that a letter may be late, None for ever: then views may be kept as one running sum.
    `resync_every`: rounds between two snapshots to every neighbour, None for snapshots only where something was lost.
    """

    def __init__(
        self,
        node: Node,
        mail: Mail,
        topology: Topology,
        *,
        deadline: float | None,
        resync_every: int | None = None,
        buffers: Tensor | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.node, self.mail, self.topology = node, mail, topology
        self.deadline, self.resync_every = deadline, resync_every
        self.buffers = torch.empty(0) if buffers is None else buffers
        self.membership = membership or Membership(mail.world_size, rank=mail.rank, life=mail.life)
        self.edges = {peer: Edge(peer) for peer in topology.ever(mail.rank)}
        self.round = 0  # of the letters that were sent last; those of the neighbours may be on their way
        self.arrived = True  # there are none before the first step
        self.coefficients: dict[int, float] = {}
        self.correction: Tensor | None = None  # to be added to the next update: what flowed one way only
        self.switched = False  # this node has changed its algorithm
        self.heard_switch = False  # or a neighbour has
        self.counts = Counts()
        self._read = mail.shared(Letter.unpack)
        self._mixed_buffers: Tensor | None = None
        self._away: set[int] = set()

    # ------------------------------------------------------------------------------------------------------- beginning

    def begin(self, model: Tensor, buffers: Tensor) -> None:
        """All ranks start from this."""
        self.node.restart(model)
        self.buffers = buffers

    def begin_from(self, peer: int, letter: Letter) -> Tensor:
        """Start where a neighbour is, from its letter with a snapshot; the model."""
        edge = self.edges[peer]
        self.round, self.arrived = letter.round, True
        self.node.views.put(peer, letter.snapshot)
        self.node.views.absorb({peer: letter.message}, self.node.codec, *self.node.blend(letter.round))
        model = self.node.views.of(peer).clone()
        self.node.stand_at(model)
        edge.last, edge.valid, edge.wanted = letter.round, True, True
        self.membership.hear(letter.news)
        self.membership.came(peer, letter.life)
        return model

    # -------------------------------------------------------------------------------------------------------- sending

    def post(self, message: Tensor, buffers: Tensor) -> None:
        """End a step: send letter number `round` + 1 to the neighbours of that round."""
        self._welcome()
        self.round += 1
        self.arrived = False
        self.buffers = buffers
        now = self._neighbours()
        checked = self.node.views.each and self.node.tracks and self.round % CHECK_EVERY == 0
        view_checksum = kernels.checksum(self.node.own.view(torch.uint8)) if checked and now else 0
        regular = self.resync_every is not None and self.round % self.resync_every == 0 and self.node.tracks
        news = self.membership.news()
        packed: dict[tuple[Flag, bool], Tensor] = {}  # neighbours that are told the same get the same letter
        for edge in now:
            edge.wants = self.node.tracks and not edge.valid
            edge.announced = len(now)
            flags = Flag.WANTS if edge.wants else Flag(0)
            flags |= Flag.CHECKED if checked else Flag(0)
            flags |= Flag.SWITCHED if self.switched else Flag(0)
            flags |= Flag.USED if edge.used[0] == self.round - 1 else Flag(0)
            whole = edge.wanted or (regular and edge.valid)
            if (flags, whole) not in packed:
                packed[flags, whole] = Letter(
                    self.round,
                    flags=flags,
                    degree=len(now),
                    life=self.mail.life,
                    view_checksum=view_checksum,
                    scale=self.node.scale,
                    message=message,
                    buffers=buffers,
                    snapshot=self.node.own if whole else torch.empty(0),
                    news=news,
                ).pack()
            if whole:
                edge.wanted, edge.snapshot = False, self.round
                self.counts.resyncs += 1
            self.mail.send(edge.peer, packed[flags, whole])

    def _neighbours(self) -> list[Edge]:
        """Those that this round is with, in order."""
        peers = self.topology.neighbours(self.mail.rank, self.round)
        return [self.edges[peer] for peer in peers if peer in self.edges]

    def _welcome(self) -> None:
        for peer in self.mail.arrivals():
            edge = Edge(peer, last=self.round, valid=not self.node.tracks, wanted=True, entering=True)
            self.edges[peer] = edge
            self._away.discard(peer)
            _log.info("round %d: rank %d comes (back)", self.round, peer)

    # ------------------------------------------------------------------------------------------------------ receiving

    def arrive(self) -> None:
        """Have the letters of this round, or as many as came in time, and let the views follow them."""
        if self.arrived:
            return
        until = self.mail.now() + (float("inf") if self.deadline is None else self.deadline)
        edges = self._neighbours()
        letters = {edge.peer: letter for edge in edges if (letter := self._letter(edge, until)) is not None}
        for edge in edges:
            self._take_back(edge, letters.get(edge.peer))
        messages, usable = {}, []
        for edge in edges:
            letter = letters.get(edge.peer)
            if letter is None:
                self.counts.skipped += edge.peer in self.edges
                continue
            if self._follows(edge, letter):
                messages[edge.peer] = letter.message
            # Who asked for a snapshot can use the round that brings it, and who sent one knows that.
            known = edge.valid and (not edge.wants or letter.snapshot.numel() > 0)
            if known and (Flag.WANTS not in letter.flags or edge.snapshot == self.round):
                usable.append((edge, letter))
            else:
                self.counts.skipped += 1
        self.node.absorb(messages, self.round)
        weights = {edge.peer: self._weight(edge, letter) for edge, letter in usable}
        scales = {edge.peer: min(self.node.scale, letter.scale) for edge, letter in usable}
        self.coefficients = {peer: weight * scales[peer] for peer, weight in weights.items()}
        self._mix_buffers({edge.peer: letter.buffers for edge, letter in usable}, weights)
        for edge, _ in usable:
            edge.used = (self.round, self.coefficients[edge.peer])
        self.arrived = True

    def next_letter(self, edge: Edge, until: float) -> Letter | None:
        """The next letter of a neighbour that is whole; None if there is none in time, or the neighbour is gone."""
        while True:
            try:
                packed = self.mail.receive(edge.peer, until=until)
            except GoneError as gone:
                self.remove(edge.peer, str(gone))
                return None
            try:
                return None if packed is None else self._read(packed)
            except MessageError as damage:
                self.counts.damaged += 1
                _log.warning("round %d: a letter of rank %d is not used: %s", self.round, edge.peer, damage)

    def _letter(self, edge: Edge, until: float) -> Letter | None:
        """The letter of this round from one neighbour, or None; letters that come late are followed on the way."""
        if edge.entering:
            until = self.mail.now()
        while True:
            letter = edge.held.pop(0) if edge.held else self.next_letter(edge, until)
            if letter is None:
                self._missed(edge)
                return None
            if letter.kind != Kind.ROUND and letter.round >= self.round:  # it averages already: its letter is lost
                edge.held.insert(0, letter)
                self.counts.lost += 1
                return None
            if letter.kind != Kind.ROUND or letter.round <= edge.last:
                continue  # an average that was given up, or a letter for the second time
            self.membership.hear(letter.news)
            self.heard_switch |= Flag.SWITCHED in letter.flags
            if edge.entering:
                edge.entering, edge.last = False, letter.round - 1
                self.membership.came(edge.peer, letter.life)
            edge.missed = 0
            if letter.round == self.round:
                return letter
            if letter.round > self.round:  # that of this round is lost
                edge.held.insert(0, letter)
                self.counts.lost += 1
                if self.node.tracks and self.node.views.each:
                    edge.valid = False  # nobody knows what it said: ask for a snapshot now, not one letter later
                return None
            if self._follows(edge, letter):  # late: its round is over, but what it says is still true
                self.node.views.absorb({edge.peer: letter.message}, self.node.codec, *self.node.blend(letter.round))

    def _follows(self, edge: Edge, letter: Letter) -> bool:
        """Whether the view of the neighbour can follow this letter's message."""
        # A letter that was sent before ours with a snapshot could arrive may ask for one still.
        edge.wanted |= Flag.WANTS in letter.flags and letter.round > edge.snapshot
        views, size = self.node.views, self.node.own.numel()
        if not self.node.tracks:
            edge.last = letter.round
            return True
        if letter.snapshot.numel():
            if letter.snapshot.numel() != size:
                raise ExchangeError(f"rank {edge.peer} sent a snapshot of another model: start all ranks with the same")
            views.put(edge.peer, letter.snapshot)
            edge.valid = True
        elif letter.round != edge.last + 1:
            if not views.each:
                views.remove(edge.peer)  # which it cannot, and says why
            edge.valid = False
        elif Flag.CHECKED in letter.flags and edge.valid and views.each and not self._same_view(edge, letter):
            self.counts.mismatches += 1
            edge.valid = False
            _log.warning("round %d: the copy of rank %d's model is not what it should be", self.round, edge.peer)
        edge.last = letter.round
        return edge.valid

    def _same_view(self, edge: Edge, letter: Letter) -> bool:
        return kernels.checksum(self.node.views.of(edge.peer).view(torch.uint8)) == letter.view_checksum

    def _take_back(self, edge: Edge, letter: Letter | None) -> None:
        """If the neighbour did not use the last round and we did, take back what flowed. Views are still as then."""
        counted, coefficient = edge.used
        if letter is None or counted != self.round - 1 or counted == 0 or Flag.USED in letter.flags:
            return
        if edge.last != self.round - 1 or not self.topology.static or not self.node.views.each:
            return
        flow = self.node.flow_from(edge.peer, coefficient)
        self.correction = flow.neg_() if self.correction is None else self.correction.sub_(flow)
        self.counts.undone += 1

    def _weight(self, edge: Edge, letter: Letter) -> float:
        if self.topology.weights == "uniform":
            return self.topology.weight(self.mail.rank, edge.peer, self.round)
        return metropolis(edge.announced, letter.degree)

    def _mix_buffers(self, theirs: Mapping[int, Tensor], weights: Mapping[int, float]) -> None:
        self._mixed_buffers = None
        if not self.buffers.numel():
            return
        total = self.buffers * (1.0 - sum(weights.values()))
        for peer, buffers in sorted(theirs.items()):
            total.add_(buffers, alpha=weights[peer])
        self._mixed_buffers = total

    def take_buffers(self) -> Tensor | None:
        """How much the neighbours' buffers change the own ones, once."""
        mixed, self._mixed_buffers = self._mixed_buffers, None
        return None if mixed is None else mixed.sub_(self.buffers)

    def take_correction(self) -> Tensor | None:
        correction, self.correction = self.correction, None
        return correction

    # -------------------------------------------------------------------------------------------------------- leaving

    def _missed(self, edge: Edge) -> None:
        if edge.entering or edge.peer not in self.edges:
            return
        edge.missed += 1
        _log.warning("round %d: no letter of rank %d within %s s", self.round, edge.peer, self.deadline)
        if edge.missed >= PATIENCE:
            self.remove(edge.peer, f"no letter in {edge.missed} rounds")

    def remove(self, peer: int, why: str) -> None:
        """Go on without a neighbour; weights follow from the degrees."""
        self.node.views.remove(peer)
        self.edges.pop(peer, None)
        self.membership.died(peer)
        self.mail.drop(peer)
        self._away.add(peer)
        self.mail.expect(self._away)
        _log.warning("round %d: rank %d goes on without rank %d: %s", self.round, self.mail.rank, peer, why)

    # ---------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Everything, once the letters of this round are there."""
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
        self.round, self.arrived = state["round"], True
        self.coefficients = dict(state["coefficients"])
        self.correction, self.buffers = state["correction"], state["buffers"].clone()
        self._mixed_buffers, self.switched = state["mixed_buffers"], state["switched"]
        for peer, saved in state["edges"].items():
            if peer in self.edges:
                self.edges[peer].last, self.edges[peer].valid = saved["last"], saved["valid"]
                self.edges[peer].used = tuple(saved["used"])
