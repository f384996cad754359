"""Global-QSGD: agree on a scale, then add integers (arXiv 2305.18627).

One small all-reduce gives every rank the same scale, per bucket or per block. Linear codes are then summed by the
network as int8: a rank uses 127 // n levels, so the sum never wraps. Exponential codes are no numbers that a network
can add: every rank gets one piece of all ranks, adds its codes by the unbiased rule in a balanced tree, and all ranks
collect the pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels, theory
from ..codecs.global_qsgd import GlobalQsgd
from ..comm.network import Network
from ..errors import OptionError
from .base import EXACT_BYTES, Cargo, Delivery, delivered, exact_beside, start_mean
from .script import Op, Script, Send, Wait, Work, awaited_sum

_NORM_BYTES = 4
_TYPICAL = 1 << 20  # elements that share a scale if all of a bucket do


def refusal(codec: GlobalQsgd, world_size: int, remembers: bool) -> str | None:
    """Levels shrink with the ranks: why so many cannot use this codec, or None."""
    try:
        levels = codec.levels(world_size) if codec.addition == "sum" else codec.top - codec.headroom(world_size)
    except OptionError as none_left:
        return str(none_left)
    if not remembers:
        return None
    d = codec.block or _TYPICAL
    if codec.addition == "codes":
        omega = theory.exponential(d, levels)
    else:
        omega = theory.uniform_l2(d, levels) if codec.norm == "l2" else theory.uniform_linf(d, levels)
    if omega < 1:
        return None
    return (
        f"{codec.spec()} leaves {levels} levels to each of {world_size} ranks and may then err by more than the "
        "gradient itself, so a memory would grow without end: leave out the memory, or use smaller blocks"
    )


def script(codec: GlobalQsgd, numel: int, *, world_size: int, exact: int) -> Script:
    """See `Exchange.script`."""
    norms = _NORM_BYTES * kernels.blocks_of(numel, codec.block) if numel else 0
    ops: list[Op] = [Work("pass", numel)] if numel else []
    if codec.combination == "sum":
        ops += awaited_sum(norms + EXACT_BYTES * exact, world_size, "norms")
    else:
        ops += exact_beside(exact) + awaited_sum(norms, world_size, "norms")
        ops += [Wait("exact")] if exact else []
    if not numel:
        return ops
    ops.append(Work("encode", numel, codec))
    if codec.addition == "sum":
        ops += awaited_sum(numel, world_size, "codes")
    elif world_size > 1:
        piece = _piece(numel, world_size)
        ops += [Work("pass", numel), Send("all_to_all", world_size * piece, "codes"), Wait("codes")]
        ops += [Work("add", (world_size - 1) * piece, codec, world_size - 1)]
        ops += [Send("all_gather", piece, "sums"), Wait("sums"), Work("pass", numel)]
    return [*ops, Work("put", numel, codec)]


def mean(codec: GlobalQsgd, cargo: Cargo, network: Network) -> Delivery:
    n = network.world_size
    scale, exact = _agreed(codec, cargo, network)
    if cargo.u.numel() == 0:
        return delivered(cargo.blank(), exact)
    codes = codec.to_sum(cargo.u, scale=scale, world_size=n, draw=cargo.draw)
    if cargo.remembers:
        cargo.u -= codec.from_sum(codes, scale=scale, world_size=n)
    total = network.all_reduce(codes) if codec.addition == "sum" else _added(codec, codes, cargo, network)
    # Integers are always finite and never exceed the scale; powers of two need headroom above it, which may overflow.
    finite = kernels.all_finite(scale) if codec.addition == "sum" else None
    out = codec.from_sum(total, scale=scale, world_size=n, mean=True, out=cargo.out)
    return delivered(out, exact, finite=finite)


def _agreed(codec: GlobalQsgd, cargo: Cargo, network: Network) -> tuple[Tensor, Tensor]:
    """The scale of all ranks and the mean of the exact elements: in one message where both are sums."""
    norms = codec.local_norm(cargo.u) if cargo.u.numel() else cargo.u.clone()
    if codec.combination == "sum":
        both = network.all_reduce(torch.cat((norms, cargo.exact * (1.0 / network.world_size))))
        return codec.scale_from(both[: norms.numel()]), both[norms.numel() :]
    exact = start_mean(cargo.exact, network)
    if norms.numel():
        network.all_reduce(norms, op="max")
    return codec.scale_from(norms), exact()


def _piece(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


def _added(codec: GlobalQsgd, codes: Tensor, cargo: Cargo, network: Network) -> Tensor:
    """The sum of all ranks' codes, each piece added by one rank."""
    n, numel = network.world_size, codes.numel()
    if n == 1:
        return codes
    rows = codes.new_zeros(n, _piece(numel, n))
    rows.view(-1)[:numel] = codes
    received = network.all_to_all(rows)
    return network.all_gather(_tree(codec, list(received), cargo, network)).view(-1)[:numel]


def _tree(codec: GlobalQsgd, codes: list[Tensor], cargo: Cargo, network: Network) -> Tensor:
    """Neighbour with neighbour until one is left; every addition of every piece has a draw of its own."""
    addition = 0
    while len(codes) > 1:
        level = []
        for left, right in zip(codes[::2], codes[1::2], strict=False):
            level.append(codec.add_codes(left, right, cargo.drawn(f"sum{addition}", rank=network.rank)))
            addition += 1
        codes = level + codes[2 * len(level) :]
    return codes[0]
