"""Sums as plain DDP has them: divided by the ranks, added in the tensor's own dtype, nothing compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..codecs.base import flag
from ..comm.network import Network
from .step import Work


def start_in_place(work: Work, buffer: Tensor, network: Network) -> None:
    """Begin to replace a buffer by its mean; it may be sparse."""
    work.is_sum = True
    if network.world_size > 1:
        buffer.mul_(1.0 / network.world_size)
        work.pending = network.start_all_reduce(buffer)


def start(work: Work, tensors: Mapping[str, Tensor], network: Network) -> None:
    """Begin to write the means of tensors to the outputs of `work`, in one message."""
    work.is_sum = True
    share, given = 1.0 / network.world_size, list(tensors.values())
    if len(given) == 1:
        out = next(iter(work.outputs.values()))
        if out.is_contiguous():
            torch.mul(given[0].detach(), share, out=out)
            work.pending = network.start_all_reduce(out)
            return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in given]).mul_(share)
    work.copies = list(zip(tensors, torch.split(flat, [tensor.numel() for tensor in given]), strict=True))
    work.pending = network.start_all_reduce(flat)


def scatter(work: Work, tensor: Tensor, cuts: Sequence[slice], network: Network) -> None:
    """Write this rank's shard of the mean to the output of `work`."""
    out = next(iter(work.outputs.values()))
    rows = tensor.new_zeros(network.world_size, cuts[0].stop)
    rows.view(-1)[: tensor.numel()] = tensor.detach().reshape(-1)
    out.copy_(network.reduce_scatter(rows.mul_(1.0 / network.world_size))[: out.numel()])


def finite(mean: Tensor) -> bool | Tensor:
    """Whether a mean that travelled as it is, perhaps sparse, is finite."""
    values = mean.coalesce().values() if mean.is_sparse else mean
    return flag(values.view(-1).to(torch.float32))
