"""Our selector: the k largest in one pass a step, because the threshold of the last step nearly fits.

A pass collects every element above a threshold set a little too low (about 1.4 k of them), then the k largest of these
few are kept and the others go back. That yields the k-th magnitude of this step, its local slope and its trend, from
which the next threshold follows. Where the guess fails (a sudden change of scale) a sample gives a new one and the pass
is repeated. Error feedback makes the distribution steep at its edge: a 1 % error of a threshold is a 20 to 40 % error
of the count, which is why a threshold alone cannot hold a target and the published estimators miss it.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels, theory
from ..kernels import Selection
from ..recipe.registry import register
from ..rng import Key
from .base import State
from .select import as_selection, largest, non_finite, sampled_threshold
from .sparse import Sparsifier

_AIM = 1.2  # candidates per element wanted: few enough to be cheap, enough to hold k almost always
_ROOM = 4.0  # candidates per element wanted that fit in the buffer
_ENOUGH = 0.8  # of k: below this the pass is repeated
_SAMPLED = 400  # of the wanted elements should be in a sample: 5 % standard error of the count
_UNKNOWN = -1.0


def _aim(k: int) -> float:
    """Small k fluctuate more, so they aim higher."""
    return k * (_AIM + 3 / math.sqrt(k))


def _room(k: int, numel: int) -> int:
    return min(numel, math.ceil(_ROOM * k) + 64)


def _sample(x: Tensor, wanted: float, key: Key) -> float:
    """A threshold that about `wanted` elements exceed."""
    stride = max(1, min(63, int(wanted / _SAMPLED)) | 1)
    return sampled_threshold(x, math.ceil(wanted), stride=stride, start=key.k0 % stride)


def _change(now: float, before: float, *, limit: float) -> float:
    """The logarithm of a change, but not more of it than the limit: a jump is no trend."""
    return min(max(math.log(now / before), -limit), limit)


def follow(state: State, *, k: int, count: int, cut: float, repeated: bool) -> None:
    """Set the next threshold from what this step found.

    `count` candidates lay above the threshold in `state`, the k-th of them at `cut`. In log-log scale the count falls
    with a local slope; the cut drifts with a trend (up while memory fills, down after the gradient has dropped).
    """
    threshold, slope, trend = state["threshold"], state["slope"], state["trend"]
    if not 0 < threshold <= cut:
        state.update(threshold=_UNKNOWN, last=_UNKNOWN)
        return
    if count > 1.05 * k and cut > threshold:
        measured = math.log(count / k) / math.log(threshold / cut)
        slope = 0.7 * slope + 0.3 * min(max(measured, -400.0), -2.0)
    elif count < k:
        cut = threshold * math.exp(math.log(k / (count + 1)) / slope)  # it lies lower: extrapolate
    if state["last"] > 0:
        # While memory fills, the cut grows like a power of the step number: quickly, by less each time.
        steps = state["steps"]
        weight = max(0.5 if repeated else 0.3, min(0.9, 5 / steps))
        moved = _change(cut, state["last"], limit=1.0 if steps < 20 else 0.2)
        trend = ((1 - weight) * trend + weight * moved) * steps / (steps + 1)
    following = cut * math.exp(math.log(_aim(k) / k) / slope + trend)
    following = float(torch.tensor(following, dtype=torch.float32))  # as the kernels compare it
    state.update(threshold=following, slope=slope, trend=trend, last=cut)


@register
class ThresholdK(Sparsifier):
    """Keeps the k largest of d elements (up to ties within 2**-18 of magnitude) in one pass over the data.

    Needs its state from step to step, which a memory keeps per parameter; without one every call samples first.

    Args:
        ratio: share k / d to keep.
        indices: index code, see `codecs/indices.py`; `auto` takes the smallest.

    >>> import torch
    >>> codec = threshold_k(0.25)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -5.0, 2.0, 0.5])))
    tensor([ 0., -5.,  0.,  0.])
    """

    name: ClassVar[str] = "threshold_k"
    examples: ClassVar[tuple[str, ...]] = ("threshold_k:0.01",)

    def new_state(self) -> State:
        """Threshold, slope and trend; `steps` and `passes` count, so that passes / steps is the price."""
        own = {"threshold": _UNKNOWN, "slope": -10.0, "trend": 0.0, "last": _UNKNOWN, "steps": 0, "passes": 0}
        return {**super().new_state(), **own}

    def rescale_state(self, state: State, factor: float) -> None:
        for key in ("threshold", "last"):
            if state[key] > 0:
                state[key] *= factor

    def _kept_energy(self, numel: int) -> float:
        return _ENOUGH * theory.top_k(numel, self.k(numel)) if numel else 1.0

    def _select(self, x: Tensor, key: Key, state: State) -> Selection:
        if self.k(x.numel()) == x.numel():
            return as_selection(x.clone(), torch.arange(x.numel(), device=x.device))
        if state["threshold"] < 0:
            state["threshold"] = _sample(x, _aim(self.k(x.numel())), key)
        found = kernels.select(x, state["threshold"], capacity=_room(self.k(x.numel()), x.numel()))
        return self._finish(x, found, key, state, memory=None)

    def _take_compensated(
        self, gradient: Tensor, residual: Tensor, key: Key, state: State, decay: float
    ) -> Selection | None:
        numel, k = gradient.numel(), self.k(gradient.numel())
        if state["threshold"] < 0:
            stride = 63 if numel > 1 << 16 else 1  # a sum of samples is the sample of the sum
            thinned = torch.add(gradient[::stride], residual[::stride], alpha=decay)
            state["threshold"] = _sample(thinned, _aim(k) / numel * thinned.numel(), key)
        found = kernels.select_ef(
            residual, gradient, state["threshold"], capacity=_room(k, numel), out=gradient, decay=decay
        )
        return self._finish(gradient, found, key, state, memory=gradient)

    def _finish(self, x: Tensor, found: Selection, key: Key, state: State, *, memory: Tensor | None) -> Selection:
        """From candidates to the k largest; repeats the selection if there are far too few or too many candidates."""
        k = self.k(x.numel())
        state["steps"] += 1
        state["passes"] += 1
        repeated = not self._fits(found, state["threshold"], x.numel())
        if repeated:
            if memory is not None:
                memory[found.indices.to(torch.int64)] = found.values
            found = self._again(x, key, state)
            if memory is not None:
                memory[found.indices.to(torch.int64)] = 0.0
        if not kernels.all_finite(found.values):
            state.update(threshold=_UNKNOWN, last=_UNKNOWN, trend=0.0)
            if memory is not None:
                memory[found.indices.to(torch.int64)] = found.values
            return non_finite(x, self.capacity(x.numel()))
        values, indices, cut = kernels.keep_largest(
            found.values, found.indices, k=k, threshold=state["threshold"], memory=memory
        )
        follow(state, k=k, count=found.above, cut=cut, repeated=repeated)
        return as_selection(values, indices)

    def _fits(self, found: Selection, threshold: float, numel: int) -> bool:
        k, count = self.k(numel), found.above
        enough = count >= _ENOUGH * k or threshold == 0  # at zero there is nothing more to find
        return enough and count <= _room(k, numel)

    def _again(self, x: Tensor, key: Key, state: State) -> Selection:
        """A sampled threshold, and if even that does not fit (many equal magnitudes), the exact choice."""
        k = self.k(x.numel())
        state["threshold"] = _sample(x, _aim(k), key)
        state["passes"] += 1
        found = kernels.select(x, state["threshold"], capacity=_room(k, x.numel()))
        return found if self._fits(found, state["threshold"], x.numel()) else largest(x, k)


threshold_k = ThresholdK
