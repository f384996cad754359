"""Failures by the hundred: ranks that are killed, stopped or slow, links that lose packets, messages that are damaged.

    python -m benchmarks.scripts.trust        200 kills, 100 damages and 28 of each other kind, in about an hour; writes
                                              benchmarks/results/<date>-trust.json and prints the counts
    python -m benchmarks.scripts.trust --only "short stop" --only damage --into benchmarks/results/<date>-trust.json
                                              only these kinds; the file keeps what it has of the others, and counts
                                              are added if --seed follows the last one there

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
              or it had no effect: all replicas have the bits of a run without damage. Two runs of `auto` differ, so
              there only equal replicas are asked for

After each, a rank that has closed its link has no thread of thinwire and no socket more than before it. Namespaces are
gone. A trial that keeps none of these is listed with its seed, and the exit code is 1. Of each kind the file says which
commit measured it, on which processor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KINDS = {"kill": "kills", "long stop": "long_stops", "short stop": "short_stops"}  # and the options of their counts
KINDS |= {"slow": "slow", "loss": "losses", "damage": "damages"}
COUNTS = {"kill": 200, "long stop": 28, "short stop": 28, "slow": 28, "loss": 28, "damage": 100}


def main() -> int:
    from benchmarks.scripts import results

    options = _options()
    counts = {kind: getattr(options, KINDS[kind]) for kind in options.only or KINDS}
    found = measured(counts, first=options.seed, minutes=options.minutes)
    out = options.into or options.out or results.path_of_today("trust")
    content = merged(results.read(options.into) if options.into else {}, found)
    results.write(out, content)
    print(f"written to {out}")
    return 1 if content["broken"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, name in KINDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=COUNTS[kind])
    parser.add_argument("--only", action="append", choices=KINDS, help="only this kind; may be given several times")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the recipes follow it in turns")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this long and keep what was done")
    written = parser.add_mutually_exclusive_group()
    written.add_argument("--out", type=Path, help="default: benchmarks/results/<date>-trust.json")
    written.add_argument("--into", type=Path, help="a results file whose entries of the measured kinds are replaced")
    return parser.parse_args()


def measured(counts: Mapping[str, int], *, first: int = 0, minutes: float = 0.0) -> dict[str, Any]:
    """Run trials of these kinds; the content of a results file."""
    from benchmarks.scripts.trust_loss import NETWORK, LossTrial
    from benchmarks.scripts.trust_ranks import CHECK_EVERY, RANKS, TIMEOUT
    from benchmarks.scripts.trust_trials import Trial, contenders
    from thinwire.lab.compare.machine import describe_machine

    end = time.monotonic() + (60 * minutes or 1e9)
    preload = ["torch", "numba", "thinwire", "thinwire.auto", "benchmarks.scripts.trust_ranks"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    settings = {"ranks": RANKS, "timeout": TIMEOUT, "check_every": CHECK_EVERY, "loss": NETWORK}
    found: dict[str, Any] = {"schema": 2, "machine": describe_machine(), "settings": settings}
    found |= {"trials": {}, "measured": {}, "packets of loss": {}, "broken": []}
    version, packets = _commit(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in counts.items():
            words, recipes, seeds = Counter[str](), contenders(kind), range(first, first + count)
            for seed in seeds:
                if time.monotonic() > end:
                    seeds = range(first, seed)
                    break
                trial = (LossTrial if kind == "loss" else Trial)(kind, seed, recipes[seed % len(recipes)], folder)
                word = trial.run()
                words[word] += 1
                if kind == "loss":
                    packets.update(sent=trial.packets, lost=trial.packets_lost)
                if word.startswith("bad"):
                    found["broken"].append({"kind": kind, "seed": seed, "recipe": trial.contender, "what": word})
                    print(f"{kind} {seed} with {trial.contender}: {word} ({trial.details})", flush=True)
            if seeds:
                found["trials"][kind] = dict(words)
                processor = found["machine"]["processor"]
                found["measured"][kind] = {"commit": version, "processor": processor, "seeds": [first, seeds.stop - 1]}
            print(f"{kind}: {dict(words)}", flush=True)
    return found | {"packets of loss": dict(packets)}


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A results file with the kinds of the new one in place of the old ones; the rest is kept.

    Where the new seeds follow the old ones, and the same commit ran both, the counts are added.

    >>> old = {"trials": {"kill": {"raised": 2}, "slow": {"bad: a rank hangs": 1}}, "broken": [{"kind": "slow"}]}
    >>> merged(old, {"trials": {"slow": {"replicas equal": 1}}, "broken": []})
    {'trials': {'kill': {'raised': 2}, 'slow': {'replicas equal': 1}}, 'broken': []}
    """
    content = {**old, **new}
    if "machine" in old and set(old["trials"]) - set(new["trials"]):
        content["machine"] = old["machine"]  # of what is kept; the new kinds name their processor
    for key in ("trials", "measured"):
        both = {**old.get(key, {}), **new.get(key, {})}
        content |= {key: dict(sorted(both.items(), key=lambda item: list(KINDS).index(item[0])))} if both else {}
    gone = set(new["trials"])
    for kind in new["trials"]:
        before, now = old.get("measured", {}).get(kind), new.get("measured", {}).get(kind)
        if before and now and before["commit"] == now["commit"] and before["seeds"][1] + 1 == now["seeds"][0]:
            gone.discard(kind)
            content["trials"][kind] = dict(Counter(old["trials"][kind]) + Counter(new["trials"][kind]))
            content["measured"][kind] = {**now, "seeds": [before["seeds"][0], now["seeds"][1]]}
    content["broken"] = [*(one for one in old.get("broken", []) if one["kind"] not in gone), *new["broken"]]
    if "loss" in new["trials"]:
        kept = old.get("packets of loss", {}) if "loss" not in gone else {}
        content["packets of loss"] = dict(Counter(kept) + Counter(new.get("packets of loss", {})))
    elif "packets of loss" in old:
        content["packets of loss"] = old["packets of loss"]
    return content


def _commit() -> str:
    """The commit that is measured, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
