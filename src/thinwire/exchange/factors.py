"""PowerSGD over an all-reduce: the left factors of all matrices of a cargo in one message, then the right ones.

Matrices for which factors would not be smaller, and the exact elements, travel with the left factors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Shape, State
from ..codecs.cast import Bf16, Fp16, Fp32
from ..codecs.low_rank import LowRank, sides
from ..comm.network import Network
from ..rng import Draw
from .base import EXACT_BYTES, FLOATS, Cargo, Delivery, Part, delivered
from .script import Op, Script, Send, Wait, Work, awaited_sum


def script(codec: LowRank, *, world_size: int, exact: int, shapes: Sequence[Shape]) -> Script:
    """See `Exchange.script`."""
    itemsize = _factor_codec(codec).dtype.itemsize
    factored = [sides(shape) for shape in shapes if codec.pays(shape)]
    whole = sum(math.prod(shape) for shape in shapes if not codec.pays(shape))
    elements, count = sum(rows * columns for rows, columns in factored), max(1, len(factored))
    left, right = (itemsize * codec.rank * sum(pair[side] for pair in factored) for side in (0, 1))
    ops: list[Op] = [Work("pass", 2 * (elements + whole))]
    for iteration in range(codec.iterations):
        plain = EXACT_BYTES * (whole + exact) if iteration == 0 else 0
        ops.append(Work("left", elements, codec, count))
        if itemsize == EXACT_BYTES:
            ops += awaited_sum(left + plain, world_size, f"left{iteration}")
        else:
            ops += [Send("all_reduce", plain, "plain")] if plain else []
            ops += awaited_sum(left, world_size, f"left{iteration}")
            ops += [Wait("plain")] if plain else []
        ops.append(Work("right", elements, codec, count))
        ops += awaited_sum(right, world_size, f"right{iteration}")
    ops.append(Work("put", elements, codec, count))
    return [*ops, Work("pass", 2 * (elements + whole))]


@dataclasses.dataclass
class _Matrix:
    """One matrix on its way: its part of the cargo, its state and its factors."""

    part: Part
    x: Tensor
    state: State
    p: Tensor
    q: Tensor


def mean(codec: LowRank, cargo: Cargo, network: Network) -> Delivery:
    share, out = 1.0 / network.world_size, cargo.blank()
    news = not kernels.all_finite(cargo.u)
    matrices = [_begin(codec, part, cargo) for part in cargo.parts if codec.pays(part.shape)]
    whole = [part for part in cargo.parts if not codec.pays(part.shape)]
    plain = torch.cat([*(part.of(cargo.u) for part in whole), cargo.exact]) * share
    for iteration in range(codec.iterations):
        lefts = [codec.left(m.x, state=m.state, draw=_draw(cargo, m)) * share for m in matrices]
        beside = plain if iteration == 0 else plain.new_empty(0)
        for matrix, p in zip(matrices, _averaged(codec, lefts, beside, network), strict=True):
            matrix.p = codec.orthonormal(p)
        rights = [codec.right(m.x, m.p) * share for m in matrices]
        for matrix, q in zip(matrices, _averaged(codec, rights, plain.new_empty(0), network), strict=True):
            matrix.q = q
            codec.warm(matrix.state, q)
    for matrix in matrices:
        # A NaN anywhere makes the whole mean NaN: P or Q has no finite column then.
        matrix.part.of(out).view(matrix.part.shape).copy_(codec.restore(matrix.p, matrix.q, matrix.part.shape))
    place = 0
    for part in whole:
        size = part.stop - part.start
        part.of(out).copy_(plain[place : place + size])
        place += size
    if cargo.remembers and not news:
        cargo.u -= out
        for part in whole:
            part.of(cargo.u).zero_()  # sent as it was
    return delivered(out, plain[place:])


def _begin(codec: LowRank, part: Part, cargo: Cargo) -> _Matrix:
    x = part.of(cargo.u).view(part.shape)
    nothing = x.new_empty(0)
    return _Matrix(part, x, cargo.state.setdefault(part.name, codec.new_state()), nothing, nothing)


def _draw(cargo: Cargo, matrix: _Matrix) -> Draw:
    return dataclasses.replace(cargo.draw, stream=matrix.part.name)


def _averaged(codec: LowRank, shares: list[Tensor], plain: Tensor, network: Network) -> list[Tensor]:
    """The sums of factors of many matrices, which travel as one message; `plain` is summed beside them, in place."""
    factor_codec = _factor_codec(codec)
    flat = torch.cat([share.reshape(-1) for share in shares]) if shares else plain.new_empty(0)
    if isinstance(factor_codec, Fp32):
        both = torch.cat((flat, plain))
        if both.numel():
            network.all_reduce(both)
        total = both[: flat.numel()]
        plain.copy_(both[flat.numel() :])
    else:
        narrow = factor_codec.to_sum(flat)
        pending = network.start_all_reduce(plain) if plain.numel() else None
        if narrow.numel():
            network.all_reduce(narrow)
        if pending is not None:
            pending.wait()
        total = factor_codec.from_sum(narrow)
    averaged, place = [], 0
    for share in shares:
        averaged.append(total[place : place + share.numel()].view(share.shape))
        place += share.numel()
    return averaged


def _factor_codec(codec: LowRank) -> Fp32 | Fp16 | Bf16:
    assert isinstance(codec.factors, FLOATS)
    return codec.factors
