"""Which candidate carries the gradients: decided on one rank from numbers of all ranks, as rarely as it pays.

Every choice has a predicted step (`Outlook`, on the line that `Learner` knows), corrected by what was measured when its
family ran, and a worth. The least time to quality wins, if it wins by more than the noise. A family that has not run
lately is entered only after single buckets sent its way (canaries) took what was predicted, or if it promises so much
that waiting for them costs more. What does worse than it promised is left again, and not tried again for a while.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..predict.devices import Device
from ..predict.workload import Profile
from . import words
from .agreement import KINDS, Decision, main_kind
from .canaries import Canaries
from .candidates import Auto, Candidate, energy_at
from .experience import ENOUGH, Experience
from .learner import Learner, Learnt
from .observation import Event, Expected, Observation
from .outlook import Outlook
from .pareto import Point, soonest
from .ties import Ties

DENSE = 0  # the first candidate
_HYSTERESIS, _LEAVES_DENSE = 0.03, 0.05
_AT_ONCE = 1.5  # so much better, and no canary is waited for
_AT_FIRST = 1.25  # before the first step was measured
_RAN_LATELY = 300  # steps in which a family's own steps are trusted
_RESOLVE, _SOONEST_RESOLVE = 50, 10  # steps until everything is predicted anew: in any case, and if numbers moved
_MOVED = 0.2  # relative, of a number that predictions depend on
_HOPEFUL = 1.6  # what cost more than so many times the best is not predicted anew every time
_DECIDING = 0.007  # of the time
_ROUND_SECONDS, _LONGEST_ROUND = 0.4, 3  # a round costs about a millisecond of a processor
_LEAST_REST = 1e-4
_ITS_OWN = 2.5  # times what was expected: how far a candidate may be off by itself
_ANOTHER = 2.0  # times the rate: a line on which ties are settled anew
_ASK = 3  # canaries, after a family was left because the line had changed
_REGRET, _DOUBT = 1.05, 0.1  # where steps cost so many times more than before a change, its reason is doubted


class Controller:
    """Takes observations, gives decisions. One per training, on rank 0; it is given nothing but numbers."""

    def __init__(
        self,
        options: Auto,
        device: Device,
        learner: Learner,
        *,
        workers: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options, self.learner, self._clock = options, learner, clock
        self.seconds_deciding = 0.0
        self.candidates: list[Candidate] = options.for_ranks(workers)
        self.outlook = Outlook(self.candidates, device, workers=workers)
        self.decision = Decision(0, (DENSE,) * len(KINDS))
        self.events: list[Event] = []
        self.points: list[Point] = []
        self.experience, self.canaries, self._ties = Experience(), Canaries(), Ties()
        self._before: tuple[int, ...] | None = None  # what the last change left
        self._left = ("", math.inf)  # its family, and what a step cost before the line changed
        self._elapsed = 0.0
        self._solved_at: tuple[int, float, float, float] | None = None
        self._whole_at = 0
        self._seen_mbit = learner.mbit
        self._known: Expected | None = None
        self._since_jump = ENOUGH  # observations
        self._wanted: int | None = None  # a candidate that only canaries are missing for
        self._entering = 0  # observations until a new family's factor is known
        self._news, self._answered = False, ""  # the line has changed; of which family a canary has come back
        self._doubts = 0  # canaries that ask whether the last change was right

    # ---------------------------------------------------------------------------------------------- observing

    def meet(self, profile: Profile, kinds: Sequence[str]) -> None:
        """What is trained. Times may be guesses; observations replace them."""
        self.outlook.set_profile(profile, kinds)

    def observe(self, seen: Observation, *, ran: Decision) -> None:
        """Learn from a round, in which an older decision may still have run."""
        begin = self._clock()
        self._observe(seen, ran)
        self.seconds_deciding += self._clock() - begin

    def _observe(self, seen: Observation, ran: Decision) -> None:
        if seen.canary is not None and ran.canary is not None:
            self._judge_canary(seen, ran)
        if not seen.steps:
            return
        self._elapsed += seen.steps * (seen.seconds + seen.rest)
        self._follow_profile(seen, dense=self._family(ran.choice) == "all_reduce")
        choice, family = ran.choice, self._family(ran.choice)
        if seen.trip is not None:
            self.learner.take_trip(seen.trip)
        if seen.curve is not None:
            old = self.outlook.curve
            self.outlook.curve = tuple(0.7 * a + 0.3 * b for a, b in zip(old, seen.curve, strict=True))
        if seen.kept is not None:
            self._judge_energy(self._main(choice), seen.kept)
        self._learn_line(seen, choice, family)
        if ran.number != self.decision.number:
            return
        taken = seen.seconds + seen.rest
        missed = taken - self._expected(choice).step
        self.experience.note(taken, missed=missed, group=self._group(choice), step=seen.step)

    def _learn_line(self, seen: Observation, choice: tuple[int, ...], family: str) -> None:
        self._since_jump += 1
        expected, share = self._expected(choice).under_way, self._expected(choice).latency_share
        if self._entering and choice == self.decision.choice:
            self._entering -= 1
            if 1 / _ITS_OWN < seen.exchange / max(expected, 1e-9) < _ITS_OWN:  # else the line changed meanwhile
                name = self._main(choice).name
                self.learner.take_factor(name, family, seconds=seen.exchange, expected=expected, pull=0.9)
                return
        before = self.learner.mbit
        if self.learner.take_line(seconds=seen.exchange, latency_share=share, expected=expected, steady=seen.steady):
            self.experience.line_changed()
            if not 1 / _ANOTHER < self.learner.mbit / before < _ANOTHER:
                self._ties.forget()
            self._news, self._since_jump = True, 0

    def _expected(self, choice: tuple[int, ...]) -> Expected:
        """What a step should take: near the last prediction by its slopes, because a prediction costs a millisecond."""
        line, compute = self._line(choice), self.outlook.profile.compute
        if self._known is None or self._known.choice != choice or self._known.far(line, compute):
            predicted = self.outlook.predict(choice, line)
            share = self.outlook.latency_share(choice, line)
            self._known = Expected(choice, line, compute, predicted.step, predicted.under_way, share, predicted.exposed)
        return self._known.near(line, compute)

    def _follow_profile(self, seen: Observation, *, dense: bool) -> None:
        old = self.outlook.profile
        # Beside codecs backward takes longer, and predictions add that themselves: only cheap ones show it as it is.
        backward = seen.backward if dense else min(seen.backward, old.backward * seen.forward / max(old.forward, 1e-9))
        pull = 0.5 if old.measured else 1.0
        mixed = [
            a + pull * (b - a)
            for a, b in ((old.forward, seen.forward), (old.backward, backward), (old.rest, seen.rest))
        ]
        ready = seen.ready if len(seen.ready) == len(old.buckets) else [bucket.ready for bucket in old.buckets]
        profile = self.outlook.at_pace(mixed[0], mixed[1], max(mixed[2], _LEAST_REST), ready)
        self.outlook.set_profile(replace(profile, measured=True), self.outlook.kinds)

    def _judge_canary(self, seen: Observation, ran: Decision) -> None:
        assert seen.canary is not None
        assert ran.canary is not None
        name, family = self.candidates[ran.canary[0]].name, self.candidates[ran.canary[0]].family
        expected = self.outlook.predict(ran.choice, self.learner.network(name, family), ran.canary).under_way
        self.learner.take_factor(name, family, seconds=seen.canary, expected=expected)
        self.canaries.answer(family, seen.step, ratio=seen.canary / expected if expected else 1.0)
        self._answered = family

    def _judge_energy(self, candidate: Candidate, kept: float) -> None:
        if candidate.density is not None:
            said = energy_at(candidate.density, self.outlook.curve)
            old = self.outlook.kept.get(candidate.family, 1.0)
            self.outlook.kept[candidate.family] = old + 0.5 * (kept / max(said, 1e-9) - old)

    # ----------------------------------------------------------------------------------------------- deciding

    def decide(self, step: int) -> Decision:
        """What runs from now on; the same object if nothing changes."""
        begin = self._clock()
        decision = self._decide(step)
        self.seconds_deciding += self._clock() - begin
        return decision

    def _decide(self, step: int) -> Decision:
        every = self._every()
        if self.decision.canary is not None or every != self.decision.every:
            self.decision = Decision(self.decision.number, self.decision.choice, every)
        if not self._worth_solving(step):
            if self.canaries.in_flight(step):
                return self.decision
            wanted = self._doubted() if self._wanted is None else self._wanted
            return self.decision if wanted is None else self._try(wanted, step)
        self._solve(step)
        self._wanted = None
        choice = self._best()
        if choice != self.decision.choice:
            if self._may_enter(choice, step):
                return self._change(choice, step)
            self._wanted = choice[0]
            return self._try(choice[0], step)
        if (other := self._tied()) is not None:
            return self._change(other, step)
        untried = self._due_canary(step)
        return self.decision if untried is None else self._try(untried, step)

    def _doubted(self) -> int | None:
        """What was left because of the line, while steps cost more than before: a few canaries say whether it was."""
        if self._doubts == 0 or self._before is None:
            return None
        if self._cost(self._now()) < _REGRET * self._left[1]:
            if self.experience.settled:  # measured and well: do not predict for this in every round
                self._doubts = 0
            return None
        self._doubts -= 1
        return self._before[main_kind(self.outlook.kinds)]

    def first(self, forward: float) -> Decision:
        """Before the first bucket is sent: all that is known is the line and how long forward took.

        Dense is left only if it is hopeless, because nothing was verified.
        """
        profile = self.outlook.profile
        ready = [bucket.ready for bucket in profile.buckets]
        guess = self.outlook.at_pace(forward, 2.0 * forward, max(0.2 * forward, _LEAST_REST), ready)
        self.outlook.set_profile(guess, self.outlook.kinds)
        self._solve(0, whole=True)
        best, dense = self._soonest(), self._point((DENSE,) * len(KINDS))
        if self._cost(dense) > _AT_FIRST * self._cost(best):
            return self._change(self._uniform(best.name), 0)
        return self.decision

    def _worth_solving(self, step: int) -> bool:
        if self._news or self._answered or self.experience.observations == ENOUGH:
            return True
        if self.experience.observations < ENOUGH or self.seconds_deciding > _DECIDING * self._elapsed:
            return False
        then = self._solved_at
        if then is None or step - then[0] >= _RESOLVE:
            return True
        moved = any(abs(a / b - 1) > _MOVED for a, b in zip(self._where(step)[1:], then[1:], strict=True))
        return moved and step - then[0] >= _SOONEST_RESOLVE

    def _where(self, step: int) -> tuple[int, float, float, float]:
        return step, self.learner.latency, self.learner.byte_seconds, self.outlook.profile.compute

    def _solve(self, step: int, *, whole: bool = False) -> None:
        """Predict every candidate; between two changes of the line, only those that come into question."""
        whole = whole or self._news or not self.points or step - self._whole_at >= 4 * _RESOLVE
        self._whole_at = step if whole else self._whole_at
        answered, self._answered = self._answered, ""
        self._solved_at, self._news = self._where(step), False
        limit = math.inf if whole else _HOPEFUL * min(self._cost(point) for point in self.points)
        for number in range(len(self.candidates)):
            if whole and number >= len(self.points):
                self.points.append(self._point((number,) * len(KINDS)))
            elif self._cost(self.points[number]) <= limit or self.candidates[number].family == answered:
                self.points[number] = self._point((number,) * len(KINDS))

    def _point(self, choice: tuple[int, ...]) -> Point:
        predicted = self.outlook.predict(choice, self._line(choice)).step
        groups = {"group": self._group(choice), "running": self._group(self.decision.choice)}
        corrected = predicted + self.experience.correction(predicted=predicted, **groups)
        return Point(self._name(choice), max(corrected, 1e-6), self.outlook.worth(choice))

    def _soonest(self) -> Point:
        banned = self.experience.banned((self._solved_at or (0,))[0])
        banned.discard(self._group(self.decision.choice))
        groups = [self._group((number,) * len(KINDS)) for number in range(len(self.candidates))]
        allowed = [point for point, group in zip(self.points, groups, strict=True) if group not in banned]
        quality = self.options.objective == "time_to_quality"
        return soonest(allowed or self.points, floor=1.0 - self.options.max_error, quality=quality)

    def _best(self) -> tuple[int, ...]:
        """The choice to go to, or the present one if nothing is better beyond hysteresis and noise."""
        now, choice = self._now(), self._uniform(self._soonest().name)
        choice = self._refined(choice)
        if choice == self.decision.choice:
            return choice
        leaves_dense = self._main(self.decision.choice).recipe.dense
        margin = _LEAVES_DENSE if leaves_dense else _HYSTERESIS
        margin += self.experience.standard_error
        new = self._cost(self._point(choice))
        return choice if new * (1 + margin) < self._cost(now) else self.decision.choice

    def _refined(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """Other kinds of buckets may do better with a candidate of the same or another family."""
        for kind in self.outlook.present()[1:]:
            options = [(*choice[:kind], number, *choice[kind + 1 :]) for number in range(len(self.candidates))]
            best = min(options, key=lambda one: self._cost(self._point(one)))
            if self._cost(self._point(best)) * (1 + _HYSTERESIS) < self._cost(self._point(choice)):
                choice = best
        return choice

    def _tied(self) -> tuple[int, ...] | None:
        """Another of the same family that may be better by less than predictions can tell, or was before a trial."""
        choice, now = self.decision.choice, self._cost(self._now())
        if not self.experience.settled or self._group(choice) == "dense":
            return None
        if (before := self._ties.better_before(now, noise=self.experience.standard_error)) is not None:
            return before
        floor = 1.0 - self.options.max_error
        others = [
            ((number,) * len(KINDS), self._cost(point))
            for number, (one, point) in enumerate(zip(self.candidates, self.points, strict=True))
            if one.family == self._family(choice) and point.worth >= floor and not one.recipe.dense
        ]
        return self._ties.challenger(choice, now, others)

    def _now(self) -> Point:
        """What runs, as it was measured."""
        point = self._point(self.decision.choice)
        return replace(point, seconds=self.experience.median()) if self.experience.settled else point

    def _may_enter(self, choice: tuple[int, ...], step: int) -> bool:
        family = self._family(choice)
        if family == self._family(self.decision.choice) or self._ran_lately(choice, step):
            return True
        at_once = self._cost(self._now()) > _AT_ONCE * self._cost(self._point(choice))
        return at_once or self.canaries.vouch_for(family, step)

    def _ran_lately(self, choice: tuple[int, ...], step: int) -> bool:
        return self.experience.ran_since(self._group(choice), step - _RAN_LATELY)

    def _change(self, choice: tuple[int, ...], step: int) -> Decision:
        was, will = self._now(), self._point(choice)
        rates = {"mbit": self.learner.mbit, "before": self._seen_mbit}
        text = words.decision(step, was, will, way=self._main(choice).recipe.exchange.name, **rates)
        old, new = self._group(self.decision.choice), self._group(choice)
        self._left = (self._family(self.decision.choice), self._cost(replace(was, seconds=self.experience.median())))
        if choice == self._before and self.experience.observations <= 3 * ENOUGH:
            if old != new:
                self.experience.failed(old, step)
            text += f"; {self._name(self.decision.choice)} took {words.ms(was.seconds)}, which is not better"
        self._before = self.decision.choice
        self.decision = Decision(self.decision.number + 1, choice, self._every())
        # While the line moves, what differs is the line and not what a candidate makes of it.
        self._doubts = _ASK if self._since_jump < ENOUGH and self._left[0] != self._family(choice) else 0
        known = self._main(choice).name in self.learner.factors
        self._entering = 0 if self._since_jump < ENOUGH else 1 if known else 2
        self.experience.recipe_changed()
        self._news, self._wanted = False, None
        self.events.append(Event(step, self._name(choice), text, will.seconds, self.learner.mbit))
        self._seen_mbit = self.learner.mbit
        return self.decision

    # ---------------------------------------------------------------------------------------------- canaries

    def _try(self, candidate: int, step: int) -> Decision:
        """Send the first bucket, which is small and has the line for itself, another way for one step."""
        choice = self.decision.choice
        name, family = self.candidates[candidate].name, self.candidates[candidate].family
        canary = (candidate, 0)
        if self.canaries.in_flight(step):
            return self.decision
        line = self.learner.network(name, family)
        excess = max(0.0, self.outlook.predict(choice, line, canary).step - self.outlook.predict(choice, line).step)
        if self.canaries.affordable(excess, elapsed=self._elapsed, step_seconds=self.experience.last):
            self.canaries.send(family, step, excess=excess)
            self.decision = replace(self.decision, canary=canary)
        return self.decision

    def _due_canary(self, step: int) -> int | None:
        """The best candidate of the family that is tried next, if one is due."""
        now = self._cost(self._now())
        present = self._family(self.decision.choice)
        for family in dict.fromkeys(one.family for one in self.candidates):
            if family == present:
                continue
            numbers = [n for n, one in enumerate(self.candidates) if one.family == family]
            best = min(numbers, key=lambda n: self._cost(self.points[n]))
            gap = self._cost(self.points[best]) / now - 1
            if family == self._left[0] and now > _REGRET * self._left[1]:
                gap = min(gap, _DOUBT)  # before the change steps cost less: was it really the line?
            if self.canaries.due(family, step, gap=gap):
                return best
        return None

    # ----------------------------------------------------------------------------------------------- helpers

    def _cost(self, point: Point) -> float:
        return point.cost if self.options.objective == "time_to_quality" else point.seconds

    def _main(self, choice: Sequence[int]) -> Candidate:
        """That of the first kind there is, which most elements belong to."""
        return self.candidates[choice[main_kind(self.outlook.kinds)]]

    def _family(self, choice: Sequence[int]) -> str:
        return self._main(choice).family

    def _line(self, choice: Sequence[int]) -> Learnt:
        candidate = self._main(choice)
        return self.learner.network(candidate.name, candidate.family)

    def _group(self, choice: Sequence[int]) -> str:
        """Those who miss their predictions alike: a family, but for dense, which has no codec to take longer."""
        ways = [self.candidates[choice[kind]].recipe.dense for kind in self.outlook.present()]
        return "dense" if all(ways) else self._family(choice)

    def _uniform(self, name: str) -> tuple[int, ...]:
        number = next(n for n, one in enumerate(self.candidates) if one.name == name)
        return (number,) * len(KINDS)

    def _name(self, choice: Sequence[int]) -> str:
        names = dict.fromkeys(self.candidates[choice[kind]].name for kind in self.outlook.present())
        return " and ".join(names) or self.candidates[choice[0]].name

    def _every(self) -> int:
        taken = self.experience.recent()
        return 1 if taken is None else min(max(1, round(_ROUND_SECONDS / max(taken, 1e-6))), _LONGEST_ROUND)

    def outlined(self) -> str:
        """Everything that the next decision depends on, in one line for a log."""
        best = sorted(self.points, key=self._cost)[:4]
        return words.outlook(self.learner, self.outlook.profile, self._now(), self.experience.noise, best)

    # ------------------------------------------------------------------------------------------------ keeping

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; plain numbers and text."""
        return {
            "candidates": [one.name for one in self.candidates],
            "choice": list(self.decision.choice),
            "number": self.decision.number,
            "learner": self.learner.state(),
            "outlook": self.outlook.state(),
            **self.experience.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where another left off. Candidates that are no longer allowed fall back to dense."""
        names = {one.name: number for number, one in enumerate(self.candidates)}
        saved = state["candidates"]
        choice = tuple(names.get(saved[number], DENSE) for number in state["choice"])
        self.learner.load(state["learner"])
        self.outlook.load(state["outlook"])
        self.experience.load(state)
        self.decision = Decision(int(state["number"]), choice)
