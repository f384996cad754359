"""Two-shot: every rank adds up one piece of all ranks in float32 and sends the sum back compressed."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape
from ..codecs.stages import Work
from ..comm.network import Network, Pending
from ..errors import OptionError
from ..kernels import Spread
from ..recipe.registry import register
from .base import Exchange, shard_result, sum_rows
from .first_shot import GRAIN, first_shot, keys_back, keys_there, own_piece, pieces, write_rows
from .request import Flag, Request, Result, result
from .script import EXACT_BYTES, Op, Script, Send, Wait

_MOST_WAVES = 3
_WORTH_A_WAVE = 1 << 17  # elements of one rank's piece: a message of fewer costs more to handle than to send


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
        total = own_piece(codec, request, mine, keep=request.remembers or self.feedback)
        left = total if isinstance(total, Tensor) else request.flat.new_empty(total.numel()) if self.feedback else None
        held = request.back if self.feedback and request.back is not None else None
        held = held if held is not None and held.numel() == total.numel() else None
        second = []
        for wave, under_way in zip(waves, first, strict=True):
            own = slice(wave.places[rank].start - mine.start, wave.places[rank].stop - mine.start)
            rows = under_way.wait()
            beside = (None if one is None else one[own] for one in (held, left if self.feedback else None))
            row = self._row_back(codec, request, wave, rows, total[own], *beside)
            second.append(network.start_all_gather(row))
        if self.feedback:
            request.back, request.back_start = left, mine.start
        out, exact, finite = request.place_of_mean(back), request.exact, list[Flag | None]()
        for wave, under_way in zip(waves, second, strict=True):
            rows = under_way.wait()
            keys = keys_back(back, request, ranks=len(rows), wave=wave.number)
            finite.append(back.put_rows(rows, wave.places, out, keys))  # every rank, the owner too, decodes these bytes
            if wave.share:
                exact = _exact_of(rows, wave.message_bytes(back)).reshape(-1)[: request.exact.numel()]
        known = [flag for flag in finite if flag is not None]
        whole = functools.reduce(operator.and_, known) if len(known) == len(finite) else None
        return result(out, exact, known=whole)

    @staticmethod
    def _start_first_shot(codec: Codec, request: Request, wave: _Wave, network: Network) -> Pending:
        """To every other rank its piece of this wave, and to all their shares of the exact elements."""
        rows = torch.zeros(len(wave.places), wave.row_bytes(codec), dtype=torch.uint8, device=request.device)
        if wave.share:
            shares = _exact_of(rows, wave.message_bytes(codec))
            for share, exact in zip(shares, torch.split(request.exact, wave.share), strict=False):
                share[: exact.numel()] = exact
        write_rows(codec, request, wave.places, rows, rank=network.rank, wave=wave.number)
        return network.start_all_to_all(rows)

    def _row_back(
        self,
        codec: Codec,
        request: Request,
        wave: _Wave,
        rows: Tensor,
        own: Tensor | Spread,
        held: Tensor | None,
        left: Tensor | None,
    ) -> Tensor:
        """The second shot of this rank; `held` is what the last one kept back, and `left` what this one does."""
        back, rank = self.codec_back(codec), request.draw.rank
        row = torch.zeros(wave.row_bytes(back), dtype=torch.uint8, device=own.device)
        if wave.share:
            exact_sum = sum_rows(rows[:, wave.message_bytes(codec) :], 1.0 / len(rows))
            row[wave.message_bytes(back) :].view(torch.float32).copy_(exact_sum)
        if not own.numel():
            return row
        body = row[: back.body_bytes(own.numel())]
        keys = keys_there(codec, request, ranks=len(rows), wave=wave.number, to=rank)
        key = keys_back(back, request, ranks=len(rows), wave=wave.number)[rank]
        if held is None or left is None or not request.may_be_unused:
            codec.write_mean(rows, own, body, skip=rank, keys=keys, back=back, key=key, held=held, left=left)
            return row
        total = own.gather(left) if isinstance(own, Spread) else own
        codec.add_mean(rows, total, skip=rank, keys=keys)
        unused = torch.where(total == 0, held, 0.0)  # of parameters that no rank uses: kept once more
        total += held - unused
        back.write_taking(total, body, key, back.new_state())
        total += unused
        return row


def _exact_of(rows: Tensor, start: int) -> Tensor:
    """The exact elements at the end of rows, float32."""
    return rows.view(torch.float32)[:, start // EXACT_BYTES :]


@dataclasses.dataclass(frozen=True)
class _Wave:
    """A part of every rank's piece, which travels together. The exact elements go with the first."""

    number: int
    places: Sequence[slice]
    share: int  # of the exact elements, for each rank

    @property
    def suffix(self) -> str:
        """Of the names of its messages in a script."""
        return f".{self.number}" if self.number else ""

    def message_bytes(self, codec: Codec) -> int:
        """Of the longest message, which is the first rank's."""
        longest: int = self.places[0].stop - self.places[0].start
        return codec.message_bytes(longest) if longest else 0

    def row_bytes(self, codec: Codec) -> int:
        return self.message_bytes(codec) + EXACT_BYTES * self.share


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
        waves.append(_Wave(number, places, 0 if number else share))
    return tuple(waves)


two_shot = TwoShot
