"""Buckets: which tensors travel together, planned in the order of the model and not as DDP delivers them.

Ours do not follow DDP's first, single bucket, nor its order within a bucket: those change while training and after a
restart, and then the same gradients would give other messages. A layout is planned once, taken over from DDP when it
has settled, and saved with the state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..codecs.base import Shape
from ..errors import OptionError
from ..exchange.request import Part
from ..kernels import Spread

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
    embedding: bool = False  # a table of them

    @classmethod
    def of(
        cls, name: str, tensor: Tensor, exempt: Exempt, *, sparse: bool = False, embedding: bool = False
    ) -> Parameter:
        exact = exempt(name, tensor)
        return cls(name, tuple(tensor.shape), tensor.numel(), tensor.dtype, tensor.device, exact, sparse, embedding)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        return self.dtype, self.device


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tensors that travel together: compressed parts of one flat tensor, exact parts of another.

    Memory, codec state and draws are kept under its name.
    """

    name: str
    parts: tuple[Part, ...]
    exact: tuple[Part, ...]
    dtype: torch.dtype
    device: torch.device
    index: int = 0  # which lane it takes
    embeddings: int = 0  # compressed elements that belong to tables of embeddings

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, Tensor], *, exact: Collection[str] = (), index: int = 0) -> Bucket:
        """Of tensors as they are.

        >>> bucket = Bucket.of("layer", {"w": torch.empty(4, 2), "b": torch.empty(4)}, exact=["b"])
        >>> bucket.numel, bucket.exact_numel, str(bucket)
        (8, 4, 'layer (w and 1 more)')
        """
        shapes = {part: tuple(tensor.shape) for part, tensor in tensors.items()}
        first = next(iter(tensors.values()))
        compressed = _parts((part, shape) for part, shape in shapes.items() if part not in exact)
        whole = _parts((part, shape) for part, shape in shapes.items() if part in exact)
        return cls(name, compressed, whole, first.dtype, first.device, index)

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
        if not self.names:
            return self.name
        first, more = self.names[0], len(self.names) - 1
        shown = self.name if not self.name.startswith("bucket") else f"bucket {self.name[6:]}"
        return shown if [shown] == self.names else f"{shown} ({first}{f' and {more} more' if more else ''})"


class Layout:
    """All parameters in buckets.

    >>> tensors = {"a.weight": torch.empty(64, 64), "a.bias": torch.empty(64), "b.weight": torch.empty(64, 64)}
    >>> known = [Parameter.of(name, tensor, one_dimensional_or_tiny) for name, tensor in tensors.items()]
    >>> layout = Layout.planned(known, first=1, cap=20_000)
    >>> [bucket.names for bucket in layout.buckets]
    [['b.weight'], ['a.weight', 'a.bias']]
    """

    def __init__(self, parameters: Iterable[Parameter], groups: Sequence[Sequence[str]]) -> None:
        known = {parameter.name: parameter for parameter in parameters}
        self.parameters = list(known.values())
        self.groups = [sorted(group, key=list(known).index, reverse=True) for group in groups]
        self.buckets = [_bucket(index, [known[name] for name in group]) for index, group in enumerate(self.groups)]
        self.of: dict[str, Bucket] = {name: bucket for bucket in self.buckets for name in bucket.names}

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

    def add(self, bucket: Bucket) -> None:
        """A bucket that was not planned: a tensor that a program reduces by itself."""
        self.groups.append(bucket.names)
        self.buckets.append(bucket)
        self.of.update(dict.fromkeys(bucket.names, bucket))

    def named(self, name: str, tensors: Mapping[str, Tensor], exact: Collection[str]) -> tuple[Bucket, bool]:
        """The bucket of tensors that a program reduces under a name, and whether it is new."""
        for one, tensor in tensors.items():
            if not tensor.is_floating_point() or tensor.is_sparse:
                kind = "sparse" if tensor.is_sparse else str(tensor.dtype)
                raise OptionError(f"a reducer averages dense floating-point tensors, {one} is {kind}: cast it first")
        known = next((bucket for bucket in self.buckets if bucket.name == name), None)
        found = known or Bucket.of(name, tensors, exact=exact, index=len(self.buckets))
        if known is None:
            if taken := [one for one in found.names if one in self.of]:
                raise OptionError(f"{taken[0]} is reduced under another name already: give every tensor one name")
            self.add(found)
        shapes = {part.name: part.shape for part in (*found.parts, *found.exact)}
        if shapes != {one: tuple(tensor.shape) for one, tensor in tensors.items()}:
            raise OptionError(f"{name} was reduced in other shapes before: give every tensor a name of its own")
        return found, known is None

    def regrouped(self, groups: Sequence[Sequence[str]]) -> Layout:
        """The same parameters in other buckets; a layout that grows with what a program reduces stays as it is."""
        return Layout(self.parameters, groups) if self.parameters else self

    def same_groups(self, groups: Sequence[Sequence[str]]) -> bool:
        return {frozenset(group) for group in groups} == {frozenset(group) for group in self.groups}


def _bucket(index: int, parameters: Sequence[Parameter]) -> Bucket:
    first = parameters[0]
    compressed = _parts((parameter.name, parameter.shape) for parameter in parameters if not parameter.exact)
    exact = _parts((parameter.name, parameter.shape) for parameter in parameters if parameter.exact)
    embeddings = sum(parameter.numel for parameter in parameters if parameter.embedding and not parameter.exact)
    return Bucket(f"bucket{index}", compressed, exact, first.dtype, first.device, index, embeddings)


def _parts(shapes: Iterable[tuple[str, Shape]]) -> tuple[Part, ...]:
    parts, start = [], 0
    for name, shape in shapes:
        stop = start + math.prod(shape)
        parts.append(Part(name, shape, start, stop))
        start = stop
    return tuple(parts)


@dataclasses.dataclass(frozen=True)
class InPlace:
    """Where the tensors of a bucket lie in one buffer, so that loops can read and write them there."""

    parts: Spread
    exact: Spread

    @classmethod
    def of(cls, bucket: Bucket, tensors: Mapping[str, Tensor], buffer: Tensor) -> InPlace | None:
        """None if they do not, or not as flat float32 of the host.

        >>> buffer = torch.zeros(12)
        >>> tensors = {"w": buffer[4:].view(4, 2), "b": buffer[:4]}
        >>> found = InPlace.of(Bucket.of("layer", tensors, exact=["b"]), tensors, buffer)
        >>> found.parts.table.tolist(), found.exact.table.tolist()
        ([[0, 8, 4]], [[0, 4, 0]])
        """
        if buffer.dtype != torch.float32 or buffer.device.type != "cpu" or not buffer.is_contiguous():
            return None
        begin, flat, found = buffer.data_ptr(), buffer.view(-1), list[Spread]()
        for parts in (bucket.parts, bucket.exact):
            runs = []
            for part in parts:
                tensor = tensors[part.name]
                place = (tensor.data_ptr() - begin) // flat.element_size()
                inside = 0 <= place <= flat.numel() - tensor.numel() and tensor.dtype == flat.dtype
                if not inside or not tensor.is_contiguous():
                    return None
                runs.append((place, tensor.numel()))
            found.append(Spread.of(flat, _joined(runs)))
        return cls(*found)


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one run."""
    found: list[tuple[int, int]] = []
    for place, length in runs:
        if found and sum(found[-1]) == place:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((place, length))
    return found


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
