"""What a proof says in words: for the terminal and for the page, from the result alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hardware import in_one_line


def headline(result: Mapping[str, Any]) -> str:
    """One sentence: what holds, and on what.

    >>> headline({"proved": True, "device": "cpu", "missing": ["x"], "parts": []})
    'The CPU part is proved; nothing was proved on a GPU'
    """
    failed = [part["name"] for part in result["parts"] if part["verdict"] == "failed"]
    if failed:
        return f"Not proved: {', '.join(failed)} failed"
    if result["device"] == "cpu":
        return "The CPU part is proved; nothing was proved on a GPU"
    if result["missing"]:
        return "Proved in part: kernels on a GPU, without NCCL"
    return "Proved on GPUs: kernels and the DDP contract over NCCL"


def not_proved(result: Mapping[str, Any]) -> list[str]:
    """A line for each reason for which parts could not run, and for each part that failed.

    >>> part = {"name": "kernels on a GPU", "verdict": "not here", "reason": "no GPU here"}
    >>> not_proved({"parts": [part]})
    ['no GPU here: kernels on a GPU: not proved']
    """
    lines = [f"{part['name']}: failed: {part['reason']}" for part in result["parts"] if part["verdict"] == "failed"]
    missing: dict[str, list[str]] = {}
    for part in result["parts"]:
        if part["verdict"] == "not here":
            missing.setdefault(part["reason"], []).append(part["name"])
    return lines + [f"{reason}: {', '.join(names)}: not proved" for reason, names in missing.items()]


def verdict(part: Mapping[str, Any]) -> str:
    """The verdict as it is shown: a benchmark that ran proves nothing but its own numbers.

    >>> verdict({"name": "benchmark over gloo", "verdict": "proved"})
    'measured'
    """
    if part["verdict"] != "proved":
        return str(part["verdict"])
    return "found" if part["name"] == "machine" else "measured" if "benchmark" in part["name"] else "proved"


def finding(part: Mapping[str, Any]) -> str:
    """What a part found, in one line; the reason if it could not run or failed."""
    details = part["details"]
    if part["verdict"] != "proved":
        return str(part["reason"])
    if "kernels" in details:
        kernels = {row["kernel"] for row in details["kernels"]}
        return f"{_counted(len(kernels), 'kernel')} equal to the definition in {details['cases']:,} cases"
    if "recipes" in details:
        recipes, checks = _counted(len(details["recipes"]), "recipe"), f"{details['held']} of {details['checks']}"
        return f"{checks} checks hold: {recipes} in {details['processes']} processes over {details['backend']}"
    if "rows" in details:
        return _best(details)
    return in_one_line(details) if "processor" in details else ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _best(details: Mapping[str, Any]) -> str:
    """The quickest recipe beside plain DDP; what torch itself offers is not ours to claim."""
    by_name = {row["contender"]: row for row in details["rows"]}
    plain = by_name["ddp"]["step_ms"]["median"]
    ours = [row for name, row in by_name.items() if name not in ("ddp", "no-communication") and "torch-" not in name]
    text = f"plain DDP {plain:,.1f} ms a step"
    if ours:
        best = max(ours, key=lambda row: row["times_ddp"]["median"])
        ratio = best["times_ddp"]
        times = f"{ratio['median']:.2f} times the speed of DDP ({ratio['low']:.2f} to {ratio['high']:.2f})"
        text += f"; quickest recipe {best['contender']}, {times}"
    return text


def summary(result: Mapping[str, Any]) -> str:
    """For a terminal: one line for each part, then what is not proved, then the headline."""
    machine = result["machine"]
    lines = [
        f"thinwire {result['thinwire']} on {in_one_line(machine)}" if machine else f"thinwire {result['thinwire']}"
    ]
    wide = max(len(part["name"]) for part in result["parts"]) + 2
    for part in result["parts"]:
        if part["name"] != "machine":
            shown = "" if part["verdict"] == "not here" else f" ({part['seconds']:.1f} s)"
            lines.append(f"{verdict(part):10}{part['name']:{wide}}{finding(part)}{shown}")
    return "\n".join([*lines, "", *not_proved(result), headline(result)])
