"""Where the processor time of a step goes: kernels, Python, gloo and the main thread, by recipe and number of buckets.

    python -m benchmarks.scripts.hotpath            about five minutes; writes benchmarks/results/<date>-hotpath.json
    python -m benchmarks.scripts.hotpath two-shot-1@2 dense@25 --rounds 3

Four processes train the workload gpt over the emulated network. All contenders take turns of a few steps within one
run. A contender is a recipe, `ddp` or `no-communication`, with the `bucket_cap_mb` that DDP is given after an @. All
times are milliseconds of one rank and step. Those of processors are above `no-communication`:

    cpu            the whole process
    main           its main thread: forward, backward, hooks, and the kernels that run there
    lanes          threads of thinwire, with the kernels in them
    gloo, others   threads of gloo, and all other threads
    kernels        in the lanes and in the main thread: time inside thinwire.kernels
    python         lanes without kernels: Python, torch's dispatch, starting collectives and waiting for them
    calls          of kernels
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.scripts import results

RANKS, NETWORK = 4, "100mbit,1ms"
ALONE = "no-communication@25"
RECIPES = ("two-shot-1", "two-shot-2", "threshold-k", "ar-top-k")
CONTENDERS = ("ddp@25", "dense@25", *(f"{recipe}@{cap}" for recipe in RECIPES for cap in ("25", "0.5")))


def split(contender: str) -> tuple[str, float]:
    """
    >>> split("two-shot-1@0.5"), split("ddp")
    (('two-shot-1', 0.5), ('ddp', 25.0))
    """
    name, _, cap = contender.partition("@")
    return name, float(cap or 25)


def summary(laps: list[dict[str, Any]], alone: list[dict[str, Any]], buckets: int) -> dict[str, float]:
    """Medians over the rounds; processor times above those of `alone` in the same round."""
    baseline = {lap["round"]: lap for lap in alone}

    def median(*names: str, above: bool = True) -> float:
        found = [sum(lap[name] - (baseline[lap["round"]][name] if above else 0.0) for name in names) for lap in laps]
        return float(statistics.median(found))

    step = median("step", above=False)
    found = {"buckets": float(buckets), "step": step, "exposed": median("exposed", above=False)}
    found["fraction"] = statistics.median(baseline[lap["round"]]["step"] / lap["step"] for lap in laps)
    found |= {name: median(name) for name in ("cpu", "main", "lanes", "gloo", "others")}
    found["kernels"] = median("kernels_main", "kernels_lanes")
    found["python"] = statistics.median(lap["lanes"] - lap["kernels_lanes"] for lap in laps)
    found["calls"] = median("kernel_calls", above=False)
    return found


def run(contenders: list[str], *, rounds: int, steps: int, batch: int, network: str) -> dict[str, Any]:
    from thinwire.lab.compare.machine import describe_machine
    from thinwire.lab.emulate.hosts import emulated_hosts
    from thinwire.lab.emulate.processes import process_events, rendezvous

    names = [ALONE, *contenders]
    laps: list[list[dict[str, Any]]] = [[] for _ in names]
    buckets: list[int] = []
    with emulated_hosts(RANKS, network=network, prove=False) as hosts:
        task = {"meet_at": rendezvous(hosts), "ranks": RANKS, "contenders": [split(name) for name in names]}
        task |= {"rounds": rounds, "steps": steps, "batch": batch}
        tasks = [json.dumps(task | {"rank": rank}) for rank in range(RANKS)]
        for event in process_events(hosts, "benchmarks.scripts.hotpath_rank", lambda rank: tasks[rank]):
            if event["event"] == "lap":
                laps[event["contender"]].append(event)
            elif event["event"] == "end":
                buckets = event["buckets"]
    rows = {name: summary(laps[place], laps[0], buckets[place]) for place, name in enumerate(names)}
    settings = {"ranks": RANKS, "network": network, "rounds": rounds, "steps": steps, "batch": batch}
    alone = {"step": rows[ALONE]["step"], "cpu": statistics.median(lap["cpu"] for lap in laps[0])}
    del rows[ALONE]
    return {"schema": 1, "machine": describe_machine(), "settings": settings, "no_communication": alone, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """As text, one line a contender."""
    names = list(next(iter(found["rows"].values())))
    lines = [f"{'':<18}" + "".join(f"{name:>10}" for name in names)]
    for contender, row in found["rows"].items():
        lines.append(f"{contender:<18}" + "".join(f"{row[name]:>10.2f}" for name in names))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="of one turn (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=0, help="sequences a step and rank; 0: as the workload has it")
    parser.add_argument("--network", default=NETWORK)
    parser.add_argument("--out", type=Path, default=Path(), help="default: benchmarks/results/<date>-hotpath.json")
    options = parser.parse_args()
    found = run(
        options.contenders, rounds=options.rounds, steps=options.steps, batch=options.batch, network=options.network
    )
    print(f"no communication: {found['no_communication']}\n{table(found)}")
    out = results.path_of_today("hotpath") if options.out == Path() else options.out
    results.write(out, found)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
