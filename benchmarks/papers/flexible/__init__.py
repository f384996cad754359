"""The page flexible: "Flexible Communication for Optimal Distributed Learning over Unpredictable Networks" here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..page import Page
from ..run import Options
from . import choosing, claims, sections

PARTS = ("book", "collectives", "leaders", "rules", "schedules")
_PAPER = (
    "Tyagi and Swany, *Flexible Communication for Optimal Distributed Learning over Unpredictable Networks*, 2023, "
    "[arXiv 2312.02493](https://arxiv.org/abs/2312.02493). Top-k is sent by all-gather, or all workers use one "
    "worker's positions and add the values there by all-reduce (AR-Topk). The leader rotates (STAR) or is the worker "
    "with the largest gradient (VAR). A controller chooses ratio and collective when the network changes."
)


def measure(part: str, options: Options) -> Any:
    """One part, measured."""
    from . import runs

    return getattr(runs, part)(options)


def page(found: dict[str, Any]) -> Page:
    """The page of what was measured."""
    made = Page.for_run(found, title="Flexible communication", paper=_PAPER)
    parts: Mapping[str, Any] = found["parts"]
    sections.book(made, parts["book"])
    sections.collectives(made, parts["collectives"])
    sections.leaders(made, parts["leaders"])
    choosing.fronts(made, parts["schedules"], parts["rules"])
    choosing.rules(made, parts["rules"])
    choosing.schedules(made, parts["schedules"])
    made.claims(claims.all_of(parts))
    return made
