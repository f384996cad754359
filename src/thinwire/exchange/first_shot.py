"""The first shot: every rank gets one piece of all ranks' tensors and adds it up in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..comm.network import Network, Pending
from ..kernels import Spread
from ..rng import Keys
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


def own_piece(codec: Codec, request: Request, mine: slice, *, keep: bool) -> Tensor | Spread:
    """What this rank brings to the piece it adds up: no message says it, so all of it counts as sent."""
    if isinstance(given := request.given(codec), Spread):
        return given[mine]
    own = given[mine]
    if not keep:
        return own  # to be added to in place: nobody reads it again
    total = own.clone()
    own.zero_()
    return total


@functools.lru_cache(maxsize=1024)  # a training step has the same few
def _purposes(senders: tuple[int, ...], receivers: tuple[int, ...], wave: int, way: int) -> tuple[int, ...]:
    """A number for each message of an exchange, by which its key is folded."""
    pairs = zip(senders, receivers, strict=True)
    return tuple(((2 * wave + way) << 40) + (sender << 20) + receiver for sender, receiver in pairs)


def keys_there(codec: Codec, request: Request, *, ranks: int, wave: int = 0, to: int | None = None) -> Keys:
    """Of the first shots that this rank sends to all, or, with `to`, that all send to one."""
    every, one = tuple(range(ranks)), (request.draw.rank,) * ranks
    senders, receivers = (one, every) if to is None else (every, (to,) * ranks)
    if codec.shares_draw:
        senders = (0,) * ranks
    return request.keys(_purposes(senders, receivers, wave, 0))


def keys_back(codec: Codec, request: Request, *, ranks: int, wave: int = 0) -> Keys:
    """Of the second shots of all ranks."""
    senders = (0,) * ranks if codec.shares_draw else tuple(range(ranks))
    return request.keys(_purposes(senders, (0,) * ranks, wave, 1))


def write_rows(
    codec: Codec, request: Request, places: Sequence[slice], rows: Tensor, *, rank: int, wave: int = 0
) -> None:
    """To every other rank its piece, as the first bytes of its row; the rest of the row is left as it is."""
    keys = keys_there(codec, request, ranks=len(places), wave=wave)
    others = [_NOWHERE if to == rank else place for to, place in enumerate(places)]
    if not request.remembers:
        codec.write_rows(request.given(codec), others, rows, keys)
        return
    for place, row, key in zip(others, rows, keys, strict=True):
        if place.stop > place.start:
            body = row[: codec.body_bytes(place.stop - place.start)]
            codec.write_taking(request.u[place], body, key, codec.new_state())


def start_rows(codec: Codec, request: Request, network: Network) -> Pending:
    """Begin to send every rank its shard."""
    assert request.shards is not None
    longest = max(place.stop - place.start for place in request.shards)
    rows = request.flat.new_zeros((network.world_size, codec.message_bytes(longest)), dtype=torch.uint8)
    write_rows(codec, request, request.shards, rows, rank=network.rank)
    return network.start_all_to_all(rows)


def first_shot(codec: Codec, request: Request, network: Network) -> Tensor:
    """The mean of this rank's shard: half of a two-shot, and what a reduce-scatter is for codecs that are not added."""
    assert request.shards is not None
    under_way = start_rows(codec, request, network)
    total = own_piece(codec, request, request.shards[network.rank], keep=True)
    if isinstance(total, Spread):
        total = total.gather(torch.empty(total.numel(), dtype=torch.float32, device=total.device))
    rows = under_way.wait()
    if total.numel():
        keys = keys_there(codec, request, ranks=len(rows), to=network.rank)
        codec.add_mean(rows, total, skip=network.rank, keys=keys)
    return total
