"""Codecs that keep a share of the elements: the largest, found exactly or by a guessed threshold, or random ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .. import kernels, theory
from ..comm import streams
from ..kernels import Selection
from ..recipe.registry import register
from ..rng import Key
from .base import Codec, Rounds, Shape, State, flag
from .cast import Bf16
from .select import as_selection, largest, largest_of, largest_resident, sampled_threshold, select_all, take_largest
from .sparse import SparseCodec, Sparsifier
from .stages import Round, RoundCost, Work

if TYPE_CHECKING:
    from ..exchange.request import Request

_SAMPLE, _POSITIONS, _ROUND = 2, 3, 16  # purposes of folded keys
_SMALL = 4096  # elements up to which every position is drawn, because short permutations are not random enough
_WALK = 48  # steps after which one position in 2**48 is still outside
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


@register
class TopK(Sparsifier):
    """Keeps exactly the k = ratio * numel elements of largest magnitude; of equal ones the first.

    `ratio`: share of elements to keep. `indices`: code of the positions, `auto` for the smallest. `values`: codec of
    the kept values. The error is at most (1 - k/d) |x|^2, and (1 - k/d)^2 |x|^2 on bell-shaped data
    (`theory.top_k_bell`).
    Reference: Aji and Heafield 2017, arXiv 1704.05021; Stich et al. 2018, arXiv 1809.07599.

    >>> top_k(0.5).decode(top_k(0.5).encode(torch.tensor([1.0, -3.0, 2.0, 0.5])))
    tensor([ 0., -3.,  2.,  0.])
    """

    name: ClassVar[str] = "top_k"
    examples: ClassVar[tuple[str, ...]] = ("top_k:0.01", "top_k:0.25,indices=int32")

    def _kept_energy(self, numel: int) -> float:
        return theory.top_k(numel, self.k(numel)) if numel else 1.0

    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        return largest(x, self.k(x.numel()))

    def _take_compensated(
        self, gradient: Tensor, residual: Tensor, key: Key, state: State, decay: float
    ) -> Selection | None:
        return take_largest(gradient, residual, self.k(gradient.numel()), decay=decay)


@register
class GaussianK(Sparsifier):
    """Keeps what exceeds the threshold that would keep k elements if they were Gaussian, as published.

    t = mean + |z| std, z the two-sided quantile of `ratio`; up to three evaluations, t halved below 2k/3 and times 1.5
    above 4k/3; the last one counts whatever it found. Arguments as in `top_k`. The message has room for 4k/3 elements:
    the largest travel, what does not fit stays in the memory (the paper sends all of it). `state["passes"]` counts
    evaluations.

    `delta` is 0, no guarantee: error feedback makes data that are not Gaussian, and the rule then sends far from k. At
    ratio 0.001 it settled at 0.47 k on Gaussian and at 0.004 k on heavy-tailed gradients with drift (1,200 steps, three
    evaluations each), without feedback it finds nothing in uniform data. To train, use `threshold_k`.
    Reference: Shi et al. 2019, Understanding Top-k Sparsification, arXiv 1911.08772.

    >>> x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    >>> indices, values = gaussian_k(0.01).decode_sparse(gaussian_k(0.01).encode(x))
    >>> 67 <= len(indices) <= 133
    True
    """

    name: ClassVar[str] = "gaussian_k"
    examples: ClassVar[tuple[str, ...]] = ("gaussian_k:0.01",)

    def capacity(self, numel: int) -> int:
        return min(numel, -(-4 * self.k(numel) // 3))

    def new_state(self) -> State:
        return {**super().new_state(), "passes": 0}

    def first_threshold(self, x: Tensor) -> float:
        """mean + |z| std from one pass; not finite if x is not."""
        numel = x.numel()
        total, squares, max_abs = kernels.moments(x)
        if not math.isfinite(max_abs):
            return max_abs
        mean = total / numel
        variance = max(0.0, squares - total * mean) / max(1, numel - 1)
        return mean - NormalDist().inv_cdf(self.ratio / 2) * math.sqrt(variance)

    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        k, capacity = self.k(x.numel()), self.capacity(x.numel())
        threshold = self.first_threshold(x)
        if not math.isfinite(threshold):
            return self._select_non_finite(x, key)
        for evaluation in (1, 2, 3):
            threshold = threshold if threshold > 0 else 0.0  # a negative mean: then everything that is not zero
            found = kernels.select(x, threshold, capacity=capacity)
            count = found.above
            state["passes"] = state.get("passes", 0) + 1
            if evaluation == 3 or 2 * k <= 3 * count <= 4 * k:
                break
            threshold *= 0.5 if 3 * count < 2 * k else 1.5
        return found if count <= capacity else largest_of(kernels.select(x, threshold, capacity=count), capacity)

    def _select_resident(self, x: Tensor, key: Key) -> Selection:
        """The same rule in tensors; what fits beyond the threshold travels as zeros and stays in the memory."""
        k = self.k(x.numel())
        z = -NormalDist().inv_cdf(self.ratio / 2)
        threshold = (x.mean() + z * x.std()).clamp(min=0.0)
        for _ in (1, 2):
            count = (x.abs() > threshold).sum()
            threshold = threshold * torch.where(3 * count < 2 * k, 0.5, torch.where(3 * count > 4 * k, 1.5, 1.0))
        found = largest_resident(x, self.capacity(x.numel()))
        kept = (found.values.abs() > threshold) | ~found.values.isfinite()
        return found._replace(values=torch.where(kept, found.values, 0.0))


@register
class DgcK(Sparsifier):
    """Keeps at most k elements above a threshold taken from a sample, as in Deep Gradient Compression.

    The threshold is the top-`ratio` quantile of a strided sample of 1 % (at least 2 / ratio elements) whose start is
    drawn; it is lowered by 0.8 while fewer than 0.8 k exceed it, and of more than k the k largest are kept. Arguments
    as in `top_k`. Two differences to the reference code: between k and 1.3 k it drops the last positions, here the
    smallest go; and after ten adaptations in vain it sends what it has, here the exact top k, hence delta = 0.8 k/d.
    Reference: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887.

    >>> codec = dgc_k(0.25)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -8.0, 2.0, 0.5])))
    tensor([ 0., -8.,  0.,  0.])
    """

    name: ClassVar[str] = "dgc_k"
    examples: ClassVar[tuple[str, ...]] = ("dgc_k:0.01",)

    def _fewest(self, k: int) -> int:
        return -(-4 * k // 5)

    def _kept_energy(self, numel: int) -> float:
        return theory.top_k(numel, self._fewest(self.k(numel))) if numel else 1.0

    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        numel, k = x.numel(), self.k(x.numel())
        sample = max(1, math.ceil(0.01 * numel), math.ceil(2 / self.ratio))
        stride = max(1, (numel // sample - 1) | 1)  # odd, so that it falls in with no power of two
        threshold = sampled_threshold(x, k, stride=stride, start=key.fold(_SAMPLE).k0 % min(stride, numel))
        for _ in range(10):
            found = select_all(x, threshold, expected=2 * k)
            if found.above >= self._fewest(k) or threshold == 0:  # zeros are not worth sending
                return largest_of(found, k)
            threshold *= 0.8
        return largest(x, k)


@register
class TrimmedK(Sparsifier):
    """Keeps exactly the k largest, found among the few above a threshold between mean and maximum of |x| (RedSync).

    The threshold mean + r (max - mean) is tried with r = 1 - eps, 1 - 2 eps, ... until k elements exceed it, then the k
    largest of those are taken; if r reaches 0, of all. Arguments as in `top_k`, and `eps`: 0.01 to below 1. Published
    copies leave out the exact choice at the end and send up to 306 k.
    Reference: Fang et al. 2019, RedSync, arXiv 1808.04357.

    >>> trimmed_k(0.5).decode(trimmed_k(0.5).encode(torch.tensor([1.0, -3.0, 2.0, 0.5])))
    tensor([ 0., -3.,  2.,  0.])
    """

    name: ClassVar[str] = "trimmed_k"
    examples: ClassVar[tuple[str, ...]] = ("trimmed_k:0.01",)
    eps: float = field(default=0.2, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            0.01 <= self.eps < 1, f"eps is the step from maximum to mean, 0.01 to below 1, not {self.eps}: use 0.2"
        )

    def _kept_energy(self, numel: int) -> float:
        return theory.top_k(numel, self.k(numel)) if numel else 1.0

    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        k = self.k(x.numel())
        top = float(kernels.block_abs_max(x, block=0))
        if not math.isfinite(top):
            return self._select_non_finite(x, key)
        mean = min(top, float(x.abs().mean()))  # the sum in the mean may overflow
        for step in range(1, math.ceil(1 / self.eps)):
            threshold = mean + (1 - step * self.eps) * (top - mean)
            count = kernels.threshold_count(x, threshold)
            if count >= k:
                return largest_of(kernels.select(x, threshold, capacity=count), k)
        return largest(x, k)


# ----------------------------------------------------------------------------------------------------------- random


def _hashed(numbers: Tensor, key: Key, bits: int) -> Tensor:
    """`bits` (at most 16) random bits for each number below 2**16."""
    h = ((numbers + key.k0) * _MULTIPLIERS[0]) & _WORD
    return (((h ^ (h >> 15) ^ key.k1) * _MULTIPLIERS[1]) & _WORD) >> (32 - bits)


def _permuted(numbers: Tensor, bits: int, key: Key) -> Tensor:
    """A random permutation of 0 .. 2**bits - 1: a Feistel network of four rounds (Luby and Rackoff 1988)."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = numbers >> low_bits, numbers & ((1 << low_bits) - 1)
    for i in range(2):
        high = high ^ _hashed(low, key.fold(_ROUND + 2 * i), high_bits)
        low = low ^ _hashed(high, key.fold(_ROUND + 2 * i + 1), low_bits)
    return (high << low_bits) | low


