"""The description of one tensor: u = g + e of a parameter or of the whole model, at one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import OptionError
from ...rng import Draw
from . import moments as shape
from .bounds import DENSITIES, DRAWS, checked_densities, contraction
from .distributions import LEAST, best, fits


@dataclass(frozen=True)
class Lens:
    """The options of a description: elements for fits, and densities for Top-k.

    `elements`: of each tensor, drawn by `seed`, densities are fitted to; histograms, moments and top-k see all of them.
    `least`: parameters with fewer elements are part of the whole model only. `most`: elements of the model that are
    kept for a look; of a larger model, an equal share of every parameter is, and the look says so.

    >>> Lens(elements=2)
    Traceback (most recent call last):
    thinwire.errors.OptionError: elements is a number to fit densities to, 100 or more, not 2
    """

    elements: int = 20_000
    densities: tuple[float, ...] = DENSITIES
    least: int = 1024
    most: int = 50_000_000
    draws: int = DRAWS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.elements < 100:
            raise OptionError(f"elements is a number to fit densities to, 100 or more, not {self.elements}")
        if self.least < 1 or self.most < self.elements or self.draws < 1:
            raise OptionError("least and draws are 1 or more, and most is not below elements")
        object.__setattr__(self, "densities", checked_densities(self.densities))

    def told(self) -> dict[str, Any]:
        return asdict(self) | {"densities": list(self.densities)}


def portrait(u: Tensor, *, gradient: Tensor | None = None, name: str, step: int, lens: Lens) -> dict[str, Any]:
    """Distribution and contraction of u, and the distribution of the gradient if a residual was added to it.

    >>> u = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    >>> found = portrait(u, name="weight", step=0, lens=Lens())
    >>> found["best"], found["hump"]["one"], found["contraction"][0]["holds"]
    ('gaussian', True, {'classic': True, 'bell': True})
    """
    flat = u.detach().reshape(-1)
    if not bool(torch.isfinite(flat).all()):
        return {"numel": flat.numel(), "finite": False}
    draw = Draw(seed=lens.seed, step=step, stream=name)
    found = _shape(flat, draw, lens) | {"contraction": contraction(flat, lens.densities, draw=draw, draws=lens.draws)}
    if gradient is None:
        return found | {"memory_share": 0.0, "gradient": None}
    rest = flat.to(torch.float64) - gradient.detach().reshape(-1).to(torch.float64)
    residual = float(rest.square().sum())
    # A share of the two energies, not of the energy of the sum: gradient and residual may point against each other.
    of_both = residual + float(gradient.detach().to(torch.float64).square().sum())
    share = residual / of_both if of_both else 0.0
    return found | {"memory_share": share, "gradient": _shape(gradient.detach().reshape(-1), draw, lens)}


def _shape(flat: Tensor, draw: Draw, lens: Lens) -> dict[str, Any]:
    found = shape.moments(flat)
    all_of_it, sizes = shape.histogram(flat), shape.histogram_of_sizes(flat)
    told = {key: value for key, value in asdict(found).items() if key != "squares"}
    return {
        **told,
        "finite": True,
        "norm": found.squares**0.5,
        "histogram": asdict(all_of_it) | {"counts": list(all_of_it.counts)},
        "hump": shape.unimodality(all_of_it).told(),
        "falls": shape.falling(sizes).told(),
        **_fitted(flat, draw, lens),
    }


def _fitted(flat: Tensor, draw: Draw, lens: Lens) -> dict[str, Any]:
    """Fits to the elements that are not zero: rectified units leave many zeros, and no density has a spike."""
    chosen = shape.sample(flat, lens.elements, draw=draw).to(torch.float64).cpu().numpy()
    chosen = chosen[chosen != 0.0]
    if len(np.unique(chosen[: 2 * LEAST])) < LEAST:
        return {"fits": {}, "best": None, "fitted_to": len(chosen)}
    found = fits(chosen)
    return {"fits": {key: fit.told() for key, fit in found.items()}, "best": best(found), "fitted_to": len(chosen)}


def look(
    tensors: Sequence[tuple[str, Tensor, Tensor | None]], *, step: int, lens: Lens, share: float = 1.0
) -> dict[str, Any]:
    """A sample of one step: every tensor (name, u, and the gradient if it differs from u), and all as one.

    >>> sample = look([("a", torch.randn(2000), None), ("b", torch.randn(10), None)], step=3, lens=Lens())
    >>> sample["step"], list(sample["layers"]), sample["whole"]["numel"]
    (3, ['a'], 2010)
    """
    layers = {
        name: portrait(u, gradient=gradient, name=name, step=step, lens=lens)
        for name, u, gradient in tensors
        if u.numel() >= lens.least
    }
    device = tensors[0][1].device
    whole = torch.cat([u.detach().reshape(-1).to(device, torch.float32) for _, u, _ in tensors])
    plain = None
    if any(gradient is not None for _, _, gradient in tensors):
        parts = [u if gradient is None else gradient for _, u, gradient in tensors]
        plain = torch.cat([part.detach().reshape(-1).to(device, torch.float32) for part in parts])
    everything = portrait(whole, gradient=plain, name="(whole model)", step=step, lens=lens)
    return {"step": step, "share": share, "whole": everything, "layers": layers}
