"""Shared Top-k: one rank chooses the positions, all ranks add their values there (AR-Topk, arXiv 2312.02493)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, Shape, flag
from ..codecs.stages import RoundCost, Work
from ..comm import streams
from ..comm.network import Network
from ..recipe.registry import register
from .base import Exchange, start_mean
from .request import Request, Result, result
from .script import Op, Script, Send, Wait, exact_beside, of_rounds

_NORM_BYTES = 4


@register
class SharedTopK(Exchange):
    """One rank chooses the positions, all ranks add their values there: a sparse all-reduce.

    `leader`: "turn", every rank in turn (STAR), or "norm", the rank with the largest gradient (VAR), which costs one
    small message more. Only the leader selects. Its positions travel in the narrow code, the values are all-reduced,
    and every rank remembers its own rest.

    >>> from thinwire.codecs import bf16, top_k
    >>> SharedTopK().accepts(top_k(0.01, values=bf16())) is None
    True
    >>> SharedTopK().accepts(bf16())
    'shared_top_k shares the positions of a sparsifier, and bf16 has none: write top_k:0.01|bf16|shared_top_k, or ...'
    """

    name = "shared_top_k"

    leader: Literal["turn", "norm"] = "turn"

    def __post_init__(self) -> None:
        self._require(self.leader in ("turn", "norm"), f"leader is turn or norm, not {self.leader}")

    def accepts(self, codec: Codec) -> str | None:
        if codec.sparse and not codec.chooses:
            return f"{codec.name} needs no leader to agree on positions: use all_reduce"
        if not codec.chooses:
            half = codec.sum_dtype in (torch.bfloat16, torch.float16)
            written = f"top_k:0.01|{codec.spec()}" if half else "top_k:0.01|bf16"
            other = "two_shot" if codec.sum_dtype is None else "all_reduce"
            return (
                f"shared_top_k shares the positions of a sparsifier, and {codec.name} has none: "
                f"write {written}|shared_top_k, or use {other}"
            )
        values = codec.values_codec
        if values.sum_dtype is None or not values.sum_dtype.is_floating_point or values.needs_shape:
            return (
                f"shared_top_k lets the network add the values, which {values.name} does not allow: "
                f"write {codec.text()}|bf16|shared_top_k"
            )
        return None

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        """Of the rank that leads: the others wait for what it selects."""
        if not numel:
            return [*exact_beside(exact), Wait("exact")] if exact else []
        kept, dtype = codec.capacity(numel), codec.values_codec.sum_dtype
        assert dtype is not None
        ops: list[Op] = [Work("pass", numel // 2)]  # only read
        if self.leader == "norm":
            ops += [Work("pass", numel), Send("all_gather", _NORM_BYTES, "norms"), Wait("norms")]
        ops += [Work("select", numel, codec, leads=True), Send("broadcast", codec.positions_bytes(numel), "positions")]
        ops += [Wait("positions"), Work("add", 2 * kept, codec)]
        summed = RoundCost(dtype.itemsize * kept, "sum", plain=dtype == torch.float32)
        *begin, end = of_rounds([summed], ranks=world_size, exact=exact + 1)
        return [*ops, *begin, Work("pass", numel // 2), end, Work("add", kept, codec)]

    # ------------------------------------------------------------------------------------------------- running

    def mean(self, codec: Codec, request: Request, network: Network) -> Result:
        n, values = network.world_size, codec.values_codec
        if not request.numel:
            return result(request.blank(), start_mean(request.exact, network)())
        u = request.u
        # An inf outside the leader's positions would go unseen, so every rank reports it beside the exact elements.
        sane = torch.as_tensor(flag(u), device=u.device).view(1)
        alarm = torch.where(sane, 0.0, math.nan)
        positions = request.positions = self._agreed_positions(codec, request, network)
        places = positions.to(torch.int64)
        chosen = u[places]
        sent = values.to_sum(chosen * (1.0 / n))
        if request.remembers:
            u[places] = chosen.sub_(values.from_sum(sent), alpha=n)
        beside = torch.cat((request.exact * (1.0 / n), alarm))
        if values.lossless:
            whole = network.start_all_reduce(torch.cat((sent, beside)), soon=True)
            out = request.blank()  # meanwhile
            total, beside = torch.split(whole.wait(), [sent.numel(), beside.numel()])
        else:
            under_way = network.start_all_reduce(beside)
            summed = network.start_all_reduce(sent, soon=True)
            out = request.blank()  # meanwhile
            total, beside = summed.wait(), under_way.wait()
        exact, alarm = beside[:-1], beside[-1:]
        finite = flag(alarm) & flag(total)
        out[places] = values.from_sum(total)
        if isinstance(finite, Tensor):
            out.add_(torch.where(finite, 0.0, math.nan))
        elif not finite:
            out.fill_(math.nan)
        return result(out if request.shard is None else out[request.shard], exact, known=finite)

    def _agreed_positions(self, codec: Codec, request: Request, network: Network) -> Tensor:
        """What one rank selects, on all of them. Under `norm`, a device does not tell the host which rank that is."""
        numel, device = request.numel, request.device
        if self.leader == "norm" and streams.resident(device):
            packed = codec.pack_positions(request.u, draw=request.draw, state=request.state)
            norms = network.all_gather(torch.linalg.vector_norm(request.u).view(1)).view(-1)
            leads = norms.nan_to_num(nan=math.inf).argmax() == network.rank
            packed = torch.where(leads, packed, torch.zeros_like(packed))
            return codec.unpack_positions(network.all_reduce(packed), numel)  # one rank adds, the others have zeros
        leader = self._leader(request, network)
        if network.rank == leader:
            packed = codec.pack_positions(request.u, draw=request.draw, state=request.state)
        else:
            packed = torch.empty(codec.positions_bytes(numel), dtype=torch.uint8, device=device)
        return codec.unpack_positions(network.broadcast(packed, source=leader), numel)

    def _leader(self, request: Request, network: Network) -> int:
        if self.leader == "turn":
            return request.draw.step % network.world_size
        norm = kernels.moments(request.u).squares
        norms = network.all_gather(torch.tensor([norm], dtype=torch.float32, device=request.u.device))
        return int(norms.nan_to_num(nan=math.inf).argmax())


shared_top_k = SharedTopK
