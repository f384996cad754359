"""One part of a proof: its name, its verdict, how long it took, and what was found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import ThinwireError

Verdict = Literal["proved", "failed", "not here"]
Tell = Callable[[str], None]  # called once for every unit of work, with a word on it


@dataclass(frozen=True)
class Found:
    """What the work of a part returns; a problem means that the part failed."""

    details: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class Plan:
    """A part before it runs: `missing` says why it cannot run on this machine."""

    name: str
    work: Callable[[Tell], Found] = lambda tell: Found({})
    units: int = 1
    missing: str | None = None


@dataclass(frozen=True)
class Part:
    """A part after it ran."""

    name: str
    verdict: Verdict
    seconds: float
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def run_part(plan: Plan, tell: Tell = lambda word: None) -> Part:
    """Do the work of a part; whatever it raises becomes the reason of a failure.

    >>> run_part(Plan("kernels on a GPU", missing="no GPU here")).verdict
    'not here'
    >>> run_part(Plan("arithmetic", lambda tell: Found({}, None if 1 + 1 == 2 else "1 + 1 is not 2"))).verdict
    'proved'
    >>> part = run_part(Plan("arithmetic", lambda tell: Found({"by": 1 / 0})))
    >>> part.verdict, part.reason
    ('failed', 'ZeroDivisionError: division by zero')
    """
    if plan.missing is not None:
        return Part(plan.name, "not here", 0.0, plan.missing)
    begin = time.perf_counter()
    try:
        found = plan.work(tell)
    except ThinwireError as problem:
        found = Found({}, str(problem))
    except Exception as problem:  # a proof ends with a verdict, whatever happens
        found = Found({}, f"{type(problem).__name__}: {problem}")
    seconds = time.perf_counter() - begin
    verdict: Verdict = "proved" if found.problem is None else "failed"
    return Part(plan.name, verdict, round(seconds, 3), found.problem or "", found.details)
