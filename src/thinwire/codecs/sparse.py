"""The base of codecs that send some of the elements: their message, and the rest of a tensor.

    body of a `Sparsifier`: count 4 | positions, padded to 4 | `values` codec of `capacity` values       (fixed size)

A non-finite element counts as larger than every finite one. If there is any, the message carries NaN at the first
`capacity` non-finite positions and nothing else: every rank notices, and no estimate is made from such data. On a
device whose values must stay there (`streams.resident`), a message always carries `capacity` elements, and the
non-finite ones among them are what ranks notice.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..comm import streams
from ..errors import OptionError
from ..kernels import Selection
from ..rng import Draw, Key
from .base import Codec, Shape, State
from .cast import Fp32
from .frames import open_frame, padded
from .indices import INDEX_CODES, choose_index_code, decode_indices, encode_indices, index_bytes
from .select import largest_resident, non_finite
from .stages import Trials

_COUNT_BYTES = 4
_VALUES = 1  # purposes of folded keys: independent of what the values codec and the selection draw from the same key


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

    @property
    def density(self) -> float:
        return self.ratio

    @property
    def values_codec(self) -> Codec:
        return self.values

    def accepts_inner(self, inner: Codec) -> str | None:
        if inner.sparse:
            return f"{self.name} and {inner.name} both choose elements: keep one of them"
        if inner.whole_tensors:
            reason = f"{inner.name} needs whole tensors, and {self.name} leaves single values"
            return f"{reason}: write {self.text()}|abs_max:4"
        return None

    def milder(self) -> list[Codec]:
        return [self, *(replace(self, values=values) for values in self.values.milder())]

    def not_summable(self) -> str:
        return (
            f"{self.name} keeps other positions on every rank, so its messages cannot be added: "
            "use all_gather, or shared_top_k"
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
        the selection must hold a non-finite value: that is how it is noticed."""

    @abstractmethod
    def _select_non_finite(self, x: Tensor, key: Key) -> Selection:
        """What to send of an `x` that is not finite."""

    @abstractmethod
    def _assemble(self, found: Selection, body: Tensor, numel: int, key: Key, state: State) -> None:
        """Write the body that carries a selection."""

    @abstractmethod
    def _values_at(self, numel: int) -> int:
        """Where in the body the values begin."""

    @abstractmethod
    def positions_and_values(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
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

    def delta(self, numel: int, *, shape: Shape | None = None) -> float | None:
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
        self.values.write(values, body, key.fold(_VALUES), state.get("values", {}))

    def _unpack_values(self, body: Tensor, capacity: int, key: Key) -> Tensor:
        values = torch.zeros(capacity, dtype=torch.float32, device=body.device)
        self.values.add_body(body, values, key.fold(_VALUES), (capacity,))
        return values

    def _selected(self, x: Tensor, key: Key, state: State) -> tuple[Selection, bool]:
        """What to send of flat `x`, and whether it stands for an x that is not finite (never told on a device)."""
        self._check_size(x.numel())
        if streams.resident(x.device):
            return self._select_resident(x, key), False
        found = self._select(x, key, state)
        return (found, False) if kernels.all_finite(found.values) else (self._select_non_finite(x, key), True)

    def _select_resident(self, x: Tensor, key: Key) -> Selection:
        """As `_select`, `capacity` elements whatever the data, without a value read on the host."""
        return largest_resident(x, self.capacity(x.numel()))

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        self._assemble(self._selected(flat, key, state)[0], body, flat.numel(), key, state)

    def _check_size(self, numel: int) -> None:
        if numel > self.most_elements:
            raise OptionError(
                f"{self.name} addresses at most {self.most_elements} elements: split the tensor of {numel}"
            )

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        indices, values = self.positions_and_values(body, out.numel(), key)
        kernels.scatter_add(out, indices, values)

    def decode_sparse(self, message: Tensor, *, numel: int | None = None) -> tuple[Tensor, Tensor]:
        """Positions (int32, increasing) and float32 values of a message, for who adds messages without a dense tensor.

        With `numel`, a message of a tensor of another length is refused.

        >>> from thinwire.codecs import top_k
        >>> top_k(0.5).decode_sparse(top_k(0.5).encode(torch.tensor([1.0, -3.0, 2.0, 0.0])))
        (tensor([1, 2], dtype=torch.int32), tensor([-3.,  2.]))
        """
        body, claimed, key = open_frame(self, message, None, numel)
        if claimed == 0:
            return body.new_empty(0, dtype=torch.int32), body.new_empty(0, dtype=torch.float32)
        return self.positions_and_values(body, claimed, key)

    # --------------------------------------------------------------------------------------------- what is left

    def write_taking(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        self._leave(flat, self._take(flat, key, state), body, key, state)
        if not x.is_contiguous():  # then `flat` is a copy
            x.copy_(flat.view(x.shape))

    def write_compensated(
        self, gradient: Tensor, residual: Tensor, body: Tensor, key: Key, state: State, *, decay: float = 1.0
    ) -> None:
        flat = gradient.reshape(-1)
        found = None
        if not streams.resident(flat.device) and self.k(flat.numel()) < flat.numel():
            self._check_size(flat.numel())
            found = self._take_compensated(flat, residual.reshape(-1), key, state, decay)
        if found is None:
            torch.add(flat, residual.reshape(-1), alpha=decay, out=flat)
        if found is None or found.above < 0:
            found = self._take(flat, key, state)
        self._leave(flat, found, body, key, state)
        if not gradient.is_contiguous():
            gradient.copy_(flat.view(gradient.shape))

    def _take(self, x: Tensor, key: Key, state: State) -> Selection:
        """The selection, taken out of flat `x`."""
        found, non_finite = self._selected(x, key, state)
        if not non_finite:
            kernels.scatter_add(x, found.indices, -found.values)
        return found

    def _take_compensated(
        self, gradient: Tensor, residual: Tensor, key: Key, state: State, decay: float
    ) -> Selection | None:
        """The selection, taken out of u = gradient + decay * residual in one pass; `gradient` holds the rest.

        None if the codec has no such pass. A selection with `above` -1 says that `gradient` holds u and is not taken.
        """
        return None

    def _leave(self, rest: Tensor, found: Selection, body: Tensor, key: Key, state: State) -> None:
        """Write the body of what was taken; `rest` gets back what rounding the values loses."""
        self._assemble(found, body, rest.numel(), key, state)
        if not self.values.lossless:
            self._remember_rounding(rest, found, body, key)

    def _remember_rounding(self, memory: Tensor, found: Selection, body: Tensor, key: Key) -> None:
        numel, count = memory.numel(), found.values.numel()
        sent = self._unpack_values(body[self._values_at(numel) :], self.capacity(numel), key)[:count]
        lost = (found.values - sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        kernels.scatter_add(memory, found.indices, lost)


@dataclass(frozen=True, repr=False)
class Sparsifier(SparseCodec):
    """Sends values together with their positions, in the index code `indices` (`auto`: the smallest)."""

    chooses: ClassVar[bool] = True
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

    def _select_non_finite(self, x: Tensor, key: Key) -> Selection:
        return non_finite(x, self.capacity(x.numel()))

    def _assemble(self, found: Selection, body: Tensor, numel: int, key: Key, state: State) -> None:
        capacity, _, _, values_at = self._layout(numel)
        self._write_positions(found.indices, body[:values_at], numel)
        self._pack_values(found, body[values_at:], capacity, key, state)

    def _write_positions(self, indices: Tensor, body: Tensor, numel: int) -> None:
        capacity, code, end, _ = self._layout(numel)
        body[:_COUNT_BYTES].view(torch.int32).fill_(indices.numel())
        body[_COUNT_BYTES:end] = encode_indices(code, indices, capacity=capacity, numel=numel)
        body[end:] = 0

    def trials(self, given: Sequence[Tensor], draw: Draw) -> Trials:
        turns, state = itertools.cycle(given), self.new_state()
        select = (lambda: self.pack_positions(next(turns), draw=draw, state=state), given[0].numel())
        return {**super().trials(given, draw), "select": select}

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
        numel, state = x.numel(), self.new_state() if state is None else state
        self._check_size(numel)
        key = (draw or Draw()).key()
        found = self._select_resident(x, key) if streams.resident(x.device) else self._select(x, key, state)
        packed = torch.empty(self.positions_bytes(numel), dtype=torch.uint8, device=x.device)
        self._write_positions(found.indices, packed, numel)
        return packed

    def unpack_positions(self, packed: Tensor, numel: int) -> Tensor:
        """What `pack_positions` chose: int32, increasing."""
        capacity, code, end, _ = self._layout(numel)
        if streams.resident(packed.device):  # there a message is always full
            return decode_indices(code, packed[_COUNT_BYTES:end], capacity, capacity=capacity, numel=numel)
        count = int.from_bytes(bytes(packed[:_COUNT_BYTES].tolist()), "little")
        return decode_indices(code, packed[_COUNT_BYTES:end], count, capacity=capacity, numel=numel)

    def positions_and_values(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
        capacity, _, _, values_at = self._layout(numel)
        indices = self.unpack_positions(body, numel)
        return indices, self._unpack_values(body[values_at:], capacity, key)[: indices.numel()]
