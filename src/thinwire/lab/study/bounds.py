"""The energy that Top-k leaves out: measured, beside Random-k and the two bounds.

|u - TopK(u)|^2 / |u|^2 is at most 1 - k/d for any u, and at most (1 - k/d)^2 where the density of |u| falls from 0 on
(Shi et al. 2019, arXiv 1911.08772: bell-shaped u). A contraction 1 - delta means a delta; the larger, the better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import theory
from ...codecs.select import largest
from ...codecs.sparsify import random_k, top_k
from ...errors import OptionError
from ...rng import Draw

DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DRAWS = 5  # of Random-k
_ROUNDING = 1e-6  # that float32 may leave of an equality


def checked_densities(densities: Sequence[float]) -> tuple[float, ...]:
    """Check densities: above 0 and below 1; returns them in order.

    >>> checked_densities([0.1, 0.01])
    (0.01, 0.1)
    """
    if not densities or not all(0 < density < 1 for density in densities):
        raise OptionError("densities are shares of the elements, above 0 and below 1: use some like 0.001, 0.01, 0.1")
    return tuple(sorted({float(density) for density in densities}))


def contraction(
    u: Tensor, densities: Sequence[float] = DENSITIES, *, draw: Draw | None = None, draws: int = DRAWS
) -> list[dict[str, Any]]:
    """One row for each density that keeps at least one element, exact for top-k.

    Each has the share of the energy left out (`top_k`, `random_k` as the mean of some draws, and `random_k_expected`),
    the bounds `classic` and `bell`, which of them holds, and the delta of each.

    >>> rows = contraction(torch.tensor([3.0, 1.0, 1.0, 1.0]), [0.25])
    >>> rows[0]["top_k"], rows[0]["classic"], rows[0]["bell"]
    (0.25, 0.75, 0.5625)
    """
    flat = u.detach().reshape(-1).to(torch.float32)
    d = flat.numel()
    wanted = [density for density in checked_densities(densities) if density * d >= 1]
    energy = float(flat.to(torch.float64).square().sum())
    if not wanted or not energy > 0:
        return []
    # One selection for all: smaller sets are the beginnings of the largest, ordered by size.
    chosen = largest(flat, top_k(wanted[-1]).k(d)).values
    kept = chosen.abs().sort(descending=True).values.to(torch.float64).square().cumsum(0)
    start = draw or Draw()
    rows = []
    for density in wanted:
        k = top_k(density).k(d)
        drawn = []
        for number in range(draws):
            one = Draw(start.seed, start.step, f"{start.stream}/random_k", number)
            codec = random_k(density, scaled=False, shared=False)
            _, values = codec.decode_sparse(codec.encode(flat, draw=one))
            drawn.append(1 - float(values.to(torch.float64).square().sum()) / energy)
        left = max(0.0, 1 - float(kept[k - 1]) / energy)
        rows.append(_row(density, k, d, left=left, drawn=drawn))
    return rows


def _row(density: float, k: int, d: int, *, left: float, drawn: Sequence[float]) -> dict[str, Any]:
    classic, bell = theory.top_k(d, k), theory.top_k_bell(d, k)
    mean = sum(drawn) / len(drawn)
    return {
        "density": density,
        "k": k,
        "d": d,
        "top_k": left,
        "random_k": mean,
        "random_k_least": min(drawn),
        "random_k_most": max(drawn),
        "random_k_expected": 1 - k / d,
        "classic": 1 - classic,
        "bell": 1 - bell,
        "delta": {"top_k": 1 - left, "random_k": 1 - mean, "classic": classic, "bell": bell},
        "holds": {"classic": left <= 1 - classic + _ROUNDING, "bell": left <= 1 - bell + _ROUNDING},
    }
