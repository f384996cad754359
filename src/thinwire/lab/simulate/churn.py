"""Absences of simulated workers: who leaves, when, and when it returns, drawn by seed or read from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import OptionError

_STREAM = 0x63687572


@dataclass(frozen=True, order=True)
class Absence:
    """A worker is away from `leaves` to `returns`, in seconds; infinity if it never returns."""

    leaves: float
    returns: float
    worker: int

    def __post_init__(self) -> None:
        if not 0 <= self.leaves < self.returns or self.worker < 0:
            raise OptionError(
                f"a worker leaves at 0 s or later and returns after that, not {self.leaves:g} to {self.returns:g}"
            )


def drawn(*, workers: int, there: float, away: float, until: float, seed: int = 0) -> list[Absence]:
    """Random absences until a time: on average, workers stay for `there` seconds and are gone for `away`.

    >>> trace = drawn(workers=100, there=50.0, away=10.0, until=100.0)
    >>> trace == drawn(workers=100, there=50.0, away=10.0, until=100.0), 100 < len(trace) < 250
    (True, True)
    """
    if not there > 0 or not away > 0:
        raise OptionError("--churn is mean seconds there and away, both above 0, such as 600/60")
    found = []
    for worker in range(workers):
        draw = np.random.Generator(np.random.Philox(key=np.array([seed, _STREAM + (worker << 32)], dtype=np.uint64)))
        now = draw.exponential(there)
        while now < until:
            returns = now + draw.exponential(away)
            found.append(Absence(now, returns, worker))
            now = returns + draw.exponential(there)
    return sorted(found)


def read(text: str, *, workers: int, until: float, seed: int = 0) -> list[Absence]:
    """`600/60` (mean seconds there and away), or a JSON file of `[worker, leaves, returns or null]`."""
    there, slash, away = text.partition("/")
    if slash and not text.endswith(".json"):
        try:
            return drawn(workers=workers, there=float(there), away=float(away), until=until, seed=seed)
        except ValueError:
            raise OptionError(f"--churn is such as 600/60, or a JSON file, not {text}") from None
    try:
        rows = json.loads(Path(text).read_text())
        found = [Absence(float(a), math.inf if b is None else float(b), int(worker)) for worker, a, b in rows]
    except OSError as problem:
        raise OptionError(
            f"cannot read {text}: {problem.strerror}; --churn is such as 600/60, or a JSON file"
        ) from None
    except (ValueError, TypeError):
        raise OptionError(f"{text} has no absences: write [[worker, leaves, returns], ...] in seconds") from None
    return checked(found, workers=workers)


def checked(trace: Sequence[Absence], *, workers: int) -> list[Absence]:
    """The absences in order of time; refuses one of a worker that is already away."""
    last: dict[int, float] = {}
    for one in sorted(trace):
        if one.worker >= workers:
            raise OptionError(f"the list names worker {one.worker}, but workers are 0 to {workers - 1}")
        if one.leaves < last.get(one.worker, 0.0):
            raise OptionError(f"worker {one.worker} leaves at {one.leaves:g} s, but is away then")
        last[one.worker] = one.returns
    return sorted(trace)
