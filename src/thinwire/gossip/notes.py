"""Ranks compare their options at the start, when they join and when they resume, and say what two of them have.

The first rank leaves a note with its options at the transport; the others compare theirs with it. A rank that differs
leaves a note of the conflict before it raises, so that ranks which agree with the first one raise too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import nn

from .. import __version__
from ..codecs.base import Codec
from ..comm.peers import PeerTransport
from ..errors import AttachError
from .topology import Topology

_CONFLICT = "conflict"


def facts_of(
    algorithm: str,
    *,
    codec: Codec | None,
    topology: Topology | None,
    parameters: Mapping[str, nn.Parameter],
    buffers: int,
) -> dict[str, str]:
    """What must be the same on all ranks, by the name that an error uses for it.

    >>> list(facts_of("dcd", codec=None, topology=None, parameters={}, buffers=4))
    ['thinwire version', 'algorithm', 'parameters', 'size of the buffers']
    """
    found = {"thinwire version": __version__, "algorithm": algorithm}
    if codec is not None:
        found["codec"] = codec.spec()
    if topology is not None:
        found["topology"] = str(topology)
    found["parameters"] = ", ".join(f"{name} {tuple(one.shape)}" for name, one in parameters.items())
    return found | {"size of the buffers": str(buffers)}


def compare(transport: PeerTransport, occasion: str, facts: Mapping[str, str], *, remedy: str) -> None:
    """Raise AttachError if the first rank on this occasion has other facts. All ranks learn of it.

    >>> from thinwire.comm.peers import LocalTransport
    >>> a, b = LocalTransport.of(2)
    >>> compare(a, "start", {"algorithm": "dcd"}, remedy="give all ranks the same arguments")
    >>> compare(b, "start", {"algorithm": "ecd"}, remedy="give all ranks the same arguments")
    Traceback (most recent call last):
    thinwire.errors.AttachError: the ranks disagree on the algorithm: rank 0 has dcd, rank 1 has ecd: give all ranks ...
    """
    first = json.loads(transport.note(occasion, json.dumps({"rank": transport.rank, "facts": dict(facts)})))
    for fact in [*first["facts"], *facts]:
        mine, theirs = facts.get(fact, "none"), first["facts"].get(fact, "none")
        if mine != theirs:
            there, here = _where_they_differ(theirs, mine)
            sentence = (
                f"the ranks disagree on the {fact}: rank {first['rank']} has {there}, rank {transport.rank} has "
                f"{here}: {remedy}"
            )
            if transport.incarnation == 1:  # a rank that joins with other options must not end a run that is at work
                transport.note(_CONFLICT, sentence)
            raise AttachError(sentence)


def raise_conflict(transport: PeerTransport) -> None:
    """Raise AttachError if a rank that started with the others has found a difference."""
    sentence = transport.peek(_CONFLICT) if transport.incarnation == 1 else None
    if sentence is not None:
        raise AttachError(sentence)


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Of two long lists, the first items that differ.

    >>> _where_they_differ("a (2,), b (3,)", "a (2,), b (4,)")
    ('b (3,)', 'b (4,)')
    """
    here, there = one.split("), "), other.split("), ")
    if len(here) < 2 or len(there) < 2:
        return one or "none", other or "none"
    for a, b in zip(here, there, strict=False):
        if a != b:
            return tuple(f"{text.rstrip(')')})" for text in (a, b))  # type: ignore[return-value]
    return f"{len(here)} of them", f"{len(there)} of them"
