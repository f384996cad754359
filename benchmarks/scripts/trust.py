"""Failures by the hundred: ranks that are killed or stopped, and messages that are damaged, in real processes.

    python -m benchmarks.scripts.trust --kills 200 --damages 100 --stops 10
                            about half an hour; writes benchmarks/results/<date>-trust.json and prints it

Every trial trains a small model on 3 ranks over gloo with a recipe drawn from all presets and `auto`. What must hold:

    kill      SIGKILL of a random rank at a random moment: every survivor raises a ThinwireError within the group's
              timeout + 5 s, raises the same once more, and leaves no thread behind
    stop      SIGSTOP for longer than the timeout: as above. For shorter: training goes on, replicas stay equal
    damage    one random bit of one received message is flipped on one rank: all ranks raise within `check_every` steps,
              or the bit was one that no replica depends on, and replicas are equal to the bit

A trial that keeps none of these is listed with its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS, TIMEOUT, CHECK_EVERY = 3, 6, 5
LATE = 5  # seconds after the timeout that a survivor may take


def train(rank: int, meet_at: str, recipe: str, plan: dict[str, Any], pipe: Any) -> None:
    """One rank: trains until something is raised, or for the steps of the plan, and tells what it saw."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=RANKS, timeout=limit)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(5)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.05)
    link = tw.attach(model, recipe, check_every=CHECK_EVERY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        numbers = torch.Generator().manual_seed(1000 * link.step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 96, generator=numbers)).square().mean()
        loss.backward()
        optimizer.step()

    told: dict[str, Any] = {"raised": "", "again": "", "seconds": 0.0}
    hit = plan["damage"] if rank == plan["victim"] and "damage" in plan else None
    for _ in range(3):  # DDP arranges its buckets in forward, with a collective of its own
        step()
    with _damaged(hit):
        pipe.send("ready")
        last = time.monotonic()
        try:
            for _ in range(plan["steps"]):
                last = time.monotonic()
                step()
        except tw.ThinwireError as failure:
            told["raised"] = f"{type(failure).__name__}: {failure}"
        told["seconds"] = time.monotonic() - last
    if told["raised"]:
        try:
            step()
        except tw.ThinwireError as failure:
            told["again"] = f"{type(failure).__name__}: {failure}"
    told["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    told["bits"] = [p.detach().numpy().tobytes() for p in net.parameters()]
    pipe.send(told)
    os._exit(0)


@contextlib.contextmanager
def _damaged(plan: dict[str, Any] | None) -> Iterator[None]:
    """Flip one bit of the n-th message that arrives; what ranks compare is left alone. Without a plan, none."""
    import torch

    from thinwire.comm.network import Pending

    wait, left = Pending.wait, [0 if plan is None else plan["message"]]

    def damaging(self: Pending) -> Any:
        received = wait(self)
        if received.dtype not in (torch.int64, torch.float64) and received.numel():
            left[0] -= 1
            if left[0] == 0 and plan is not None:
                flat = received.view(-1).view(torch.uint8)
                flat[int(plan["at"] * (flat.numel() - 1))] ^= 1 << plan["bit"]
        return received

    Pending.wait = damaging  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pending.wait = wait  # type: ignore[method-assign]


class Trial:
    """Three processes, what is done to them, and what they told."""

    def __init__(self, kind: str, seed: int, recipe: str, folder: str) -> None:
        self.kind, self.seed, self.recipe = kind, seed, recipe
        self.random = random.Random(f"{kind} {seed}")
        self.victim = self.random.randrange(RANKS)
        self._meet_at = f"file://{folder}/{kind}-{seed}"

    def run(self) -> str:
        """The outcome in one word; a word that begins with `bad` breaks a promise."""
        plan: dict[str, Any] = {"steps": 10**6, "victim": self.victim}
        if self.kind == "damage":
            at, bit = self.random.random(), self.random.randrange(8)
            plan |= {"steps": 30, "damage": {"message": self.random.randrange(1, 40), "at": at, "bit": bit}}
        if self.kind == "short stop":
            plan |= {"steps": 30}
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe() for _ in range(RANKS)]
        arguments = [(rank, self._meet_at, self.recipe, plan, pipes[rank][1]) for rank in range(RANKS)]
        processes = [context.Process(target=train, args=one, daemon=True) for one in arguments]
        for process in processes:
            process.start()
        try:
            return self._judged(processes, [mine for mine, _ in pipes])
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(process.pid or -1, signal.SIGKILL)
                process.join(10)

    def _judged(self, processes: list[Any], pipes: list[Any]) -> str:
        if not all(pipe.poll(120) and pipe.recv() == "ready" for pipe in pipes):
            return "bad: did not start"
        survivors = [rank for rank in range(RANKS) if rank != self.victim or self.kind in ("damage", "short stop")]
        if self.kind != "damage":
            time.sleep(self.random.random() * 0.5)
            sent = signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP
            os.kill(processes[self.victim].pid, sent)
            if self.kind == "short stop":
                time.sleep(TIMEOUT / 3)
                os.kill(processes[self.victim].pid, signal.SIGCONT)
        told = {rank: pipes[rank].recv() for rank in survivors if pipes[rank].poll(TIMEOUT + LATE + 30)}
        if len(told) < len(survivors):
            return "bad: a rank hangs"
        if any(one["threads"] for one in told.values() if one["raised"]):
            return "bad: threads are left"
        if self.kind in ("kill", "long stop"):
            return self._lost(list(told.values()))
        return self._undisturbed(list(told.values()))

    @staticmethod
    def _lost(told: list[dict[str, Any]]) -> str:
        if not all(one["raised"] for one in told):
            return "bad: nothing was raised"
        if any(one["again"] != one["raised"] for one in told):
            return "bad: the next step raised something else"
        return "raised" if all(one["seconds"] < TIMEOUT + LATE for one in told) else "bad: late"

    def _undisturbed(self, told: list[dict[str, Any]]) -> str:
        equal = all(one["bits"] == told[0]["bits"] for one in told)
        if all(one["raised"] for one in told):
            return "raised" if self.kind == "damage" else "bad: raised"
        if any(one["raised"] for one in told):
            return "bad: some ranks raised"
        return "replicas equal" if equal else "bad: replicas differ"


