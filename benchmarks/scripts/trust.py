"""Failures by the hundred: ranks that are killed, stopped or slow, links that lose packets, messages that are damaged.

    python -m benchmarks.scripts.trust --kills 200 --damages 100 --stops 10 --slow 30 --losses 30
                            about an hour; writes benchmarks/results/<date>-trust.json and prints it

Every trial trains a small model in 3 processes over gloo. Recipes come in turns: all presets, `auto`, and all
algorithms of gossip (damage: not those of gossip). What must hold:

    kill      SIGKILL of a random rank at a random moment: every survivor raises a ThinwireError within the group's
              timeout + 5 s, and raises the same once more. In gossip every survivor trains on instead: 20 more steps
              within that time, a finite model, the right list of live ranks, and an average that is equal to the bit
    stop      SIGSTOP for longer than the timeout: as above. For shorter: training goes on, replicas stay equal
    slow      every step of one rank takes 3 times as long: training goes on, replicas stay equal; in gossip nobody is
              thought dead, and averages are equal to the bit
    loss      ranks in namespaces of their own, on links that lose 1 % of packets: as with a slow rank
    damage    one random bit of one received message is flipped on one rank: all ranks raise within `check_every` steps,
              or the bit was one that no replica depends on, and replicas are equal to the bit

After each, a rank that has closed its link has no thread of thinwire and no socket more than before it. Namespaces are
gone. A trial that keeps none of these is listed with its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> int:
    from benchmarks.scripts import results
    from benchmarks.scripts.trust_loss import NETWORK, LossTrial
    from benchmarks.scripts.trust_ranks import CHECK_EVERY, RANKS, TIMEOUT
    from benchmarks.scripts.trust_trials import Trial, contenders
    from thinwire.lab.compare.machine import describe_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=10, help="for longer than the timeout, and as many for shorter")
    parser.add_argument("--slow", type=int, default=30)
    parser.add_argument("--losses", type=int, default=30)
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this long and keep what was done")
    parser.add_argument("--out", type=Path, default=Path(), help="default: benchmarks/results/<date>-trust.json")
    options = parser.parse_args()
    counts = {"kill": options.kills, "long stop": options.stops, "short stop": options.stops}
    counts |= {"slow": options.slow, "loss": options.losses, "damage": options.damages}
    end = time.monotonic() + (60 * options.minutes or 1e9)
    preload = ["torch", "numba", "thinwire", "thinwire.auto", "benchmarks.scripts.trust_ranks"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    found, broken, packets = dict[str, Counter[str]](), list[dict[str, Any]](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in counts.items():
            found[kind], recipes = Counter(), contenders(kind)
            for seed in range(options.seed, options.seed + count):
                if time.monotonic() > end:
                    break
                make = LossTrial if kind == "loss" else Trial
                trial = make(kind, seed, recipes[seed % len(recipes)], folder)
                word = trial.run()
                found[kind][word] += 1
                if kind == "loss":
                    packets.update(sent=trial.packets, lost=trial.packets_lost)
                if word.startswith("bad"):
                    broken.append({"kind": kind, "seed": seed, "recipe": trial.contender, "what": word})
                    print(f"{kind} {seed} with {trial.contender}: {word} ({trial.details})", flush=True)
            print(f"{kind}: {dict(found[kind])}", flush=True)
    out = results.path_of_today("trust") if options.out == Path() else options.out
    settings = {"ranks": RANKS, "timeout": TIMEOUT, "check_every": CHECK_EVERY, "seed": options.seed, "loss": NETWORK}
    tallies = {kind: dict(words) for kind, words in found.items()}
    content = {"schema": 1, "machine": describe_machine(), "settings": settings, "trials": tallies, "broken": broken}
    content["packets of loss"] = dict(packets)
    results.write(out, content)
    print(f"written to {out}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
