"""The colours, dashes and marks of all drawings, light and dark, for pages and for SVG files that stand alone.

Series colours differ for colour-blind readers too. Dashes and marks repeat what colour says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any

SERIES = (  # light and dark theme, of the classes s0, s1 and so on
    ("#0959b6", "#0d7dd6"),
    ("#97920c", "#e9c31b"),
    ("#cf67ae", "#a74390"),
    ("#0493e9", "#2bae94"),
    ("#7e3402", "#d27f36"),
    ("#642b7d", "#b090ee"),
    ("#a96250", "#746900"),
)
REFERENCE = ("#30363d", "#d5d9dd")  # of the class ref: plain DDP, bounds
SHADES = ("#e8eef2", "#cfe3ea", "#a9d0dc", "#7ab6c9", "#4d97b1", "#2c7894", "#175a75")  # of a map: more is darker
COLOURS = len(SERIES)
DASHES = ("", "7 4", "2 3", "9 3 2 3")
MARKS = 6  # shapes that the curves of a report have
_REFERENCE_ROW = "ddp"

VARIABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "paper": ("#fdfdfc", "#14171a"),
        "raised": ("#f4f5f5", "#1c2024"),
        "ink": ("#1a1e23", "#e7e9eb"),
        "muted": ("#565e68", "#a2abb5"),
        "rule": ("#e2e4e7", "#2c3238"),
        "strong": ("#b9bec5", "#4a525b"),
        "accent": ("#005fa8", "#74bbff"),
        "bad": ("#a8280f", "#ff9a85"),
        "ref": REFERENCE,
        **{f"s{place}": pair for place, pair in enumerate(SERIES)},
    }
)


def styles(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str | int]]:
    """Colour, dash and mark of each row; no two of the first 84 share all three.

    >>> styles([{"recipe": "ddp"}, {"recipe": "two-shot-4"}])
    [{'colour': 'ref', 'dash': 1, 'mark': 0}, {'colour': 's0', 'dash': 0, 'mark': 1}]
    """
    found: list[dict[str, str | int]] = []
    place = 0
    for row in rows:
        if row.get("recipe") == _REFERENCE_ROW:
            found.append({"colour": "ref", "dash": 1, "mark": 0})
            continue
        dash = place // COLOURS % len(DASHES)
        found.append({"colour": f"s{place % COLOURS}", "dash": dash, "mark": (place + 1) % MARKS})
        place += 1
    return found


def dash_of(place: int, *, dashed: bool = False) -> str | None:
    """The dash of a series by its place. Colours repeat after seven series; then the dash differs.

    >>> dash_of(0), dash_of(0, dashed=True), dash_of(7)
    (None, '7 4', '7 4')
    """
    kind = 1 if dashed and place < COLOURS else place // COLOURS % len(DASHES) + (2 if dashed else 0)
    return DASHES[kind % len(DASHES)] or None


def page_style() -> str:
    """The colours and the drawings of a page that follows the theme of the reader."""
    pairs = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in VARIABLES.items())
    return f":root{{color-scheme:light dark;{pairs}}}\n" + _drawing_rules()


def file_style() -> str:
    """The style of an SVG file that stands alone; it follows the theme where it is shown."""
    light = "".join(f"--{name}:{pair[0]};" for name, pair in VARIABLES.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in VARIABLES.items())
    font = 'background:var(--paper);font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;'
    return f"svg{{{light}{font}}}\n@media(prefers-color-scheme:dark){{svg{{{dark}}}}}\n" + _drawing_rules()


def _drawing_rules() -> str:
    classes = "".join(f".{name}{{--c:var(--{name})}}" for name in ("ref", *(f"s{place}" for place in range(COLOURS))))
    return f"{classes}\n{(files(__package__) / 'assets' / 'drawing.css').read_text(encoding='utf-8')}"
