"""`auto` against fixed recipes on several networks, one of which changes: time to the same loss, over seeds.

    python -m benchmarks.scripts.auto            measure, about half an hour; writes benchmarks/results/<date>-auto.json
    python -m benchmarks.scripts.auto --table    write the newest such file into README.md and docs/auto.md

The target of a network is the loss that plain DDP reaches after about 60 steps. Plain DDP takes seconds per step on
slow networks, and its progress per step does not depend on the network. So it trains only a few steps there, and its
time to the target is its step time times the number of steps it needs elsewhere. Such rows say `extrapolated`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.scripts import pages, results

STATIC = ("unshaped", "1gbit,0.1ms", "100mbit,1ms", "100mbit,20ms", "20mbit,5ms")
QUICK, FEW_BITS = ("two-shot-1", "global-qsgd-8", "bf16"), ("two-shot-1", "two-shot-2", "two-shot-4")
FIXED = dict(zip(STATIC, (QUICK, QUICK, FEW_BITS, FEW_BITS, FEW_BITS[:2]), strict=True))  # candidates for the best
SLOW_DDP = {"100mbit,1ms": 10, "100mbit,20ms": 10, "20mbit,5ms": 4}  # steps of plain DDP on slow networks
CHANGING_FIXED = ("two-shot-1", "two-shot-2", "ar-top-k")
TARGET, STEPS = 2.66, 110
LATER_TARGET = 2.52  # on the changing network: reached after its bandwidth is back
CHANGING = "1gbit,0.1ms@0s;30mbit,10ms@{first}s;1gbit,0.1ms@{second}s"


def run(
    network: str, recipes: list[str], *, steps: int, seeds: int, target: float | None, first_seed: int = 0
) -> dict[str, Any]:
    """`thinwire compare` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "thinwire", "compare", "--network", network, "--recipes", ",".join(recipes)]
        command += ["--steps", str(steps), "--lap", "5", "--probe-seconds", "0", "--json", str(out)]
        command += ["--repeats", str(seeds), "--seed", str(first_seed), "--extra", "0"]
        command += [] if target is None else ["--target-loss", str(target)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return results.read(out)


def times(row: dict[str, Any]) -> list[float | None]:
    """Seconds to the target, one per seed; None where a seed did not reach it."""
    return [one["seconds_to_target"] for one in row["repeats"]]


def steps_to(row: dict[str, Any], target: float) -> list[int]:
    """The steps that each seed needs to the target."""
    found = []
    for one in row["repeats"]:
        reached = [point["step"] for point in one["curve"] if point["held_out"] <= target]
        found.append(reached[0] if reached else STEPS)
    return found


def measure(seeds: int, networks: list[str]) -> dict[str, Any]:
    """The networks that do not change."""
    settings: list[dict[str, Any]] = []
    needed: list[int] = []
    for network in networks:
        told: list[dict[str, Any]] = []
        slow = SLOW_DDP.get(network)
        if slow is not None:
            short = run(network, ["ddp"], steps=slow, seeds=1, target=None)["rows"][0]
            needs = statistics.fmean(needed) if needed else 60.0
            seconds = short["step_ms"] / 1e3 * needs
            told.append({"recipe": "ddp", "step_ms": short["step_ms"], "seconds": [seconds], "extrapolated": True})
        recipes = [*(["ddp"] if slow is None else []), "auto", *FIXED[network]]
        result = run(network, recipes, steps=STEPS, seeds=seeds, target=TARGET)
        for row in result["rows"]:
            if row["recipe"] == "ddp":
                needed += steps_to(row, TARGET)
            entry = {"recipe": row["recipe"], "step_ms": row["step_ms"], "seconds": times(row), "extrapolated": False}
            entry |= {key: row[key] for key in ("decisions", "deciding_share") if key in row}
            entry["problem"] = row["problem"]
            entry["losses"] = [[(one["step"], one["held_out"]) for one in repeat["curve"]] for repeat in row["repeats"]]
            told.append(entry)
        settings.append({"network": network, "rows": told, **verdict(told)})
        print(json.dumps({key: value for key, value in settings[-1].items() if key != "rows"}), flush=True)
    for setting in settings:
        setting["loss_over_dense"] = loss_over_dense(setting["rows"], settings)
    for row in (row for setting in settings for row in setting["rows"] if "losses" in row):
        row["last_losses"] = [curve[-1] if curve else None for curve in row.pop("losses")]
    return {"kind": "auto", "seeds": seeds, "target_loss": TARGET, "machine": result["machine"], "networks": settings}


def loss_over_dense(rows: list[dict[str, Any]], settings: list[dict[str, Any]]) -> float | None:
    """The loss of `auto` over that of plain DDP at the last step that both took, mean over the seeds.

    Progress per step of plain DDP does not depend on the network, so its first full run stands for all networks.
    """
    dense = [row for setting in settings for row in setting["rows"] if row["recipe"] == "ddp" and "losses" in row]
    mine = next(row for row in rows if row["recipe"] == "auto")["losses"]
    ratios = []
    for seed, curve in enumerate(mine):
        own = dict(curve)
        for row in dense[:1]:
            other = dict(row["losses"][seed])
            if common := own.keys() & other.keys():
                ratios.append(own[max(common)] / other[max(common)])
    return statistics.fmean(ratios) if ratios else None


def mean(row: dict[str, Any]) -> float | None:
    """Mean over the seeds; None if one of them did not reach the target."""
    reached = [value for value in row["seconds"] if value is not None]
    return statistics.fmean(reached) if reached and len(reached) == len(row["seconds"]) else None


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best fixed recipe, and the time of `auto` over it and over plain DDP."""
    by_name = {row["recipe"]: mean(row) for row in rows}
    fixed = {name: value for name, value in by_name.items() if name != "auto" and value is not None}
    best = min(fixed, key=lambda name: fixed[name])
    taken, dense = by_name["auto"], by_name.get("ddp")
    return {
        "best_fixed": best,
        "auto_over_best": None if taken is None else taken / fixed[best],
        "auto_over_ddp": None if taken is None or dense is None else taken / dense,
    }


def changing(seeds: int) -> dict[str, Any]:
    """One network that slows down and recovers; recipes take turns, so each sees a change at the same step."""
    network = CHANGING.format(first=40, second=130)
    rows: dict[str, dict[str, Any]] = {}
    for seed in range(seeds):
        for row in run(
            network, ["auto", *CHANGING_FIXED], steps=STEPS + 40, seeds=1, target=LATER_TARGET, first_seed=seed
        )["rows"]:
            name = row["recipe"]
            entry = rows.setdefault(name, {"recipe": name, "seconds": [], "extrapolated": False, "loss": []})
            entry["seconds"].append(row["repeats"][0]["seconds_to_target"])
            entry["loss"].append(row["final_loss"])
            for key in ("decisions", "deciding_share"):
                if key in row:
                    entry.setdefault(key, []).append(row[key])
    told = list(rows.values())
    return {"network": network, "target_loss": LATER_TARGET, "rows": told, **verdict(told)}


def table(found: dict[str, Any]) -> str:
    """One line per network."""
    lines = [
        "| network | `auto`, s | best fixed, s | plain DDP, s | `auto` over best | loss over dense | decided first |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for one in [*found["networks"], found["changing"]]:
        rows = {row["recipe"]: row for row in one["rows"]}
        decisions = rows["auto"]["decisions"]
        told = decisions[0] if decisions and isinstance(decisions[0], list) else decisions
        decided = " → ".join(f"{event['recipe']} (step {event['step']})" for event in told) or "dense"
        best, dense, over = one["best_fixed"], rows.get("ddp"), one["auto_over_best"]
        loss = one.get("loss_over_dense")
        price = "-" if loss is None else f"{round(100 * (loss - 1), 1) + 0.0:+.1f} %"
        lines.append(
            f"| {one['network'].replace('@0s', '').replace(';', ' → ')} | {shown(rows['auto'])} | `{best}` "
            f"{shown(rows[best])} | {'-' if dense is None else shown(dense)} | {over:.2f} | {price} | {decided} |"
        )
    return "\n".join(lines)


def shown(row: dict[str, Any]) -> str:
    """Seconds to the target; a star marks what was extrapolated."""
    value = mean(row)
    return "-" if value is None else f"{value:.0f}*" if row["extrapolated"] else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe (default: %(default)s)")
    parser.add_argument("--networks", nargs="*", default=list(STATIC), choices=STATIC, help="default: all of them")
    parser.add_argument("--out", type=Path, help="the file to write (default: benchmarks/results/<date>-auto.json)")
    parser.add_argument(
        "--table", type=Path, nargs="?", const=Path(), metavar="FILE",
        help="measure nothing; write the tables from FILE or from the newest results",
    )  # fmt: skip
    options = parser.parse_args()
    if options.table is not None:
        text = table(results.read(results.given_or_newest(options.table, "auto")))
        for page in (pages.README, pages.DOCS / "auto.md"):
            pages.replace_block(page, "auto table", text)
        return
    found = measure(options.seeds, options.networks)
    found["changing"] = changing(options.seeds)
    results.write(options.out or results.path_of_today("auto"), found)


if __name__ == "__main__":
    main()
