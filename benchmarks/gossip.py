"""Decentralised training: accuracy on real images, time per epoch over networks, and what a death or lost letters cost.

    python benchmarks/gossip.py --data DIR [--seeds 3] [--parts accuracy,text,networks,faults] [--out FILE]
    python benchmarks/gossip.py --table [FILE]              writes the tables into docs/gossip.md

`accuracy` trains 8 workers in a ring on an unshaped network, on iid and on label-skewed shards; rows that --out has
already are kept. `text` trains the gpt workload with AdamW, 80 steps. `networks` times the
first on {1 Gbit/s, 50 Mbit/s} x {0.1 ms, 20 ms}. An epoch is all training images once, over all workers. `faults`
trains 8 processes on loopback: as they are, with one killed at a random step, and with 1 % of the letters lost; there
the learning rate falls to nothing over the second half, so that runs can be told apart by less than a point.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKERS, STEPS, EXAMPLES, BATCH = 8, 200, 60_000, 64
ONE_SCALE = "min_max:4,block=65536"  # one for nearly all of the model, as those had who saw naive fail
ACCURACY = (
    *("dpsgd", "dcd:8", "dcd:4", f"dcd:{ONE_SCALE}", "choco:4", "choco:sign", "ecd:8", "naive:4"),
    f"naive:{ONE_SCALE}",
)
TEXT, TEXT_STEPS = "dpsgd,dcd:8,dcd:4,choco:4,choco:sign,ecd:8", 80
TIMED_RECIPES, TIMED = "ddp,global-qsgd-8,two-shot-8", "dpsgd,dcd:8,dcd:4,ecd:8"
FAULTY = (("dpsgd", "fp32"), ("dcd", "min_max:4,block=512"), ("ecd", "absolute:8,step=0.02"), ("choco", "sign:512"))
NETWORKS = ("1gbit,0.1ms", "1gbit,20ms", "50mbit,0.1ms", "50mbit,20ms")


def compare(options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "thinwire", "compare", "--workers", str(WORKERS), "--probe-seconds", "0"]
        subprocess.run([*command, *options, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _told(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("recipe", "step_ms", "bytes_per_step", "final_loss", "accuracy", "averaged_loss", "local_loss")
    each = [repeat["curve"][-1].get("accuracy") if repeat["curve"] else None for repeat in row["repeats"]]
    return {key: row.get(key) for key in (*kept, "consensus_distance", "problem")} | {"accuracies": each}


def accuracy(data: str, seeds: int, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for skew in (0.0, 0.9):
        rows = {row["recipe"]: row for one in known if one["skew"] == skew for row in one["rows"]}
        missing = [name for name in ACCURACY if f"{name}@ring" not in rows]
        if missing:
            options = ["--workload", "cnn", "--data", data, "--network", "unshaped", "--steps", str(STEPS)]
            options += ["--recipes", "" if "ddp" in rows else "ddp", "--algorithms", ",".join(missing), "--extra", "0"]
            result = compare([*options, "--lap", "50", "--skew", str(skew), "--repeats", str(seeds)])
            rows |= {row["recipe"]: _told(row) for row in result["rows"]}
        order = ("ddp", *(f"{name}@ring" for name in ACCURACY))
        found.append({"skew": skew, "rows": [rows[name] for name in order]})
        print(json.dumps({"skew": skew, **{name: row["accuracy"] for name, row in rows.items()}}), flush=True)
    return found


def text(seeds: int) -> list[dict[str, Any]]:
    options = ["--workload", "gpt", "--network", "unshaped", "--recipes", "ddp", "--algorithms", TEXT, "--extra", "0"]
    result = compare([*options, "--steps", str(TEXT_STEPS), "--lap", "20", "--repeats", str(seeds)])
    return [
        _told(row) | {"losses": [repeat["curve"][-1]["held_out"] for repeat in row["repeats"]]}
        for row in result["rows"]
    ]


def networks(data: str, steps: int) -> list[dict[str, Any]]:
    found = []
    for network in NETWORKS:
        options = ["--workload", "cnn", "--data", data, "--network", network, "--recipes", TIMED_RECIPES]
        options += ["--algorithms", TIMED, "--steps", str(steps), "--lap", str(steps // 2), "--extra", "0"]
        result = compare(options)
        per_epoch = EXAMPLES / (WORKERS * BATCH) / 1e3
        rows = [_told(row) | {"epoch_seconds": row["step_ms"] * per_epoch} for row in result["rows"]]
        found.append({"network": network, "rows": rows, "gains": gains(rows)})
        told = {row["recipe"]: round(row["epoch_seconds"], 1) for row in rows}
        print(json.dumps({"network": network, "gains": found[-1]["gains"], **told}), flush=True)
    return found


def faults(
    data: str, seeds: int, known: list[dict[str, Any]], keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """One seed of every algorithm, then the next, after those that are known; `keep` has all after each."""
    found = known or [
        {"algorithm": algorithm, "codec": codec, "unharmed": [], "killed": [], "lossy": [], "kills": []}
        for algorithm, codec in FAULTY
    ]
    for seed in range(len(found[0]["lossy"]), seeds):
        for told in found:
            algorithm, codec = told["algorithm"], told["codec"]
            told["unharmed"].append(crew(data, algorithm, codec, seed=seed)["accuracy"])
            killed = crew(data, algorithm, codec, seed=seed, kill=True)
            told["killed"].append(killed["accuracy"])
            told["kills"].append({key: killed[key] for key in ("victim", "step", "gap_seconds", "alive")})
            told["lossy"].append(crew(data, algorithm, codec, seed=seed, loss=0.01)["accuracy"])
            print(json.dumps(told), flush=True)
        keep(found)
    return found


def crew(data: str, algorithm: str, codec: str, *, seed: int, kill: bool = False, loss: float = 0.0) -> dict[str, Any]:
    """Eight processes; what the lowest that is left tells at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    draw = random.Random(f"{algorithm}/{codec}/{seed}")
    victim, step = draw.randrange(1, WORKERS), draw.randrange(20, STEPS - 20)
    program, environment = Path(__file__).with_name("gossip_rank.py"), {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(WORKERS):
        task = {"data": data, "algorithm": algorithm, "codec": codec, "seed": seed, "loss": loss, "steps": STEPS}
        task |= {
            "address": address,
            "rank": rank,
            "ranks": WORKERS,
            "die_at": step if kill and rank == victim else None,
        }
        command = [sys.executable, str(program), json.dumps(task)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    told = processes[0].communicate(timeout=1800)[0].strip().splitlines()[-1]
    for rank, process in enumerate(processes):
        code = process.wait(120)
        if code and not (kill and rank == victim):
            raise RuntimeError(f"rank {rank} of {algorithm} ended with {code}")
    return {**json.loads(told), "victim": victim, "step": step}


def gains(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The best of the merely decentralised and the merely compressed over each that is both."""
    seconds = {row["recipe"]: row["epoch_seconds"] for row in rows}
    merely = min(seconds["dpsgd@ring"], seconds["global-qsgd-8"], seconds["two-shot-8"])
    return {name: float(merely / seconds[name]) for name in seconds if name.startswith(("dcd", "ecd"))}


def tables(found: dict[str, Any]) -> str:
    lines = []
    if found.get("accuracy"):
        lines += ["| row | accuracy, iid | apart | accuracy, skew 0.9 | apart |", "|---|---:|---:|---:|---:|"]
        even, skewed = (part["rows"] for part in found["accuracy"])
        for a, b in zip(even, skewed, strict=True):
            cells = [f"{shown(row)} | {distance(row)}" for row in (a, b)]
            lines.append(f"| `{a['recipe']}` | {' | '.join(cells)} |")
        lines.append("")
    if found.get("text"):
        lines += ["| row | held-out loss, gpt | apart |", "|---|---:|---:|"]
        for row in found["text"]:
            lines.append(f"| `{row['recipe']}` | {plus_minus(row['losses'], digits=3)} | {distance(row)} |")
        lines.append("")
    if found.get("networks"):
        names = [row["recipe"] for row in found["networks"][0]["rows"]]
        lines.append(f"| network | {' | '.join(f'`{name}`' for name in names)} | gain |")
        lines.append("|---|" + "---:|" * (len(names) + 1))
        for one in found["networks"]:
            cells = [f"{row['epoch_seconds']:.1f}" for row in one["rows"]]
            gains = sorted(one["gains"].values())
            lines.append(f"| {one['network']} | {' | '.join(cells)} | {gains[0]:.2f} to {gains[-1]:.2f} |")
        lines.append("")
    if found.get("faults"):
        lines += ["| algorithm | unharmed | one of 8 killed | 1 % of letters lost |", "|---|---:|---:|---:|"]
        for one in found["faults"]:
            cells = [plus_minus([100 * value for value in one[kind]]) for kind in ("unharmed", "killed", "lossy")]
            lines.append(f"| `{one['algorithm']}`, `{one['codec']}` | {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def shown(row: dict[str, Any]) -> str:
    return plus_minus([100 * value for value in row["accuracies"] if value is not None])


def plus_minus(values: list[float], *, digits: int = 1) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def distance(row: dict[str, Any]) -> str:
    value = row["consensus_distance"]
    return "-" if value is None else f"{value:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of the timed runs")
    parser.add_argument("--parts", default="accuracy,text,networks,faults")
    parser.add_argument("--out", type=Path)
    newest = max((ROOT / "benchmarks").glob("*-gossip.json"), default=None)
    parser.add_argument("--table", type=Path, nargs="?", const=newest)
    options = parser.parse_args()
    if options.table is not None:
        page = ROOT / "docs" / "gossip.md"
        made = tables(json.loads(options.table.read_text()))
        pattern = r"(<!-- gossip tables -->\n\n).*?(\n\n<!-- end -->)"
        page.write_text(re.sub(pattern, lambda m: m[1] + made + m[2], page.read_text(), flags=re.DOTALL))
        return
    found: dict[str, Any] = {"kind": "gossip", "workers": WORKERS, "workload": "cnn", "seeds": options.seeds}
    if options.out is not None and options.out.exists():  # one part after the other
        found = json.loads(options.out.read_text())

    def keep(known: dict[str, Any]) -> None:
        text = json.dumps(known, indent=1) + "\n"
        if options.out is None:
            print(text)
        else:
            options.out.write_text(text)

    if "accuracy" in options.parts:
        found["accuracy"] = accuracy(options.data, options.seeds, found.get("accuracy", []))
        keep(found)
    if "text" in options.parts:
        found["text"] = text(options.seeds)
        keep(found)
    if "networks" in options.parts:
        found["networks"] = networks(options.data, options.steps)
    if "faults" in options.parts:
        found["faults"] = faults(
            options.data, options.seeds, found.get("faults", []), lambda so_far: keep({**found, "faults": so_far})
        )
    keep(found)


if __name__ == "__main__":
    main()
