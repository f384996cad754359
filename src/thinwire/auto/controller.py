"""Decides which candidates run, on rank 0 from the numbers of all ranks, and switches only if a gain is likely.

Every choice has a predicted step time on the estimated link, corrected by measured errors, and a progress per step. The
choice with the least time to quality wins if it wins by more than the noise. A family that has not run lately needs
canaries that confirm its prediction, unless the gain is so large that waiting for them costs more. A choice that is
slower than predicted is left again, and its group is banned for a while.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..predict.devices import Device
from ..predict.workload import Profile
from . import describe
from .agreement import Decision
from .canaries import Canaries
from .candidates import Auto
from .choices import DENSE, Choice, main_kind, uniform
from .estimator import LinkEstimator
from .history import ENOUGH
from .observation import Event, Observation
from .observer import LEAST_REST, Observer
from .pareto import Point
from .performance import PerformanceModel
from .ranking import HYSTERESIS, Ranking
from .tie_breaker import TieBreaker

_LEAVES_DENSE = 0.05  # relative gain that leaving dense needs
_AT_ONCE = 1.5  # gain that needs no canaries
_AT_FIRST = 1.25  # gain that leaves dense before the first measured step
_RAN_LATELY = 300  # steps for which the measurements of a family are trusted
_OVERHEAD = 0.007  # share of the training time that deciding may take
_ROUND_SECONDS, _LONGEST_ROUND = 0.4, 3  # a round costs about a millisecond of a processor
_RECHECKS = 3  # canaries of a family that was left because the link had changed
_SLOWER = 1.05  # ratio to the cost before such a switch above which rechecks are sent
_RECHECK_GAP = 0.1  # relative extra cost that a rechecked family counts with, at most


class Controller:
    """Takes observations, gives decisions. One per training, on rank 0; it sees only numbers."""

    def __init__(
        self,
        options: Auto,
        device: Device,
        estimator: LinkEstimator,
        *,
        workers: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options, self._clock = options, clock
        self.seconds_deciding = 0.0
        self.candidates = options.for_ranks(workers)
        self.performance = PerformanceModel(self.candidates, device, estimator, workers=workers)
        self.canaries = Canaries()
        self.decision = Decision(0, uniform(DENSE))
        self.events: list[Event] = []
        self._choices, self._history = self.performance.choices, self.performance.history
        self._observer = Observer(self.performance, self.canaries)
        self._ranking = Ranking(options, self.performance)
        self._ties = TieBreaker()
        self._before: Choice | None = None  # what ran before the last switch
        self._left = ("", math.inf)  # its family, and its cost before the link changed
        self._told_mbit = estimator.mbit  # the bandwidth that the last event mentioned
        self._wanted: int | None = None  # a candidate that lacks only canaries
        self._rechecks = 0  # canaries left that ask whether the last switch was right

    @property
    def points(self) -> list[Point]:
        """The predicted points of the last ranking, by candidate."""
        return self._ranking.points

    # ---------------------------------------------------------------------------------------------- observing

    def set_workload(self, profile: Profile, kinds: Sequence[str]) -> None:
        """Set the buckets and their kinds. Times may be guesses: observations replace them."""
        self.performance.predictor.set_profile(profile, kinds)

    def observe(self, seen: Observation, *, ran: Decision) -> None:
        """Learn from a round in which `ran` was running, which may be an older decision."""
        begin = self._clock()
        self._observer.observe(seen, ran=ran, current=self.decision)
        if self._observer.another_link:
            self._observer.another_link = False
            self._ties.reset()
        self.seconds_deciding += self._clock() - begin

    # ----------------------------------------------------------------------------------------------- deciding

    def decide(self, step: int) -> Decision:
        """What runs from now on; the same object if nothing changes."""
        begin = self._clock()
        decision = self._decide(step)
        self.seconds_deciding += self._clock() - begin
        return decision

    def decide_first(self, forward: float) -> Decision:
        """Decide before the first bucket is sent, from the calibrated link and the time of the first forward pass.

        Nothing is verified yet, so only a large gain leaves dense.
        """
        predictor = self.performance.predictor
        ready = [bucket.ready for bucket in predictor.profile.buckets]
        predictor.set_times(forward, 2.0 * forward, max(0.2 * forward, LEAST_REST), ready)
        self._rank(0, complete=True)
        best, dense = self._ranking.best(running=self.decision.choice), self._point(uniform(DENSE))
        if self._cost(dense) > _AT_FIRST * self._cost(self.points[best[0]]):
            return self._switch(best, 0)
        return self.decision

    def _decide(self, step: int) -> Decision:
        every = self._every()
        if self.decision.canary is not None or every != self.decision.every:
            self.decision = Decision(self.decision.number, self.decision.choice, every)
        if not self._must_rank(step):
            if self.canaries.in_flight(step):
                return self.decision
            wanted = self._recheck() if self._wanted is None else self._wanted
            return self.decision if wanted is None else self._try(wanted, step)
        self._rank(step)
        self._wanted = None
        choice = self._better()
        if choice != self.decision.choice:
            if self._may_enter(choice, step):
                return self._switch(choice, step)
            self._wanted = choice[0]
            return self._try(choice[0], step)
        if (other := self._tied()) is not None:
            return self._switch(other, step)
        untried = self._due_canary(step)
        return self.decision if untried is None else self._try(untried, step)

    def _must_rank(self, step: int) -> bool:
        if self._observer.link_changed or self._observer.answered or self._history.observations == ENOUGH:
            return True
        if self._history.observations < ENOUGH or self.seconds_deciding > _OVERHEAD * self._observer.elapsed:
            return False
        return self._ranking.stale(step)

    def _rank(self, step: int, *, complete: bool = False) -> None:
        observer = self._observer
        complete = complete or observer.link_changed
        self._ranking.refresh(step, running=self.decision.choice, complete=complete, answered=observer.answered)
        observer.answered, observer.link_changed = "", False

    def _better(self) -> Choice:
        """The choice to switch to, or the current one if no gain exceeds hysteresis and noise."""
        current = self.decision.choice
        now, choice = self._now(), self._ranking.best(running=current)
        choice = self._ranking.refined(choice, running=current)
        if choice == current:
            return choice
        margin = _LEAVES_DENSE if self._choices.main(current).recipe.dense else HYSTERESIS
        margin += self._history.standard_error
        new = self._cost(self._point(choice))
        return choice if new * (1 + margin) < self._cost(now) else current

    def _tied(self) -> Choice | None:
        """A choice of the same family to try because predictions cannot separate it, or to return to after a trial."""
        choice, now = self.decision.choice, self._cost(self._now())
        if not self._history.settled or self._choices.group(choice) == "dense":
            return None
        if (before := self._ties.better_before(now, noise=self._history.standard_error)) is not None:
            return before
        return self._ties.challenger(choice, now, self._ranking.comparable(choice))

    def _may_enter(self, choice: Choice, step: int) -> bool:
        family, group = self._choices.family(choice), self._choices.group(choice)
        if family == self._choices.family(self.decision.choice):
            return True
        if self._history.ran_since(group, step - _RAN_LATELY):
            return True
        at_once = self._cost(self._now()) > _AT_ONCE * self._cost(self._point(choice))
        return at_once or self.canaries.confirmed(family, step)

    def _switch(self, choice: Choice, step: int) -> Decision:
        choices, observer, mbit = self._choices, self._observer, self.performance.estimator.mbit
        current, now, new = self.decision.choice, self._now(), self._point(choice)
        exchange = choices.main(choice).recipe.exchange.name
        text = describe.switch(step, now, new, exchange=exchange, mbit=mbit, before=self._told_mbit)
        self._left = (choices.family(current), self._cost(replace(now, seconds=self._history.median())))
        if choice == self._before and self._history.observations <= 3 * ENOUGH:
            if choices.group(current) != choices.group(choice):
                self._history.failed(choices.group(current), step)
            text += f"; {choices.name(current)} took {describe.ms(now.seconds)}, which is not better"
        self._before = current
        self.decision = Decision(self.decision.number + 1, choice, self._every())
        # While the link is changing, a deviation says nothing about the factor of the new candidate.
        changing = observer.since_jump < ENOUGH
        self._rechecks = _RECHECKS if changing and self._left[0] != choices.family(choice) else 0
        known = choices.main(choice).name in self.performance.estimator.factors
        observer.entering = 0 if changing else 1 if known else 2
        self._history.recipe_changed()
        observer.link_changed, self._wanted = False, None
        self.events.append(Event(step, choices.name(choice), text, new.seconds, mbit))
        self._told_mbit = mbit
        return self.decision

    # ---------------------------------------------------------------------------------------------- canaries

    def _try(self, candidate: int, step: int) -> Decision:
        """Send a canary: the first bucket, which is small and has the link to itself."""
        if self.canaries.in_flight(step):
            return self.decision
        one, choice, canary = self.candidates[candidate], self.decision.choice, (candidate, 0)
        link, predictor = self.performance.estimator.link(one.name, one.family), self.performance.predictor
        excess = max(0.0, predictor.predict(choice, link, canary).step - predictor.predict(choice, link).step)
        if self.canaries.affordable(excess, elapsed=self._observer.elapsed, step_seconds=self._history.last):
            self.canaries.send(one.family, step, excess=excess)
            self.decision = replace(self.decision, canary=canary)
        return self.decision

    def _due_canary(self, step: int) -> int | None:
        """The best candidate of the next family that is due for a canary."""
        now = self._cost(self._now())
        current = self._choices.family(self.decision.choice)
        for family in dict.fromkeys(one.family for one in self.candidates):
            if family == current:
                continue
            best = self._ranking.best_of(family)
            gap = self._cost(self.points[best]) / now - 1
            if family == self._left[0] and now > _SLOWER * self._left[1]:
                gap = min(gap, _RECHECK_GAP)  # steps cost less before the switch: perhaps the link was not the reason
            if self.canaries.due(family, step, gap=gap):
                return best
        return None

    def _recheck(self) -> int | None:
        """The candidate that was left because of the link, if steps cost more since then and rechecks are left."""
        if self._rechecks == 0 or self._before is None:
            return None
        if self._cost(self._now()) < _SLOWER * self._left[1]:
            if self._history.settled:  # measured and good: do not predict for this in every round
                self._rechecks = 0
            return None
        self._rechecks -= 1
        return self._before[main_kind(self._choices.kinds)]

    # ----------------------------------------------------------------------------------------------- helpers

    def _cost(self, point: Point) -> float:
        return self._ranking.cost(point)

    def _point(self, choice: Choice) -> Point:
        return self._ranking.point(choice, running=self.decision.choice)

    def _now(self) -> Point:
        """The running choice, with its measured step time once there are enough steps."""
        point = self._point(self.decision.choice)
        return replace(point, seconds=self._history.median()) if self._history.settled else point

    def _every(self) -> int:
        taken = self._history.recent()
        return 1 if taken is None else min(max(1, round(_ROUND_SECONDS / max(taken, 1e-6))), _LONGEST_ROUND)

    def status(self) -> str:
        """All inputs of the next decision, in one line for the debug log."""
        performance, best = self.performance, sorted(self.points, key=self._cost)[:4]
        profile, noise = performance.predictor.profile, self._history.noise
        return describe.status(performance.estimator, profile, self._now(), noise, best)

    # -------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain numbers and text."""
        return {
            "candidates": [one.name for one in self.candidates],
            "choice": list(self.decision.choice),
            "number": self.decision.number,
            **self.performance.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Candidates that are no longer allowed become dense."""
        names = {one.name: number for number, one in enumerate(self.candidates)}
        saved = state["candidates"]
        choice = tuple(names.get(saved[number], DENSE) for number in state["choice"])
        self.performance.load_state_dict(state)
        self.decision = Decision(int(state["number"]), choice)
