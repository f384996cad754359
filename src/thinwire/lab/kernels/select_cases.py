"""What `thinwire kernels` times of sparse codecs: error feedback, selection, compaction."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ... import kernels
from ...codecs.threshold_k import threshold_k
from .case import KEY, Case, Data


def select_cases(data: Data, density: float) -> Iterator[Case]:
    """Error feedback, selection and compaction in one pass, and what stands around it."""
    x, memory, numel = data.x, data.memory, data.x.numel()
    k = max(1, round(density * numel))
    gradient = x * 1e-3
    spare, out = gradient.clone(), data.out
    quantile = math.sqrt(2) * float(torch.erfinv(torch.tensor(1.0 - density, dtype=torch.float64)))
    threshold = quantile * math.sqrt(1 + 1e-6)  # memory and gradient are independent Gaussians
    capacity = math.ceil(1.2 * k) + 64

    def refresh() -> None:
        memory.copy_(data.fresh_memory)
        spare.copy_(gradient)

    def ours() -> object:
        return kernels.select_ef(memory, gradient, threshold, capacity=capacity)

    def apart() -> object:
        return kernels.select_ef(memory, gradient, threshold, capacity=capacity, out=out)

    def decaying() -> object:
        return kernels.select_ef(memory, spare, threshold, capacity=capacity, out=spare, decay=0.9)

    def eager() -> object:
        memory.add_(gradient)
        indices = torch.topk(memory.abs(), k, sorted=False).indices
        values = memory[indices]
        memory[indices] = 0.0
        return values

    def checked() -> object:
        return kernels.all_finite(gradient) and ours()

    codec = threshold_k(density)
    state = codec.new_state()
    refresh()
    codec._take_compensated(spare, memory, KEY, state, 1.0)
    steady = dict(state)

    def whole() -> object:
        return codec._take_compensated(spare, memory, KEY, dict(steady), 1.0)

    refresh()
    chosen = ours()
    assert isinstance(chosen, kernels.Selection)
    positions = chosen.indices.to(torch.int64)
    moved = 12 + 8 * density
    yield Case("select_ef", ours, eager, moved, density, refresh)
    yield Case("select_ef_out", apart, eager, moved + 4, density, refresh)
    yield Case("select_ef_decay", decaying, eager, moved, density, refresh)
    yield Case("select_ef_checked", checked, eager, moved + 4, density, refresh)
    yield Case("threshold_k_step", whole, eager, moved, density, refresh)
    wide = kernels.select(x, 0.9 * threshold, capacity=numel)
    yield Case(
        "select",
        lambda: kernels.select(x, threshold, capacity=capacity),
        lambda: x[(x.abs() > threshold).nonzero().view(-1)],
        4 + 8 * density,
        density,
    )
    yield Case(
        "keep_largest",
        lambda: kernels.keep_largest(wide.values, wide.indices, k=k, threshold=0.9 * threshold),
        lambda: torch.topk(wide.values.abs(), min(k, wide.values.numel()), sorted=False),
        8 * density,
        density,
    )
    yield Case(
        "threshold_count",
        lambda: kernels.threshold_count(x, threshold),
        lambda: int((x.abs() > threshold).sum()),
        4,
        density,
    )
    yield Case(
        "scatter_add",
        lambda: kernels.scatter_add(data.out, chosen.indices, chosen.values),
        lambda: data.out.index_add_(0, positions, chosen.values),
        16 * density,
        density,
    )
