"""Runs a proof: which parts this machine can run, one after the other, and the result that `prove.json` holds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from ... import __version__
from . import hardware, parts
from .part import Found, Part, Plan, Tell, run_part
from .settings import Settings

SCHEMA = 1
MACHINE = "machine"
OnEvent = Callable[[dict[str, Any]], None]


def prove(settings: Settings, *, on_event: OnEvent = lambda event: None, command: str = "") -> dict[str, Any]:
    """Run every part; the result is what `prove.json` holds. A part that fails does not stop the others.

    Args:
        settings: what to run.
        on_event: called with events: `part` when one begins, `unit` for each piece of work, `done` with its verdict.
        command: how this was called, for the page.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    settings.processes_on(gpus)  # refuses too many processes before anything runs
    machine = _run(Plan(MACHINE, partial(_describe, gpus, settings)), on_event)
    found = [machine]
    for plan in plans(settings, gpus=gpus, machine=machine.details):
        found.append(_run(plan, on_event))
    return result(found, device="cuda" if gpus else "cpu", settings=settings, command=command)


def plans(settings: Settings, *, gpus: int, machine: dict[str, Any]) -> list[Plan]:
    """The parts after the description of the machine; those that cannot run here say why.

    >>> [plan.name for plan in plans(Settings(), gpus=0, machine={}) if plan.missing is None]
    ['kernels on the CPU', 'DDP contract over gloo', 'benchmark over gloo']
    """
    no_gpu = None if gpus else hardware.why_no_gpu()
    one_gpu = no_gpu or ("one GPU here, and NCCL needs two" if gpus < 2 else None)
    no_nccl = one_gpu or (None if torch.distributed.is_nccl_available() else "torch was built without NCCL")
    no_triton = None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"
    cpu, cuda = parts.Processes(settings, "cpu"), parts.Processes(settings, "cuda", gpus=gpus, machine=machine)
    found: list[Plan] = []
    if not gpus:
        found.append(cpu.kernels("kernels on the CPU"))
    found.append(cuda.kernels("kernels on a GPU", missing=no_gpu))
    if settings.interpret:
        found.append(cpu.kernels("Triton kernels in the interpreter", missing=no_triton, interpreted=True))
    if no_nccl is not None:
        found.append(cpu.contract("DDP contract over gloo"))
    found.append(cuda.contract("DDP contract over NCCL", missing=no_nccl))
    if no_nccl is not None:
        found.append(cpu.benchmark("benchmark over gloo"))
    found.append(cuda.benchmark("benchmark over NCCL", missing=no_nccl))
    disabled = {"NCCL_P2P_DISABLE": "1"}
    found.append(cuda.benchmark("benchmark over NCCL without peer-to-peer", missing=no_nccl, environment=disabled))
    return found


def result(found: list[Part], *, device: str, settings: Settings, command: str = "") -> dict[str, Any]:
    """What `prove.json` holds.

    >>> machine = Part("machine", "proved", 0.1, details={"cores": 2})
    >>> missing = Part("kernels on a GPU", "not here", 0.0, "no GPU")
    >>> whole = result([machine, missing], device="cpu", settings=Settings())
    >>> whole["proved"], whole["missing"], whole["machine"]
    (True, ['kernels on a GPU: no GPU'], {'cores': 2})
    """
    return {
        "schema": SCHEMA,
        "kind": "prove",
        "thinwire": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": command,
        "settings": {**asdict(settings), "recipes": list(settings.recipes)},
        "machine": next((part.details for part in found if part.name == MACHINE), {}),
        "device": device,
        "parts": [asdict(part) for part in found],
        "proved": all(part.verdict != "failed" for part in found),
        "missing": [f"{part.name}: {part.reason}" for part in found if part.verdict == "not here"],
    }


def _run(plan: Plan, on_event: OnEvent) -> Part:
    if plan.missing is None:
        on_event({"event": "part", "name": plan.name, "units": plan.units})
    part = run_part(plan, lambda word: on_event({"event": "unit", "name": plan.name, "word": word}))
    on_event({"event": "done", **asdict(part)})
    return part


def _describe(gpus: int, settings: Settings, tell: Tell) -> Found:
    """GPUs are described in another process: this one stays without a CUDA context, which would cost memory."""
    machine: dict[str, Any] = {**hardware.describe_software(), "gpus": None}
    if not gpus:
        return Found(machine)
    found, problem = parts.Processes(settings, "cuda", gpus=gpus).gpus()
    return Found({**machine, "gpus": found}, problem)
