"""One rank of `benchmarks.scripts.hotpath`: trains every contender in turns and reads the clocks of all its threads."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire import kernels
from thinwire.comm import Communicator
from thinwire.lab.compare.contenders import Contender
from thinwire.lab.compare.one_loop import one_loop_backend
from thinwire.lab.compare.training import TrainingRun
from thinwire.lab.compare.workloads import workload
from thinwire.lab.emulate.processes import event_writer

CLOCKS = ("main", "lanes", "gloo", "others")
_LIMIT = timedelta(minutes=10)


def thread_seconds() -> dict[str, float]:
    """Processor seconds of this process so far, by kind of thread; those of threads that have ended are lost."""
    lanes = {one.native_id for one in threading.enumerate() if one.name.startswith("thinwire")}
    found = dict.fromkeys(CLOCKS, 0.0)
    for task in Path("/proc/self/task").iterdir():
        try:
            seconds = 1e-9 * int((task / "schedstat").read_text().split()[0])
            name = (task / "comm").read_text()
        except OSError:  # it has ended
            continue
        number = int(task.name)
        kind = "main" if number == os.getpid() else "lanes" if number in lanes else "others"
        found["gloo" if kind == "others" and "gloo" in name else kind] += seconds
    return found


class KernelClock:
    """Counts calls and processor seconds of `thinwire.kernels`, for main thread and lanes apart."""

    def __init__(self) -> None:
        self.seconds = {"main": 0.0, "lanes": 0.0}
        self.calls = 0
        self._inside = threading.local()
        for name in kernels.__all__:
            function = getattr(kernels, name)
            if callable(function) and not isinstance(function, type):
                setattr(kernels, name, self._timed(function))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            if getattr(self._inside, "kernel", False):
                return function(*given, **named)
            self._inside.kernel = True
            begin = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self._inside.kernel = False
                kind = "main" if threading.current_thread() is threading.main_thread() else "lanes"
                self.seconds[kind] += time.thread_time() - begin
                self.calls += 1

        return timed


def run(
    contenders: list[tuple[str, float]], rounds: int, steps: int, batch: int, tell: Callable[[dict[str, Any]], None]
) -> None:
    everyone, work = Communicator(), workload("gpt")
    if batch:
        work.batch_per_worker = batch
    clock = KernelClock()
    runs = [
        TrainingRun(Contender.named(name), work, seed=0, group=dist.new_group(timeout=_LIMIT), bucket_mb=cap)
        for name, cap in contenders
    ]
    for one in runs:  # DDP arranges its buckets, kernels are compiled, memory is touched
        one.train(12)
    for number in range(rounds):
        for index in [(number + place) % len(runs) for place in range(len(runs))]:
            everyone.all_reduce(torch.zeros(1))
            before, kernel, calls, exposed = (
                thread_seconds(),
                dict(clock.seconds),
                clock.calls,
                _exposed(runs[index]),
            )
            begin, cpu = time.perf_counter(), time.process_time()
            runs[index].train(steps)
            values = [time.perf_counter() - begin, time.process_time() - cpu, _exposed(runs[index]) - exposed]
            threads = thread_seconds()
            values += [threads[kind] - before[kind] for kind in CLOCKS]
            values += [clock.seconds[kind] - kernel[kind] for kind in ("main", "lanes")]
            values.append(1e-3 * (clock.calls - calls))
            summed = everyone.all_reduce(torch.tensor(values, dtype=torch.float64)) / everyone.world_size
            names = ("step", "cpu", "exposed", *CLOCKS, "kernels_main", "kernels_lanes", "kernel_calls")
            means = {name: 1e3 * float(value) / steps for name, value in zip(names, summed, strict=True)}
            tell({"event": "lap", "contender": index, "round": number, **means})
    buckets = [0 if one.link is None else len(one.link.layout.buckets) for one in runs]
    tell({"event": "end", "buckets": buckets})
    for one in runs:
        one.close()


def _exposed(run: TrainingRun) -> float:
    return 0.0 if run.link is None else run.link.stats()["comm/exposed_seconds"] * run.link.step


def main(
    meet_at: str, rank: int, ranks: int, contenders: list[tuple[str, float]], rounds: int, steps: int, batch: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(one_loop_backend(), init_method=meet_at, rank=rank, world_size=ranks, timeout=_LIMIT)
    run(contenders, rounds, steps, batch, event_writer(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
