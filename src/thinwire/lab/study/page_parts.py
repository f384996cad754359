"""Parts that all sections of a study's page share: headings, captions, names of recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..draw.markup import escape, tag
from .result import ASKED, at_density

Row = Mapping[str, Any]


def section(key: str, title: str, *parts: str) -> str:
    heading = tag("h2", escape(title), id=f"{key}-title")
    return tag("section", heading + "".join(parts), id=key, aria_labelledby=f"{key}-title")


def caption(words: str) -> str:
    """Formulas stay on one line."""
    return tag("p", escape(words).replace("1 - k/d", "1\u00a0-\u00a0k/d"), class_="caption")


def recipe_name(row: Row, colour: str) -> str:
    return tag("span", "", class_=f"dot {colour}") + tag("b", escape(row["recipe"]))


def shown_density(rows: Sequence[Row]) -> float:
    found = at_density(rows[-1]["samples"][-1]["whole"])
    return ASKED if found is None else float(found["density"])
