"""Write the table of docs/kernels.md anew from benchmarks/kernels.json.

thinwire kernels --json benchmarks/kernels.json && python benchmarks/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("kernels.json")
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
START, END = "<!-- kernel table -->\n", "<!-- end -->"


def cells(row: dict[str, Any]) -> list[str]:
    """One row as it is printed."""
    density = "" if row["density"] is None else f"{row['density']:.1%}"
    ratios = (f"{row[ratio]:.2f}" for ratio in ("x_copy", "x_add", "x_torch"))
    return [f"`{row['name']}`", density, f"{row['seconds'] * 1e3:.1f}", *ratios]


def table(results: dict[str, Any]) -> str:
    """The table and a line that says what it was measured on."""
    lines = ["| kernel | density | ms | x copy | x add | x torch |", "|---|---:|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in results["rows"]]
    machine = results["machine"]
    threads = f"{results['threads']} thread" + ("s" if results["threads"] > 1 else "")
    run = f"{results['numel']:,} float32, {threads}, best of {results['rounds']} rounds"
    where = f"{machine['processor']}, torch {machine['torch']}, numba {machine['numba']}"
    return "\n".join(["", *lines, "", f"{run}; {where}.", "", ""])


def main() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE.name} has no place for the table: add {START.strip()} and {END}")
    PAGE.write_text(before + START + table(json.loads(RESULTS.read_text())) + END + after)


if __name__ == "__main__":
    main()
