"""Write the table of README.md anew from the newest benchmarks/*-compare-100mbit.json.

thinwire compare --network 100mbit,1ms --json benchmarks/2026-01-31-compare-100mbit.json
python benchmarks/compare_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "README.md"
START, END = "<!-- compare table -->\n", "<!-- end -->"


def newest() -> Path:
    return max(FOLDER.glob("*-compare-100mbit.json"))


def cells(row: dict[str, Any]) -> list[str]:
    """One row as it is printed; what was not reached is a dash."""
    reached = row["seconds_to_target"]
    return [
        "`" + row["recipe"].replace("|", "\\|") + "`",
        f"{row['step_ms']:,.0f}",
        f"{row['fraction_of_no_communication']:.2f}",
        f"{row['bytes_per_step'] / 1e6:.2f}",
        f"{row['final_loss']:.3f}",
        "-" if reached is None else f"{reached:.0f}",
        "-" if row["speedup_to_target"] is None else f"{row['speedup_to_target']:.1f}",
    ]


def table(results: dict[str, Any]) -> str:
    head = "| recipe | step, ms | of no comm. | MB a step | loss | s to DDP's loss | times faster |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in results["rows"]]
    return "\n".join(["", *lines, "", ""])


def main() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE.name} has no place for the table: add {START.strip()} and {END}")
    PAGE.write_text(before + START + table(json.loads(newest().read_text())) + END + after)


if __name__ == "__main__":
    main()
