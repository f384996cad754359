"""Legends on a page: a list of swatches and names."""

from __future__ import annotations

from collections.abc import Sequence

from .markup import escape, tag


def swatch(colour: str, dash: str | None = None, *, area: bool = False) -> str:
    """A piece of a line, or of an area, for a legend on a page."""
    body = tag("path", class_=f"curve {colour}", d="M0 6H26", stroke_dasharray=dash)
    if area:
        body = tag("rect", class_=f"area {colour}", x=0, y=2, width=26, height=9)
    return tag("svg", body, class_="drawing", width=26, height=12, viewBox="0 0 26 12", aria_hidden="true")


def key(items: Sequence[tuple[str, str]]) -> str:
    """A legend as a list of swatches and names.

    >>> key([(swatch("s0"), "top-k")]).startswith('<ul class="key"><li><svg')
    True
    """
    return tag("ul", "".join(tag("li", drawn + escape(name)) for drawn, name in items), class_="key")
