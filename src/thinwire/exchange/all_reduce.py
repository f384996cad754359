"""All-reduce: the network itself adds the messages, so traffic does not grow with the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, Shape
from ..codecs.cast import Bf16, Fp8, Fp16, Fp32
from ..codecs.global_qsgd import GlobalQsgd
from ..codecs.low_rank import LowRank
from ..codecs.quantize import Natural
from ..codecs.sparsify import RandomK
from ..comm.network import Network
from . import factors, global_scale
from .base import FLOATS, Cargo, Delivery, Exchange, delivered, exact_beside
from .script import Op, Script, Wait, Work, awaited_sum


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce(Exchange):
    """The network adds the messages: for dense tensors and for codecs whose messages can be added.

    Numbers are divided by the number of ranks before they are added, so that a sum leaves its type only if the mean
    does. `global_qsgd` agrees on a scale first; `low_rank` averages its two factors one after the other.

    >>> from thinwire.codecs import bf16, top_k
    >>> AllReduce().accepts(bf16()) is None
    True
    >>> AllReduce().accepts(top_k(0.01))
    'top_k keeps other positions on every rank, so its messages cannot be added: use all_gather, or shared_top_k'
    >>> AllReduce().sent_bytes(bf16(), 1_000_000, world_size=4)
    3000000
    """

    name = "all_reduce"

    def accepts(self, codec: Codec) -> str | None:
        if codec.linear:
            return None
        if isinstance(codec, RandomK):
            values = codec.values if isinstance(codec.values, FLOATS) else Bf16()
            shared = dataclasses.replace(codec, shared=True, values=values)
            return f"messages of {codec.spec()} cannot be added: write {shared.spec()}, or use all_gather"
        if codec.sparse:
            return (
                f"{codec.name} keeps other positions on every rank, so its messages cannot be added: "
                "use all_gather, or shared_top_k"
            )
        if isinstance(codec, (Fp8, Natural)):
            return f"the network cannot add numbers in {codec.name}: use bf16, all_gather or two_shot"
        return (
            f"{codec.name} writes the values of every rank on a scale of its own, so its messages cannot be added: "
            "use global_qsgd, all_gather or two_shot"
        )

    def refuses(self, codec: Codec, *, world_size: int, remembers: bool) -> str | None:
        if isinstance(codec, GlobalQsgd):
            return global_scale.refusal(codec, world_size, remembers)
        return None

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        if isinstance(codec, GlobalQsgd):
            return global_scale.script(codec, numel, world_size=world_size, exact=exact)
        if isinstance(codec, LowRank):
            return factors.script(codec, world_size=world_size, exact=exact, shapes=shapes)
        if isinstance(codec, RandomK):
            kept, floats = codec.k(numel) if numel else 0, codec.values
            assert isinstance(floats, FLOATS)
            before: list[Op] = [Work("pass", numel), Work("encode", numel, codec)]
            return [*before, *floats_sum(floats, kept, exact, world_size), Work("add", kept, codec)]
        assert isinstance(codec, FLOATS)
        passes = 1 if isinstance(codec, Fp32) else 2
        after: list[Op] = [Work("pass", passes * numel)]  # and whether all is finite
        return [Work("pass", passes * numel), *floats_sum(codec, numel, exact, world_size), *after]

    def mean(self, codec: Codec, cargo: Cargo, network: Network) -> Delivery:
        if isinstance(codec, GlobalQsgd):
            return global_scale.mean(codec, cargo, network)
        if isinstance(codec, LowRank):
            return factors.mean(codec, cargo, network)
        if isinstance(codec, RandomK):
            return _random_mean(codec, cargo, network)
        assert isinstance(codec, FLOATS)
        return _dense_mean(codec, cargo, network)


def floats_sum(codec: Fp32 | Fp16 | Bf16, values: int, exact: int, world_size: int) -> list[Op]:
    """The script of a `FloatSum`; its last word is a `Wait`."""
    if not values:
        return [*exact_beside(exact), Wait("exact")] if exact else []
    if isinstance(codec, Fp32):
        return awaited_sum(4 * (values + exact), world_size, "sum")
    summed = awaited_sum(codec.dtype.itemsize * values, world_size, "sum")
    return [*exact_beside(exact), *summed, Wait("exact")] if exact else summed


class FloatSum:
    """Both added up over the ranks: `values` as they come from `codec.to_sum`, `exact` in float32.

    In float32 they travel as one message; else both are under way at the same time.
    """

    def __init__(self, codec: Fp32 | Fp16 | Bf16, values: Tensor, exact: Tensor, network: Network) -> None:
        self._values, self._exact = values, exact
        self._whole = self._beside = self._summed = None
        if isinstance(codec, Fp32) and values.numel() and exact.numel():
            self._whole = network.start_all_reduce(torch.cat((values, exact)), soon=True)
            return
        self._beside = network.start_all_reduce(exact) if exact.numel() else None
        self._summed = network.start_all_reduce(values, soon=True) if values.numel() else None

    def wait(self) -> tuple[Tensor, Tensor]:
        if self._whole is not None:
            whole = self._whole.wait()
            return whole[: self._values.numel()], whole[self._values.numel() :]
        values = self._values if self._summed is None else self._summed.wait()
        return values, self._exact if self._beside is None else self._beside.wait()


def _dense_mean(codec: Fp32 | Fp16 | Bf16, cargo: Cargo, network: Network) -> Delivery:
    n = network.world_size
    shares = torch.mul(cargo.u, 1.0 / n, out=cargo.out)
    sent = shares if isinstance(codec, Fp32) else codec.to_sum(shares)
    if cargo.remembers:
        cargo.u.sub_(sent.to(torch.float32), alpha=n)
    total, exact = FloatSum(codec, sent, cargo.exact * (1.0 / n), network).wait()
    return delivered(total if total is sent is shares else shares.copy_(total), exact)


def _random_mean(codec: RandomK, cargo: Cargo, network: Network) -> Delivery:
    """Positions need no agreement: every rank draws the same."""
    n = network.world_size
    values, exact, out = codec.values, cargo.exact * (1.0 / n), cargo.blank()
    assert isinstance(values, FLOATS)
    if cargo.u.numel() == 0:
        return delivered(out, FloatSum(values, cargo.u, exact, network).wait()[1])
    chosen = codec.chosen(cargo.u, draw=cargo.draw)
    cargo.positions = chosen.indices
    sent = values.to_sum(chosen.values * (1.0 / n))
    if cargo.remembers:
        kernels.scatter_add(cargo.u, chosen.indices, values.from_sum(sent) * -n)
    total, exact = FloatSum(values, sent, exact, network).wait()
    kernels.scatter_add(out, chosen.indices, values.from_sum(total))
    return delivered(out, exact, finite=kernels.all_finite(total))


all_reduce = AllReduce
