"""The input and the output of the controller: measurements of a round, and an event for every switch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Observation:
    """The mean over the steps since the last round, combined over all ranks; times in seconds."""

    step: int  # the next one
    steps: int  # number of steps, without a canary step; the means below cover these
    seconds: float  # from forward to the last bucket, on the slowest rank
    forward: float
    backward: float  # until the last bucket was ready
    rest: float  # optimizer and data
    exchange: float  # with a message under way, on the rank that waited least; the median of the last steps
    ready: tuple[float, ...]  # when each bucket was ready, as a share of backward
    steady: bool | None = None  # whether the last exchange times agree; None if there are too few
    latency: float | None = None  # of a message of a few bytes
    canary: float | None = None  # exchange time of the step that had a canary
    energy_kept: float | None = None  # energy sent over energy offered, on all ranks, if it was sampled
    curve: tuple[float, ...] | None = None  # energy kept at each density, of the mean gradient, if it was sampled


@dataclass(frozen=True)
class Event:
    """A switch of the recipe, for the log, the statistics and the report.

    >>> Event(340, "two-shot-1", "step 340: ...", predicted_seconds=0.2, mbit=50.0).recipe
    'two-shot-1'
    """

    step: int
    recipe: str
    text: str
    predicted_seconds: float
    mbit: float
