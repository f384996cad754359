"""Two-shot: every rank adds up one piece of all ranks in float32 and sends the sum back compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape
from ..codecs.low_rank import LowRank
from ..comm import Network
from ..errors import OptionError
from .base import EXACT_BYTES, Cargo, Delivery, Exchange, delivered, sum_rows

_GRAIN = 1024  # pieces are multiples of this many elements, which all blocks and rotations divide


@dataclasses.dataclass(frozen=True, repr=False)
class TwoShot(Exchange):
    """Each rank adds one piece in float32 and sends it back compressed: for codecs that keep all elements.

    `back`: bits of the second shot, 0 for those of the first. The second shot's error does not average out over the
    ranks, so it deserves at least as many bits. `feedback`: what the second shot rounds away is added to the next sum;
    a memory in front of the codec does the same for the first shot.

    >>> from thinwire.codecs import rotated
    >>> TwoShot(4).accepts(rotated(3)) is None
    True
    >>> TwoShot(8).accepts(rotated(3))
    'two_shot cannot send 8 bits back, rotated: bits must be 2, 3 or 4, got 8'
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
        if codec.sparse:
            return (
                f"two_shot sends back a sum, which is no longer sparse after {codec.name}: "
                "use all_gather, or shared_top_k"
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

    def sent_bytes(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> int:
        rows = [_row_bytes(c, numel, exact, world_size) for c in (codec, self.codec_back(codec))]
        return (world_size - 1) * sum(rows)

    # ------------------------------------------------------------------------------------------------- running

    def mean(self, codec: Codec, cargo: Cargo, network: Network) -> Delivery:
        own = self._sum_of_own_piece(codec, cargo, network)
        return self._collected(self.codec_back(codec), cargo, own, network)

    def _sum_of_own_piece(self, codec: Codec, cargo: Cargo, network: Network) -> tuple[Tensor, Tensor]:
        """First shot: the mean of this rank's piece, and of its share of the exact elements."""
        n, numel, extra = network.world_size, cargo.u.numel(), cargo.exact.numel()
        exact_at = _message_bytes(codec, numel, n)
        rows = torch.zeros(n, _row_bytes(codec, numel, extra, n), dtype=torch.uint8, device=cargo.u.device)
        encode = codec.encode_taking if cargo.remembers else codec.encode
        for to, (row, piece) in enumerate(zip(rows, pieces(numel, n), strict=True)):
            if piece.stop > piece.start:
                message = encode(cargo.u[piece], draw=cargo.drawn(f"to{to}"))
                row[: message.numel()] = message
        for row, piece in zip(rows, _exact_pieces(extra, n), strict=True):
            row[exact_at : exact_at + EXACT_BYTES * (piece.stop - piece.start)] = cargo.exact[piece].view(torch.uint8)
        received = network.all_to_all(rows)
        mine = list(pieces(numel, n))[network.rank]
        size = mine.stop - mine.start
        total = torch.zeros(size, dtype=torch.float32, device=cargo.u.device)
        for row in received if size else ():
            codec.add(row[: codec.wire_bytes(size)], total)
        return total.mul_(1.0 / n), sum_rows(received[:, exact_at:], 1.0 / n)

    def _collected(self, codec: Codec, cargo: Cargo, own: tuple[Tensor, Tensor], network: Network) -> Delivery:
        """Second shot: every rank, the owner too, decodes the same bytes."""
        n, numel, extra = network.world_size, cargo.u.numel(), cargo.exact.numel()
        total, exact_sum = own
        held = self._add_what_was_kept_back(total, cargo)
        exact_at = _message_bytes(codec, numel, n)
        row = torch.zeros(_row_bytes(codec, numel, extra, n), dtype=torch.uint8, device=cargo.u.device)
        if total.numel():
            encode = codec.encode_taking if self.feedback else codec.encode
            message = encode(total, draw=cargo.drawn("back"))
            row[: message.numel()] = message
        row[exact_at:] = exact_sum.view(torch.uint8)
        if self.feedback:
            cargo.back = total if held is None else total.add_(held)
        rows = network.all_gather(row)
        out = cargo.blank()
        for row, piece in zip(rows, pieces(numel, n), strict=True):
            if piece.stop > piece.start:
                codec.add(row[: codec.wire_bytes(piece.stop - piece.start)], out[piece])
        exact = torch.empty_like(cargo.exact)
        for row, piece in zip(rows, _exact_pieces(extra, n), strict=True):
            values = row[exact_at:].view(torch.float32) if extra else exact
            exact[piece] = values[: piece.stop - piece.start]
        return delivered(out, exact)

    def _add_what_was_kept_back(self, total: Tensor, cargo: Cargo) -> Tensor | None:
        """Returns what is kept once more: of parameters that no rank seems to use."""
        kept = cargo.back
        if not self.feedback or kept is None or kept.numel() != total.numel():
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


def _exact_pieces(extra: int, world_size: int) -> Iterator[slice]:
    size = -(-extra // world_size)
    for rank in range(world_size):
        yield slice(min(rank * size, extra), min((rank + 1) * size, extra))


def _message_bytes(codec: Codec, numel: int, world_size: int) -> int:
    """Of the longest piece."""
    longest = next(pieces(numel, world_size))
    return codec.wire_bytes(longest.stop) if longest.stop else 0


def _row_bytes(codec: Codec, numel: int, extra: int, world_size: int) -> int:
    return _message_bytes(codec, numel, world_size) + EXACT_BYTES * -(-extra // world_size)


two_shot = TwoShot
