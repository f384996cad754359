"""The first shot: every rank gets one piece of all ranks' tensors and adds it up in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..comm.network import Network, Pending
from .request import Request

_NOWHERE = slice(0, 0)
GRAIN = 1024  # pieces are multiples of this many elements, which all blocks and rotations divide


def pieces(numel: int, world_size: int) -> list[slice]:
    """Which elements each rank adds up: whole blocks, as even as these allow.

    >>> pieces(5000, 3)
    [slice(0, 2048, None), slice(2048, 4096, None), slice(4096, 5000, None)]
    """
    return shards(numel, world_size, grain=GRAIN)


def shards(numel: int, world_size: int, *, grain: int = 1) -> list[slice]:
    """Even shards of a flat tensor, in rank order; the last ones may be shorter or empty.

    >>> shards(10, 4)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    size = -(-numel // (world_size * grain)) * grain
    return [slice(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(world_size)]


def own_piece(request: Request, mine: slice, *, keep: bool) -> Tensor:
    """What this rank brings to the piece it adds up: no message says it, so all of it counts as sent."""
    own = request.u[mine]
    if not keep:
        return own  # to be added to in place: nobody reads it again
    total = own.clone()
    own.zero_()
    return total


def write_rows(
    codec: Codec, request: Request, places: Sequence[slice], rows: Tensor, *, rank: int, suffix: str = ""
) -> None:
    """To every other rank its piece, as the first bytes of its row; the rest of the row is left as it is."""
    keys = [codec.own_draw(request.drawn(f"to{to}{suffix}")).key() for to in range(len(places))]
    others = [_NOWHERE if to == rank else place for to, place in enumerate(places)]
    if not request.remembers:
        codec.write_rows(request.u, others, rows, keys)
        return
    for place, row, key in zip(others, rows, keys, strict=True):
        if place.stop > place.start:
            body = row[: codec.body_bytes(place.stop - place.start)]
            codec.write_taking(request.u[place], body, key, codec.new_state())


def add_rows(codec: Codec, request: Request, rows: Tensor, total: Tensor, *, rank: int, suffix: str = "") -> None:
    """`total` becomes the mean of this rank's piece, added in rank order."""
    if total.numel():
        senders = range(len(rows))
        keys = [codec.own_draw(request.drawn(f"to{rank}{suffix}", rank=sender)).key() for sender in senders]
        places = [_NOWHERE if sender == rank else slice(0, total.numel()) for sender in senders]
        codec.add_rows(rows, places, total, keys)
    total.mul_(1.0 / len(rows))


def start_rows(codec: Codec, request: Request, network: Network) -> Pending:
    """Begin to send every rank its shard."""
    assert request.shards is not None
    longest = max(place.stop - place.start for place in request.shards)
    rows = request.gradient.new_zeros((network.world_size, codec.message_bytes(longest)), dtype=torch.uint8)
    write_rows(codec, request, request.shards, rows, rank=network.rank)
    return network.start_all_to_all(rows)


def first_shot(codec: Codec, request: Request, network: Network) -> Tensor:
    """The mean of this rank's shard: half of a two-shot, and what a reduce-scatter is for codecs that are not added."""
    assert request.shards is not None
    under_way = start_rows(codec, request, network)
    total = own_piece(request, request.shards[network.rank], keep=True)
    add_rows(codec, request, under_way.wait(), total, rank=network.rank)
    return total
