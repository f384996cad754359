"""Fragments: the parts of a model that take turns, and the buckets in which their tensors travel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from ...errors import OptionError
from .settings import Fragments

_BUCKET_BYTES = 25 << 20  # as DDP's: large enough for the wire, small enough that encoding overlaps it


def partition(parameters: Mapping[str, Tensor], fragments: Fragments) -> list[list[str]]:
    """The names of each fragment. Every parameter is in one.

    A number of fragments strides over the blocks of the model (layers.0 to the first, layers.1 to the second, ...), the
    better of the patterns in Streaming DiLoCo (arXiv 2501.18512); what is in no block goes to the smallest fragment.

    >>> import torch
    >>> sizes = {"embed.weight": 9, "layers.0.w": 4, "layers.1.w": 4, "layers.2.w": 4, "head.weight": 2}
    >>> partition({name: torch.empty(size) for name, size in sizes.items()}, 2)
    [['layers.0.w', 'layers.2.w', 'head.weight'], ['embed.weight', 'layers.1.w']]
    """
    if not isinstance(fragments, int):
        return _as_listed(parameters, fragments)
    blocks: dict[str, list[str]] = {}
    for name in parameters:
        blocks.setdefault(_block(name), []).append(name)
    numbered = [names for block, names in blocks.items() if block[-1:].isdigit()]
    if len(numbered) < fragments:  # then single parameters
        numbered = []
    found: list[list[str]] = [[] for _ in range(fragments)]
    for place, names in enumerate(numbered):
        found[place % fragments] += names
    placed = {name for names in found for name in names}
    rest = sorted((name for name in parameters if name not in placed), key=lambda one: -parameters[one].numel())
    for name in rest:  # largest first, to the smallest fragment
        min(found, key=lambda names: sum(parameters[one].numel() for one in names)).append(name)
    if not all(found):
        raise OptionError(f"{fragments} fragments of {len(parameters)} parameters: use at most as many")
    order = {name: place for place, name in enumerate(parameters)}
    return [sorted(names, key=order.__getitem__) for names in found]


def _block(name: str) -> str:
    """The name up to its first number: that of the layer in a list of layers."""
    match = re.match(r"(.*?\.?\d+)\.", name)
    return match[1] if match else name.rpartition(".")[0] or name


def _as_listed(parameters: Mapping[str, Tensor], fragments: Sequence[Sequence[str]]) -> list[list[str]]:
    """A listed name stands for a parameter, or for all below a module."""
    found: list[list[str]] = []
    owner: dict[str, int] = {}
    for place, words in enumerate(fragments):
        found.append([])
        for word in words:
            names = [name for name in parameters if name == word or name.startswith(f"{word}.")]
            if not names:
                raise OptionError(f"fragment {place} names {word}, which is no trained parameter or module")
            if taken := [name for name in names if name in owner]:
                raise OptionError(f"{taken[0]} is in fragments {owner[taken[0]]} and {place}: name it once")
            owner.update(dict.fromkeys(names, place))
            found[-1] += names
    if missing := [name for name in parameters if name not in owner]:
        raise OptionError(f"no fragment has {missing[0]}: every trained parameter needs one")
    return found


def buckets(parameters: Mapping[str, Tensor], names: Sequence[str]) -> list[list[str]]:
    """The names of a fragment in groups that travel together: of one device, of some 25 MB."""
    groups: list[list[str]] = []
    size, device = 0, None
    for name in names:
        tensor = parameters[name]
        if not groups or device != tensor.device or size >= _BUCKET_BYTES:
            groups.append([])
            size, device = 0, tensor.device
        groups[-1].append(name)
        size += 4 * tensor.numel()
    return groups
