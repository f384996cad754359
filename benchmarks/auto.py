"""`auto` beside fixed recipes on several networks, and on one that changes: time to the same loss, over seeds.

    python benchmarks/auto.py [--seeds 3] [--out FILE]      measures (half an hour), writes JSON
    python benchmarks/auto.py --table [FILE]                writes the table into README.md and docs/auto.md

The target of a network is a loss that plain DDP reaches after about 60 steps, the same for all. Plain DDP takes seconds
a step on slow networks, and learns the same from each step on all: there it trains for a few steps only, and its time
to the target is that of its steps times as many as it needs elsewhere. Rows say so (`extrapolated`).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATIC = ("unshaped", "1gbit,0.1ms", "100mbit,1ms", "100mbit,20ms", "20mbit,5ms")
QUICK, FEW_BITS = ("two-shot-1", "global-qsgd-8", "bf16"), ("two-shot-1", "two-shot-2", "two-shot-4")
FIXED = dict(zip(STATIC, (QUICK, QUICK, FEW_BITS, FEW_BITS, FEW_BITS[:2]), strict=True))  # those that may be best there
SLOW_DDP = {"100mbit,1ms": 10, "100mbit,20ms": 10, "20mbit,5ms": 4}  # steps that plain DDP trains there
CHANGING_FIXED = ("two-shot-1", "two-shot-2", "ar-top-k")
TARGET, STEPS = 2.66, 110
LATER_TARGET = 2.52  # on the network that changes: reached after it came back
CHANGING = "1gbit,0.1ms@0s;30mbit,10ms@{first}s;1gbit,0.1ms@{second}s"


def run(
    network: str, recipes: list[str], *, steps: int, seeds: int, target: float | None, first_seed: int = 0
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "thinwire", "compare", "--network", network, "--recipes", ",".join(recipes)]
        command += ["--steps", str(steps), "--lap", "5", "--probe-seconds", "0", "--json", str(out)]
        command += ["--repeats", str(seeds), "--seed", str(first_seed), "--extra", "0"]
        command += [] if target is None else ["--target-loss", str(target)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def times(row: dict[str, Any]) -> list[float | None]:
    return [one["seconds_to_target"] for one in row["repeats"]]


def steps_to(row: dict[str, Any], target: float) -> list[int]:
    """After how many steps each seed has come down to the target."""
    found = []
    for one in row["repeats"]:
        reached = [point["step"] for point in one["curve"] if point["held_out"] <= target]
        found.append(reached[0] if reached else STEPS)
    return found


def measure(seeds: int, networks: list[str]) -> dict[str, Any]:
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
    return {"kind": "auto", "seeds": seeds, "target_loss": TARGET, "machine": result["machine"], "networks": settings}


def loss_over_dense(rows: list[dict[str, Any]], settings: list[dict[str, Any]]) -> float | None:
    """The loss of `auto` over that of plain DDP after the same steps, the last that both took; mean over the seeds.

    Plain DDP learns the same from every step on every network, so those that it trained on in full stand for all.
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
    """Over the seeds; None if one of them did not get there."""
    reached = [value for value in row["seconds"] if value is not None]
    return statistics.fmean(reached) if reached and len(reached) == len(row["seconds"]) else None


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
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
    """The network of all recipes changes at the same moments; they take turns, so each sees it at the same step."""
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
    value = mean(row)
    return "-" if value is None else f"{value:.0f}*" if row["extrapolated"] else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", default=list(STATIC))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--table", type=Path, nargs="?", const=max((ROOT / "benchmarks").glob("*-auto.json"), default=None)
    )
    options = parser.parse_args()
    if options.table is not None:
        found = json.loads(options.table.read_text())
        for page in (ROOT / "README.md", ROOT / "docs" / "auto.md"):
            made = re.sub(
                r"(<!-- auto table -->\n\n).*?(\n\n<!-- end -->)",
                lambda m: m[1] + table(found) + m[2],
                page.read_text(),
                flags=re.DOTALL,
            )
            page.write_text(made)
        return
    found = measure(options.seeds, options.networks)
    found["changing"] = changing(options.seeds)
    text = json.dumps(found, indent=1) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
