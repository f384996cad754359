"""Write the measured tables of README.md and docs/kernels.md from benchmarks/results.

Measure first, keep what results need of the files, then write the tables:

    thinwire kernels --json kernels.json
    thinwire compare --network 100mbit,1ms --json compare.json
    python -m benchmarks.scripts.tables --keep kernels.json compare.json

Without --keep the tables are written from the files that are there: kernels.json and the newest comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.scripts import pages, results
from benchmarks.scripts.comparisons import brief_comparison

RESULTS = results.RESULTS / "kernels.json"
PAGE, README = pages.DOCS / "kernels.md", pages.README


def keep(file: Path, *, folder: Path = results.RESULTS) -> Path:
    """Write what results need of a file of `thinwire kernels` or `thinwire compare`; gives where."""
    found = results.read(file)
    if found.get("kind") == "compare":
        network = found["settings"]["network"].partition(",")[0]
        place = folder / f"{found['created'][:10]}-compare-{network}.json"
        results.write(place, brief_comparison(found))
    elif {"numel", "rounds", "rows"} <= found.keys():
        place = folder / RESULTS.name
        results.write(place, found)
    else:
        raise SystemExit(f"{file} is not from `thinwire kernels --json` or `thinwire compare --json`")
    return place


def cells(row: dict[str, Any]) -> list[str]:
    """One kernel as it is printed."""
    density = "" if row["density"] is None else f"{row['density']:.1%}"
    ratios = (f"{row[ratio]:.2f}" for ratio in ("x_copy", "x_add", "x_torch"))
    return [f"`{row['name']}`", density, f"{row['seconds'] * 1e3:.1f}", *ratios]


def table(found: dict[str, Any]) -> str:
    """The kernels, and a line that says what they were measured on."""
    lines = ["| kernel | density | ms | x copy | x add | x torch |", "|---|---:|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in found["rows"]]
    machine = found["machine"]
    threads = f"{found['threads']} thread" + ("s" if found["threads"] > 1 else "")
    run = f"{found['numel']:,} float32, {threads}, best of {found['rounds']} rounds"
    where = f"{machine['processor']}, torch {machine['torch']}, numba {machine['numba']}"
    return "\n".join(["", *lines, "", f"{run}; {where}.", "", ""])


def newest() -> Path:
    """The comparison that the README shows."""
    found = results.newest("compare-100mbit")
    if found is None:
        raise SystemExit("no comparison yet: run `thinwire compare --network 100mbit,1ms --json FILE`, then --keep it")
    return found


def compared_cells(row: dict[str, Any]) -> list[str]:
    """One recipe as it is printed; a target that was not reached is a dash."""
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


def compared_table(found: dict[str, Any]) -> str:
    """The recipes of a comparison."""
    head = "| recipe | step, ms | of no comm. | MB a step | loss | s to DDP's loss | times faster |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(compared_cells(row))} |" for row in found["rows"]]
    return "\n".join(["", *lines, "", ""])


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, nargs="+", default=[], metavar="FILE",
        help="first copy these files of `thinwire kernels` or `thinwire compare` to benchmarks/results, shortened",
    )  # fmt: skip
    for file in parser.parse_args(arguments).keep:
        print(keep(file))
    pages.replace_block(PAGE, "kernel table", table(results.read(RESULTS)))
    pages.replace_block(README, "compare table", compared_table(results.read(newest())))


if __name__ == "__main__":
    main(sys.argv[1:])
