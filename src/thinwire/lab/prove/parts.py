"""The parts that run in processes of their own: kernels, the DDP contract and the benchmark, on one kind of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .benchmark import PLAIN
from .contract import checks_of
from .kernels import runs
from .launch import Event, run_processes
from .part import Found, Plan, Tell
from .ratios import rows
from .settings import LAP, MODELS, Settings

_ON_CPU = {"OMP_NUM_THREADS": "1"}
# cuBLAS gives the same bits for the same matrices with a fixed workspace only; the contract compares runs bit for bit.
_ON_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TRITON_INTERPRET": "0"}
_BATCH = {"cpu": (2, 64), "cuda": (8, 128)}  # sequences and their length, for each process


class Processes:
    """Makes the parts of one kind of device: `cpu` with gloo, or `cuda` with NCCL."""

    def __init__(
        self, settings: Settings, device: str, *, gpus: int = 0, machine: Mapping[str, Any] | None = None
    ) -> None:
        self._settings, self._device, self._gpus = settings, device, gpus
        self._found: Mapping[str, Any] = (machine or {}).get("gpus") or {}
        self._count = settings.processes_on(gpus if device == "cuda" else 0)
        self._backend = "nccl" if device == "cuda" else "gloo"

    def gpus(self) -> tuple[dict[str, Any] | None, str | None]:
        """The description of all GPUs, made in another process, and what went wrong with it."""
        found: list[dict[str, Any]] = []

        def take(event: Event) -> None:
            if event["event"] == "machine":
                found.append(event["gpus"])

        problem = self._start({"part": "machine"}, 1, take, _ON_GPU)
        return (found[0] if found else None), problem or (None if found else "the GPUs were not described")

    # ------------------------------------------------------------------------------------------------------ kernels

    def kernels(self, name: str, *, missing: str | None = None, interpreted: bool = False) -> Plan:
        """Every kernel against its definition; on GPUs, on the first of each model."""
        devices = ["interpreter"] if interpreted else self._distinct_gpus() if self._device == "cuda" else ["cpu"]
        units = len(runs(quick=self._settings.quick, interpreted=interpreted)) * len(devices)

        def work(tell: Tell) -> Found:
            counts: list[Event] = []

            def take(event: Event) -> None:
                if event["event"] == "kernel":
                    counts.append(event)
                elif event["event"] == "run":
                    tell(event["word"])

            task = {"part": "kernels", "devices": devices, "quick": self._settings.quick}
            interpreter = {"TRITON_INTERPRET": "1" if interpreted else "0"}
            problem = self._start(task, 1, take, {**_ON_CPU, **interpreter})
            return judge_kernels(counts, problem)

        return Plan(name, work, units, missing)

    def _distinct_gpus(self) -> list[str]:
        names = [device["name"] for device in self._found.get("devices", [])]
        return [f"cuda:{names.index(name)}" for name in dict.fromkeys(names)] or ["cuda:0"]

    # ----------------------------------------------------------------------------------------------------- contract

    def contract(self, name: str, *, missing: str | None = None) -> Plan:
        """Every check of every recipe, in real processes."""
        recipes = self._settings.contract_recipes
        wanted = [(recipe, check) for recipe in recipes for check in checks_of(recipe)]

        def work(tell: Tell) -> Found:
            told: list[Event] = []

            def take(event: Event) -> None:
                if event["event"] == "check":
                    told.append(event)
                elif event["event"] == "begin" and event["rank"] == 0:
                    tell(event["word"])

            task = {"part": "contract", "device": self._device, "recipes": list(recipes)}
            problem = self._start(task, self._count, take, self._environment)
            about = {"backend": self._backend, "processes": self._count}
            return judge_contract(told, wanted, about, problem)

        return Plan(name, work, len(wanted), missing)

    # ---------------------------------------------------------------------------------------------------- benchmark

    def benchmark(self, name: str, *, missing: str | None = None, environment: Mapping[str, str] | None = None) -> Plan:
        """Contenders in turns; proved if all of them trained to the end."""
        settings = self._settings
        memory = [device["memory_gb"] for device in self._found.get("devices", [])][: self._count]
        model = settings.model_on(self._device, gigabytes=min(memory, default=0.0))
        steps, (batch, length) = settings.steps_on(self._device), _BATCH[self._device]
        recipes = list(settings.benchmark_recipes)
        units = (len(recipes) + 3) * (1 + steps // LAP)

        def work(tell: Tell) -> Found:
            told: list[Event] = []

            def take(event: Event) -> None:
                told.append(event)
                if event["event"] in ("begin", "lap"):
                    tell(event.get("word") or f"{event['contender']}, {event['step_ms']:.1f} ms a step")

            task: dict[str, Any] = {"part": "benchmark", "device": self._device, "recipes": recipes, "model": model}
            task |= {"steps": steps, "batch": batch, "length": length}
            problem = self._start(task, self._count, take, {**self._environment, **(environment or {})})
            layers, width = MODELS[model]
            about = {"backend": self._backend, "processes": self._count, "environment": dict(environment or {})}
            about |= {"model": model, "layers": layers, "width": width, "steps": steps, "lap": LAP}
            about |= {"batch_per_process": batch, "sequence": length}
            return judge_benchmark(told, about, problem)

        return Plan(name, work, units, missing)

    # ------------------------------------------------------------------------------------------------------ helpers

    @property
    def _environment(self) -> dict[str, str]:
        return _ON_GPU if self._device == "cuda" else _ON_CPU

    def _start(
        self, task: dict[str, Any], processes: int, take: Callable[[Event], None], environment: Mapping[str, str]
    ) -> str | None:
        timeout = self._settings.timeout
        return run_processes(task, processes=processes, timeout=timeout, on_event=take, environment=environment)


def judge_kernels(counts: list[Event], problem: str | None) -> Found:
    """A kernel that differs, is not covered, or runs in plain torch only, is not proved.

    >>> good = {"kernel": "pack", "device": "cpu", "body": "cpu", "cases": 9, "problem": None}
    >>> judge_kernels([good], None).problem is None
    True
    >>> judge_kernels([{**good, "body": "reference"}], None).problem
    'kernels on cpu run in plain torch: install numba or triton'
    """
    problems = [problem] if problem else []
    problems += [
        f"kernels on {device} run in plain torch: install numba or triton"
        for device in sorted({event["device"] for event in counts if event["body"] == "reference"})
    ]
    problems += [f"{event['problem']}, on {event['device']}" for event in counts if event["problem"]]
    keys = ("kernel", "device", "body", "cases", "problem")
    details = {
        "devices": sorted({event["device"] for event in counts}),
        "cases": sum(event["cases"] for event in counts),
        "kernels": [{key: event[key] for key in keys} for event in counts],
    }
    if not counts and not problems:
        problems = ["no kernel was run"]
    return Found(details, "; ".join(problems) or None)


def judge_contract(
    told: list[Event], wanted: list[tuple[str, str]], about: dict[str, Any], problem: str | None
) -> Found:
    """A check holds if every rank says so.

    >>> told = [{"rank": rank, "recipe": "bf16", "check": "resume", "problem": None} for rank in range(2)]
    >>> judge_contract(told, [("bf16", "resume")], {"processes": 2}, None).problem is None
    True
    >>> judge_contract(told[:1], [("bf16", "resume")], {"processes": 2}, None).problem
    'bf16, resume: not finished'
    """
    recipes: dict[str, dict[str, str]] = {}
    for recipe, check in wanted:
        said = {e["rank"]: e["problem"] for e in told if (e["recipe"], e["check"]) == (recipe, check)}
        wrong = [f"rank {rank}: {words}" for rank, words in sorted(said.items()) if words]
        if wrong:
            verdict = wrong[0]
        else:
            verdict = "holds" if len(said) == about["processes"] else "not finished"
        recipes.setdefault(recipe, {})[check] = verdict
    bad = [f"{r}, {c}: {words}" for r, checks in recipes.items() for c, words in checks.items() if words != "holds"]
    held = len(wanted) - len(bad)
    problems = [problem] if problem else bad[:5] + ([f"and {len(bad) - 5} more"] if len(bad) > 5 else [])
    return Found({**about, "checks": len(wanted), "held": held, "recipes": recipes}, "; ".join(problems) or None)


def judge_benchmark(told: list[Event], about: dict[str, Any], problem: str | None) -> Found:
    """Rows of medians and ratios; a contender whose loss is not finite fails the part."""
    laps: dict[str, dict[int, float]] = {}
    for event in told:
        if event["event"] == "lap":
            laps.setdefault(event["contender"], {})[event["round"]] = event["step_ms"]
    summaries = {event["contender"]: event for event in told if event["event"] == "summary"}
    measured = rows(laps) if PLAIN in laps else []
    for row in measured:
        summary = summaries.get(row["contender"], {})
        sent = summary.get("bytes_per_step", -1.0)
        row["bytes_per_step"] = sent if sent >= 0 else None
    lost = [name for name, summary in summaries.items() if not summary["finite"]]
    model = next((event for event in told if event["event"] == "model"), {})
    size = {"parameters": model.get("parameters"), "computes_in": "bfloat16" if model.get("autocast") else "float32"}
    if problem is None and lost:
        problem = f"the loss of {', '.join(lost)} is not finite"
    if problem is None and not measured:
        problem = "nothing was measured"
    return Found({**about, **size, "rows": measured}, problem)
