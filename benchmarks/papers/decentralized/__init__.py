"""The page decentralized: compression in decentralised training, as two papers have it, measured here."""

from __future__ import annotations

from typing import Any

from ..page import Page
from ..run import Options
from . import claims, parts, runs, sections, theory

PARTS = ("networks", "convergence", "noise", "speedup")
PAPER = (
    "Tang, Gan, Zhang, Zhang, Liu 2018, *Communication Compression for Decentralized Training*, arXiv 1803.06443 "
    "(DCD-PSGD and ECD-PSGD), and Koloskova, Lin, Stich, Jaggi 2020, *Decentralized Deep Learning with Arbitrary "
    "Communication Compression*, arXiv 1907.09356 (CHOCO-SGD), whose authors also tried DCD and ECD. Everything here "
    "uses the optimizers of [gossip](../gossip.md), with many workers in one process."
)


def measure(part: str, options: Options) -> Any:
    """One part, measured."""
    measures = {
        "networks": parts.networks, "convergence": parts.convergence, "noise": parts.noise, "speedup": parts.speed_up,
    }  # fmt: skip
    with runs.quietly():
        return measures[part](options)


def page(found: dict[str, Any]) -> Page:
    """The page of what was measured."""
    made = Page.for_run(found, title="Decentralised training with compression", paper=PAPER)
    told = found["parts"]
    sections.networks(made, told["networks"])
    sections.convergence(made, told["convergence"])
    sections.measured_accuracy(made, told["networks"]["accuracy"])
    theory.noise(made, told["noise"])
    theory.speed_up(made, told["speedup"])
    made.claims(claims.all_of(told))
    return made
