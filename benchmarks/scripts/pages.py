"""Tables in README.md and docs: replaces what stands between a mark and the next end mark."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scripts.results import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
END = "<!-- end -->"


def replace_block(page: Path, mark: str, text: str) -> None:
    """Put `text` between `<!-- mark -->` and the next `<!-- end -->` of a page; what stood there goes."""
    begin = f"<!-- {mark} -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{page.name} has no place for the table: add {begin} and {END}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{END}{after}")
