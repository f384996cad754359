"""What a rank knows of the edge to one neighbour, and its counters of faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from .message import GossipMessage, RefusedMessageError

MOST_EARLY = 32  # messages of a neighbour that wait for their round
MOST_UNUSED = 4096  # messages in a row that are damaged, repeated, or of an abandoned average


@dataclass
class Edge:
    """The edge to one neighbour.

    >>> edge = Edge(3)
    >>> edge.valid, edge.last
    (True, 0)
    """

    peer: int
    last: int = 0  # round of the last message that was applied to its view
    valid: bool = True  # our view of it equals its own
    requested: bool = False  # our message of this round asks for a snapshot
    snapshot_due: bool = False  # it asked for a snapshot: our next message has one
    snapshot_round: int = -1  # round of our last message with a snapshot
    joining: bool = False  # it is (re)joining: no round waits for it yet
    missed: int = 0  # consecutive rounds without its message
    announced: int = 0  # our degree in our message of this round
    used: tuple[int, float] = (0, 0.0)  # the last round that used the edge, and its coefficient
    early: list[GossipMessage] = field(default_factory=list)  # received before they were needed
    unused: int = 0  # messages in a row that were of no use

    def check_flood(self) -> None:
        """RefusedMessageError if the neighbour sends more than a run needs: memory and time have a bound.

        >>> Edge(3, unused=MOST_UNUSED + 1).check_flood()
        Traceback (most recent call last):
        thinwire.gossip.message.RefusedMessageError: it sent 4097 messages in a row that are of no use
        """
        if self.unused > MOST_UNUSED:
            raise RefusedMessageError(f"it sent {self.unused} messages in a row that are of no use")
        if len(self.early) > MOST_EARLY:
            raise RefusedMessageError(f"{len(self.early)} of its messages wait for later rounds")


@dataclass
class Counts:
    """Faults so far; `Decentralized.stats()` reports them under these names."""

    skipped: int = 0  # edges that a round did not use
    lost: int = 0  # messages that never arrived
    damaged: int = 0  # messages with a wrong checksum
    refused: int = 0  # intact messages that no rank of this run sends; each cost its sender the edge
    resyncs: int = 0  # snapshots sent
    undone: int = 0  # flows taken back
    mismatches: int = 0  # views that differed from their originals
