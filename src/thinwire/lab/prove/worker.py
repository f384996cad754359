"""One process of a part of `thinwire prove`: takes a task as JSON and reports in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from . import benchmark, contract, hardware, kernels
from .place import Place

Report = Callable[[dict[str, Any]], None]


def reporter() -> Report:
    """Writes events. What a library prints to standard output goes to the log: it must not get between the events."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    return report


def end_with_parent() -> None:
    """End this process when the one that started it is gone: its end of our standard input closes then."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def join_group(task: dict[str, Any]) -> Place:
    """Meet the other processes, each on a device of its own."""
    cuda = task["device"] == "cuda"
    device = torch.device("cuda", task["rank"]) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Sooner than the parent's patience ends, so that a rank that waits in vain can say for what.
    limit = timedelta(seconds=0.8 * task["timeout"])
    store = TCPStore("127.0.0.1", task["port"], is_master=False, timeout=limit)
    options: dict[str, Any] = {"device_id": device} if cuda else {}
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=task["rank"],
        world_size=task["world_size"],
        timeout=limit,
        **options,
    )
    return Place(task["rank"], task["world_size"], device)


def run(task: dict[str, Any], report: Report) -> None:
    if task["part"] == "machine":
        report({"event": "machine", "gpus": hardware.describe_gpus(torch.cuda.device_count())})
    elif task["part"] == "kernels":
        kernels.run_task(task, report)
    else:
        place = join_group(task)
        {"contract": contract.run_task, "benchmark": benchmark.run_task}[task["part"]](task, place, report)
        dist.destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    task = json.loads(sys.argv[1])
    end_with_parent()
    report = reporter()
    if task.get("device") != "cuda":
        torch.set_num_threads(1)
    try:
        run(task, report)
    except Exception as problem:
        report({"event": "error", "problem": f"{type(problem).__name__}: {' '.join(str(problem).split())[:600]}"})
        raise SystemExit(1) from problem


if __name__ == "__main__":
    main()
