"""Compute times of simulated workers: a median, spread over steps and workers by draws of a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import OptionError
from .links import Floats

_STEPS, _WORKERS = 0x73746570, 0x776F726B  # streams of draws


@dataclass(frozen=True)
class Pace:
    """Seconds of forward and backward: a median, and the sigma of its logarithm by step and by worker.

    >>> Pace(0.1).seconds(0, workers=3).tolist()
    [0.1, 0.1, 0.1]
    >>> uneven = Pace(0.1, straggle=0.2)
    >>> bool((uneven.seconds(7, workers=4) == uneven.seconds(7, workers=9)[:4]).all())
    True
    """

    median: float
    straggle: float = 0.0
    uneven: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.median >= 0 or not 0 <= self.straggle <= 3 or not 0 <= self.uneven <= 3:
            raise OptionError("compute takes 0 ms or more, and its spread is from 0 to 3 (the sigma of its logarithm)")

    def seconds(self, step: int, *, workers: int) -> Floats:
        spread = np.zeros(workers)
        if self.uneven:
            spread += self.uneven * _normal(self.seed, _WORKERS, workers)
        if self.straggle:
            spread += self.straggle * _normal(self.seed, _STEPS + (step << 32), workers)
        found: Floats = self.median * np.exp(spread)
        return found


def _normal(seed: int, stream: int, workers: int) -> Floats:
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(workers)
