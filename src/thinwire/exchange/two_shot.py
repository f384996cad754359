"""Two-shot: every rank adds up one piece of all ranks in float32 and sends the sum back compressed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape
from ..codecs.low_rank import LowRank
from ..comm.network import Network, Pending
from ..errors import OptionError
from .base import EXACT_BYTES, Cargo, Delivery, Exchange, delivered, sum_rows
from .script import Op, Script, Send, Wait, Work

_GRAIN = 1024  # pieces are multiples of this many elements, which all blocks and rotations divide
_MOST_WAVES = 3
_WORTH_A_WAVE = 1 << 16  # elements of one rank's piece: a message of fewer costs more to handle than to send


@dataclasses.dataclass(frozen=True, repr=False)
class TwoShot(Exchange):
    """Each rank adds one piece in float32 and sends it back compressed: as many bytes for any number of ranks.

    `back`: bits of the second shot, 0 for those of the first. The second shot's error does not average out over the
    ranks, so it deserves at least as many bits. `feedback`: what the second shot rounds away is added to the next sum;
    a memory in front of the codec does the same for the first shot. Sparse codecs need it: ranks choose different
    elements, so that most of their sum has to wait.

    >>> from thinwire.codecs import rotated
    >>> TwoShot(4).accepts(rotated(3)) is None
    True
    >>> TwoShot(8).accepts(rotated(3))
    'two_shot cannot send 8 bits back, rotated: bits must be 1, 2, 3 or 4, got 8'
    """

    name = "two_shot"

    back: int = 0
    feedback: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._require(
            isinstance(self.back, int) and 0 <= self.back <= 8,
            f"back is 1 to 8 bits for the second shot, or 0 for those of the first, got {self.back}",
        )

    def accepts(self, codec: Codec) -> str | None:
        if codec.sparse and not self.feedback:
            return (
                f"two_shot sends back a sum, which is no longer sparse after {codec.name}: "
                f"write {codec.spec()}|two_shot:feedback=true, or use all_gather or shared_top_k"
            )
        if isinstance(codec, LowRank):
            return "two_shot cuts a tensor into pieces, and low_rank needs the whole matrix: use all_reduce"
        try:
            self.codec_back(codec)
        except OptionError as refusal:
            return str(refusal)
        return None

    def codec_back(self, codec: Codec) -> Codec:
        """The codec of the second shot.

        >>> from thinwire.codecs import rotated
        >>> TwoShot(4).codec_back(rotated(3))
        rotated(4)
        """
        if not self.back:
            return codec
        if "bits" not in codec.option_names():
            raise OptionError(f"{codec.name} has no bits to choose for the way back: write two_shot without a number")
        try:
            return dataclasses.replace(codec, **{"bits": self.back})  # as a dict: only some codecs have bits
        except OptionError as refusal:
            raise OptionError(f"two_shot cannot send {self.back} bits back, {refusal}") from None

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        """Of the first rank, whose piece is the longest."""
        back, waves = self.codec_back(codec), _waves(numel, world_size, exact)
        first, middle, last = list[Op](), list[Op](), list[Op]()
        for wave in waves:
            own = wave.places[0].stop - wave.places[0].start
            others = sum(place.stop - place.start for place in wave.places) - own
            there, returned = f"there{wave.suffix}", f"back{wave.suffix}"
            if others:
                first.append(Work("encode", others, codec, world_size - 1))
            first.append(Send("all_to_all", world_size * wave.row_bytes(codec), there))
            middle.append(Wait(there))
            if own:
                middle.append(Work("add", (world_size - 1) * own, codec, world_size - 1))
                middle.append(Work("pass", own))
                middle.append(Work("encode", own, back))
            middle.append(Send("all_gather", wave.row_bytes(back), returned))
            last.append(Wait(returned))
            if own:
                last.append(Work("put", own + others, back, world_size))
        return [*first, *middle, *last, Work("pass", numel // 2)]  # only read

    # ------------------------------------------------------------------------------------------------- running

    def mean(self, codec: Codec, cargo: Cargo, network: Network) -> Delivery:
        """In waves: while one is on its way, the next is compressed and the last is added up."""
        codec_back = self.codec_back(codec)
        waves = _waves(cargo.u.numel(), network.world_size, cargo.exact.numel())
        first = [self._start_first_shot(codec, cargo, wave, network) for wave in waves]
        mine = list(pieces(cargo.u.numel(), network.world_size))[network.rank]
        total = self._own_piece(cargo, mine)
        kept = cargo.back if self.feedback and cargo.back is not None and cargo.back.numel() == total.numel() else None
        second = []
        for wave, under_way in zip(waves, first, strict=True):
            own = slice(wave.places[network.rank].start - mine.start, wave.places[network.rank].stop - mine.start)
            exact_sum = self._add_up(codec, wave, under_way.wait(), total[own], network.rank)
            old = None if kept is None else kept[own]
            row = self._row_back(codec_back, cargo, wave, (total[own], exact_sum), old)
            second.append(network.start_all_gather(row))
        if self.feedback:
            cargo.back = total
        out, exact = cargo.room(), torch.empty_like(cargo.exact)
        for wave, under_way in zip(waves, second, strict=True):
            self._take_out(codec_back, wave, under_way.wait(), out, exact)
        return delivered(out, exact)

    def _own_piece(self, cargo: Cargo, mine: slice) -> Tensor:
        """What this rank brings to the piece it adds up: no message says it, so all of it counts as sent."""
        own = cargo.u[mine]
        if not (cargo.remembers or self.feedback):
            return own  # to be added to in place: nobody reads it again
        total = own.clone()
        own.zero_()
        return total

    @staticmethod
    def _start_first_shot(codec: Codec, cargo: Cargo, wave: _Wave, network: Network) -> Pending:
        """To every other rank its piece of this wave, and to all their shares of the exact elements."""
        rows = torch.empty(len(wave.places), wave.row_bytes(codec), dtype=torch.uint8, device=cargo.u.device)
        encode = codec.encode_taking if cargo.remembers else codec.encode
        exact_at = wave.message_bytes(codec)
        for to, (row, place, exact) in enumerate(zip(rows, wave.places, wave.exact, strict=True)):
            size = 0
            if place.stop > place.start and to != network.rank:
                message = encode(cargo.u[place], draw=cargo.drawn(f"to{to}{wave.suffix}"))
                size = message.numel()
                row[:size] = message
            row[size:] = 0
            row[exact_at : exact_at + EXACT_BYTES * (exact.stop - exact.start)] = cargo.exact[exact].view(torch.uint8)
        return network.start_all_to_all(rows)

    @staticmethod
    def _add_up(codec: Codec, wave: _Wave, rows: Tensor, total: Tensor, rank: int) -> Tensor:
        """`total` becomes the mean of this rank's piece; returns that of its share of the exact elements."""
        size, scale = total.numel(), 1.0 / len(rows)
        for sender, row in enumerate(rows) if size else ():
            if sender != rank:
                codec.add(row[: codec.wire_bytes(size)], total)
        total.mul_(scale)
        return sum_rows(rows[:, wave.message_bytes(codec) :], scale)

    def _row_back(
        self, codec: Codec, cargo: Cargo, wave: _Wave, own: tuple[Tensor, Tensor], kept: Tensor | None
    ) -> Tensor:
        """The second shot of this rank. With feedback, `own` is left with what the message does not say."""
        total, exact_sum = own
        held = _add_what_was_kept_back(total, kept, cargo)
        row = torch.empty(wave.row_bytes(codec), dtype=torch.uint8, device=total.device)
        size = 0
        if total.numel():
            encode = codec.encode_taking if self.feedback else codec.encode
            message = encode(total, draw=cargo.drawn(f"back{wave.suffix}"))
            size = message.numel()
            row[:size] = message
            if held is not None:
                total.add_(held)
        exact_at = wave.message_bytes(codec)
        row[size:exact_at] = 0
        row[exact_at:] = exact_sum.view(torch.uint8)
        return row

    @staticmethod
    def _take_out(codec: Codec, wave: _Wave, rows: Tensor, out: Tensor, exact: Tensor) -> None:
        """Every rank, the owner too, decodes the same bytes."""
        exact_at = wave.message_bytes(codec)
        for row, place, share in zip(rows, wave.places, wave.exact, strict=True):
            if place.stop > place.start:
                codec.put(row[: codec.wire_bytes(place.stop - place.start)], out[place])
            if share.stop > share.start:
                exact[share] = row[exact_at:].view(torch.float32)[: share.stop - share.start]


