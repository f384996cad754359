"""Decisions in words: the line for people, and everything that the next decision depends on for a log."""

from __future__ import annotations

from collections.abc import Sequence

from ..predict.workload import Profile
from .learner import Learner
from .pareto import Point

_TOLD = 0.3  # relative change of the rate that is worth a word


def ms(seconds: float) -> str:
    """
    >>> ms(1.2345)
    '1,234 ms'
    """
    return f"{1e3 * seconds:,.0f} ms"


def decision(step: int, was: Point, will: Point, *, way: str, mbit: float, before: float) -> str:
    """One line for a change of the recipe.

    >>> was, will = Point("dense", 0.655, 1.0), Point("threshold-k 1.1 %", 0.212, 0.2)
    >>> decision(340, was, will, way="all_gather", mbit=50, before=940)
    'step 340: 50 Mbit/s now (was 940); threshold-k 1.1 % by all-gather, 212 ms predicted, was 655 ms'
    """
    moved = f" now (was {before:,.0f})" if abs(mbit / before - 1) > _TOLD and step else ""
    gain = f"{ms(will.seconds)} predicted, was {ms(was.seconds)}"
    return f"step {step}: {mbit:,.0f} Mbit/s{moved}; {will.name} by {way.replace('_', '-')}, {gain}"


def outlook(learner: Learner, profile: Profile, now: Point, noise: float, best: Sequence[Point]) -> str:
    """What is known of line, training and the best candidates."""
    line = f"{1e3 * learner.latency:.2f} ms, {learner.mbit:,.0f} Mbit/s"
    times = f"{ms(profile.forward)} forward, {ms(profile.backward)} backward, {ms(profile.rest)} rest"
    costs = ", ".join(f"{one.name} {ms(one.seconds)} / {one.worth:.2f}" for one in best)
    return f"{line}; now {ms(now.seconds)}, noise {noise:.2f}; {times}; {costs}"
