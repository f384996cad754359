"""Ranks that disagree would wait for each other for ever. They compare notes first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from ..comm import Network
from ..errors import AttachError

_SHOWN = 240  # bytes of a value that travel, for the error text; all of it counts in its digest
_DIGEST = 16


def check_agreement(network: Network, facts: Mapping[str, str], *, device: torch.device) -> None:
    """Raise on every rank if any fact differs on any rank, saying what two of them have."""
    mine = torch.stack([_note(value) for value in facts.values()]).to(device)
    notes = network.all_gather(mine).cpu()
    for place, fact in enumerate(facts):
        for rank in range(1, network.world_size):
            if not torch.equal(notes[rank, place], notes[0, place]):
                here, there = (_text(notes[other, place]) for other in (0, rank))
                raise AttachError(
                    f"the ranks disagree on the {fact}: rank 0 has {here}, rank {rank} has {there}: "
                    "call it with the same arguments on every rank"
                )


def _note(value: str) -> torch.Tensor:
    written = value.encode()
    digest = hashlib.blake2s(written, digest_size=_DIGEST).digest()
    return torch.frombuffer(bytearray(digest + written[:_SHOWN].ljust(_SHOWN, b"\0")), dtype=torch.uint8)


def _text(note: torch.Tensor) -> str:
    return bytes(note[_DIGEST:].tolist()).rstrip(b"\0").decode(errors="ignore")
