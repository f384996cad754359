"""The page global-qsgd: "Global-QSGD", measured here."""

from __future__ import annotations

from typing import Any

from ..page import Page
from ..run import Options
from . import claims, moments, sections, training

PAPER = (
    "J. Xin, M. Canini, P. Richtárik, S. Horváth, *Global-QSGD*, [arXiv 2305.18627](https://arxiv.org/abs/2305.18627), "
    "2023 (ECAI 2025 as *Quantize Once, Train Fast*): all workers quantise with one scale, so the network can add "
    "codes without decoding them. The baselines are QSGD by all-gather and PowerSGD (`low_rank`)."
)
_MEASURES = {
    "bias": moments.bias, "variance": moments.variance, "sparsity": moments.sparsity,
    "scales": training.scales, "training": training.training, "payoff": training.payoff,
}  # fmt: skip
PARTS = tuple(_MEASURES)


def measure(part: str, options: Options) -> Any:
    """One part, measured."""
    return _MEASURES[part](options)


def page(found: dict[str, Any]) -> Page:
    """The page of what was measured."""
    parts = found["parts"]
    made = Page.for_run(found, title="Global-QSGD", paper=PAPER)
    sections.bias(made, parts["bias"])
    sections.variance(made, parts["variance"])
    sections.sparsity(made, parts["sparsity"])
    sections.training(made, parts["training"])
    sections.scales(made, parts["scales"])
    sections.payoff(made, parts["payoff"])
    made.claims(claims.all_of(parts))
    return made
