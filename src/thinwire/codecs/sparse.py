"""What all codecs that keep some of the elements share: the message, the memory, and ways to find the largest.

    body of a `Sparsifier`: count 4 | positions, padded to 4 | `values` codec of `capacity` values       (fixed size)

A non-finite element counts as larger than every finite one. If there is any, the message carries NaN at the first
`capacity` non-finite positions and nothing else: every rank gets the news, and no estimate is made from such data.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..errors import OptionError
from ..kernels import Selection
from ..rng import Draw, Key
from .base import Codec, Shape, State, padded
from .cast import Fp32
from .indices import INDEX_CODES, choose_index_code, decode_indices, encode_indices, index_bytes

_COUNT_BYTES = 4
_VALUES = 1  # purposes of folded keys: independent of what the values codec and the selection draw from the same key
_LARGEST_FINITE = torch.finfo(torch.float32).max
_LARGEST_FINITE_BITS = 0x7F7FFFFF
_MAGNITUDE = 0x7FFFFFFF
_SAMPLE_STRIDE = 63
_WORTH_SAMPLING = 1 << 15


# ---------------------------------------------------------------------------------------------- finding the largest


def as_selection(values: Tensor, indices: Tensor) -> Selection:
    """A selection whose threshold nobody asks about."""
    return Selection(values, indices.to(torch.int32), indices.numel())


def _pick(found: Selection, places: Tensor) -> Selection:
    """Part of a selection; `places` count within it."""
    places = places.to(torch.int64)
    return as_selection(found.values[places], found.indices[places])


def non_finite(x: Tensor, capacity: int) -> Selection:
    """NaN at the first `capacity` positions of inf or NaN."""
    found = kernels.select(x, _LARGEST_FINITE, capacity=capacity)
    return found._replace(values=torch.full_like(found.values, math.nan))


def select_all(x: Tensor, threshold: float, *, expected: int) -> Selection:
    """Every element with |x| > threshold; one pass if no more than `expected` are found, else two."""
    found = kernels.select(x, threshold, capacity=expected)
    count = found.above
    return found if count <= expected else kernels.select(x, threshold, capacity=count)


def sampled_threshold(x: Tensor, k: int, *, stride: int, start: int = 0) -> float:
    """A threshold that about k elements exceed, from every `stride`-th element.

    It is the next float below the sample's quantile, so that `>` keeps the quantile itself (equal magnitudes!), and
    never above the largest finite float, so that `>` always finds inf and NaN.

    >>> sampled_threshold(torch.tensor([1.0, -3.0, 2.0, -3.0]), 2, stride=1) < 3.0
    True
    """
    sample = x[start::stride]
    rank = min(max(1, math.ceil(k * sample.numel() / x.numel())), sample.numel())
    return _just_below(_smallest_of_largest(sample, rank))


def _smallest_of_largest(x: Tensor, k: int) -> int:
    """The k-th largest magnitude as an integer: float bits without the sign keep the order, NaN last."""
    magnitude = x.view(torch.int32) & _MAGNITUDE
    if 2 * k > x.numel():  # topk takes longer the more it finds
        return int(magnitude.topk(x.numel() - k + 1, largest=False, sorted=False).values.max())
    return int(magnitude.topk(k, sorted=False).values.min())


def _just_below(bits: int) -> float:
    bits = min(max(bits - 1, 0), _LARGEST_FINITE_BITS)
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def _candidates(x: Tensor, k: int) -> Selection | None:
    """Somewhat more than the k largest, if a sample finds a threshold for that."""
    in_sample = k / _SAMPLE_STRIDE
    wanted = math.ceil((in_sample + 4 * math.sqrt(in_sample) + 4) * _SAMPLE_STRIDE)  # 4 standard deviations above k
    if x.numel() < _WORTH_SAMPLING or 4 * wanted > x.numel():
        return None
    found = kernels.select(x, sampled_threshold(x, wanted, stride=_SAMPLE_STRIDE), capacity=2 * wanted)
    return found if k <= found.above <= 2 * wanted else None


def largest(x: Tensor, k: int) -> Selection:
    """Exactly the k largest magnitudes, in order of position; of equal ones the first. inf and NaN are the largest.

    Magnitudes are compared as integers. A sampled threshold leaves a few candidates for the exact choice where that
    works; the result is the same without it.

    >>> largest(torch.tensor([1.0, -3.0, 2.0, 3.0, 3.0]), 2).indices
    tensor([1, 3], dtype=torch.int32)
    """
    if k >= x.numel():
        return as_selection(x.clone(), torch.arange(x.numel(), device=x.device))
    candidates = _candidates(x, k)
    if candidates is None:
        return _largest_in(x, k)
    return _pick(candidates, _largest_in(candidates.values, k).indices)


def _largest_in(x: Tensor, k: int) -> Selection:
    smallest = _smallest_of_largest(x, k)
    if smallest == 0:  # then zeros are needed to make it k
        found = as_selection(x, torch.arange(x.numel(), device=x.device))
    else:
        found = select_all(x, _just_below(smallest), expected=k)
    if found.values.numel() == k:
        return found
    magnitude = found.values.view(torch.int32) & _MAGNITUDE
    above, ties = magnitude > smallest, magnitude == smallest
    keep = above | (ties & (ties.cumsum(0, dtype=torch.int32) <= k - above.sum()))
    return _pick(found, keep.nonzero().view(-1))


def largest_of(found: Selection, k: int) -> Selection:
    """The k largest of a selection; all of it if it holds no more."""
    return found if found.values.numel() <= k else _pick(found, largest(found.values, k).indices)


# ----------------------------------------------------------------------------------------------------------- codecs


@dataclass(frozen=True, repr=False)
class SparseCodec(Codec):
    """Keeps a share `ratio` of the elements and sends them through the codec `values`."""

    sparse: ClassVar[bool] = True
    most_elements: ClassVar[int] = 2**31 - 1  # positions are int32
    ratio: float
    values: Codec = field(default=Fp32(), kw_only=True, metadata={"inner": True})

    def __post_init__(self) -> None:
        number = isinstance(self.ratio, (int, float))
        self._require(
            number and 0 < self.ratio <= 1,
            f"ratio is the share to keep, above 0 and at most 1, not {self.ratio}: use 0.01",
        )
        object.__setattr__(self, "ratio", float(self.ratio))  # top_k(1) and top_k(1.0) are one codec, also on the wire
        self._require(
            not self.values.sparse,
            f"its values cannot be made sparse again by {self.values.name}: lower the ratio instead",
        )

    def k(self, numel: int) -> int:
        """How many of `numel` elements the codec aims at.

        >>> from thinwire.codecs import top_k
        >>> top_k(0.01).k(1000), top_k(0.01).k(3), top_k(0.01).k(0)
        (10, 1, 0)
        """
        return min(numel, max(1, round(self.ratio * numel)))

    def capacity(self, numel: int) -> int:
        """How many elements fit into a message, at most."""
        return self.k(numel)

    # ------------------------------------------------------------------------------- what a kind of codec defines

    @abstractmethod
    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        """What to send of flat float32 `x`, at most `capacity` elements by position. If anything in x is not finite,
        the selection must hold a non-finite value: that is how the news is noticed."""

    @abstractmethod
    def _news(self, x: Tensor, key: Key) -> Selection:
        """What to send of an `x` that is not finite."""

    @abstractmethod
    def _assemble(self, found: Selection, body: Tensor, numel: int, key: Key, state: State) -> None:
        """Write the body that carries a selection."""

    @abstractmethod
    def _values_at(self, numel: int) -> int:
        """Where in the body the values begin."""

    @abstractmethod
    def _take_apart(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
        """Positions and values of a body."""

    # ------------------------------------------------------------------------------------------------------ facts

    def _value_delta(self, numel: int) -> float | None:
        """Which part of the kept energy the values codec surely keeps."""
        values = self.capacity(numel)
        if self.values.unbiased:
            omega = self.values.omega(values)
            return 1 - omega if omega is not None and omega < 1 else None
        return self.values.delta(values)

    def _kept_energy(self, numel: int) -> float:
        """Delta of the selection alone."""
        return 0.0

    def delta(self, numel: int) -> float | None:
        """The selection's times the values': lost is |x|^2 - |kept|^2 and of the kept (1 - delta_v) |kept|^2."""
        of_values = self._value_delta(numel)
        return None if of_values is None else self._kept_energy(numel) * of_values

    # --------------------------------------------------------------------------------------------------- messages

    def new_state(self) -> State:
        inner = self.values.new_state()
        return {"values": inner} if inner else {}

    def _pack_values(self, found: Selection, body: Tensor, capacity: int, key: Key, state: State) -> None:
        values = found.values
        if values.numel() < capacity:
            values = torch.zeros(capacity, dtype=torch.float32, device=values.device)
            values[: found.values.numel()] = found.values
        self.values._pack(values, body, key.fold(_VALUES), state.get("values", {}))

    def _unpack_values(self, body: Tensor, capacity: int, key: Key) -> Tensor:
        values = torch.zeros(capacity, dtype=torch.float32, device=body.device)
        self.values._add(body, values, key.fold(_VALUES), (capacity,))
        return values

    def _pack(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        self._check_size(flat.numel())
        found = self._select(flat, key, state)
        if not kernels.all_finite(found.values):
            found = self._news(flat, key)
        self._assemble(found, body, flat.numel(), key, state)

    def _check_size(self, numel: int) -> None:
        if numel > self.most_elements:
            raise OptionError(
                f"{self.name} addresses at most {self.most_elements} elements: split the tensor of {numel}"
            )

    def _add(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        indices, values = self._take_apart(body, out.numel(), key)
        kernels.scatter_add(out, indices, values)

    def decode_sparse(self, message: Tensor, *, numel: int | None = None) -> tuple[Tensor, Tensor]:
        """Positions (int32, increasing) and float32 values of a message, for who adds messages without a dense tensor.

        With `numel`, a message of a tensor of another length is refused.

        >>> from thinwire.codecs import top_k
        >>> top_k(0.5).decode_sparse(top_k(0.5).encode(torch.tensor([1.0, -3.0, 2.0, 0.0])))
        (tensor([1, 2], dtype=torch.int32), tensor([-3.,  2.]))
        """
        body, claimed, key = self._open(message, None, numel)
        if claimed == 0:
            return body.new_empty(0, dtype=torch.int32), body.new_empty(0, dtype=torch.float32)
        return self._take_apart(body, claimed, key)

    # ----------------------------------------------------------------------------------------------------- memory

    def _select_taking(self, x: Tensor, key: Key, state: State) -> Selection:
        """Take the selection out of flat `x`."""
        found = self._select(x, key, state)
        if kernels.all_finite(found.values):
            kernels.scatter_add(x, found.indices, -found.values)
            return found
        return self._news(x, key)

    def _select_remembering(self, memory: Tensor, gradient: Tensor, key: Key, state: State) -> Selection:
        """memory += gradient, then take the selection out of it. What is not finite is sent and forgotten."""
        memory += gradient
        found = self._select_taking(memory, key, state)
        if not kernels.all_finite(found.values):
            memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return found

    def encode_taking(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        return self._encode_leaving(x, None, draw, state)

    def encode_remembering(
        self, memory: Tensor, gradient: Tensor, *, draw: Draw | None = None, state: State | None = None
    ) -> Tensor:
        """memory += gradient, encode it, and leave in memory what the message does not carry, also by rounding.

        The message is that of `encode(memory + gradient)`. If the sum is not finite, the message says so and the memory
        keeps the finite rest of it.
        """
        return self._encode_leaving(memory, gradient.detach().reshape(-1), draw, state)

    def _encode_leaving(
        self, memory: Tensor, gradient: Tensor | None, draw: Draw | None, state: State | None
    ) -> Tensor:
        self._check_size(memory.numel())
        key = (draw or Draw()).key()
        state = self.new_state() if state is None else state
        flat = memory.reshape(-1)
        message, body = self._blank(flat.numel(), None, memory.device)
        if flat.numel():
            if gradient is None:
                found = self._select_taking(flat, key, state)
            else:
                found = self._select_remembering(flat, gradient, key, state)
            self._assemble(found, body, flat.numel(), key, state)
            if not isinstance(self.values, Fp32):
                self._remember_rounding(flat, found, body, key)
            if not memory.is_contiguous():  # then `flat` is a copy
                memory.copy_(flat.view(memory.shape))
        return self._sign(message, body, flat.numel(), key)

    def _remember_rounding(self, memory: Tensor, found: Selection, body: Tensor, key: Key) -> None:
        numel, count = memory.numel(), found.values.numel()
        sent = self._unpack_values(body[self._values_at(numel) :], self.capacity(numel), key)[:count]
        lost = (found.values - sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # news leaves no trace
        kernels.scatter_add(memory, found.indices, lost)


@dataclass(frozen=True, repr=False)
class Sparsifier(SparseCodec):
    """Sends values together with their positions, in the index code `indices` (`auto`: the smallest)."""

    indices: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("auto", *INDEX_CODES)
        self._require(self.indices in known, f"indices={self.indices!r} is unknown: use one of {', '.join(known)}")

    def index_code(self, numel: int) -> str:
        """The code in which the positions of `numel` elements travel."""
        return choose_index_code(self.capacity(numel), numel) if self.indices == "auto" else self.indices

    def _layout(self, numel: int) -> tuple[int, str, int, int]:
        """(capacity, index code, end of the positions, start of the values)."""
        capacity, code = self.capacity(numel), self.index_code(numel)
        end = _COUNT_BYTES + index_bytes(code, capacity, numel)
        return capacity, code, end, padded(end)

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        if numel == 0:
            return 0
        capacity, _, _, values_at = self._layout(numel)
        return values_at + self.values.body_bytes(capacity)

    def _values_at(self, numel: int) -> int:
        return self._layout(numel)[3]

    def _news(self, x: Tensor, key: Key) -> Selection:
        return non_finite(x, self.capacity(x.numel()))

    def _assemble(self, found: Selection, body: Tensor, numel: int, key: Key, state: State) -> None:
        capacity, _, _, values_at = self._layout(numel)
        self._write_positions(found.indices, body[:values_at], numel)
        self._pack_values(found, body[values_at:], capacity, key, state)

    def _write_positions(self, indices: Tensor, body: Tensor, numel: int) -> None:
        capacity, code, end, _ = self._layout(numel)
        body[:_COUNT_BYTES] = torch.tensor([indices.numel()], dtype=torch.int32).view(torch.uint8)
        body[_COUNT_BYTES:end] = encode_indices(code, indices, capacity=capacity, numel=numel)
        body[end:] = 0

    # ---------------------------------------------------------------- positions alone, which several ranks may share

    def positions_bytes(self, numel: int) -> int:
        """Exact size of `pack_positions`."""
        return self._values_at(numel) if numel else 0

    def pack_positions(self, x: Tensor, *, draw: Draw | None = None, state: State | None = None) -> Tensor:
        """The positions that this codec chooses in flat `x`, as bytes; their number may differ, their size does not.

        >>> from thinwire.codecs import top_k
        >>> packed = top_k(0.5).pack_positions(torch.tensor([1.0, -3.0, 2.0, 0.0]))
        >>> top_k(0.5).unpack_positions(packed, 4)
        tensor([1, 2], dtype=torch.int32)
        """
        numel = x.numel()
        self._check_size(numel)
        key = (draw or Draw()).key()
        found = self._select(x, key, self.new_state() if state is None else state)
        packed = torch.empty(self.positions_bytes(numel), dtype=torch.uint8, device=x.device)
        self._write_positions(found.indices, packed, numel)
        return packed

    def unpack_positions(self, packed: Tensor, numel: int) -> Tensor:
        """What `pack_positions` chose: int32, increasing."""
        capacity, code, end, _ = self._layout(numel)
        count = int.from_bytes(bytes(packed[:_COUNT_BYTES].tolist()), "little")
        return decode_indices(code, packed[_COUNT_BYTES:end], count, capacity=capacity, numel=numel)

    def _take_apart(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
        capacity, _, _, values_at = self._layout(numel)
        indices = self.unpack_positions(body, numel)
        return indices, self._unpack_values(body[values_at:], capacity, key)[: indices.numel()]
