"""One process of `thinwire compare`: trains every contender in turn, lap by lap, and writes events as JSON lines.

All contenders live in the same processes and take turns, so that a busy moment of the machine hurts all of them alike.
Each has its own process groups: if one fails, the others go on.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...comm.communicator import Communicator
from ...comm.peers import GlooTransport
from ...errors import ThinwireError
from ..emulate.paced import backend_here, hold_here
from ..emulate.processes import event_writer
from .contenders import NO_COMMUNICATION, Contender
from .forecast import measure_here
from .one_loop import one_loop_backend
from .training import TrainingRun
from .workloads import Workload, workload

_MINUTES = 5  # timeout of collectives


@dataclass(frozen=True)
class Task:
    """The task of every worker."""

    workload: str
    data: str | None
    recipes: list[str]
    seeds: list[int]
    steps: int
    lap: int
    extra: float
    bucket_mb: float
    target_loss: float | None
    meet_at: str
    world_size: int
    interface: str
    probe_seconds: float = 0.0
    skew: float = 0.0
    rank: int = field(default=0)

    def as_text(self) -> str:
        return json.dumps(asdict(self))


class Worker:
    """Runs a task on this rank. `tell` writes its events."""

    def __init__(self, task: Task, tell: Callable[[dict[str, Any]], None]) -> None:
        self.task, self._tell = task, tell
        self._work: Workload = workload(task.workload, data=task.data, skew=task.skew)
        self._contenders = [Contender.named(name) for name in (NO_COMMUNICATION, *task.recipes)]
        self._everyone = Communicator()
        groups = [dist.new_group([rank], timeout=timedelta(minutes=_MINUTES)) for rank in range(task.world_size)]
        self._alone = groups[self._everyone.rank]

    def run(self) -> None:
        self._warm_up()
        if self.task.probe_seconds:
            self._measure()
        for seed in self.task.seeds:
            self._run(seed)

    def _warm_up(self) -> None:
        """Compile the kernels that contenders need, without the network; rank 0 first, so that the others find them."""
        for turn in (self._everyone.rank == 0, self._everyone.rank != 0):
            for number, contender in enumerate(self._contenders) if turn else ():
                self._tell({"event": "warming up", "contender": contender.name, "number": number})
                run = TrainingRun(contender, self._work, seed=0, group=self._alone)
                with contextlib.suppress(ThinwireError, RuntimeError):  # reported when it happens in training
                    run.train(2)
                run.close()
            self._meet()

    def _measure(self) -> None:
        """Measure what predictions need."""
        found = measure_here(
            self._work,
            self.task.recipes,
            self._everyone,
            self._alone,
            bucket_mb=self.task.bucket_mb,
            seconds=self.task.probe_seconds,
            tell=lambda what, done, of: self._tell({"event": "probing", "what": what, "done": done, "of": of}),
        )
        self._tell({"event": "measured", **found})

    def _run(self, seed: int) -> None:
        runs = {contender.name: self._training_run(contender, seed) for contender in self._contenders}
        target = self.task.target_loss
        best: dict[str, float] = {}
        laps = 0
        while active := [one for one in runs.values() if self._goes_on(one, best, target)]:
            start = laps % len(active)  # rotate: the first in a round finds the machine in another state than the last
            for run in active[start:] + active[:start]:
                if not self._lap(run, seed, best):
                    del runs[run.contender.name]
            laps += 1
            if target is None and "ddp" in runs and runs["ddp"].step >= self.task.steps:
                target = best["ddp"]
                self._tell({"event": "target", "seed": seed, "loss": target})
        for run in runs.values():
            run.close()

    def _training_run(self, contender: Contender, seed: int) -> TrainingRun:
        group = dist.new_group(timeout=timedelta(minutes=_MINUTES))
        return TrainingRun(
            contender,
            self._work,
            seed=seed,
            group=group,
            sent_bytes=self._sent_bytes,
            bucket_mb=self.task.bucket_mb,
            transport=lambda: GlooTransport.of_default_group(delay=hold_here()),
        )

    def _goes_on(self, run: TrainingRun, best: dict[str, float], target: float | None) -> bool:
        """Until its steps are done; after that, only to reach the loss of DDP."""
        name, steps = run.contender.name, self.task.steps
        reached = target is not None and best.get(name, float("inf")) <= target
        if self.task.target_loss is not None and reached and name != NO_COMMUNICATION:
            return False
        if run.step < steps:
            return True
        allowed = int(steps * (1 + self.task.extra)) if target is not None and self.task.target_loss is None else steps
        return not reached and name not in (NO_COMMUNICATION, "ddp") and run.step < allowed

    def _lap(self, run: TrainingRun, seed: int, best: dict[str, float]) -> bool:
        """Train one lap; returns whether it succeeded on every rank."""
        name, problem = run.contender.name, None
        event: dict[str, Any] = {}
        left = self.task.steps - run.step
        try:
            event = run.lap(min(self.task.lap, left) if left > 0 else self.task.lap)
        except (ThinwireError, RuntimeError) as failure:
            problem = " ".join(str(failure).split())
            run.close()
        failed = self._everyone.all_reduce(torch.tensor([float(problem is not None)]), op="max")
        if failed.any():
            self._tell(
                {"event": "failed", "contender": name, "seed": seed, "problem": problem or "another rank failed"}
            )
            return False
        best[name] = event["held_out"] if name == "ddp" else min(best.get(name, float("inf")), event["held_out"])
        self._tell(
            {
                "event": "lap",
                "contender": name,
                "seed": seed,
                **event,
                "breakdown": run.breakdown(),
                **run.decisions(),
            }
        )
        return True

    def _meet(self) -> None:
        self._everyone.all_reduce(torch.zeros(1))

    def _sent_bytes(self) -> int:
        return sent_by(self.task.interface) // (self.task.world_size if self.task.interface == "lo" else 1)


def sent_by(interface: str) -> int:
    """Bytes that this network namespace has sent through an interface. All workers share the loopback."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def main() -> None:
    warnings.simplefilter("ignore")
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    tell = event_writer(task.rank)
    backend = backend_here()
    try:
        dist.init_process_group(
            one_loop_backend() if backend == "gloo" else backend,
            init_method=task.meet_at,
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(minutes=_MINUTES),
        )
        Worker(task, tell).run()
        tell({"event": "done"})
        dist.destroy_process_group()
    except Exception as failure:
        tell(
            {
                "event": "error",
                "rank": task.rank,
                "problem": f"{type(failure).__name__}: {' '.join(str(failure).split())}",
            }
        )
        raise SystemExit(1) from failure


if __name__ == "__main__":
    main()
