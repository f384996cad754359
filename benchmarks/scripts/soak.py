"""A soak: 20,000 steps with `auto` on a network that changes every minute of emulated time, and nothing grows.

    python -m benchmarks.scripts.soak           about ten minutes; writes benchmarks/results/<date>-soak.json

Two processes train a small model of several buckets over the emulated network of `thinwire compare`: namespaces and a
token bucket where the machine allows them. Emulated time runs 20 times as fast as the clock on the wall: a minute of it
takes 3 s. In real minutes, 20,000 quick steps would see a handful of changes. After every emulated minute the bandwidth
of all hosts takes a new value, drawn by the seed. It never stays the same.

Every 500 steps each rank samples what it has in use. What must hold on every rank:

    threads, descriptors    after the first tenth of the run, never more than in that tenth
    memory                  the line through the last 80 % of the resident set, as the median of all slopes between two
                            samples, rises by less than 16 MB over the whole run. One step that keeps 1 kB makes 20 MB.
                            The allocator and pages of libraries that are touched late move it by a few MB, as steps
                            that a median of slopes passes over.
    replicas                equal to the bit at the end

If anything grows or differs, it is listed and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.scripts import results

RANKS, STEPS, SAMPLE_EVERY = 2, 20_000, 500
MINUTE = 3.0  # seconds on the wall
MINUTES = 1200  # the schedule is longer than any run
RATES = ("10gbit", "1gbit", "200mbit", "50mbit", "10mbit")
EARLY, SETTLED = 0.1, 0.2  # of the run: where threads and descriptors have their maximum, where the line begins
MOST_BYTES = 16 << 20


def schedule(seed: int) -> str:
    """The network: another bandwidth with every emulated minute."""
    draw, rates = random.Random(seed), [RATES[0]]
    while len(rates) < MINUTES:
        rates.append(draw.choice([rate for rate in RATES if rate != rates[-1]]))
    return ";".join(f"{rate}@{minute * MINUTE:g}s" for minute, rate in enumerate(rates))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen): single jumps do not move it.

    >>> slope([(0, 5.0), (1, 7.0), (2, 90.0), (3, 11.0)])
    2.0
    """
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in combinations(points, 2))


def judged(samples: list[dict[str, int]], steps: int) -> dict[str, Any]:
    """What a rank had in use, early and later, and the list of what grows."""
    found: dict[str, Any] = {}
    grows = []
    for what in ("threads", "descriptors"):
        early = max(one[what] for one in samples if one["step"] <= EARLY * steps)
        later = max(one[what] for one in samples if one["step"] > EARLY * steps)
        found[what] = {"early": early, "later": later}
        grows += [what] if later > early else []
    settled = [(one["step"], one["rss"]) for one in samples if one["step"] >= SETTLED * steps]
    growth = slope(settled) * steps
    found["rss"] = {"settled": settled[0][1], "last": settled[-1][1], "most": max(size for _, size in settled)}
    found["rss"]["rise_over_run"] = growth
    grows += ["memory"] if growth >= MOST_BYTES else []
    return found | {"grows": grows}


def run(steps: int, seed: int) -> dict[str, Any]:
    """Train, print every sample of rank 0, and judge all ranks."""
    from thinwire.lab.compare.machine import describe_machine
    from thinwire.lab.emulate.hosts import emulated_hosts
    from thinwire.lab.emulate.processes import process_events, rendezvous

    every = max(1, min(SAMPLE_EVERY, steps // 40))
    end: dict[str, Any] = {}
    last: dict[str, Any] = {}
    recipes: set[str] = set()
    with emulated_hosts(RANKS, network=schedule(seed), prove=False) as hosts:
        task = {"meet_at": rendezvous(hosts), "ranks": RANKS, "steps": steps, "every": every, "seed": seed}
        tasks = [json.dumps(task | {"rank": rank}) for rank in range(RANKS)]
        for event in process_events(hosts, "benchmarks.scripts.soak_rank", lambda rank: tasks[rank]):
            if event["event"] == "sample":
                last = event
                recipes.add(event["recipe"])
                print(json.dumps(results.plain(results.without(event, "event"))), flush=True)
            else:
                end = event
        method = hosts.method
    ranks = [judged(one["samples"], steps) for one in end["ranks"]]
    broken = [f"rank {rank}: {what} grows" for rank, one in enumerate(ranks) for what in one["grows"]]
    if len({one["weights"] for one in end["ranks"]}) > 1:
        broken.append("replicas differ")
    if not all(one["finite"] for one in end["ranks"]):
        broken.append("weights are not finite")
    seconds = end["ranks"][0]["seconds"]
    changes = min(int(seconds / MINUTE), MINUTES - 1)
    settings: dict[str, Any] = {
        "ranks": RANKS,
        "steps": steps,
        "sample_every": every,
        "seed": seed,
        "method": method,
        "rates": RATES,
    }
    settings |= {"seconds_of_a_minute": MINUTE, "most_bytes": MOST_BYTES, "buckets": end["ranks"][0]["buckets"]}
    counts = {"seconds": seconds, "network_changes": changes, "switches": last["switches"], "recipes": sorted(recipes)}
    counts["samples"] = len(end["ranks"][0]["samples"])
    whole = {"schema": 1, "machine": describe_machine(), "settings": settings, "counts": counts}
    return whole | {"ranks": [results.without(one, "grows") for one in ranks], "broken": broken}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="at least 100 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="default: benchmarks/results/<date>-soak.json")
    options = parser.parse_args()
    if options.steps < 100:
        parser.error(f"--steps must be at least 100, got {options.steps}: fewer show no growth")
    found = run(options.steps, options.seed)
    out = results.path_of_today("soak") if options.out == Path() else options.out
    results.write(out, found)
    print(json.dumps(results.plain(results.only(found, "counts", "ranks", "broken")), indent=1))
    print(f"written to {out}")
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
