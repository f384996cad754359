"""Collects the events of the workers into results: one row a recipe, the headline, and everything as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .contenders import NO_COMMUNICATION, Contender

SCHEMA = 1
_WARM = 3  # first steps of a run, in which DDP arranges its buckets: they count as training time, not as step time
_SAME_LOSS = 0.01
_SOMETIMES = ("accuracy", "averaged_loss", "local_loss", "consensus_distance")  # only some laps have them


@dataclass
class Run:
    """One contender with one seed."""

    seed: int
    laps: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None

    def step_ms(self) -> float | None:
        """Milliseconds a step: the median over laps, so that a lap on a busy machine does not count."""
        each = []
        for number, lap in enumerate(self.laps):
            steps = lap["step_seconds"]
            if number == 0:
                warm = sum(steps[:_WARM]) if len(steps) > _WARM else 0.0
                rest = len(steps) - (_WARM if len(steps) > _WARM else 0)
                each.append((lap["lap_seconds"] - warm) / rest)
            else:
                each.append(lap["lap_seconds"] / len(steps))
        return 1e3 * statistics.median(each) if each else None

    def cpu_ms(self) -> float | None:
        """Processor time of a rank, milliseconds a step: the median over laps, the first left out if there are more."""
        laps = [lap for lap in self.laps if lap.get("lap_cpu_seconds") is not None]
        each = [lap["lap_cpu_seconds"] / len(lap["step_seconds"]) for lap in laps[1:] or laps]
        return 1e3 * statistics.median(each) if each else None

    def bytes_per_step(self) -> float | None:
        last = [lap["lap_bytes"] / len(lap["step_seconds"]) for lap in self.laps]
        return statistics.median(last) if last else None

    def loss_after(self, steps: int) -> float | None:
        """Held-out loss after this number of steps, or at the last look before."""
        upto = [lap["held_out"] for lap in self.laps if lap["step"] <= steps]
        return _number(upto[-1]) if upto else None

    def seconds_to(self, target: float | None) -> float | None:
        """Seconds until the held-out loss first reached the target, interpolated between two looks."""
        if target is None:
            return None
        seconds, loss = 0.0, math.inf
        for lap in self.laps:
            if lap["held_out"] <= target:
                share = (loss - target) / (loss - lap["held_out"]) if math.isfinite(loss) else 1.0
                return float(seconds + share * (lap["seconds"] - seconds))
            seconds, loss = lap["seconds"], lap["held_out"]
        return None

    def last(self, key: str) -> Any:
        """A value of the last lap; None if it has none."""
        return self.laps[-1].get(key) if self.laps else None

    def breakdown(self) -> dict[str, float | None] | None:
        return self.laps[-1]["breakdown"] if self.laps else None


@dataclass
class Results:
    """The results so far; `as_dict` works at any time.

    >>> results = Results(recipes=["ddp"], steps=10, network_text="100mbit")
    >>> results.as_dict()["rows"][0]["step_ms"] is None
    True
    """

    recipes: Sequence[str]
    steps: int
    network_text: str
    target_loss: float | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)
    targets: dict[int, float] = field(default_factory=dict)
    predicted: dict[str, float | None] = field(default_factory=dict)  # milliseconds a step, from before the run
    finished: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """An event of a worker."""
        if event["event"] == "lap":
            self._run(event).laps.append({key: event[key] for key in event.keys() - {"event", "contender", "seed"}})
        elif event["event"] == "failed":
            self._run(event).problem = event["problem"]
        elif event["event"] == "target":
            self.targets[event["seed"]] = event["loss"]
        elif event["event"] == "done":
            self.finished = True

    def _run(self, event: dict[str, Any]) -> Run:
        runs = self.runs.setdefault(event["contender"], [])
        if not runs or runs[-1].seed != event["seed"]:
            runs.append(Run(event["seed"]))
        return runs[-1]

    # ---------------------------------------------------------------------------------------------------- rows

    def as_dict(self) -> dict[str, Any]:
        alone = self._mean(NO_COMMUNICATION, Run.step_ms)
        rows = [self._row(name, alone) for name in self.recipes]
        ddp: dict[str, Any] = next((row for row in rows if row["recipe"] == "ddp"), {})
        for row in rows:
            row["speedup_over_ddp"] = _ratio(ddp.get("step_ms"), row["step_ms"])
            row["speedup_to_target"] = _ratio(ddp.get("seconds_to_target"), row["seconds_to_target"])
        runs = self.runs.get(NO_COMMUNICATION, [])
        cpu_alone = self._mean(NO_COMMUNICATION, Run.cpu_ms)
        return {
            "no_communication": {"step_ms": alone, "cpu_ms": cpu_alone, "repeats": [_repeat(run) for run in runs]},
            "target_losses": {str(seed): loss for seed, loss in self.targets.items()},
            "headline": self._headline(rows),
            "rows": rows,
        }

    def _row(self, name: str, alone: float | None) -> dict[str, Any]:
        contender, runs = Contender.named(name), self.runs.get(name, [])
        problem = next((run.problem for run in runs if run.problem), None)
        step_ms = self._mean(name, Run.step_ms)
        reached = [at for run in runs if (at := run.seconds_to(self._target(run))) is not None]
        breakdown = runs[-1].breakdown() if runs else None
        if breakdown is not None:
            exposed = breakdown["exposed_ms"]
            if exposed is None and step_ms is not None and alone is not None:
                exposed = max(0.0, step_ms - alone)  # torch's hooks do not measure it; this is the same by subtraction
            breakdown = {"compute_ms": alone, **breakdown, "exposed_ms": exposed}
        ended = "failed" if problem else "finished" if self.finished or self._is_done(runs) else "stopped"
        return {
            "recipe": name,
            "spelled": contender.spelled,
            "about": contender.about,
            "note": contender.note,
            "status": ended,
            "problem": problem,
            "step_ms": step_ms,
            "predicted_ms": self.predicted.get(name),
            "fraction_of_no_communication": _ratio(alone, step_ms),
            "cpu_ms": self._above(name, Run.cpu_ms),
            "bytes_per_step": self._mean(name, Run.bytes_per_step),
            "final_loss": self._mean(name, lambda run: run.loss_after(self.steps)),
            "seconds_to_target": statistics.fmean(reached) if runs and len(reached) == len(runs) else None,
            "speedup_over_ddp": None,
            "speedup_to_target": None,
            "breakdown": breakdown,
            "accuracy": self._mean(name, lambda run: run.last("accuracy")),
            **({} if contender.gossip is None else self._gossiped(contender, name)),
            **({} if name != "auto" else _decided(runs)),
            "curve": [_point(lap) for lap in runs[0].laps] if runs else [],
            "repeats": [{**_repeat(run), "seconds_to_target": run.seconds_to(self._target(run))} for run in runs],
        }

    def _gossiped(self, contender: Contender, name: str) -> dict[str, Any]:
        assert contender.gossip is not None
        told = {"algorithm": contender.gossip.algorithm, "topology": contender.gossip.topology}
        means = ("consensus_distance", "averaged_loss", "local_loss")
        return told | {key: self._mean(name, lambda run, key=key: run.last(key)) for key in means}

    def _target(self, run: Run) -> float | None:
        return self.target_loss if self.target_loss is not None else self.targets.get(run.seed)

    def _is_done(self, runs: Sequence[Run]) -> bool:
        return bool(runs) and bool(runs[-1].laps) and runs[-1].laps[-1]["step"] >= self.steps

    def _mean(self, name: str, of: Any) -> float | None:
        values = [value for run in self.runs.get(name, []) if (value := of(run)) is not None]
        return statistics.fmean(values) if values else None

    def _above(self, name: str, of: Any) -> float | None:
        """A mean over runs, above that of training without communication."""
        here, alone = self._mean(name, of), self._mean(NO_COMMUNICATION, of)
        return None if here is None or alone is None else here - alone

    def _headline(self, rows: Sequence[dict[str, Any]]) -> str:
        """The best recipe by time to the target, with its loss; never more than was measured."""
        where = f"on {self.network_text}"
        ours = [row for row in rows if not row["recipe"].startswith(("ddp", "torch-")) and row["status"] != "failed"]
        ddp = next((row for row in rows if row["recipe"] == "ddp"), None)
        reached = [row for row in ours if row["speedup_to_target"]]
        if reached:
            best = max(reached, key=lambda row: row["speedup_to_target"])
            return _headline(best["recipe"], best["speedup_to_target"], where, "same loss")
        quick = [row for row in ours if row["speedup_over_ddp"]]
        if quick and ddp is not None:
            best = max(quick, key=lambda row: row["speedup_over_ddp"])
            loss, dense = best["final_loss"], ddp["final_loss"]
            same = loss is not None and dense is not None and loss <= dense * (1 + _SAME_LOSS)
            price = "same loss" if same else f"loss {_loss(loss)} instead of {_loss(dense)}"
            return _headline(best["recipe"], best["speedup_over_ddp"], where, price)
        return f"{len(rows)} recipes {where}"


def _headline(name: str, ratio: float, where: str, price: str) -> str:
    if ratio < 1.05:
        return f"Nothing is faster than DDP {where}: stay with it"
    return f"{ratio:.1f}x faster than DDP {where}, {price}: {name}"


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _decided(runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0] if runs else Run(0)
    return {key: first.last(key) for key in ("decisions", "front", "deciding_share")}


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _point(lap: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": lap["step"],
        "seconds": lap["seconds"],
        "bytes": lap["bytes"],
        "loss": _number(lap["loss"]),
        "held_out": _number(lap["held_out"]),
        **{key: _number(lap[key]) for key in _SOMETIMES if lap.get(key) is not None},
    }


def _repeat(run: Run) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "problem": run.problem,
        "step_ms": run.step_ms(),
        "bytes_per_step": run.bytes_per_step(),
        "lap_seconds": [lap["lap_seconds"] for lap in run.laps],
        "step_seconds": [lap["step_seconds"] for lap in run.laps],
        "curve": [_point(lap) for lap in run.laps],
    }