def _add_what_was_kept_back(total: Tensor, kept: Tensor | None, cargo: Cargo) -> Tensor | None:
    """Returns what is kept once more: of parameters that no rank seems to use."""
    if kept is None:
        return None
    held = torch.where(total == 0, kept, 0.0) if cargo.may_be_unused else None
    total += kept if held is None else kept - held
    return held


def pieces(numel: int, world_size: int) -> Iterator[slice]:
    """Which elements each rank adds up: whole blocks, as even as these allow.

    >>> list(pieces(5000, 3))
    [slice(0, 2048, None), slice(2048, 4096, None), slice(4096, 5000, None)]
    """
    size = -(-numel // (world_size * _GRAIN)) * _GRAIN
    for rank in range(world_size):
        yield slice(min(rank * size, numel), min((rank + 1) * size, numel))


@dataclasses.dataclass(frozen=True)
class _Wave:
    """A part of every rank's piece, which travels together. The exact elements go with the first."""

    number: int
    places: Sequence[slice]
    exact: Sequence[slice]

    @property
    def suffix(self) -> str:
        """To what its messages are drawn by."""
        return f".{self.number}" if self.number else ""

    def message_bytes(self, codec: Codec) -> int:
        """Of the longest message, which is the first rank's."""
        longest: int = self.places[0].stop - self.places[0].start
        return codec.wire_bytes(longest) if longest else 0

    def row_bytes(self, codec: Codec) -> int:
        share: int = self.exact[0].stop - self.exact[0].start
        return self.message_bytes(codec) + EXACT_BYTES * share


@functools.lru_cache(maxsize=256)  # asked several times a step, for the same few buckets
def _waves(numel: int, world_size: int, exact: int) -> Sequence[_Wave]:
    """Few, of equal size; small tensors travel in one."""
    whole = list(pieces(numel, world_size))
    longest = whole[0].stop
    count = min(_MOST_WAVES, max(1, longest // _WORTH_A_WAVE))
    step = -(-longest // (count * _GRAIN)) * _GRAIN
    share = -(-exact // world_size)
    waves = []
    for number in range(count):
        places = [
            slice(min(piece.start + number * step, piece.stop), min(piece.start + (number + 1) * step, piece.stop))
            for piece in whole
        ]
        ends = [0 if number else min(rank * share, exact) for rank in range(world_size + 1)]
        waves.append(_Wave(number, places, [slice(*pair) for pair in itertools.pairwise(ends)]))
    return tuple(waves)


two_shot = TwoShot
