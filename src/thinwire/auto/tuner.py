"""The policy behind `auto`: times every step, exchanges reports in rounds, and says which recipes run.

All ranks time their steps. Rank 0 has the controller and puts its decisions into its reports, so that all ranks switch
at the same step.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..recipe.compose import Recipe
from .agreement import Decision
from .calibrate import calibrate, prepare, processors_per_rank
from .candidates import Auto, Candidate, energy_curve
from .choices import DENSE, Choices, kind_of, per_bucket, uniform
from .controller import Controller
from .observation import Event, Observation
from .pareto import Point, front
from .predictor import assumed_profile
from .reports import RankReport, combined
from .rounds import Rounds
from .timing import StepTimer

if TYPE_CHECKING:
    from ..reduce.reducer import Reducer
    from ..reduce.step import Step

_log = logging.getLogger(__name__)
_SAMPLE_EVERY = 25  # steps between two samples of the gradient


class AutoTuner:
    """The policy of one reducer. All ranks construct it together: it calibrates the link and compiles the candidates.

    >>> from thinwire import Reducer
    >>> from thinwire.auto import auto
    >>> from thinwire.comm.local import LocalNetwork
    >>> reducer = Reducer("dense", group=LocalNetwork.alone(), policy=auto(allow=["bf16"]))
    >>> str(reducer.policy.recipe), reducer.policy.overrides
    ('fp32|all_reduce', {})
    """

    def __init__(self, options: Auto, reducer: Reducer) -> None:
        network = reducer.network
        self.options, self.name = options, str(options)
        self.candidates: list[Candidate] = options.for_ranks(network.world_size)
        self._network, self._reducer = network, weakref.proxy(reducer)  # weakly: the reducer holds its policy
        self._choices = Choices(self.candidates)
        self._running = self._decided = Decision(0, uniform(DENSE))  # the decided one waits for the next round
        self._rounds = Rounds(network, self._running)
        weakref.finalize(reducer, self._rounds.give_up)  # also where a program ends without close()
        self._timer = StepTimer()
        self._reported_canary: tuple[int, int] | None = None
        self._unseen: tuple[int, Observation | None, Decision] | None = None  # the last round, not yet judged
        self._first = True
        self._controller: Controller | None = None
        self._processors = math.inf
        network.spans = []
        if network.world_size > 1:  # a single rank has nothing to decide
            self._calibrate()
        network.spans = None  # until the first step that is timed: nobody takes those of a warm-up
        self.layout_changed()

    def _calibrate(self) -> None:
        network, device = self._network, self._network.device
        if device.type != "cuda":
            self._processors = processors_per_rank(network, device)
        speeds = prepare(self.candidates, network, device)
        estimator = calibrate(network, device)
        if speeds is not None:
            self._controller = Controller(self.options, speeds, estimator, workers=network.world_size)

    # ------------------------------------------------------------------------------------------------ the policy

    @property
    def recipe(self) -> Recipe:
        """The recipe of the main kind of bucket."""
        return self._choices.main(self._running.choice).recipe

    @property
    def overrides(self) -> dict[str, Recipe]:
        """The buckets that use another recipe in this step, by name."""
        numbers = per_bucket(self._running.choice, self._choices.kinds, self._running.canary)
        main = self._choices.main(self._running.choice)
        pairs = zip(self._reducer.layout.buckets, (self.candidates[number] for number in numbers), strict=True)
        return {bucket.name: candidate.recipe for bucket, candidate in pairs if candidate is not main}

    def before_step(self, step: int) -> None:
        """Finish the round that this step depends on, if any, and adopt its decision."""
        if self._network.world_size == 1:
            return
        if self._network.spans is None:
            self._network.spans = []
        if not self._rounds.agreement.needs_round(step):
            self._running = self._rounds.agreement.for_step(step)
        elif self._first:
            self._decide_first(step)
        else:
            self._finish_round(step)

    def measures(self, step: int) -> bool:
        """Whether this step should sample how much energy its codecs keep."""
        return step % _SAMPLE_EVERY == _SAMPLE_EVERY - 1

    def forward_begins(self) -> None:
        self._timer.forward_begins()

    def forward_ends(self) -> None:
        self._timer.forward_ends()

    def arrived(self, names: Sequence[str]) -> None:
        self._timer.arrived(names)

    def before_wait(self) -> None:
        """On rank 0, judge the last round and decide. Messages are under way, so this costs no time."""
        unseen, self._unseen = self._unseen, None
        if unseen is None or self._controller is None:
            return
        step, seen, ran = unseen
        if seen is not None:
            self._controller.observe(seen, ran=ran)
        self._decided = self._controller.decide(step)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("step %d: %s; %s", step, seen, self._controller.status())

    def after_step(self, step: Step) -> None:
        """Time the step, and start the round that the next step needs while the optimizer runs."""
        end, buckets = time.perf_counter(), None
        if self._network.rank == 0:
            buckets = [bucket.names for bucket in self._reducer.layout.buckets]
        self._timer.end_step(end, self._take_spans(), canary=self._running.canary, buckets=buckets)
        totals = self._timer.totals
        for offered, left in step.energies:
            totals.offered += offered
            totals.left += left
        dense = self._choices.main(self._running.choice).density is None
        if step.measures and dense and step.device is None and bool(step.all_finite()):  # a device is not read
            totals.curve = energy_curve(step.largest())
        self._start_round(step.number + 1)

    def layout_changed(self) -> None:
        layout = self._reducer.layout
        self._choices.kinds = [kind_of(bucket.numel, bucket.embeddings) for bucket in layout.buckets]
        if self._controller is not None and layout.buckets:
            self._controller.set_workload(assumed_profile(layout, self._processors), self._choices.kinds)

    def close(self) -> None:
        """Stop timing collectives."""
        self._rounds.give_up()
        for network in self._reducer.networks:
            network.spans = None

    # ---------------------------------------------------------------------------------------------------- rounds

    def _start_round(self, step: int) -> None:
        agreement = self._rounds.agreement
        if self._network.world_size == 1 or self._rounds.started or not agreement.needs_round(step):
            return
        totals = self._timer.take()
        self._reported_canary = totals.canary
        measured = replace(self._timer.measurement(totals), latency=self._rounds.latency)
        self._rounds.start(RankReport(agreement.round, step, self._decided, measured))

    def _finish_round(self, step: int) -> None:
        self._start_round(step)
        reports, hurry = self._rounds.finish()
        if self._controller is not None:
            seen = combined(step, [report.measured for report in reports], ready=self._timer.ready)
            self._unseen = (step, seen, replace(self._running, canary=self._reported_canary))
        if hurry:  # decide now: another step like the last would cost too much
            self.before_wait()
            self._adopt(step, self._rounds.broadcast(self._decided), hurry=True)
        else:
            self._adopt(step, reports[0].decision)

    def _decide_first(self, step: int) -> None:
        """The first decision: no step was measured yet, only the link and this step's forward pass."""
        self._first = False
        forward = self._rounds.largest(self._timer.forward)
        if self._controller is not None and forward > 0:
            self._decided = self._controller.decide_first(forward)
        self._adopt(step, self._rounds.broadcast(self._decided))

    def _adopt(self, step: int, decision: Decision, *, hurry: bool = False) -> None:
        agreement = self._rounds.agreement
        changed = agreement.adopt(agreement.round, step, decision, hurry=hurry)
        self._running = agreement.for_step(step)
        if changed:
            self._timer.recipe_changed()
        if changed and self._controller is not None and self._controller.events:
            _log.info("%s", self._controller.events[-1].text)

    def _take_spans(self) -> list[tuple[float, float]]:
        """Begin and end of all collectives since the last call."""
        spans: list[tuple[float, float]] = []
        for network in self._reducer.networks:
            spans += network.take_spans()
            if network.spans is None:  # a new lane: time it from now on
                network.spans = []
        return spans

    # ------------------------------------------------------------------------------------------------ statistics

    @property
    def events(self) -> list[Event]:
        """All switches so far; empty on other ranks than 0."""
        return [] if self._controller is None else list(self._controller.events)

    def front(self) -> list[Point]:
        """The Pareto front of the last ranking; empty on other ranks than 0."""
        return [] if self._controller is None else front(self._controller.points)

    def stats(self) -> dict[str, float]:
        found = {"auto/changes": float(self._rounds.agreement.current.number)}
        if self._controller is not None:
            estimator = self._controller.performance.estimator
            found["auto/mbit"] = estimator.mbit
            found["auto/latency_ms"] = 1e3 * estimator.latency
            found["auto/deciding_seconds"] = self._controller.seconds_deciding
        return found

    # ----------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The decision of this rank; on rank 0 also the state of the controller."""
        return {
            "decision": self._rounds.agreement.current.numbers(),
            "next": self._decided.numbers(),
            "due": self._rounds.agreement.due,
            "candidates": [one.name for one in self.candidates],
            "controller": None if self._controller is None else self._controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a saved decision, which is the same on all ranks; without one, begin anew."""
        self._timer.restart()
        self._unseen, self._first = None, state is None
        first = following = Decision(0, uniform(DENSE))
        if state is not None:
            names = {one.name: number for number, one in enumerate(self.candidates)}
            numbers = [names.get(name, DENSE) for name in state["candidates"]]
            first = replace(Decision.from_numbers(state["decision"]).renumbered(numbers), canary=None)
            following = Decision.from_numbers(state["next"]).renumbered(numbers) if "next" in state else first
            if self._controller is not None and state["controller"] is not None:
                self._controller.load_state_dict(state["controller"])
        self._rounds.restart(first, due=0 if state is None else state.get("due", 0))
        self._running, self._decided = first, following
