"""Predicted and measured step times over networks, recipes and workers: the proof of `thinwire plan`.

    python -m benchmarks.scripts.plan            all cells, about 25 minutes; writes benchmarks/results/<date>-plan.json
    python -m benchmarks.scripts.plan --table    write the newest such file into docs/plan.md

Every cell is predicted before any recipe runs in it. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.scripts import pages, results
from benchmarks.scripts.comparisons import brief_forecast
from thinwire.lab.compare.machine import describe_machine
from thinwire.lab.compare.verify import RECIPES, as_text, summary, verify

NETWORKS = ("20mbit,20ms", "100mbit,1ms", "1gbit,0.1ms", "unshaped")
WORKERS = (2, 4)


def newest() -> Path:
    """The results that docs/plan.md shows."""
    return results.given_or_newest(Path(), "plan")


def table(found: dict[str, Any]) -> str:
    """One row per network and recipe: predicted, measured and error for both numbers of workers."""
    lines = [
        "",
        "| network | recipe | 2 workers: predicted | measured | error | 4 workers: predicted | measured | error |",
    ]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|")
    cells = {(row["network"], row["recipe"], row["workers"]): row for row in found["rows"]}
    for network in dict.fromkeys(row["network"] for row in found["rows"]):
        for recipe in dict.fromkeys(row["recipe"] for row in found["rows"]):
            words = [f"`{network}`", f"`{recipe}`"]
            for workers in WORKERS:
                row = cells[network, recipe, workers]
                words += [f"{row['predicted_ms']:,.0f}", f"{row['measured_ms']:,.0f}", f"{row['error']:+.0%}"]
            lines.append(f"| {' | '.join(words)} |")
    within = (
        f"{found['within_15_percent']} of {found['cells']} cells within 15 %, {found['within_30_percent']} within 30 %."
    )
    worst = max(found["choices"], key=lambda one: one["over_best"])
    lines += ["", f"Milliseconds a step. {within} Taking the recipe that is predicted to be the quickest costs at most"]
    lines += [f"{worst['over_best']:.1%} over the one that was ({worst['network']}, {worst['workers']} workers).", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="measure nothing; write the table into docs/plan.md")
    parser.add_argument("--steps", type=int, default=18, help="steps of each recipe in a cell (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the file to write (default: benchmarks/results/<date>-plan.json)")
    options = parser.parse_args()
    if options.table:
        pages.replace_block(pages.DOCS / "plan.md", "plan table", table(results.read(newest())))
        return
    rows, forecasts = list[dict[str, Any]](), list[dict[str, Any]]()
    for network in NETWORKS:
        found = verify(network, workers=WORKERS, recipes=RECIPES, steps=options.steps)
        print(f"{network}\n{as_text(found)}\n", flush=True)
        rows += found["rows"]
        forecasts += [{"network_asked": network, **brief_forecast(one)} for one in found["forecasts"]]
    result = {
        "machine": describe_machine(),
        "steps": options.steps,
        **summary(rows),
        "rows": rows,
        "forecasts": forecasts,
    }
    results.write(options.out or results.path_of_today("plan"), result)


if __name__ == "__main__":
    main()
