"""How far the simulator scales, and what it predicts for large networks.

    python -m benchmarks.scripts.simulate            writes benchmarks/results/<date>-simulate.json
    python -m benchmarks.scripts.simulate --parts faithful --measured benchmarks/results/DATE-gossip.json --data DIR
    python -m benchmarks.scripts.simulate --table    write the newest such file into docs/internet-scale.md

Parts: `scale` trains 64, 256 and 1,024 workers (DCD, 4 bits, exponential graph, 100 k parameters), each in a process of
its own. `cost` predicts 100,000 workers for 100 steps. `learned` trains 8, 32 and 128 workers on a small model to a
held-out loss and counts steps; time plays no part. `pages` has what docs/internet-scale.md shows: milliseconds per step
for 8 to 10,000 workers on three networks, without training. `faithful` compares simulated step times with those that
benchmarks.scripts.gossip measured. If the file exists, its other parts stay.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.scripts import pages, results
from thinwire.lab.simulate import Settings, simulate

CODEC = "min_max:4,block=512"
NETWORKS = ("data-centre", "three-regions", "home-1000")
WORKERS = (8, 32, 128, 512, 2048, 10_000)
PARAMETERS = 25_600_000
LEARNED, TARGET, MOST_STEPS, LAP = (8, 32, 128), 1.15, 240, 4
THREADS = 32  # most workers for which recipes learn in reasonable time: each needs a thread
ALGORITHMS, RECIPES = ("dpsgd", "dcd:4", "choco:sign"), ("ddp", "two-shot-4", "two-shot-1", "threshold-k")


def simulated(*options: str) -> dict[str, Any]:
    """`thinwire simulate` in a process of its own, so that its peak memory is its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "thinwire", "simulate", "--quiet", "--no-growth", *options, "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return results.read(out)


