"""Presets of local steps: published methods, and ours with one bit, each with its settings and its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class LocalPreset:
    """Settings under a name; any of them may be given to `local_steps` instead.

    >>> print(LOCAL_PRESETS["diloco-1"])
    diloco-1: every=30 recipe=two-shot-1 outer=nesterov:0.7,0.9
      DiLoCo with one bit there and back.
      Source: ours; rates of arXiv 2311.08105
    """

    name: str
    about: str
    source: str
    every: int
    recipe: str
    outer: str
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    inner: str | None = None  # the optimizer that it is made for

    def __str__(self) -> str:
        words = [f"every={self.every}", f"recipe={self.recipe}", f"outer={self.outer}"]
        words += [
            f"{name}={getattr(self, name)}"
            for name, default in (("fragments", 1), ("delay", 0), ("mixing", 0.0), ("inner", None))
            if getattr(self, name) != default
        ]
        return f"{self.name}: {' '.join(words)}\n  {self.about}\n  Source: {self.source}"


_TABLE = (
    LocalPreset(
        "average",
        "The mean of all parameters every few steps, in full precision.",
        "local SGD, arXiv 1805.09767",
        every=5,
        recipe="dense",
        outer="average",
    ),
    LocalPreset(
        "diloco",
        "Nesterov over the mean change of 30 steps, in full precision.",
        "DiLoCo, arXiv 2311.08105; 30 steps as in its scaling laws, arXiv 2503.09799",
        every=30,
        recipe="dense",
        outer="nesterov:0.7,0.9",
    ),
    LocalPreset(
        "streaming-diloco",
        "Fragments take turns, 4 bits, one step of delay. Published with E3M0 floats; here rotated codes, both ways.",
        "Streaming DiLoCo, arXiv 2501.18512",
        every=100,
        recipe="two-shot-4",
        outer="nesterov:0.4,0.9",
        fragments=4,
        delay=1,
    ),
    LocalPreset(
        "sparseloco",
        "64 of each 4,096 elements in 2 bits; decayed feedback takes the place of the outer momentum.",
        "SparseLoCo, arXiv 2508.15706; clipping to the median norm as in Covenant-72B, arXiv 2603.08163",
        every=30,
        recipe="ef:0.95|chunked_top_k:0.015625|bin_mean:2|all_gather:median",
        outer="none:1.0",
    ),
    LocalPreset(
        "muloco",
        "Muon for matrices inside, 2 bits with feedback, Nesterov outside.",
        "MuLoCo, arXiv 2505.23725",
        every=30,
        recipe="ef:0.9|bin_mean:2|two_shot:feedback=true",
        outer="nesterov:0.7,0.9",
        inner="Muon",
    ),
    LocalPreset(
        "diloco-1",
        "DiLoCo with one bit there and back.",
        "ours; rates of arXiv 2311.08105",
        every=30,
        recipe="two-shot-1",
        outer="nesterov:0.7,0.9",
    ),
)
LOCAL_PRESETS: Mapping[str, LocalPreset] = MappingProxyType({preset.name: preset for preset in _TABLE})
