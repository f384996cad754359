"""`thinwire plan --verify`: predicts step times, trains on the emulated network, and compares both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import OptionError
from .runner import Settings, compare
from .screen import shown

RECIPES = ("ddp", "global-qsgd-8", "two-shot-4", "two-shot-1", "threshold-k", "ar-top-k")
_LAP = 6


def verify(
    network: str,
    *,
    workers: Sequence[int],
    workload: str = "gpt",
    recipes: Sequence[str] = RECIPES,
    steps: int = 30,
    method: str | None = None,
    probe_seconds: float = 30.0,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """One row for every recipe and number of workers: predicted, measured, error."""
    if steps < 2 * _LAP:
        raise OptionError(
            f"--steps is {2 * _LAP} or more with --verify, not {steps}: DDP arranges its buckets in the first few"
        )
    rows, forecasts, done = list[dict[str, Any]](), list[dict[str, Any]](), 0
    total = len(workers) * (len(recipes) + 1) * steps
    for count in workers:
        kept: list[dict[str, Any]] = []

        def listen(event: dict[str, Any]) -> None:
            nonlocal done
            if event["event"] == "lap":
                done += len(event["step_seconds"])
                on_progress(done, total)

        settings = Settings(
            tuple(recipes),
            workload=workload,
            workers=count,
            network=network,
            steps=steps,
            lap=_LAP,
            extra=0.0,
            method=method,
            probe_seconds=probe_seconds,
        )
        compare(settings, keep=kept.append, on_event=listen)
        alone = kept[0]["no_communication"]["step_ms"]
        rows += [_row(row, network, count, alone) for row in kept[0]["rows"]]
        forecasts.append({"workers": count, "measured": kept[0]["network"], **kept[0].get("forecast", {})})
    return {
        "schema": 1,
        "kind": "plan-verify",
        "network": network,
        **summary(rows),
        "rows": rows,
        "forecasts": forecasts,
    }


def _row(row: dict[str, Any], network: str, workers: int, alone: float | None) -> dict[str, Any]:
    predicted, measured = row["predicted_ms"], row["step_ms"]
    error = predicted / measured - 1 if predicted and measured else None
    return {
        "recipe": row["recipe"],
        "network": network,
        "workers": workers,
        "predicted_ms": predicted,
        "measured_ms": measured,
        "error": error,
        "no_communication_ms": alone,
        "problem": row["problem"],
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many cells were predicted how well, and the cost of following the prediction on each network."""
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    cells = {(row["network"], row["workers"]) for row in rows}
    chosen = []
    for network, workers in sorted(cells):
        here = [
            row for row in rows if (row["network"], row["workers"]) == (network, workers) and row["error"] is not None
        ]
        if here:
            advised = min(here, key=lambda row: row["predicted_ms"])
            best = min(here, key=lambda row: row["measured_ms"])
            over = advised["measured_ms"] / best["measured_ms"] - 1
            names = {"advised": advised["recipe"], "best": best["recipe"]}
            chosen.append({"network": network, "workers": workers, **names, "over_best": over})
    return {
        "cells": len(errors),
        "within_15_percent": sum(error <= 0.15 for error in errors),
        "within_30_percent": sum(error <= 0.30 for error in errors),
        "choices": chosen,
    }


def as_text(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [f"{'recipe':18}{'workers':>8}{'predicted ms':>14}{'measured ms':>13}{'error':>8}"]
    for row in found["rows"]:
        predicted, measured = (shown(row[key], "{:,.0f}") for key in ("predicted_ms", "measured_ms"))
        error = shown(row["error"], "{:+.0%}")
        lines.append(f"{row['recipe']:18}{row['workers']:>8}{predicted:>14}{measured:>13}{error:>8}")
    lines.append(
        f"{found['within_15_percent']} of {found['cells']} within 15 %, {found['within_30_percent']} within 30 %"
    )
    for one in found["choices"]:
        lines.append(
            f"{one['workers']} workers: predicted fastest {one['advised']}, measured fastest {one['best']}"
            f" ({one['over_best']:+.1%})"
        )
    return "\n".join(lines)