def scale(steps: int) -> list[dict[str, Any]]:
    """Training with 64, 256 and 1,024 workers: virtual and real seconds, bytes, memory."""
    found = []
    for workers in (64, 256, 1024):
        told = simulated(
            "--workers", str(workers), "--topology", "exponential", "--algorithm", "dcd", "--codec", CODEC,
            "--network", "home-1000", "--steps", str(steps), "--lap", str(max(1, steps // 4)),
        )  # fmt: skip
        kept = {key: told[key] for key in ("virtual_seconds", "real_seconds", "bytes", "peak_memory_bytes")}
        found.append({"workers": workers, "steps": steps, **kept, "final": told["loss"][-1]})
        print(json.dumps(found[-1]), flush=True)
    return found


def cost() -> dict[str, Any]:
    """100,000 workers without training."""
    told = simulated(
        "--cost-only", "--workers", "100000", "--topology", "exponential", "--algorithm", "dcd", "--codec", CODEC,
        "--network", "home-1000", "--steps", "100",
    )  # fmt: skip
    keys = ("virtual_seconds", "real_seconds", "bytes", "peak_memory_bytes")
    return {"workers": 100_000, "steps": 100, **{key: told[key] for key in keys}}


def learned() -> list[dict[str, Any]]:
    """Steps that every algorithm and recipe needs to the target loss."""
    found = []
    for workers in LEARNED:
        steps: dict[str, int | None] = {}
        for topology in ("ring", "exponential"):
            steps |= _steps_to_target(workers, algorithms=ALGORITHMS, topology=topology)
        steps |= _steps_to_target(workers, algorithms=(), recipes=RECIPES if workers <= THREADS else RECIPES[:1])
        found.append({"workers": workers, "target": TARGET, "most": MOST_STEPS, "steps": steps})
        print(json.dumps(found[-1]), flush=True)
    return found


def _steps_to_target(workers: int, **way: Any) -> dict[str, int | None]:
    told = simulate(Settings(workers=workers, network="data-centre", steps=MOST_STEPS, lap=LAP, growth=False, **way))
    return {
        row["recipe"]: next((point["step"] for point in row["curve"] if point["held_out"] <= TARGET), None)
        for row in told["rows"]
    }


def step_times() -> list[dict[str, Any]]:
    """Milliseconds per step by network and number of workers, without training."""
    found = []
    for network in NETWORKS:
        for workers in WORKERS:
            step_ms: dict[str, float | None] = {}
            for topology in ("ring", "exponential"):
                step_ms |= _step_ms(network, workers, algorithms=ALGORITHMS, topology=topology)
            step_ms |= _step_ms(network, workers, algorithms=(), recipes=RECIPES)
            found.append({"network": network, "workers": workers, "step_ms": step_ms})
            print(json.dumps(found[-1]), flush=True)
    return found


def _step_ms(network: str, workers: int, **way: Any) -> dict[str, float]:
    told = simulate(
        Settings(
            workers=workers, network=network, steps=20, cost_only=True, parameters=PARAMETERS, compute_ms=200.0,
            growth=False, **way,
        )
    )  # fmt: skip
    return {row["recipe"]: row["step_ms"] for row in told["rows"]}


def faithful(measured: Path, data: str, compute_ms: float) -> list[dict[str, Any]]:
    """Step times that `benchmarks.scripts.gossip` measured on emulated networks, and the simulated ones over them."""
    found = []
    for one in results.read(measured)["networks"]:
        names = [row["recipe"] for row in one["rows"]]
        told = simulate(
            Settings(
                workers=8, network=one["network"], workload="cnn", data=data, steps=20, cost_only=True, device="this",
                cores=0.25, compute_ms=compute_ms, topology="ring", growth=False,
                algorithms=tuple(name.partition("@")[0] for name in names if "@" in name),
                recipes=tuple(name for name in names if "@" not in name),
            )
        )  # fmt: skip
        simulated_ms = {row["recipe"]: row["step_ms"] for row in told["rows"]}
        for row in one["rows"]:
            ratio = simulated_ms[row["recipe"]] / row["step_ms"]
            found.append(
                {"network": one["network"], "row": row["recipe"], "measured_ms": row["step_ms"], "ratio": ratio}
            )
    return found


def tables(found: dict[str, Any]) -> str:
    """The tables of docs/internet-scale.md."""
    lines = []
    for network in NETWORKS:
        rows = [one for one in found["pages"] if one["network"] == network]
        names = list(rows[0]["step_ms"])
        lines += [f"### {network}", "", f"| workers | {' | '.join(f'`{name}`' for name in names)} |"]
        lines.append("|---:|" + "---:|" * len(names))
        for row in rows:
            least = min(value for value in row["step_ms"].values() if value is not None)
            cells = [_cell(row["step_ms"].get(name), least) for name in names]
            lines.append(f"| {row['workers']:,} | {' | '.join(cells)} |")
        lines.append("")
    if "learned" in found:
        lines += ["### Until the same loss", *_until_the_loss(found)]
    return "\n".join(lines).strip()


def _until_the_loss(found: dict[str, Any]) -> list[str]:
    """Steps needed times milliseconds per step, in minutes."""
    names = list(found["pages"][0]["step_ms"])
    lines = ["", f"| network | workers | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("|---|---:|" + "---:|" * len(names))
    for one in found["learned"]:
        cells = [_cell(one["steps"].get(name), math.inf) for name in names]
        lines.append(f"| *steps* | {one['workers']:,} | {' | '.join(cells)} |")
    for network in NETWORKS:
        for one in found["learned"]:
            row = next(r for r in found["pages"] if (r["network"], r["workers"]) == (network, one["workers"]))
            known = {name: one["steps"][name] for name in names if one["steps"].get(name)}
            minutes = {name: steps * row["step_ms"][name] / 6e4 for name, steps in known.items()}
            least = min(minutes.values())
            cells = [_cell(minutes.get(name), least, digits=2) for name in names]
            lines.append(f"| {network} | {one['workers']:,} | {' | '.join(cells)} |")
    return lines


def _cell(value: float | None, least: float, *, digits: int = 0) -> str:
    if value is None:
        return "-"
    said = f"{value:,.{digits}f}"
    return f"**{said}**" if value == least else said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="scale,cost,learned,pages", help="default: %(default)s; also: faithful")
    parser.add_argument("--steps", type=int, default=200, help="steps of `scale` (default: %(default)s)")
    parser.add_argument("--measured", type=Path, help="for `faithful`: a file that benchmarks.scripts.gossip wrote")
    parser.add_argument("--data", help="for `faithful`: a folder with Fashion-MNIST")
    parser.add_argument(
        "--compute-ms", type=float, default=150.0,
        help="for `faithful`: milliseconds of a step without communication (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="the file to write (default: benchmarks/results/<date>-simulate.json)")
    parser.add_argument(
        "--table", type=Path, nargs="?", const=Path(), metavar="FILE",
        help="measure nothing; write the tables from FILE or from the newest results",
    )  # fmt: skip
    options = parser.parse_args()
    if options.table is not None:
        made = tables(results.read(results.given_or_newest(options.table, "simulate")))
        pages.replace_block(pages.DOCS / "internet-scale.md", "tables", made)
        return
    if "faithful" in options.parts and (options.measured is None or options.data is None):
        parser.error("--parts faithful needs --measured and --data")
    out = options.out or results.path_of_today("simulate")
    found: dict[str, Any] = {"kind": "simulate-benchmark", "parameters": PARAMETERS}
    if out.exists():  # parts may be measured one after the other
        found = results.read(out)
    if "scale" in options.parts:
        found["scale"] = scale(options.steps)
    if "cost" in options.parts:
        found["cost"] = cost()
    if "learned" in options.parts:
        found["learned"] = learned()
    if "faithful" in options.parts:
        found["faithful"] = faithful(options.measured, options.data, options.compute_ms)
    if "pages" in options.parts:
        found["pages"] = step_times()
    results.write(out, found)


if __name__ == "__main__":
    main()
