"""Which parameters travel together. A parcel is what thinwire sends at once; DDP's buckets are how gradients arrive.

Parcels do not follow DDP's first, single bucket, nor its order within a bucket: those change while training and after a
restart, and then the same gradients would give other messages. A layout is planned once, taken over from DDP when it
has settled, and saved with the state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..exchange.base import Part

FIRST_BUCKET = 1 << 20  # bytes of the first one, as in DDP
TINY = 1024  # elements below which a tensor is not worth compressing
COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
Exempt = Callable[[str, Tensor], bool]


def one_dimensional_or_tiny(name: str, parameter: Tensor) -> bool:
    """The parameters that travel exact by default: biases, norms and other small ones.

    They hold few bytes, and a wrong bit in them costs more than in a large matrix.

    >>> one_dimensional_or_tiny("norm.weight", torch.empty(4096)), one_dimensional_or_tiny("w", torch.empty(64, 64))
    (True, False)
    """
    return parameter.dim() < 2 or parameter.numel() < TINY


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a layout needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    exact: bool
    sparse: bool = False  # its gradients are, and travel as they are

    @classmethod
    def of(cls, name: str, tensor: Tensor, exempt: Exempt, *, sparse: bool = False) -> Parameter:
        exact = exempt(name, tensor)
        return cls(name, tuple(tensor.shape), tensor.numel(), tensor.dtype, tensor.device, exact, sparse)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        return self.dtype, self.device


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Parameters that travel together: compressed parts of one flat tensor, exact parts of another."""

    index: int
    parts: tuple[Part, ...]
    exact: tuple[Part, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """Under which memory, state and draws of the parcel are kept."""
        return f"bucket{self.index}"

    @property
    def numel(self) -> int:
        return self.parts[-1].stop if self.parts else 0

    @property
    def exact_numel(self) -> int:
        return self.exact[-1].stop if self.exact else 0

    @property
    def names(self) -> list[str]:
        return [part.name for part in (*self.parts, *self.exact)]

    def __str__(self) -> str:
        first, more = self.names[0], len(self.names) - 1
        return f"bucket {self.index} ({first}{f' and {more} more' if more else ''})"


class Layout:
    """All parameters in parcels.

    >>> tensors = {"a.weight": torch.empty(64, 64), "a.bias": torch.empty(64), "b.weight": torch.empty(64, 64)}
    >>> known = [Parameter.of(name, tensor, one_dimensional_or_tiny) for name, tensor in tensors.items()]
    >>> layout = Layout.planned(known, first=1, cap=20_000)
    >>> [parcel.names for parcel in layout.parcels]
    [['b.weight'], ['a.weight', 'a.bias']]
    """

    def __init__(self, parameters: Iterable[Parameter], groups: Sequence[Sequence[str]]) -> None:
        known = {parameter.name: parameter for parameter in parameters}
        self.groups = [sorted(group, key=list(known).index, reverse=True) for group in groups]
        self.parcels = [_parcel(index, [known[name] for name in group]) for index, group in enumerate(self.groups)]
        self.of: Mapping[str, Parcel] = {name: parcel for parcel in self.parcels for name in parcel.names}

    @classmethod
    def planned(cls, parameters: Sequence[Parameter], *, first: int, cap: int) -> Layout:
        """As DDP will do it if gradients become ready in reverse order: a small first bucket, then larger ones."""
        groups: list[list[str]] = []
        open_groups: dict[object, tuple[list[str], int]] = {}
        started: set[object] = set()
        for parameter in reversed(parameters):
            if parameter.dtype not in COMPRESSIBLE or parameter.sparse:
                continue
            group, size = open_groups.pop(parameter.kind, ([], 0))
            if not group:
                groups.append(group)
            group.append(parameter.name)
            size += parameter.numel * parameter.dtype.itemsize
            if size < (cap if parameter.kind in started else first):
                open_groups[parameter.kind] = (group, size)
            else:
                started.add(parameter.kind)
        return cls(parameters, groups)

    def same_groups(self, groups: Sequence[Sequence[str]]) -> bool:
        return {frozenset(group) for group in groups} == {frozenset(group) for group in self.groups}


def _parcel(index: int, parameters: Sequence[Parameter]) -> Parcel:
    first = parameters[0]
    compressed = _parts(parameter for parameter in parameters if not parameter.exact)
    exact = _parts(parameter for parameter in parameters if parameter.exact)
    return Parcel(index, compressed, exact, first.dtype, first.device)


def _parts(parameters: Iterable[Parameter]) -> tuple[Part, ...]:
    parts, start = [], 0
    for parameter in parameters:
        parts.append(Part(parameter.name, parameter.shape, start, start + parameter.numel))
        start += parameter.numel
    return tuple(parts)


def gather(parts: Sequence[Part], views: Mapping[str, Tensor], out: Tensor) -> Tensor:
    """The gradients one after the other, in float32."""
    for part in parts:
        part.of(out).view(part.shape).copy_(views[part.name])
    return out


def scatter(parts: Sequence[Part], flat: Tensor, views: Mapping[str, Tensor]) -> None:
    """Back to where each gradient came from, in its own type."""
    for part in parts:
        views[part.name].copy_(part.of(flat).view(part.shape))


def as_parameter(parameter: Tensor, gradient: Tensor) -> Tensor:
    """DDP shows every gradient of a bucket row by row, but it lies there as its parameter does (channels_last)."""
    if parameter.is_contiguous():
        return gradient
    outer_first = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if not parameter.permute(outer_first).is_contiguous():  # it has holes, and DDP packs its gradient row by row
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
