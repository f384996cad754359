"""Decisions as text: one line per switch for users, and one line with all inputs of a decision for the debug log."""

from __future__ import annotations

from collections.abc import Sequence

from ..predict.workload import Profile
from .estimator import LinkEstimator
from .pareto import Point

_NOTABLE = 0.3  # relative change of the bandwidth that the line mentions


def ms(seconds: float) -> str:
    """
    >>> ms(1.2345)
    '1,234 ms'
    """
    return f"{1e3 * seconds:,.0f} ms"


def switch(step: int, old: Point, new: Point, *, exchange: str, mbit: float, before: float) -> str:
    """One line for a change of the recipe.

    >>> old, new = Point("dense", 0.655, 1.0), Point("threshold-k 1.1 %", 0.212, 0.2)
    >>> switch(340, old, new, exchange="all_gather", mbit=50, before=940)
    'step 340: 50 Mbit/s now (was 940); threshold-k 1.1 % by all-gather, 212 ms predicted, was 655 ms'
    """
    moved = f" now (was {before:,.0f})" if abs(mbit / before - 1) > _NOTABLE and step else ""
    times = f"{ms(new.seconds)} predicted, was {ms(old.seconds)}"
    return f"step {step}: {mbit:,.0f} Mbit/s{moved}; {new.name} by {exchange.replace('_', '-')}, {times}"


def status(estimator: LinkEstimator, profile: Profile, now: Point, noise: float, best: Sequence[Point]) -> str:
    """The link, the workload and the best candidates with their step time and progress per step."""
    link = f"{1e3 * estimator.latency:.2f} ms, {estimator.mbit:,.0f} Mbit/s"
    times = f"{ms(profile.forward)} forward, {ms(profile.backward)} backward, {ms(profile.rest)} rest"
    costs = ", ".join(f"{one.name} {ms(one.seconds)} / {one.progress_per_step:.2f}" for one in best)
    return f"{link}; now {ms(now.seconds)}, noise {noise:.2f}; {times}; {costs}"
