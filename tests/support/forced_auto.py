"""`auto` with decisions that a test writes down: recipes change, buckets differ, canaries try others, on a schedule.

What runs in a step is then a function of the step alone, so two runs can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import thinwire
from thinwire.auto.agreement import Decision
from thinwire.auto.choices import KINDS
from thinwire.auto.reports import RankReport
from thinwire.auto.tuner import AutoTuner

EXACT, MIXED = "auto, nothing lost", "auto, every family"  # stand for a recipe in the tests of this folder
CANDIDATES = {
    EXACT: [
        "ef|threshold_k:0.1|bf16|all_gather",
        "dense",
        "ef|top_k:0.05|bf16|two_shot:feedback=true",
        "powersgd-4",
        "ef|top_k:0.05|shared_top_k",
    ],
    MIXED: [
        "two-shot-4",
        "ef|threshold_k:0.1|bf16|all_gather",
        "bf16",
        "two-shot-2-ef",
        "dense",
        "global-qsgd-8",
        "ef|top_k:0.05|shared_top_k",
    ],
}


@dataclass(frozen=True)
class Wish:
    """What rank 0 decides in one round, by names of candidates."""

    names: tuple[str, ...]  # one for all buckets, or one for each of `KINDS`
    canary: tuple[str, int] | None = None  # and the bucket that tries it
    every: int = 1
    hurry: bool = False  # the round of this step asks for a decision at once


Script = Sequence[Wish] | Callable[[int], Wish]


def forced(link: thinwire.Link, script: Script, *, mixed: bool = False, measure_every: int = 0) -> None:
    """Let rank 0 decide what is written for the step of a round; a sequence begins again at its end.

    With `mixed`, buckets are of the three kinds in turn, whatever their size. `measure_every`: steps between samples of
    the gradient. Call it on all ranks.
    """
    tuner = link.reducer.policy
    assert isinstance(tuner, AutoTuner)
    wish = script if callable(script) else (lambda step: script[step % len(script)])
    _without_alarm(tuner, wish)
    if mixed:
        _mix_kinds(tuner)
    if measure_every:
        tuner.measures = lambda step: step % measure_every == measure_every - 1  # type: ignore[method-assign]
    controller = tuner._controller
    if controller is None:  # not rank 0
        return
    numbers = {one.name: number for number, one in enumerate(tuner.candidates)}

    def decide(step: int) -> Decision:
        one = wish(step)
        names = one.names * len(KINDS) if len(one.names) == 1 else one.names
        canary = None if one.canary is None else (numbers[one.canary[0]], one.canary[1])
        controller.decision = Decision(step, tuple(numbers[name] for name in names), one.every, canary)
        return controller.decision

    controller.decide = decide  # type: ignore[method-assign]
    controller.decide_first = lambda forward: decide(0)  # type: ignore[method-assign]


def _without_alarm(tuner: AutoTuner, wish: Callable[[int], Wish]) -> None:
    """A round is hurried where the script says so: the real alarm depends on how busy the machine is."""
    finish = tuner._rounds.finish

    def finished() -> tuple[list[RankReport], bool]:
        reports, _ = finish()
        return reports, wish(reports[0].step).hurry

    tuner._rounds.finish = finished  # type: ignore[method-assign]


def _mix_kinds(tuner: AutoTuner) -> None:
    changed = tuner.layout_changed

    def layout_changed() -> None:
        changed()
        buckets = tuner._reducer.layout.buckets
        tuner._choices.kinds = [KINDS[number % len(KINDS)] for number in range(len(buckets))]

    tuner.layout_changed = layout_changed  # type: ignore[method-assign]
    layout_changed()


def tour(names: Sequence[str]) -> Callable[[int], Wish]:
    """Every two steps other recipes, one for each kind of bucket; canaries; rounds that are rare, or hurried."""

    def wish(step: int) -> Wish:
        turn, count = step // 2, len(names)
        return Wish(
            names=tuple(names[(turn + 2 * kind) % count] for kind in range(len(KINDS))),
            canary=None if step % 3 == 1 else (names[(3 * step + 1) % count], step % 4),
            every=2 if step % 4 == 3 else 1,
            hurry=step % 5 == 2,
        )

    return wish


def attach(model: Any, recipe: Any, **options: Any) -> thinwire.Link:
    """`thinwire.attach`, where `EXACT` and `MIXED` stand for `auto` with forced decisions."""
    names = CANDIDATES.get(recipe) if isinstance(recipe, str) else None
    if names is None:
        return thinwire.attach(model, recipe, **options)
    link = thinwire.attach(model, thinwire.auto(allow=[name for name in names if name != "dense"]), **options)
    forced(link, tour(names), mixed=True, measure_every=3)
    return link
