"""Two-shot: every rank adds up one piece of all ranks in float32 and sends the sum back compressed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape
from ..codecs.stages import Work
from ..comm.network import Network, Pending
from ..errors import OptionError
from ..recipe.registry import register
from ..rng import Key
from .base import Exchange, shard_result, sum_rows
from .first_shot import GRAIN, add_rows, first_shot, own_piece, pieces, write_rows
from .request import Request, Result, result
from .script import EXACT_BYTES, Op, Script, Send, Wait

_MOST_WAVES = 3
_WORTH_A_WAVE = 1 << 16  # elements of one rank's piece: a message of fewer costs more to handle than to send


@register
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
    measures = False  # what it keeps back lies with the owner of a piece

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
        if codec.needs_shape:
            return f"two_shot cuts a tensor into pieces, and {codec.name} needs the whole matrix: use all_reduce"
        try:
            self.codec_back(codec)
        except OptionError as refusal:
            return str(refusal)
        return None

    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        return (codec, self.codec_back(codec))

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

    def mean(self, codec: Codec, request: Request, network: Network) -> Result:
        """In waves: while one is on its way, the next is compressed and the last is added up."""
        if request.shards is not None:
            return shard_result(first_shot(codec, request, network), request, network)
        rank, back = network.rank, self.codec_back(codec)
        waves = _waves(request.numel, network.world_size, request.exact.numel())
        first = [self._start_first_shot(codec, request, wave, network) for wave in waves]
        mine = pieces(request.numel, network.world_size)[rank]
        total = own_piece(request, mine, keep=request.remembers or self.feedback)
        held = request.back if self.feedback and request.back is not None else None
        held = held if held is not None and held.numel() == total.numel() else None
        second = []
        for wave, under_way in zip(waves, first, strict=True):
            own = slice(wave.places[rank].start - mine.start, wave.places[rank].stop - mine.start)
            rows = under_way.wait()
            add_rows(codec, request, rows, total[own], rank=rank, suffix=wave.suffix)
            exact_sum = sum_rows(rows[:, wave.message_bytes(codec) :], 1.0 / len(rows))
            row = self._row_back(back, request, wave, total[own], exact_sum, None if held is None else held[own])
            second.append(network.start_all_gather(row))
        if self.feedback:
            request.back, request.back_start = total, mine.start
        out, exact = request.room(), torch.empty_like(request.exact)
        for wave, under_way in zip(waves, second, strict=True):
            self._take_out(back, request, wave, under_way.wait(), out, exact)
        return result(out, exact)

    @staticmethod
    def _start_first_shot(codec: Codec, request: Request, wave: _Wave, network: Network) -> Pending:
        """To every other rank its piece of this wave, and to all their shares of the exact elements."""
        device = request.gradient.device
        rows = torch.empty(len(wave.places), wave.row_bytes(codec), dtype=torch.uint8, device=device)
        exact_at = wave.message_bytes(codec)
        for to, (row, place, exact) in enumerate(zip(rows, wave.places, wave.exact, strict=True)):
            written = codec.body_bytes(place.stop - place.start) if to != network.rank else 0
            row[written:] = 0
            if exact.stop > exact.start:
                end = exact_at + EXACT_BYTES * (exact.stop - exact.start)
                row[exact_at:end] = request.exact[exact].view(torch.uint8)
        write_rows(codec, request, wave.places, rows, rank=network.rank, suffix=wave.suffix)
        return network.start_all_to_all(rows)

    def _row_back(
        self, codec: Codec, request: Request, wave: _Wave, total: Tensor, exact_sum: Tensor, held: Tensor | None
    ) -> Tensor:
        """The second shot of this rank. With feedback, `total` is left with what the message does not say."""
        unused = _add_held_back(total, held, request)
        row = torch.empty(wave.row_bytes(codec), dtype=torch.uint8, device=total.device)
        size, exact_at = codec.body_bytes(total.numel()) if total.numel() else 0, wave.message_bytes(codec)
        row[size:exact_at] = 0
        row[exact_at:] = exact_sum.view(torch.uint8)
        if total.numel():
            write = codec.write_taking if self.feedback else codec.write
            write(total, row[:size], _back_key(codec, request, wave), codec.new_state())
            if unused is not None:
                total.add_(unused)
        return row

    @staticmethod
    def _take_out(codec: Codec, request: Request, wave: _Wave, rows: Tensor, out: Tensor, exact: Tensor) -> None:
        """Every rank, the owner too, decodes the same bytes."""
        exact_at = wave.message_bytes(codec)
        keys = [_back_key(codec, request, wave, rank=owner) for owner in range(len(rows))]
        codec.put_rows(rows, wave.places, out, keys)
        for row, share in zip(rows, wave.exact, strict=True):
            if share.stop > share.start:
                exact[share] = row[exact_at:].view(torch.float32)[: share.stop - share.start]


def _back_key(codec: Codec, request: Request, wave: _Wave, *, rank: int | None = None) -> Key:
    """Of a second shot; this rank's own by default."""
    return codec.own_draw(request.drawn(f"back{wave.suffix}", rank=rank)).key()


def _add_held_back(total: Tensor, held: Tensor | None, request: Request) -> Tensor | None:
    """Add what the last second shot kept back. Returns what is kept once more: of parameters that no rank uses."""
    if held is None:
        return None
    unused = torch.where(total == 0, held, 0.0) if request.may_be_unused else None
    total += held if unused is None else held - unused
    return unused


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
        return codec.message_bytes(longest) if longest else 0

    def row_bytes(self, codec: Codec) -> int:
        share: int = self.exact[0].stop - self.exact[0].start
        return self.message_bytes(codec) + EXACT_BYTES * share


@functools.lru_cache(maxsize=256)  # asked several times a step, for the same few buckets
def _waves(numel: int, world_size: int, exact: int) -> Sequence[_Wave]:
    """Few, of equal size; small tensors travel in one."""
    whole = pieces(numel, world_size)
    longest = whole[0].stop
    count = min(_MOST_WAVES, max(1, longest // _WORTH_A_WAVE))
    step = -(-longest // (count * GRAIN)) * GRAIN
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
