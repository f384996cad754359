"""All-gather: every rank gets every message and adds them in rank order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, Shape
from ..codecs.sparse import SparseCodec
from ..comm.network import Network
from .base import Cargo, Delivery, Exchange, delivered, exact_beside, message_bytes, start_mean
from .script import Op, Script, Send, Wait, Work


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Exchange):
    """Every rank gets every message and adds them in rank order: for any codec; traffic grows with the ranks.

    >>> from thinwire.codecs import top_k
    >>> AllGather().accepts(top_k(0.01)) is None
    True
    >>> AllGather().sent_bytes(top_k(0.01), 1_000_000, world_size=4) == 3 * top_k(0.01).wire_bytes(1_000_000)
    True
    """

    name = "all_gather"

    def accepts(self, codec: Codec) -> str | None:
        return None

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        ops: list[Op] = exact_beside(exact)
        end: list[Op] = [Wait("exact")] if exact else []
        if not numel:
            return [*ops, *end]
        rows = len(shapes) if codec.needs_shape else 1
        kept = codec.capacity(numel) if isinstance(codec, SparseCodec) else numel
        ops.append(Work("encode", numel, codec, rows))
        ops.append(Send("all_gather", message_bytes(codec, numel, shapes), "messages"))
        ops.append(Work("pass", numel // 2))  # zeros: half of a pass, as they are only written
        ops.append(Wait("messages"))
        ops.append(Work("add", world_size * kept, codec, world_size * rows))
        if not isinstance(codec, SparseCodec):
            ops.append(Work("pass", 2 * numel))
        return [*ops, *end]

    def mean(self, codec: Codec, cargo: Cargo, network: Network) -> Delivery:
        exact = start_mean(cargo.exact, network)
        messages = self._encoded(codec, cargo)
        if not messages:
            return delivered(cargo.blank(), exact())
        sizes = [message.numel() for message in messages]
        gathered = network.start_all_gather(torch.cat(messages) if len(messages) > 1 else messages[0])
        out = cargo.blank()  # meanwhile
        rows = gathered.wait()
        if isinstance(codec, SparseCodec):
            finite = self._scatter(codec, cargo, rows, out, network.rank)
            return delivered(out, exact(), finite=finite)
        for row in rows:
            place = 0
            for (x, _, _, shape), size in zip(cargo.messages(codec), sizes, strict=True):
                start = x.storage_offset() - cargo.u.storage_offset()
                codec.add(row[place : place + size], out[start : start + x.numel()], shape=shape)
                place += size
        return delivered(out.mul_(1.0 / network.world_size), exact())

    @staticmethod
    def _encoded(codec: Codec, cargo: Cargo) -> list[Tensor]:
        encode = codec.encode_taking if cargo.remembers else codec.encode
        return [encode(x, draw=draw, state=state) for x, draw, state, _ in cargo.messages(codec)]

    @staticmethod
    def _scatter(codec: SparseCodec, cargo: Cargo, rows: Tensor, out: Tensor, rank: int) -> bool:
        """Add what was received, and nothing else is touched; whether all of it was finite."""
        finite = True
        for sender, row in enumerate(rows):
            positions, values = codec.decode_sparse(row, numel=out.numel())
            finite &= kernels.all_finite(values)
            kernels.scatter_add(out, positions, values * (1.0 / len(rows)))
            if sender == rank:
                cargo.positions = positions
        return finite


all_gather = AllGather
