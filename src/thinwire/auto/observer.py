"""Learns from the measurements of a round: link, workload, energy kept, prediction errors and canaries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .agreement import Decision
from .canaries import Canaries
from .candidates import Candidate, energy_at
from .choices import Choice
from .estimator import LinkEstimate
from .history import ENOUGH
from .observation import Observation
from .performance import PerformanceModel

LEAST_REST = 1e-4  # seconds of a step for optimizer and data, at least
_ITS_OWN = 2.5  # measured over expected time up to which a deviation is attributed to a new candidate
_ANOTHER = 2.0  # ratio of bandwidths that counts as another link


@dataclass(frozen=True)
class ExpectedStep:
    """A predicted step, and the link and the compute time that the prediction assumed."""

    choice: Choice
    link: LinkEstimate
    compute: float
    step: float
    under_way: float
    latency_share: float
    exposed: float

    def far(self, link: LinkEstimate, compute: float) -> bool:
        """Whether `moved_to` would be too inaccurate."""
        return not (0.85 < self._pace(link) < 1.15 and 0.85 * self.compute < compute < 1.15 * self.compute)

    def moved_to(self, link: LinkEstimate, compute: float) -> ExpectedStep:
        """The prediction for a slightly different link and compute time, by its slopes."""
        more = self.under_way * (self._pace(link) - 1.0)
        waits = more if self.exposed > more > -self.exposed or more > 0 < self.exposed else 0.0
        step = self.step + waits + compute - self.compute
        return replace(self, link=link, compute=compute, step=step, under_way=self.under_way + more)

    def _pace(self, link: LinkEstimate) -> float:
        latency, byte = link.latency / self.link.latency, link.byte_seconds / self.link.byte_seconds
        return (self.latency_share * latency + (1 - self.latency_share) * byte) * link.factor / self.link.factor


class Observer:
    """Updates the performance model and the canaries. Its flags tell the controller when to rank anew."""

    def __init__(self, performance: PerformanceModel, canaries: Canaries) -> None:
        self._performance, self._canaries = performance, canaries
        self._choices, self._predictor = performance.choices, performance.predictor
        self._estimator, self._history = performance.estimator, performance.history
        self.elapsed = 0.0  # seconds of training
        self.since_jump = ENOUGH  # observations
        self.link_changed = False  # since the last ranking
        self.another_link = False  # the bandwidth changed by a large factor since the last ranking
        self.answered = ""  # the family of a canary that came back since the last ranking
        self.entering = 0  # observations left that measure the factor of a new candidate
        self._known: ExpectedStep | None = None

    def observe(self, seen: Observation, *, ran: Decision, current: Decision) -> None:
        """Learn from a round in which `ran` was running; `current` may be a newer decision."""
        if seen.canary is not None and ran.canary is not None:
            self._observe_canary(seen, seen.canary, ran.choice, ran.canary)
        if not seen.steps:
            return
        choice, family = ran.choice, self._choices.family(ran.choice)
        self.elapsed += seen.steps * (seen.seconds + seen.rest)
        self._observe_workload(seen, dense=family == "all_reduce")
        if seen.latency is not None:
            self._estimator.observe_latency(seen.latency)
        if seen.curve is not None:
            old = self._predictor.curve
            self._predictor.curve = tuple(0.7 * a + 0.3 * b for a, b in zip(old, seen.curve, strict=True))
        if seen.energy_kept is not None:
            self._observe_energy(self._choices.main(choice), seen.energy_kept)
        self._observe_link(seen, choice, current)
        if ran.number != current.number:
            return
        taken = seen.seconds + seen.rest
        error = taken - self._expected(choice).step
        self._history.add(taken, error=error, group=self._choices.group(choice), step=seen.step)

    def _observe_link(self, seen: Observation, choice: Choice, current: Decision) -> None:
        self.since_jump += 1
        expected, share = self._expected(choice).under_way, self._expected(choice).latency_share
        if self.entering and choice == current.choice:
            self.entering -= 1
            if 1 / _ITS_OWN < seen.exchange / max(expected, 1e-9) < _ITS_OWN:  # else the link changed meanwhile
                main = self._choices.main(choice)
                names = (main.name, main.family)
                self._estimator.observe_factor(*names, seconds=seen.exchange, expected=expected, gain=0.9)
                return
        before = self._estimator.mbit
        if self._estimator.observe_exchange(seen.exchange, expected=expected, latency_share=share, steady=seen.steady):
            self._history.link_changed()
            if not 1 / _ANOTHER < self._estimator.mbit / before < _ANOTHER:
                self.another_link = True
            self.link_changed, self.since_jump = True, 0

    def _expected(self, choice: Choice) -> ExpectedStep:
        """The expected step. A prediction costs a millisecond, so the last one is moved if it is close enough."""
        link, compute = self._performance.link(choice), self._predictor.profile.compute
        if self._known is None or self._known.choice != choice or self._known.far(link, compute):
            predicted = self._predictor.predict(choice, link)
            share = self._predictor.latency_share(choice, link)
            times = (predicted.step, predicted.under_way, share, predicted.exposed)
            self._known = ExpectedStep(choice, link, compute, *times)
        return self._known.moved_to(link, compute)

    def _observe_workload(self, seen: Observation, *, dense: bool) -> None:
        old = self._predictor.profile
        # Codecs slow down backward, and predictions add that themselves. So only a dense step shows backward as it is.
        backward = seen.backward if dense else min(seen.backward, old.backward * seen.forward / max(old.forward, 1e-9))
        gain = 0.5 if old.measured else 1.0
        forward, backward, rest = (
            a + gain * (b - a)
            for a, b in ((old.forward, seen.forward), (old.backward, backward), (old.rest, seen.rest))
        )
        ready = seen.ready if len(seen.ready) == len(old.buckets) else [bucket.ready for bucket in old.buckets]
        self._predictor.set_times(forward, backward, max(rest, LEAST_REST), ready, measured=True)

    def _observe_canary(self, seen: Observation, seconds: float, choice: Choice, canary: tuple[int, int]) -> None:
        candidate = self._choices.candidates[canary[0]]
        names = (candidate.name, candidate.family)
        expected = self._predictor.predict(choice, self._estimator.link(*names), canary).under_way
        self._estimator.observe_factor(*names, seconds=seconds, expected=expected)
        self._canaries.answer(candidate.family, seen.step, ratio=seconds / expected if expected else 1.0)
        self.answered = candidate.family

    def _observe_energy(self, candidate: Candidate, kept: float) -> None:
        if candidate.density is not None:
            said = energy_at(candidate.density, self._predictor.curve)
            old = self._predictor.energy_kept.get(candidate.family, 1.0)
            self._predictor.energy_kept[candidate.family] = old + 0.5 * (kept / max(said, 1e-9) - old)
