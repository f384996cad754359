"""Shared Top-k: one rank chooses the positions, all ranks add their values there (AR-Topk, arXiv 2312.02493)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, Shape
from ..codecs.cast import Bf16, Fp16
from ..codecs.sparse import Sparsifier
from ..codecs.sparsify import RandomK
from ..comm.network import Network
from .all_reduce import FloatSum, floats_sum
from .base import FLOATS, Cargo, Delivery, Exchange, delivered, exact_beside, start_mean
from .script import Op, Script, Send, Wait, Work

_NORM_BYTES = 4


@dataclasses.dataclass(frozen=True, repr=False)
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
        if isinstance(codec, RandomK):
            return "random_k needs no leader to agree on positions: use all_reduce"
        if not isinstance(codec, Sparsifier):
            written = f"top_k:0.01|{codec.spec()}" if isinstance(codec, (Bf16, Fp16)) else "top_k:0.01|bf16"
            other = "all_reduce" if codec.linear else "two_shot"
            return (
                f"shared_top_k shares the positions of a sparsifier, and {codec.name} has none: "
                f"write {written}|shared_top_k, or use {other}"
            )
        if not isinstance(codec.values, FLOATS):
            return (
                f"shared_top_k lets the network add the values, which {codec.values.name} does not allow: "
                f"write {dataclasses.replace(codec, values=Bf16()).spec()}|shared_top_k"
            )
        return None

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        """Of the rank that leads: the others wait for what it selects."""
        assert isinstance(codec, Sparsifier)
        values = codec.values
        assert isinstance(values, FLOATS)
        if not numel:
            return [*exact_beside(exact), Wait("exact")] if exact else []
        kept = codec.capacity(numel)
        ops: list[Op] = [Work("pass", numel // 2)]  # only read
        if self.leader == "norm":
            ops += [Work("pass", numel), Send("all_gather", _NORM_BYTES, "norms"), Wait("norms")]
        ops += [Work("select", numel, codec, leads=True), Send("broadcast", codec.positions_bytes(numel), "positions")]
        ops += [Wait("positions"), Work("add", 2 * kept, codec)]
        *begin, end = floats_sum(values, kept, exact + 1, world_size)
        return [*ops, *begin, Work("pass", numel // 2), end, Work("add", kept, codec)]

    # ------------------------------------------------------------------------------------------------- running

    def mean(self, codec: Codec, cargo: Cargo, network: Network) -> Delivery:
        assert isinstance(codec, Sparsifier)
        n, values = network.world_size, codec.values
        assert isinstance(values, FLOATS)
        if cargo.u.numel() == 0:
            return delivered(cargo.blank(), start_mean(cargo.exact, network)())
        # An inf outside the leader's positions would go unseen, so every rank reports it beside the exact elements.
        news = torch.full((1,), 0.0 if kernels.all_finite(cargo.u) else math.nan, device=cargo.u.device)
        positions = cargo.positions = self._agreed_positions(codec, cargo, network)
        places = positions.to(torch.int64)
        chosen = cargo.u[places]
        sent = values.to_sum(chosen * (1.0 / n))
        if cargo.remembers:
            cargo.u[places] = chosen.sub_(values.from_sum(sent), alpha=n)
        summed = FloatSum(values, sent, torch.cat((cargo.exact * (1.0 / n), news)), network)
        out = cargo.blank()  # meanwhile
        total, both = summed.wait()
        exact, news = both[:-1], both[-1:]
        finite = kernels.all_finite(news) and kernels.all_finite(total)
        if finite:
            out[places] = values.from_sum(total)
        else:
            out.fill_(math.nan)
        return delivered(out, exact, finite=finite)

    def _agreed_positions(self, codec: Sparsifier, cargo: Cargo, network: Network) -> Tensor:
        numel, leader = cargo.u.numel(), self._leader(cargo, network)
        if network.rank == leader:
            packed = codec.pack_positions(cargo.u, draw=cargo.draw, state=cargo.state)
        else:
            packed = torch.empty(codec.positions_bytes(numel), dtype=torch.uint8, device=cargo.u.device)
        return codec.unpack_positions(network.broadcast(packed, source=leader), numel)

    def _leader(self, cargo: Cargo, network: Network) -> int:
        if self.leader == "turn":
            return cargo.draw.step % network.world_size
        norm = kernels.moments(cargo.u).squares
        norms = network.all_gather(torch.tensor([norm], dtype=torch.float32, device=cargo.u.device))
        return int(norms.nan_to_num(nan=math.inf).argmax())


shared_top_k = SharedTopK
