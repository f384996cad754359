"""The shell of every HTML page: one file with its style, at most one script, and nothing to fetch."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from ...errors import OptionError
from .markup import escape, policy, tag
from .palette import page_style

THEME_BUTTON = '<button type="button" id="theme" aria-label="switch between light and dark">dark</button>'


def asset(package: str, name: str) -> str:
    """A file from the `assets` of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def document(body: str, *, title: str, style: str = "", script: str = "") -> str:
    """A whole page. `style` is added to that of all pages; the script of the theme button is added to `script`.

    >>> page = document("<main></main>", title="2 < 3")
    >>> page.startswith("<!doctype html>"), "2 &lt; 3" in page, "<script" in page
    (True, True, False)
    """
    if THEME_BUTTON in body:
        script += asset(__package__, "theme.js")
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(script))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'{tag("title", escape(title))}<link rel="icon" href="data:,">'
        f"<style>{page_style()}{asset(__package__, 'page.css')}{style}</style>"
    )
    run = f"<script>{script}</script>" if script else ""
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}{run}</body></html>\n'


def write_page(text: str, path: str | os.PathLike[str]) -> Path:
    """Write a page to a file and return its path. The file is whole or absent: it is written beside its place first."""
    place = Path(path)
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(place)
    except OSError as problem:
        raise OptionError(f"cannot write {place}: {problem.strerror}; choose another file") from problem
    finally:
        beside.unlink(missing_ok=True)
    return place
