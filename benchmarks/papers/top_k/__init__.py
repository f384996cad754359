"""The page top-k: "Understanding Top-k Sparsification in Distributed Deep Learning", measured here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..page import Page
from ..run import Options
from . import claims, costs, sections

PARTS = ("convergence", "shape", "selectors", "end_to_end")
_PAPER = (
    "Shi, Chu, Cheung and See, *Understanding Top-k Sparsification in Distributed Deep Learning*, 2019, "
    "[arXiv 1911.08772](https://arxiv.org/abs/1911.08772). The paper studies the vector u that Top-k with error "
    "feedback selects from: gradient plus residual. It tightens the bound on the energy that Top-k drops. It proposes "
    "GaussianK, which estimates the threshold from mean and standard deviation. d is the length of u, k the number of "
    "elements sent, k/d the density."
)


def measure(part: str, options: Options) -> Any:
    """One part, measured."""
    from . import runs

    return getattr(runs, part)(options)


def page(found: dict[str, Any]) -> Page:
    """The page of what was measured."""
    made = Page.for_run(found, title="Top-k understood", paper=_PAPER)
    parts: Mapping[str, Any] = found["parts"]
    sections.convergence(made, parts["convergence"])
    sections.shapes(made, parts["shape"])
    sections.bounds(made, parts["shape"])
    costs.one_tensor(made, parts["selectors"])
    costs.feedback(made, parts["selectors"])
    costs.steps(made, parts["end_to_end"])
    made.claims(claims.all_of(parts))
    return made
