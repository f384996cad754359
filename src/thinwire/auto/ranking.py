"""Ranks candidates by predicted cost, corrected by measured prediction errors, and says when a ranking is stale."""

from __future__ import annotations

import math

from .candidates import Auto
from .choices import Choice, uniform
from .pareto import Point, soonest
from .performance import PerformanceModel

HYSTERESIS = 0.03  # relative gain that a switch needs
_RERANK, _SOONEST_RERANK = 50, 10  # steps between rankings: at most, and at least if an input moved
_MOVED = 0.2  # relative change of an input that makes a ranking stale
_PROMISING = 1.6  # a partial ranking predicts candidates up to this many times the best cost


class Ranking:
    """The predicted point of every candidate, refreshed as rarely as it pays."""

    def __init__(self, options: Auto, performance: PerformanceModel) -> None:
        self.points: list[Point] = []  # by candidate
        self._options, self._performance = options, performance
        self._choices, self._predictor = performance.choices, performance.predictor
        self._inputs: tuple[int, float, float, float] | None = None  # of the last ranking
        self._complete_at = 0  # the step of the last complete ranking

    @property
    def step(self) -> int:
        """The step of the last ranking."""
        return 0 if self._inputs is None else self._inputs[0]

    @property
    def floor(self) -> float:
        """The least progress per step that the options allow."""
        return 1.0 - self._options.max_error

    def cost(self, point: Point) -> float:
        return point.cost if self._options.objective == "time_to_quality" else point.seconds

    def point(self, choice: Choice, *, running: Choice) -> Point:
        """The prediction for a choice, corrected by the error of its group or else of the running one."""
        predicted = self._predictor.predict(choice, self._performance.link(choice)).step
        groups = {"group": self._choices.group(choice), "running": self._choices.group(running)}
        corrected = predicted + self._performance.history.correction(predicted=predicted, **groups)
        progress = self._predictor.progress_per_step(choice)
        return Point(self._choices.name(choice), max(corrected, 1e-6), progress)

    # ------------------------------------------------------------------------------------------------ refreshing

    def stale(self, step: int) -> bool:
        """Whether an input has moved or enough steps have passed."""
        then = self._inputs
        if then is None or step - then[0] >= _RERANK:
            return True
        moved = any(abs(a / b - 1) > _MOVED for a, b in zip(self._inputs_at(step)[1:], then[1:], strict=True))
        return moved and step - then[0] >= _SOONEST_RERANK

    def _inputs_at(self, step: int) -> tuple[int, float, float, float]:
        link = self._performance.estimator
        return step, link.latency, link.byte_seconds, self._predictor.profile.compute

    def refresh(self, step: int, *, running: Choice, complete: bool, answered: str = "") -> None:
        """Predict all candidates if `complete`, else those near the best and those of the `answered` family."""
        complete = complete or not self.points or step - self._complete_at >= 4 * _RERANK
        self._complete_at = step if complete else self._complete_at
        self._inputs = self._inputs_at(step)
        limit = math.inf if complete else _PROMISING * min(self.cost(point) for point in self.points)
        for number, candidate in enumerate(self._choices.candidates):
            if complete and number >= len(self.points):
                self.points.append(self.point(uniform(number), running=running))
            elif self.cost(self.points[number]) <= limit or candidate.family == answered:
                self.points[number] = self.point(uniform(number), running=running)

    # ------------------------------------------------------------------------------------------------- selecting

    def best(self, *, running: Choice) -> Choice:
        """The best uniform choice whose group is not banned."""
        banned = self._performance.history.banned(self.step)
        banned.discard(self._choices.group(running))
        groups = [self._choices.group(uniform(number)) for number in range(len(self._choices.candidates))]
        allowed = [point for point, group in zip(self.points, groups, strict=True) if group not in banned]
        quality = self._options.objective == "time_to_quality"
        return self._choices.named(soonest(allowed or self.points, floor=self.floor, quality=quality).name)

    def refined(self, choice: Choice, *, running: Choice) -> Choice:
        """Give another kind of bucket its own candidate if that gains more than the hysteresis."""

        def cost(one: Choice) -> float:
            return self.cost(self.point(one, running=running))

        count = len(self._choices.candidates)
        for kind in self._choices.present()[1:]:
            best = min(((*choice[:kind], number, *choice[kind + 1 :]) for number in range(count)), key=cost)
            if cost(best) * (1 + HYSTERESIS) < cost(choice):
                choice = best
        return choice

    def comparable(self, choice: Choice) -> list[tuple[Choice, float]]:
        """Other candidates of the same family above the floor, with their costs; dense is not one of them."""
        return [
            (uniform(number), self.cost(point))
            for number, (one, point) in enumerate(zip(self._choices.candidates, self.points, strict=True))
            if one.family == self._choices.family(choice)
            and point.progress_per_step >= self.floor
            and not one.recipe.dense
        ]

    def best_of(self, family: str) -> int:
        """The number of the family's candidate with the least cost."""
        numbers = [number for number, one in enumerate(self._choices.candidates) if one.family == family]
        return min(numbers, key=lambda number: self.cost(self.points[number]))
