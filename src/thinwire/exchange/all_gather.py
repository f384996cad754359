"""All-gather: every rank gets every message and adds them in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, Shape, flag
from ..codecs.stages import Work
from ..comm.network import Network
from ..errors import OptionError
from ..recipe.registry import register
from .base import Exchange, message_bytes, shard_result, start_mean
from .first_shot import first_shot
from .request import Message, Request, Result, result
from .script import Op, Script, Send, Wait, exact_beside


@register
class AllGather(Exchange):
    """Every rank gets every message and adds them in rank order: for any codec; traffic grows with the ranks.

    `clip`: with `median`, what a message says is scaled down to the median norm of all ranks' messages, so that one
    rank cannot dominate the mean (Covenant-72B, arXiv 2603.08163); `none` by default.

    >>> from thinwire.codecs import top_k
    >>> AllGather().accepts(top_k(0.01)) is None
    True
    >>> AllGather().sent_bytes(top_k(0.01), 1_000_000, world_size=4) == 3 * top_k(0.01).message_bytes(1_000_000)
    True
    """

    name = "all_gather"

    clip: Literal["none", "median"] = "none"

    def __post_init__(self) -> None:
        self._require(self.clip in ("none", "median"), f"clip is none or median, not {self.clip}")

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
        ops.append(Work("encode", numel, codec, rows))
        ops.append(Send("all_gather", message_bytes(codec, numel, shapes), "messages"))
        ops.append(Work("pass", numel // 2))  # zeros: half of a pass, as they are only written
        ops.append(Wait("messages"))
        ops.append(Work("add", world_size * codec.capacity(numel), codec, world_size * rows))
        if not codec.sparse:
            ops.append(Work("pass", 2 * numel))
        return [*ops, *end]

    def mean(self, codec: Codec, request: Request, network: Network) -> Result:
        clips = self.clip == "median"
        if request.shards is not None and clips:
            raise OptionError("all_gather:median knows whole messages only: use all_gather to reduce and scatter")
        if request.shards is not None and not codec.needs_shape:
            return shard_result(first_shot(codec, request, network), request, network)
        exact = start_mean(request.exact, network)
        messages = list(request.messages(codec))
        if not messages:
            return result(request.blank(), exact())
        sizes = [message.size(codec) for message in messages]
        mine = torch.empty(sum(sizes), dtype=torch.uint8, device=request.device)
        for message, row in zip(messages, torch.split(mine, sizes), strict=True):
            body = codec.body_bytes(message.numel, shape=message.shape)
            row[body:] = 0
            request.write(codec, message, row[:body])
        gathered = network.start_all_gather(mine)
        out = request.blank()  # meanwhile
        rows = gathered.wait()
        known = None
        if clips:
            known = _add_clipped(codec, request, rows, out, messages, sizes, network.rank)
        elif codec.sparse:
            known = _scatter(codec, request, rows, out, messages[0], network.rank)
        else:
            for sender, row in enumerate(rows):
                for message, part in zip(messages, torch.split(row, sizes), strict=True):
                    written = part[: codec.body_bytes(message.numel, shape=message.shape)]
                    codec.add_body(written, out[message.place], message.key(codec, rank=sender), message.shaped())
            out.mul_(1.0 / network.world_size)
        if request.shards is None:
            return result(out, exact(), known=known)
        known = flag(out) if known is None else known  # of all shards
        return result(out[request.shards[network.rank]], exact(), known=known)


def _scatter(codec: Codec, request: Request, rows: Tensor, out: Tensor, message: Message, rank: int) -> bool | Tensor:
    """Add what was received, and nothing else is touched; whether all of it was finite."""
    finite: bool | Tensor = True
    size = codec.body_bytes(message.numel)
    for sender, row in enumerate(rows):
        key = message.key(codec, rank=sender)
        positions, values = codec.positions_and_values(row[:size], out.numel(), key)
        finite = flag(values) & finite
        kernels.scatter_add(out, positions, values * (1.0 / len(rows)))
        if sender == rank:
            request.positions = positions
    return finite


def _add_clipped(
    codec: Codec,
    request: Request,
    rows: Tensor,
    out: Tensor,
    messages: Sequence[Message],
    sizes: Sequence[int],
    rank: int,
) -> bool | Tensor:
    """Add every rank's messages, each scaled down to the median norm of its like; whether all of it was finite."""
    finite: bool | Tensor = True
    for number, message in enumerate(messages):
        said = [
            _said(codec, request, torch.split(row, list(sizes))[number], message, by) for by, row in enumerate(rows)
        ]
        norms = torch.stack([values.to(torch.float64).square().sum().sqrt() for _, values in said])
        scales = (norms.median() / norms).nan_to_num(nan=1.0).clamp(max=1.0) / len(rows)
        for sender, (positions, values) in enumerate(said):
            finite = flag(values) & finite
            scaled = values * scales[sender].to(torch.float32)
            if positions is None:
                out[message.place] += scaled
            else:
                kernels.scatter_add(out, positions, scaled)
            if sender == rank:
                request.positions = positions
    return finite


def _said(codec: Codec, request: Request, row: Tensor, message: Message, sender: int) -> tuple[Tensor | None, Tensor]:
    """Positions, if the codec sends some of the elements, and values of one message."""
    key, body = message.key(codec, rank=sender), row[: codec.body_bytes(message.numel, shape=message.shape)]
    if codec.sparse:
        return codec.positions_and_values(body, message.numel, key)
    values = torch.zeros(message.numel, dtype=torch.float32, device=row.device)
    codec.put_body(body, values, key, message.shaped())
    return None, values


all_gather = AllGather
