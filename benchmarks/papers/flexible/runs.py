"""What the page on flexible communication measures: collectives on emulated networks, leaders, rules, schedules."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.scripts.results import only, without
from thinwire.lab.compare.runner import Settings, compare
from thinwire.lab.compare.workloads import workload
from thinwire.predict import textbook
from thinwire.predict.collectives import Link

from ..run import Options
from .published import SCHEDULES, SIZE_IN_CODE, SIZES, STEP_MS, WAYS, WORKERS, cells, scaled
from .rules import RULES, against_brute_force, chosen_ratios
from .training import BATCH, MOMENTUM, RATE, Job, rate_of, train_all, work_for
from .training import WAYS as TOP_K

DENSITIES = (0.1, 0.01)
NETWORKS = ("1gbit,0.1ms", "100mbit,1ms", "100mbit,20ms")
# Those of four workers, and those of eight, which take twice as long on the same two cores.
SETTINGS = (*((network, 4) for network in NETWORKS), *((network, 8) for network in NETWORKS[1:]))
SKEWS = (0.0, 0.9)
FIXED = ("0.1", "0.01", "0.001")
LAP = 5
_LEAD = 10  # seconds in which workers are started, before the first step

# Seconds of each phase while ten recipes take turns on two cores: about as many steps in each phase of a schedule.
C1_SECONDS = (7, 40, 40, 25)
C2_SECONDS = (4, 4, 5, 6, 9, 25, 25, 9, 6, 5, 4, 4)
SECONDS = {"C1": C1_SECONDS, "C2": C2_SECONDS}
STEPS = {"C1": 50, "C2": 115}
SPARSE = {"AR": "ef|top_k:{:g}|shared_top_k", "AG": "ef|threshold_k:{:g}|bf16|all_gather"}


def say(text: str) -> None:
    print(f"  {text}", flush=True)


# ----------------------------------------------------------------------------------------------------- the book


def book(options: Options) -> dict[str, Any]:
    """The printed table of winners and the formulas, for the sizes that fit its times and for those in its code."""
    formulas = (textbook.gathered_top_k, textbook.shared_top_k_ring, textbook.shared_top_k_tree)
    rows = []
    for cell in cells():
        link = Link.of(milliseconds=1, gigabits=cell.gigabits)
        ours = [1e3 * formula(link, 4 * SIZES[cell.model], cell.ratio, WORKERS) for formula in formulas]
        in_code = textbook.top_k_winner(link, 4 * SIZE_IN_CODE[cell.model], cell.ratio, WORKERS)
        row = {"model": cell.model, "ratio": cell.ratio, "gigabits": cell.gigabits, "published_ms": list(cell.times)}
        rows.append(
            row | {"ms": ours, "published": cell.winner, "winner": WAYS[ours.index(min(ours))], "code": in_code}
        )
    return {"rows": rows}


# ----------------------------------------------------------------------------------------- collectives, measured


def collectives(options: Options) -> dict[str, Any]:
    """Steps of dense, of Top-k by all-gather and of shared Top-k on emulated networks, with what plan predicts."""
    recipes = ["ddp", *(TOP_K[way].format(d) for d in DENSITIES for way in ("AG", "STAR")), TOP_K["VAR"].format(0.01)]
    name = "mlp-100k" if options.quick else "mlp"
    numel = sum(parameter.numel() for parameter in workload(name).model(seed=0).parameters())
    steps = 4 if options.quick else 7  # of which the first three, in which DDP arranges its buckets, do not count
    found = []
    for network, workers in (("1gbit,0.1ms", 2), ("100mbit,20ms", 2)) if options.quick else SETTINGS:
        result = _compare(
            Settings(
                tuple(recipes),
                workload=name,
                workers=workers,
                network=network,
                steps=steps,
                lap=steps,
                extra=0.0,
                seed=options.first_seed,
                repeats=options.seeds,
                probe_seconds=0.5 if options.quick else 4.0,
                method="paced" if options.quick else None,
            )
        )
        link = _link(network)
        book_ms = {
            f"{density:g}": {
                "AG": 1e3 * textbook.gathered_top_k(link, 4 * numel, density, workers),
                "STAR": 1e3 * textbook.shared_top_k_ring(link, 4 * numel, density, workers),
            }
            for density in DENSITIES
        }
        rows = {
            row["recipe"]: {
                "ms": [one["step_ms"] for one in row["repeats"]],
                "predicted_ms": row["predicted_ms"],
                "bytes": row["bytes_per_step"],
                "problem": row["problem"],
            }
            for row in result["rows"]
        }
        alone = result["no_communication"]["step_ms"]
        found.append(
            {
                "network": network,
                "workers": workers,
                "rows": rows,
                "book_ms": book_ms,
                "no_communication_ms": alone,
                "method": result["network"]["method"],
            }
        )
        told = ", ".join(f"{one} {shortly(row['ms'])}" for one, row in rows.items())
        say(f"{workers} workers on {network}: {told}")
    return {"parameters": numel, "workload": name, "steps": steps, "settings": found}


def shortly(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.0f} ms" if known else "failed"


def _link(network: str) -> Link:
    rate, delay = network.split(",")
    gigabits = float(rate[:-4]) * {"mbit": 1e-3, "gbit": 1.0}[rate[-4:]]
    return Link.of(milliseconds=float(delay.removesuffix("ms")), gigabits=gigabits)


def _compare(settings: Settings, on_event: Any = lambda event: None) -> dict[str, Any]:
    kept: list[dict[str, Any]] = []
    compare(settings, keep=kept.append, on_event=on_event)
    return kept[0]


# ----------------------------------------------------------------------------------------------- leaders and rules


def leaders(options: Options) -> dict[str, Any]:
    """Dense, all-gather, STAR and VAR at two densities, on shards that are alike and on skewed ones."""
    steps, look = (12, 6) if options.quick else (140, 20)
    data = None if options.quick else options.data
    recipes = ["dense", *(one.format(density) for density in DENSITIES for one in TOP_K.values())]
    jobs = [
        Job(seed, steps, look, recipe=recipe, skew=skew, data=data, small=options.quick)
        for skew in SKEWS
        for recipe in recipes
        for seed in options.all_seeds
    ]
    runs = train_all(jobs, say)
    work = work_for(data, SKEWS[0], options.quick)
    used = {"rate": rate_of(work), "momentum": MOMENTUM, "batch": BATCH, "about": work.about}
    return {"workload": work.name, "steps": steps, "workers": WORKERS, **used, "runs": runs}


def rules(options: Options) -> dict[str, Any]:
    """The published rule, time over gain, and fixed ratios, through both schedules by the clock of the formulas."""
    steps, look = (24, 6) if options.quick else (200, 10)
    jobs = [
        Job(seed, steps, look, schedule=schedule, policy=policy, small=True)
        for schedule in SCHEDULES
        for policy in (*RULES, *FIXED, "dense")
        for seed in options.all_seeds
    ]
    runs = train_all(jobs, say)
    one = next(run for run in runs if run["policy"] == "published")
    curves = [one["choices"][place]["curve"] for place in (0, -1)]  # of the beginning and of the end of a training
    kept = [run | {"choices": [without(choice, "curve") for choice in run["choices"]]} for run in runs]
    return {
        "steps": steps,
        "workers": WORKERS,
        "rate": RATE,
        "momentum": MOMENTUM,
        "batch": BATCH,
        "about": work_for(None, 0.0, True).about,
        "compute_ms": STEP_MS,
        "runs": kept,
        "chosen": chosen_ratios(curves),
        "brute_force": against_brute_force(50 if options.quick else 3000, size=19),
    }


# ------------------------------------------------------------------------------------------------------- schedules


def schedule_text(name: str, seconds: Sequence[float], *, lead: float) -> str:
    """A schedule as the emulator reads it; the first phase also covers the start of the workers."""
    starts = [0.0, *(lead + done for done in itertools.accumulate(seconds[:-1]))]
    return ";".join(f"{scaled(phase)}@{start:g}s" for phase, start in zip(SCHEDULES[name], starts, strict=True))


def schedules(options: Options) -> dict[str, Any]:
    """`auto` and fixed recipes through both schedules, in turns; one seed. Keeps the fronts of `auto`."""
    fixed = {f"{way} {float(ratio):g}": text.format(float(ratio)) for way, text in SPARSE.items() for ratio in FIXED}
    names = {"auto": "auto", "dense": "ddp", "two-shot-2": "two-shot-2", "two-shot-1": "two-shot-1", **fixed}
    if options.quick:
        names = {key: names[key] for key in ("auto", "dense", "AR 0.01")}
    found = {}
    for name in SCHEDULES:
        seconds = [1.0] * len(SCHEDULES[name]) if options.quick else SECONDS[name]
        text = schedule_text(name, seconds, lead=0.0 if options.quick else _LEAD)
        laps = _Laps([float(part.partition("@")[2][:-1]) for part in text.split(";")])
        result = _compare(
            Settings(
                tuple(names.values()),
                workload="mlp-100k" if options.quick else "mlp",
                workers=2 if options.quick else 4,
                network=text,
                steps=10 if options.quick else STEPS[name],
                lap=LAP,
                extra=0.0,
                seed=options.first_seed,
                probe_seconds=0.0,
                method="paced" if options.quick else None,
            ),
            laps.take,
        )
        rows = {row["recipe"]: row for row in result["rows"]}
        auto = rows["auto"]
        found[name] = {
            "network": text,
            "no_communication_ms": result["no_communication"]["step_ms"],
            "workers": result["settings"]["workers"],
            "parameters": result["settings"]["parameters"],
            "method": result["network"]["method"],
            "lap": LAP,
            "rows": {key: _row(rows[one], laps) for key, one in names.items()},
            "decisions": [
                {key: one[key] for key in ("step", "seconds", "recipe", "text")} for one in auto["decisions"]
            ],
            "deciding_share": auto["deciding_share"],
            "fronts": laps.fronts,
        }
        for one in found[name]["decisions"]:
            say(f"{name}, {one['text']}")
    return found


class _Laps:
    """Listens to workers: the phase in which each lap ended, and the front that `auto` had then."""

    def __init__(self, starts: Sequence[float]) -> None:
        self._starts, self._begin = starts, time.perf_counter()
        self.phases: dict[str, list[int]] = {}
        self.fronts: list[dict[str, Any]] = []

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "network":
            self._begin = time.perf_counter()  # its clock starts now
        if event["event"] != "lap":
            return
        at = time.perf_counter() - self._begin
        phase = sum(start <= at for start in self._starts) - 1
        self.phases.setdefault(event["contender"], []).append(phase)
        if event["contender"] == "auto":
            chosen = event["decisions"][-1]["recipe"] if event["decisions"] else "dense"
            front = [only(one, "recipe", "predicted_ms", "progress_per_step") for one in event["front"] or ()]
            self.fronts.append({"step": event["step"], "phase": phase, "chosen": chosen, "front": front})


def _row(row: dict[str, Any], laps: _Laps) -> dict[str, Any]:
    curve = [{key: point[key] for key in ("step", "seconds", "held_out")} for point in row["curve"]]
    return {
        "recipe": row["spelled"],
        "problem": row["problem"],
        "curve": curve,
        "phases": laps.phases.get(row["recipe"], []),
    }
