"""Write the measured tables anew: of docs/kernels.md from kernels.json, of README.md from the newest comparison.

thinwire kernels --json benchmarks/kernels.json
thinwire compare --network 100mbit,1ms --json benchmarks/2026-01-31-compare-100mbit.json
python benchmarks/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("kernels.json")
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- kernel table -->\n", "<!-- end -->"
COMPARED = "<!-- compare table -->\n"


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


def newest() -> Path:
    """The comparison that the README shows."""
    return max(Path(__file__).parent.glob("*-compare-100mbit.json"))


def compared_cells(row: dict[str, Any]) -> list[str]:
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


def compared_table(results: dict[str, Any]) -> str:
    """The table of a comparison."""
    head = "| recipe | step, ms | of no comm. | MB a step | loss | s to DDP's loss | times faster |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(compared_cells(row))} |" for row in results["rows"]]
    return "\n".join(["", *lines, "", ""])


def put(page: Path, start: str, text: str) -> None:
    """Replace what stands between `start` and the next end mark."""
    before, _, rest = page.read_text().partition(start)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page.name} has no place for the table: add {start.strip()} and {END}")
    page.write_text(before + start + text + END + after)


def main() -> None:
    put(PAGE, START, table(json.loads(RESULTS.read_text())))
    put(README, COMPARED, compared_table(json.loads(newest().read_text())))


if __name__ == "__main__":
    main()
