"""Decentralised training: accuracy on real images, time per epoch over networks, cost of a death and of lost messages.

    python -m benchmarks.scripts.gossip --data DIR    all parts; writes benchmarks/results/<date>-gossip.json
    python -m benchmarks.scripts.gossip --table       write the newest such file into docs/gossip.md

Parts: `accuracy` trains 8 workers in a ring on an unshaped network, on iid and on label-skewed shards. `text` trains
the gpt workload with AdamW for 80 steps. `networks` times the first on {1 Gbit/s, 50 Mbit/s} x {0.1 ms, 20 ms}; an
epoch is all training images once, over all workers. `faults` trains 8 processes on loopback: unharmed, with one killed
at a random step, and with 1 % of the messages lost. There the learning rate falls to zero over the second half, so that
differences below one point show. If the file exists, its parts stay; rows of `accuracy` and seeds of `faults` that it
has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scripts import pages, results

WORKERS, STEPS, EXAMPLES, BATCH = 8, 200, 60_000, 64
ONE_SCALE = "min_max:4,block=65536"  # nearly the whole model shares a scale, as in the reports that naive fails
ACCURACY = (
    *("dpsgd", "dcd:8", "dcd:4", f"dcd:{ONE_SCALE}", "choco:4", "choco:sign", "ecd:8", "naive:4"),
    f"naive:{ONE_SCALE}",
)
TEXT, TEXT_STEPS = "dpsgd,dcd:8,dcd:4,choco:4,choco:sign,ecd:8", 80
TIMED_RECIPES, TIMED = "ddp,global-qsgd-8,two-shot-8", "dpsgd,dcd:8,dcd:4,ecd:8"
FAULTY = (("dpsgd", "fp32"), ("dcd", "min_max:4,block=512"), ("ecd", "absolute:8,step=0.02"), ("choco", "sign:512"))
NETWORKS = ("1gbit,0.1ms", "1gbit,20ms", "50mbit,0.1ms", "50mbit,20ms")


def compare(options: list[str]) -> dict[str, Any]:
    """`thinwire compare` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "thinwire", "compare", "--workers", str(WORKERS), "--probe-seconds", "0"]
        subprocess.run([*command, *options, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        return results.read(out)


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """What results keep of a row."""
    kept = ("recipe", "step_ms", "bytes_per_step", "final_loss", "accuracy", "averaged_loss", "local_loss")
    each = [repeat["curve"][-1].get("accuracy") if repeat["curve"] else None for repeat in row["repeats"]]
    return {key: row.get(key) for key in (*kept, "consensus_distance", "problem")} | {"accuracies": each}


def accuracy(data: str, seeds: int, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every algorithm on iid and on skewed shards; rows that are known are not trained again."""
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
    """The gpt workload with AdamW."""
    options = ["--workload", "gpt", "--network", "unshaped", "--recipes", "ddp", "--algorithms", TEXT, "--extra", "0"]
    result = compare([*options, "--steps", str(TEXT_STEPS), "--lap", "20", "--repeats", str(seeds)])
    return [
        _told(row) | {"losses": [repeat["curve"][-1]["held_out"] for repeat in row["repeats"]]}
        for row in result["rows"]
    ]


def networks(data: str, steps: int) -> list[dict[str, Any]]:
    """Seconds per epoch on every network, and the gain of being both decentralised and compressed."""
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
    """Accuracy unharmed, with a killed worker and with lost messages; continues `known`, calls `keep` after a seed."""
    found = known or [
        {"algorithm": algorithm, "codec": codec, "unharmed": [], "killed": [], "lossy": [], "kills": []}
        for algorithm, codec in FAULTY
    ]
    for seed in range(len(found[0]["lossy"]), seeds):
        for told in found:
            algorithm, codec = told["algorithm"], told["codec"]
            told["unharmed"].append(run_processes(data, algorithm, codec, seed=seed)["accuracy"])
            killed = run_processes(data, algorithm, codec, seed=seed, kill=True)
            told["killed"].append(killed["accuracy"])
            told["kills"].append({key: killed[key] for key in ("victim", "step", "gap_seconds", "alive")})
            told["lossy"].append(run_processes(data, algorithm, codec, seed=seed, loss=0.01)["accuracy"])
            print(json.dumps(told), flush=True)
        keep(found)
    return found


def run_processes(
    data: str, algorithm: str, codec: str, *, seed: int, kill: bool = False, loss: float = 0.0
) -> dict[str, Any]:
    """Train with eight processes; gives what rank 0 reports at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    draw = random.Random(f"{algorithm}/{codec}/{seed}")
    victim, step = draw.randrange(1, WORKERS), draw.randrange(20, STEPS - 20)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(WORKERS):
        task = {"data": data, "algorithm": algorithm, "codec": codec, "seed": seed, "loss": loss, "steps": STEPS}
        task |= {
            "address": address,
            "rank": rank,
            "ranks": WORKERS,
            "die_at": step if kill and rank == victim else None,
        }
        command = [sys.executable, "-m", "benchmarks.scripts.gossip_rank", json.dumps(task)]
        started = subprocess.Popen(command, env=environment, cwd=results.ROOT, stdout=subprocess.PIPE, text=True)
        processes.append(started)
    told = processes[0].communicate(timeout=1800)[0].strip().splitlines()[-1]
    for rank, process in enumerate(processes):
        code = process.wait(120)
        if code and not (kill and rank == victim):
            raise RuntimeError(f"rank {rank} of {algorithm} ended with {code}")
    return {**json.loads(told), "victim": victim, "step": step}


def gains(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Time of the better of decentralised only and compressed only, over the time of each algorithm that is both."""
    seconds = {row["recipe"]: row["epoch_seconds"] for row in rows}
    merely = min(seconds["dpsgd@ring"], seconds["global-qsgd-8"], seconds["two-shot-8"])
    return {name: float(merely / seconds[name]) for name in seconds if name.startswith(("dcd", "ecd"))}


def tables(found: dict[str, Any]) -> str:
    """The tables of docs/gossip.md, of all parts that were measured."""
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
        lines += ["| algorithm | unharmed | one of 8 killed | 1 % of messages lost |", "|---|---:|---:|---:|"]
        for one in found["faults"]:
            cells = [plus_minus([100 * value for value in one[kind]]) for kind in ("unharmed", "killed", "lossy")]
            lines.append(f"| `{one['algorithm']}`, `{one['codec']}` | {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def shown(row: dict[str, Any]) -> str:
    """Accuracy in per cent."""
    return plus_minus([100 * value for value in row["accuracies"] if value is not None])


def plus_minus(values: list[float], *, digits: int = 1) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def distance(row: dict[str, Any]) -> str:
    """The consensus distance, a dash where there is none."""
    value = row["consensus_distance"]
    return "-" if value is None else f"{value:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with Fashion-MNIST; accuracy, networks and faults need it")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of `networks` (default: %(default)s)")
    parser.add_argument("--parts", default="accuracy,text,networks,faults", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="the file to write (default: benchmarks/results/<date>-gossip.json)")
    parser.add_argument(
        "--table", type=Path, nargs="?", const=Path(), metavar="FILE",
        help="measure nothing; write the tables from FILE or from the newest results",
    )  # fmt: skip
    options = parser.parse_args()
    if options.table is not None:
        made = tables(results.read(results.given_or_newest(options.table, "gossip")))
        pages.replace_block(pages.DOCS / "gossip.md", "gossip tables", made)
        return
    if options.data is None and options.parts != "text":
        parser.error("--data is missing: name a folder with Fashion-MNIST, or choose --parts text")
    out = options.out or results.path_of_today("gossip")
    found: dict[str, Any] = {"kind": "gossip", "workers": WORKERS, "workload": "cnn", "seeds": options.seeds}
    if out.exists():  # parts may be measured one after the other
        found = results.read(out)

    if "accuracy" in options.parts:
        found["accuracy"] = accuracy(options.data, options.seeds, found.get("accuracy", []))
        results.write(out, found)
    if "text" in options.parts:
        found["text"] = text(options.seeds)
        results.write(out, found)
    if "networks" in options.parts:
        found["networks"] = networks(options.data, options.steps)
    if "faults" in options.parts:
        found["faults"] = faults(
            options.data,
            options.seeds,
            found.get("faults", []),
            lambda so_far: results.write(out, {**found, "faults": so_far}),
        )
    results.write(out, found)


if __name__ == "__main__":
    main()
