"""All-reduce: the network itself adds the messages, so traffic does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec, Shape
from ..codecs.stages import Round
from ..comm.network import Network, Pending
from ..recipe.registry import register
from .base import Exchange, shard_result, start_mean
from .request import Request, Result, result
from .script import Script, of_rounds


@register
class AllReduce(Exchange):
    """The network adds the messages: for every codec that declares `sum_dtype`, in the rounds that it defines.

    >>> from thinwire.codecs import bf16, top_k
    >>> AllReduce().accepts(bf16()) is None
    True
    >>> AllReduce().accepts(top_k(0.01))
    'top_k keeps other positions on every rank, so its messages cannot be added: use all_gather, or shared_top_k'
    >>> AllReduce().sent_bytes(bf16(), 1_000_000, world_size=4)
    3000000
    """

    name = "all_reduce"
    sums = True

    def accepts(self, codec: Codec) -> str | None:
        return codec.not_summable() if codec.sum_dtype is None else None

    def refuses(self, codec: Codec, *, world_size: int, remembers: bool) -> str | None:
        return codec.refuses_ranks(world_size, remembers=remembers)

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        costs = codec.round_costs(numel, world_size, shapes) if numel else []
        return of_rounds(costs, ranks=world_size, exact=exact)

    def mean(self, codec: Codec, request: Request, network: Network) -> Result:
        if not request.numel:
            return result(request.blank(), start_mean(request.exact, network)())
        exact = request.exact * (1.0 / network.world_size)
        rounds = codec.rounds(request, network.world_size)
        current = next(rounds)
        total, exact = _first(current, exact, request, network)
        while True:
            try:
                current = rounds.send(total)
            except StopIteration as end:
                mean, known = end.value
                if known is None and request.shards is not None:
                    return shard_result(mean, request, network)
                return result(mean, exact, known=known)
            total = _combined(current, request, network)


def _first(current: Round, exact: Tensor, request: Request, network: Network) -> tuple[Tensor, Tensor]:
    """The first round, and the exact elements: in one message where both are float32 sums, else at the same time."""
    extra = exact if current.beside is None else torch.cat((current.beside, exact))
    if not extra.numel():
        return _combined(current, request, network), exact
    tensor, whole = current.tensor, request.shards is None or not current.elementwise
    if current.op == "sum" and current.add is None and tensor.dtype == torch.float32 and whole:
        both = network.start_all_reduce(torch.cat((tensor.view(-1), extra)), soon=True).wait()
        total, extra = both[: tensor.numel()].view_as(tensor), both[tensor.numel() :]
    else:
        pending: Pending = network.start_all_reduce(extra)
        total = _combined(current, request, network)
        extra = pending.wait()
    if current.beside is not None:
        cut = current.beside.numel()
        current.beside, extra = extra[:cut], extra[cut:]
    return total, extra


def _combined(current: Round, request: Request, network: Network) -> Tensor:
    """What ranks make of one round's tensor."""
    if current.add is not None:
        return _added_in_a_tree(current, network)
    if request.shards is not None and current.elementwise:
        return _scattered(current.tensor, request.shards, network)
    return network.start_all_reduce(current.tensor, op=current.op, soon=True).wait()


def _scattered(tensor: Tensor, shards: Sequence[slice], network: Network) -> Tensor:
    """The sum of this rank's shard: half of what an all-reduce sends."""
    size: int = shards[0].stop - shards[0].start
    rows = tensor.new_zeros(network.world_size, size)
    rows.view(-1)[: tensor.numel()] = tensor
    mine = shards[network.rank]
    return network.reduce_scatter(rows)[: mine.stop - mine.start]


def _added_in_a_tree(current: Round, network: Network) -> Tensor:
    """The sum of codes that a network cannot add: every piece is added by one rank, neighbour with neighbour."""
    n, codes, add = network.world_size, current.tensor, current.add
    if n == 1 or add is None:
        return codes
    rows = codes.new_zeros(n, -(-codes.numel() // n))
    rows.view(-1)[: codes.numel()] = codes
    left, number = list(network.all_to_all(rows)), 0
    while len(left) > 1:
        level = []
        for a, b in zip(left[::2], left[1::2], strict=False):
            level.append(add(a, b, number))
            number += 1
        left = level + left[2 * len(level) :]
    return network.all_gather(left[0]).view(-1)[: codes.numel()]


all_reduce = AllReduce
