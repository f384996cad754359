"""One row of `thinwire kernels`: what we run, what torch runs, and the tensors that all rows share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...rng import Draw

KEY = Draw(seed=1, stream="thinwire kernels").key()
_NOTHING: Callable[[], object] = lambda: None  # noqa: E731


@dataclass(frozen=True)
class Case:
    """One row: our call, the torch code that a user would write, and the preparation of both before each run."""

    name: str
    ours: Callable[[], object]
    torchs: Callable[[], object]
    moved: float  # bytes read and written per element, by us
    density: float | None = None
    prepare: Callable[[], object] = _NOTHING


class Data:
    """The tensors that the cases share, so that a run needs a few times the memory of one of them."""

    def __init__(self, numel: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(numel, generator=generator)
        self.fresh_memory = torch.randn(numel, generator=generator)
        self.memory = self.fresh_memory.clone()
        self.out = torch.zeros(numel)
