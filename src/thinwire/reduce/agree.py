"""Ranks compare their arguments before the first step, because ranks that disagree would wait for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..comm.network import Network
from ..errors import AttachError
from ..recipe.compose import Recipe, parse

_DIGEST = 16
_BEFORE, _SHOWN = 60, 240  # characters of a long value that are shown, from a little before the difference


def checked_recipe(recipe: Recipe | str, network: Network) -> Recipe:
    """A recipe that this group can run; ranks in one process can run every one."""
    if isinstance(recipe, str):
        recipe = parse(recipe)
    if not isinstance(recipe, Recipe):
        raise AttachError(f"give a recipe, its text or the name of a preset, not {recipe!r}")
    if network.between_processes and (refusal := recipe.refusal(network.world_size)):
        raise AttachError(refusal)
    return recipe


def check_agreement(network: Network, facts: Mapping[str, str], *, device: torch.device) -> None:
    """Raise on every rank if any fact differs on any rank, saying what two of them have."""
    digests = [_bytes(hashlib.blake2s(value.encode(), digest_size=_DIGEST).digest()) for value in facts.values()]
    notes = network.all_gather(torch.stack(digests).to(device)).cpu()
    for place, fact in enumerate(facts):
        for rank in range(1, network.world_size):
            if not torch.equal(notes[rank, place], notes[0, place]):  # all ranks see it, so all come here
                here, there = _from_difference(*_values(network, facts[fact], (0, rank), device))
                raise AttachError(
                    f"the ranks disagree on the {fact}: rank 0 has {here}, rank {rank} has {there}: "
                    "call it with the same arguments on every rank"
                )


def _values(network: Network, mine: str, ranks: tuple[int, int], device: torch.device) -> list[str]:
    written = mine.encode()
    lengths = network.all_gather(torch.tensor([len(written)], device=device)).view(-1).tolist()
    texts = network.all_gather(_bytes(written.ljust(max(lengths), b"\0")).to(device)).cpu()
    return [bytes(texts[rank].tolist())[: lengths[rank]].decode() for rank in ranks]


def _from_difference(one: str, other: str) -> tuple[str, str]:
    pairs = enumerate(zip(one, other, strict=False))
    differs = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    start = one.rfind(" ", 0, max(0, differs - _BEFORE)) + 1  # whole words
    return one[start : start + _SHOWN], other[start : start + _SHOWN]


def _bytes(written: bytes) -> Tensor:
    return torch.frombuffer(bytearray(written), dtype=torch.uint8)
