"""Finds the elements of largest magnitude: exactly, by a threshold, or without a value read on the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Selection

SAMPLE_STRIDE = 63
_LARGEST_FINITE = torch.finfo(torch.float32).max
_LARGEST_FINITE_BITS = 0x7F7FFFFF
_MAGNITUDE = 0x7FFFFFFF
_WORTH_SAMPLING = 1 << 15


def as_selection(values: Tensor, indices: Tensor) -> Selection:
    """A selection whose threshold nobody asks about."""
    return Selection(values, indices.to(torch.int32), indices.numel())


def _pick(found: Selection, places: Tensor) -> Selection:
    """Part of a selection; `places` count within it."""
    places = places.to(torch.int64)
    return as_selection(found.values[places], found.indices[places])


def non_finite(x: Tensor, capacity: int) -> Selection:
    """NaN at the first `capacity` positions of inf or NaN."""
    found = kernels.select(x, _LARGEST_FINITE, capacity=capacity)
    return found._replace(values=torch.full_like(found.values, math.nan))


def select_all(x: Tensor, threshold: float, *, expected: int) -> Selection:
    """Every element with |x| > threshold; one pass if no more than `expected` are found, else two."""
    found = kernels.select(x, threshold, capacity=expected)
    count = found.above
    return found if count <= expected else kernels.select(x, threshold, capacity=count)


def sampled_threshold(x: Tensor, k: int, *, stride: int, start: int = 0) -> float:
    """A threshold that about k elements exceed, from every `stride`-th element.

    It is the next float below the sample's quantile, so that `>` keeps the quantile itself (equal magnitudes!), and
    never above the largest finite float, so that `>` always finds inf and NaN.

    >>> sampled_threshold(torch.tensor([1.0, -3.0, 2.0, -3.0]), 2, stride=1) < 3.0
    True
    """
    sample = x[start::stride]
    rank = min(max(1, math.ceil(k * sample.numel() / x.numel())), sample.numel())
    return _just_below(_smallest_of_largest(sample, rank))


def _smallest_of_largest(x: Tensor, k: int) -> int:
    """The k-th largest magnitude as an integer: float bits without the sign keep the order, NaN last."""
    magnitude = x.view(torch.int32) & _MAGNITUDE
    if 2 * k > x.numel():  # topk takes longer the more it finds
        return int(magnitude.topk(x.numel() - k + 1, largest=False, sorted=False).values.max())
    return int(magnitude.topk(k, sorted=False).values.min())


def _just_below(bits: int) -> float:
    bits = min(max(bits - 1, 0), _LARGEST_FINITE_BITS)
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def _wanted(numel: int, k: int) -> int | None:
    """How many candidates a sampled threshold should leave for an exact choice of k; None if a sample does not pay."""
    in_sample = k / SAMPLE_STRIDE
    wanted = math.ceil((in_sample + 4 * math.sqrt(in_sample) + 4) * SAMPLE_STRIDE)  # 4 standard deviations above k
    return None if numel < _WORTH_SAMPLING or 4 * wanted > numel else wanted


def _candidates(x: Tensor, k: int) -> Selection | None:
    """Somewhat more than the k largest, if a sample finds a threshold for that."""
    wanted = _wanted(x.numel(), k)
    if wanted is None:
        return None
    found = kernels.select(x, sampled_threshold(x, wanted, stride=SAMPLE_STRIDE), capacity=2 * wanted)
    return found if k <= found.above <= 2 * wanted else None


def take_largest(gradient: Tensor, residual: Tensor, k: int, *, decay: float) -> Selection | None:
    """The k largest of u = gradient + decay * residual, taken out of it in one pass; `gradient` holds the rest.

    None if a sampled threshold does not serve; `gradient` then holds all of u, or is untouched where no sample pays.
    """
    numel = gradient.numel()
    wanted = _wanted(numel, k)
    if wanted is None:
        return None
    sample = torch.add(gradient[::SAMPLE_STRIDE], residual[::SAMPLE_STRIDE], alpha=decay)  # a sample of the sum
    threshold = sampled_threshold(sample, max(1, math.ceil(wanted * sample.numel() / numel)), stride=1)
    found = kernels.select_ef(residual, gradient, threshold, capacity=2 * wanted, out=gradient, decay=decay)
    gradient[found.indices.to(torch.int64)] = found.values
    if not k <= found.above <= 2 * wanted or not kernels.all_finite(found.values):
        return Selection(found.values[:0], found.indices[:0], -1)
    chosen = _pick(found, _largest_in(found.values, k).indices)
    gradient[chosen.indices.to(torch.int64)] = 0.0
    return chosen


def largest_resident(x: Tensor, k: int) -> Selection:
    """The k largest magnitudes without a value read on the host: sizes do not depend on the data."""
    places = (x.view(torch.int32) & _MAGNITUDE).topk(k, sorted=False).indices.sort().values
    return as_selection(x[places], places)


def largest(x: Tensor, k: int) -> Selection:
    """Exactly the k largest magnitudes, in order of position; of equal ones the first. inf and NaN are the largest.

    Magnitudes are compared as integers. A sampled threshold leaves a few candidates for the exact choice where that
    works; the result is the same without it.

    >>> largest(torch.tensor([1.0, -3.0, 2.0, 3.0, 3.0]), 2).indices
    tensor([1, 3], dtype=torch.int32)
    """
    if k >= x.numel():
        return as_selection(x.clone(), torch.arange(x.numel(), device=x.device))
    candidates = _candidates(x, k)
    if candidates is None:
        return _largest_in(x, k)
    return _pick(candidates, _largest_in(candidates.values, k).indices)


def _largest_in(x: Tensor, k: int) -> Selection:
    smallest = _smallest_of_largest(x, k)
    if smallest == 0:  # then zeros are needed to make it k
        found = as_selection(x, torch.arange(x.numel(), device=x.device))
    else:
        found = select_all(x, _just_below(smallest), expected=k)
    if found.values.numel() == k:
        return found
    magnitude = found.values.view(torch.int32) & _MAGNITUDE
    above, ties = magnitude > smallest, magnitude == smallest
    keep = above | (ties & (ties.cumsum(0, dtype=torch.int32) <= k - above.sum()))
    return _pick(found, keep.nonzero().view(-1))


def largest_of(found: Selection, k: int) -> Selection:
    """The k largest of a selection; all of it if it holds no more."""
    return found if found.values.numel() <= k else _pick(found, largest(found.values, k).indices)