def main() -> int:
    from benchmarks.scripts import results
    from thinwire.lab.compare.machine import describe_machine
    from thinwire.recipe.presets import PRESETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=10, help="for longer than the timeout, and as many for shorter")
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this long and keep what was done")
    parser.add_argument("--out", type=Path, default=Path(), help="default: benchmarks/results/<date>-trust.json")
    options = parser.parse_args()
    counts = {"kill": options.kills, "long stop": options.stops, "short stop": options.stops, "damage": options.damages}
    end = time.monotonic() + (60 * options.minutes or 1e9)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "numba", "thinwire", "thinwire.auto"])
    recipes, found, broken = [*PRESETS, "auto"], dict[str, Counter[str]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in counts.items():
            found[kind] = Counter()
            for seed in range(options.seed, options.seed + count):
                if time.monotonic() > end:
                    break
                trial = Trial(kind, seed, recipes[seed % len(recipes)], folder)
                word = trial.run()
                found[kind][word] += 1
                if word.startswith("bad"):
                    broken.append({"kind": kind, "seed": seed, "recipe": trial.recipe, "what": word})
                    print(f"{kind} {seed} with {trial.recipe}: {word}", flush=True)
            print(f"{kind}: {dict(found[kind])}", flush=True)
    out = results.path_of_today("trust") if options.out == Path() else options.out
    settings = {"ranks": RANKS, "timeout": TIMEOUT, "check_every": CHECK_EVERY, "seed": options.seed}
    tallies = {kind: dict(words) for kind, words in found.items()}
    content = {"schema": 1, "machine": describe_machine(), "settings": settings, "trials": tallies, "broken": broken}
    results.write(out, content)
    print(f"written to {out}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
