"""Top-k in chunks of a fixed length: all chunks send as many elements, and a position within one needs few bits."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from ..comm import streams
from ..errors import MessageError
from ..kernels import Selection
from ..recipe.registry import register
from ..rng import Draw, Key
from .base import State
from .frames import padded
from .indices import planes_bytes, read_planes, write_planes
from .select import as_selection
from .sparse import SparseCodec

_MAGNITUDE = 0x7FFFFFFF


@register
class ChunkedTopK(SparseCodec):
    """Keeps the largest elements of every chunk; their positions within it travel in few bits (12 for 4096 elements).

    `ratio`: share of every chunk to keep, at least one element. `chunk`: its length, 64 to 65536, a power of two.
    `values`: codec of the kept values. SparseLoCo keeps 64 of 4096 (`chunked_top_k:0.015625`); it cuts matrices into
    chunks of 64 x 64, here they are runs. The error is at most (1 - ratio) |x|^2. Of equal elements any may be kept.
    If an element is not finite, it travels as NaN and all others as 0.
    Reference: Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706.

    >>> codec = chunked_top_k(0.02, chunk=64)
    >>> codec.decode(codec.encode(torch.arange(1.0, 129.0))).nonzero().view(-1)
    tensor([ 63, 127])
    """

    name: ClassVar[str] = "chunked_top_k"
    examples: ClassVar[tuple[str, ...]] = ("chunked_top_k:0.015625", "chunked_top_k:0.1,chunk=64")
    chooses: ClassVar[bool] = True
    chunk: int = field(default=4096, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = isinstance(self.chunk, int) and 64 <= self.chunk <= 65536 and self.chunk & (self.chunk - 1) == 0
        self._require(fits, f"chunk is a power of two from 64 to 65536, not {self.chunk}: use 4096")

    def _of_chunk(self, length: int) -> int:
        return min(length, max(1, round(self.ratio * length)))

    def k(self, numel: int) -> int:
        full, last = divmod(numel, self.chunk)
        return full * self._of_chunk(self.chunk) + (self._of_chunk(last) if last else 0)

    def _kept_energy(self, numel: int) -> float:
        full, last = divmod(numel, self.chunk)
        lengths = ([self.chunk] if full else []) + ([last] if last else [])
        return min((self._of_chunk(length) / length for length in lengths), default=1.0)

    # -------------------------------------------------------------------------------------------------- selection

    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        places = self._largest(x)
        return as_selection(x[places], places)

    def _select_resident(self, x: Tensor, key: Key) -> Selection:
        return self._select(x, key, {})

    def _select_non_finite(self, x: Tensor, key: Key) -> Selection:
        places = self._largest(x)
        values = x[places]
        return as_selection(torch.where(values.isfinite(), 0.0, torch.nan), places)

    def _largest(self, x: Tensor) -> Tensor:
        """Positions, increasing; inf and NaN are the largest."""
        magnitude = x.view(torch.int32) & _MAGNITUDE
        full = x.numel() // self.chunk
        found = []
        if full:
            rows = magnitude[: full * self.chunk].view(full, self.chunk)
            starts = torch.arange(full, device=x.device)[:, None] * self.chunk
            found.append((_top(rows, self._of_chunk(self.chunk)) + starts).view(-1))
        if rest := x.numel() - full * self.chunk:
            found.append(_top(magnitude[full * self.chunk :], self._of_chunk(rest)) + full * self.chunk)
        return torch.cat(found)

    # --------------------------------------------------------------------------------------------------- messages

    @property
    def _bits(self) -> int:
        return self.chunk.bit_length() - 1

    def positions_bytes(self, numel: int) -> int:
        return padded(planes_bytes(self.k(numel), self._bits)) if numel else 0

    def body_bytes(self, numel: int, *, shape: tuple[int, ...] | None = None) -> int:
        return self.positions_bytes(numel) + self.values.body_bytes(self.k(numel)) if numel else 0

    def _values_at(self, numel: int) -> int:
        return self.positions_bytes(numel)

    def _assemble(self, found: Selection, body: Tensor, numel: int, key: Key, state: State) -> None:
        at = self._values_at(numel)
        self._write_positions(found.indices, body[:at])
        self._pack_values(found, body[at:], self.k(numel), key, state)

    def _write_positions(self, indices: Tensor, region: Tensor) -> None:
        region.zero_()
        write_planes(region, indices & (self.chunk - 1), indices.numel(), self._bits)

    def pack_positions(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        self._check_size(x.numel())
        packed = torch.empty(self.positions_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        self._write_positions(self._largest(x).to(torch.int32), packed)
        return packed

    def unpack_positions(self, packed: Tensor, numel: int) -> Tensor:
        k = self.k(numel)
        within = read_planes(packed, k, k, self._bits)
        of_chunk = self._of_chunk(self.chunk)
        numbers = torch.arange(k, dtype=torch.int32, device=packed.device) // of_chunk
        found = (numbers.clamp_(max=max(0, -(-numel // self.chunk) - 1)) << self._bits) | within
        return self._checked(found, numel)

    def _checked(self, found: Tensor, numel: int) -> Tensor:
        if streams.resident(found.device):
            return found.clamp_(0, numel - 1)
        if found.numel() and (int(found[-1]) >= numel or not bool((found[1:] > found[:-1]).all())):
            raise MessageError("the positions do not increase within a chunk, or leave the tensor: damaged message")
        return found

    def positions_and_values(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
        at = self._values_at(numel)
        return self.unpack_positions(body[:at], numel), self._unpack_values(body[at:], self.k(numel), key)


def _top(magnitude: Tensor, k: int) -> Tensor:
    """Places of the k largest along the last dimension, increasing."""
    return magnitude.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values


chunked_top_k = ChunkedTopK