def random_positions(numel: int, k: int, key: Key, *, device: torch.device | str = "cpu") -> Tensor:
    """k different positions below `numel`, every one equally likely; int32, increasing; time and memory grow with k.

    >>> random_positions(1_000_000, 4, Key(1, 2)).shape
    torch.Size([4])
    """
    if k >= numel:
        return torch.arange(numel, dtype=torch.int32, device=device)
    if numel <= _SMALL:
        positions = kernels.random_bits(numel, key, device=device).argsort()[:k]
    else:
        bits = (numel - 1).bit_length()
        positions = _permuted(torch.arange(k, device=device), bits, key)
        # The permutation is of a power of two: whoever lands outside walks on along its cycle, which leads back inside.
        if streams.resident(positions.device):
            for _ in range(_WALK):  # more than half of them are inside after each step
                positions = torch.where(positions < numel, positions, _permuted(positions, bits, key))
            positions.remainder_(numel)
            return positions.to(torch.int32).sort().values
        outside = (positions >= numel).nonzero().view(-1)
        while outside.numel():
            moved = _permuted(positions[outside], bits, key)
            positions[outside] = moved
            outside = outside[moved >= numel]
    return positions.to(torch.int32).sort().values


@register
class RandomK(SparseCodec):
    """Keeps k random elements; positions do not travel, the receiver redraws them from the message's key.

    `ratio`: share of elements to keep. `shared`: every rank keeps the same positions (the draw's rank is ignored), so
    that values can be all-reduced. `scaled`: values times d/k, which makes the codec unbiased
    with variance d/k - 1; without, it contracts by k/d in expectation and wants error feedback. `values`: codec of the
    values. If any element is not finite, all values travel as NaN.
    Reference: Stich et al. 2018, Sparsified SGD with Memory, arXiv 1809.07599.

    >>> codec, x = random_k(0.5), torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> from thinwire.rng import Draw
    >>> torch.stack([codec.decode(codec.encode(x, draw=Draw(step=i))) for i in range(1000)]).mean(0).round()
    tensor([1., 2., 3., 4.])
    """

    name: ClassVar[str] = "random_k"
    examples: ClassVar[tuple[str, ...]] = ("random_k:0.1", "random_k:0.1,shared=false,scaled=false")
    shared: bool = field(default=True, kw_only=True)
    scaled: bool = field(default=True, kw_only=True)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]  # the base declares it for the class
        return self.scaled and self.values.unbiased

    @property
    def sum_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return self.values.sum_dtype if self.shared else None

    def not_summable(self) -> str:
        values = self.values if self.values.sum_dtype is not None else Bf16()
        shared = dataclasses.replace(self, shared=True, values=values)
        return f"messages of {self.spec()} cannot be added: write {shared.spec()}, or use all_gather"

    def milder(self) -> list[Codec]:
        unscaled = dataclasses.replace(self, scaled=False)
        return [unscaled, *(dataclasses.replace(unscaled, values=values) for values in self.values.milder())]

    def omega(self, numel: int) -> float | None:
        """(1 + omega of the choice) (1 + omega of the values) - 1."""
        of_values = self.values.omega(self.k(numel))
        if not self.unbiased or of_values is None:
            return None
        of_choice = theory.random_k(numel, self.k(numel)) if numel else 0.0
        return (1 + of_choice) * (1 + of_values) - 1

    def delta(self, numel: int, *, shape: Shape | None = None) -> float | None:
        return None if self.scaled else super().delta(numel)

    def _kept_energy(self, numel: int) -> float:
        return self.k(numel) / numel if numel else 1.0

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return self.values.body_bytes(self.k(numel)) if numel else 0

    # -------------------------------------------------------------------------------------------------- messages

    @property
    def shares_draw(self) -> bool:
        return self.shared

    def _positions(self, numel: int, key: Key, device: torch.device) -> Tensor:
        return random_positions(numel, self.k(numel), key.fold(_POSITIONS), device=device)

    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        if not kernels.all_finite(x):
            return self._select_non_finite(x, key)
        indices = self._positions(x.numel(), key, x.device)
        values = x[indices.to(torch.int64)]
        return as_selection(values * (x.numel() / indices.numel()) if self.scaled else values, indices)

    def _select_resident(self, x: Tensor, key: Key) -> Selection:
        places = self._positions(x.numel(), key, x.device)
        values = x[places.to(torch.int64)] * (x.numel() / places.numel() if self.scaled else 1.0)
        return as_selection(torch.where(kernels.finite(x), values, math.nan), places)

    def _select_non_finite(self, x: Tensor, key: Key) -> Selection:
        indices = self._positions(x.numel(), key, x.device)
        return as_selection(torch.full(indices.shape, math.nan, device=x.device), indices)

    def _values_at(self, numel: int) -> int:
        return 0

    def _assemble(self, found: Selection, body: Tensor, numel: int, key: Key, state: State) -> None:
        self._pack_values(found, body, self.k(numel), key, state)

    def positions_and_values(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
        return self._positions(numel, key, body.device), self._unpack_values(body, self.k(numel), key)

    # ---------------------------------------------------------------------------------------------- sums of ranks

    def rounds(self, request: Request, ranks: int) -> Rounds:
        """Positions need no agreement: every rank draws the same."""
        u, key = request.u, self.own_draw(request.draw).key()
        chosen, _ = self._selected(u, key, {})
        request.positions = chosen.indices
        sent = self.values.to_sum(chosen.values * (1.0 / ranks))
        if request.remembers:
            kernels.scatter_add(u, chosen.indices, self.values.from_sum(sent) * -ranks)
        total = yield Round(sent)
        out = request.blank()
        kernels.scatter_add(out, chosen.indices, self.values.from_sum(total))
        return out if request.shard is None else out[request.shard], flag(total)

    def round_costs(self, numel: int, ranks: int, shapes: Sequence[Shape]) -> list[Work | RoundCost]:
        assert self.sum_dtype is not None
        kept = self.k(numel)
        plain = self.sum_dtype == torch.float32
        summed = RoundCost(self.sum_dtype.itemsize * kept, "sum", plain=plain)
        return [Work("pass", numel), Work("encode", numel, self), summed, Work("add", kept, self)]


top_k = TopK
gaussian_k = GaussianK
dgc_k = DgcK
trimmed_k = TrimmedK
random_k = RandomK
