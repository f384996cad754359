"""`auto` in a training program: what is timed in every step, the rounds in which ranks tell each other, and the change.

All ranks time their steps. Rank 0 has the controller, and gives its decisions with its row of the next round. A round
is gathered after one step and taken before the next, so that it costs no step any time unless the line is very long.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..comm.network import Network, Pending
from ..recipe.compose import Recipe
from ..reduce.buckets import Layout
from ..reduce.step import Step
from . import Auto
from .agreement import DECISION_NUMBERS, KINDS, Agreement, Alarm, Decision, check_rows, main_kind, of_buckets, steady
from .calibrate import greet, prepare, processors_here
from .candidates import DENSITIES, Candidate
from .controller import Controller
from .observation import Event, Observation
from .outlook import kind_of
from .pareto import Point, front
from .timing import Clock, Sums, energy_curve, guess, union

if TYPE_CHECKING:
    from ..reduce.lanes import Conductor

_log = logging.getLogger(__name__)
_SAMPLE = 25  # steps from one look at the gradient to the next
_GAPS = 9  # from one step to the next: a pause to evaluate is not part of training
_WARM = 2  # steps in which DDP arranges its buckets
_TRIPS = 3  # small messages of which the shortest says what the latency is
_WINDOW = 3  # steps of which the median says how long messages are under way
_HEAD, _NUMBERS = 2 + DECISION_NUMBERS, 12
_SECONDS, _LATEST = _HEAD + 1, _HEAD + 11  # where a row has the time of a step, and of messages in the last one


class Pilot:
    """The side of one rank."""

    def __init__(
        self,
        options: Auto,
        network: Network,
        *,
        layout: Layout,
        embeddings: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.options, self._network, self._device = options, network, device
        self._embeddings = embeddings
        self.candidates: list[Candidate] = options.for_ranks(network.world_size)
        self.agreement = Agreement(Decision(0, (0,) * len(KINDS)))
        self._alarm = Alarm()
        self._layout = layout
        self._clock, self._sums = Clock(), Sums()
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._exchanges: deque[float] = deque(maxlen=_WINDOW)
        self._last_end: float | None = None
        self._steps = 0
        self._ready: tuple[float, ...] = ()
        self._ran = self.agreement.current
        self._tried: tuple[int, int] | None = None  # since the last round
        self._pending: Pending | None = None
        self._trips: deque[float] = deque(maxlen=_TRIPS)
        self._decided: Decision = self.agreement.current
        self._controller: Controller | None = None
        self._to_judge: tuple[int, Observation | None, Decision] | None = None  # what the last round said
        self._first = True
        network.spans = []
        self._processors = math.inf
        if network.world_size > 1:  # alone, there is nothing to decide
            self._meet()
        self.moved(layout)

    def _meet(self) -> None:
        network, device = self._network, self._device
        if device.type != "cuda":
            self._processors = processors_here(network, device)
        speeds = prepare(self.candidates, network, device)
        learner = greet(network, device)
        if speeds is not None:
            self._controller = Controller(self.options, speeds, learner, workers=network.world_size)

    # ----------------------------------------------------------------------------------------------- for people

    @property
    def events(self) -> list[Event]:
        """What was decided so far; rank 0 knows."""
        return [] if self._controller is None else list(self._controller.events)

    def front(self) -> list[Point]:
        return [] if self._controller is None else front(self._controller.points)

    def stats(self) -> dict[str, float]:
        found = {"auto/changes": float(self.agreement.current.number)}
        if self._controller is not None:
            found["auto/mbit"] = self._controller.learner.mbit
            found["auto/latency_ms"] = 1e3 * self._controller.learner.latency
            found["auto/deciding_seconds"] = self._controller.seconds_deciding
        return found

    # --------------------------------------------------------------------------------------------------- timing

    def forward_begins(self) -> None:
        self._clock.forward, self._clock.forward_end = time.perf_counter(), 0.0

    def forward_ends(self) -> None:
        self._clock.forward_end = time.perf_counter()

    def arrived(self, names: list[str]) -> None:
        self._clock.arrivals.append((time.perf_counter(), names))

    def samples(self, step: int) -> bool:
        """Whether this step should say what its codecs keep."""
        return step % _SAMPLE == _SAMPLE - 1

    def note(self, step: Step, conductor: Conductor | None) -> None:
        """A step has ended: everything has arrived."""
        end, clock, sums = time.perf_counter(), self._clock, self._sums
        spans = self._network.take_spans() + ([] if conductor is None else conductor.take_spans())
        self._steps += 1
        if self._steps > _WARM and clock.arrivals and 0 < clock.forward <= clock.forward_end:
            if self._last_end is not None and clock.forward > self._last_end:
                self._gaps.append(clock.forward - self._last_end)
            if self._ran.canary is not None:  # a step like no other
                sums.canary, self._tried = union(spans), self._ran.canary
            else:
                last = clock.arrivals[-1][0]
                sums.steps += 1
                sums.seconds += end - clock.forward
                sums.forward += clock.forward_end - clock.forward
                sums.backward += last - clock.forward_end
                self._exchanges.append(union(spans))
            if self._network.rank == 0:
                self._ready = self._shares(clock)
        for offered, left in step.energies:
            sums.offered += offered
            sums.left += left
        if step.measures and all(step.finite) and self.candidates[self._main()].density is None:
            sums.curve = energy_curve(step.largest())
        self._last_end, self._clock = end, Clock()

    def _shares(self, clock: Clock) -> tuple[float, ...]:
        """When each parcel was ready, as a share of backward."""
        begin, last = clock.forward_end, clock.arrivals[-1][0]
        came = {name: at for at, names in clock.arrivals for name in names}
        length = max(last - begin, 1e-9)
        ends = [max((came.get(name, last) for name in parcel.names), default=last) for parcel in self._layout.parcels]
        return tuple(min(1.0, max(0.0, (at - begin) / length)) for at in ends)

    # --------------------------------------------------------------------------------------------------- rounds

    def send(self, step: int) -> None:
        """After a step: if the next one needs a round, gather it while the optimizer works."""
        if self._network.world_size > 1 and self._pending is None and self.agreement.waits(step):
            row = torch.tensor(self._row(step), dtype=torch.float64, device=self._device)
            self._pending = self._network.start_all_gather(row)

    def take(self, step: int) -> None:
        """Before a step: the round it needs, if any, and with it what runs."""
        if self._network.world_size == 1:
            return
        if not self.agreement.waits(step):
            self._ran = self.agreement.for_step(step)
        elif self._first:
            self._take_first(step)
        else:
            self._take_round(step)

    def _take_round(self, step: int) -> None:
        self.send(step)
        pending, self._pending = self._pending, None
        assert pending is not None
        rows = pending.wait().tolist()
        self._note_trip()
        check_rows(rows, number=self.agreement.round)
        ran, self._tried = replace(self._ran, canary=self._tried), None
        hurry = self._alarm.rings([row[_LATEST] for row in rows], step=max(row[_SECONDS] for row in rows))
        if self._controller is not None:
            self._to_judge = (step, self._observation(step, rows), ran)
        if hurry:  # what is decided now must not wait for another step like the last
            self.think()
            self._adopt(step, self._from_rank_0(), soon=True)
        else:
            self._adopt(step, rows[0][2:_HEAD])

    def think(self) -> None:
        """On rank 0, judge the last round and decide; while messages are under way, that costs no time."""
        judged, self._to_judge = self._to_judge, None
        if judged is None or self._controller is None:
            return
        step, seen, ran = judged
        if seen is not None:
            self._controller.observe(seen, ran=ran)
        self._decided = self._controller.decide(step)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("step %d: %s; %s", step, seen, self._controller.outlined())

    def _adopt(self, step: int, numbers: Sequence[float], *, soon: bool = False) -> None:
        """What rank 0 has said holds from this step on."""
        news = self.agreement.take(self.agreement.round, step, Decision.from_numbers(numbers), soon=soon)
        self._ran = self.agreement.for_step(step)
        if news:
            self._exchanges.clear()
        if news and self._controller is not None and self._controller.events:
            _log.info("%s", self._controller.events[-1].text)

    def _take_first(self, step: int) -> None:
        """The first decision has no measured step before it: only the line, and this step's forward pass."""
        self._first = False
        taken = max(0.0, self._clock.forward_end - self._clock.forward)
        forward = self._network.all_reduce(torch.tensor([taken], dtype=torch.float64, device=self._device), op="max")
        if self._controller is not None and float(forward) > 0:
            self._decided = self._controller.first(float(forward))
        self._adopt(step, self._from_rank_0())

    def _from_rank_0(self) -> list[float]:
        """The newest decision, as a message of its own."""
        numbers = torch.tensor(self._decided.numbers(), dtype=torch.float64, device=self._device)
        said: list[float] = self._network.broadcast(numbers, source=0).tolist()
        self._network.take_spans()
        return said

    def _row(self, step: int) -> list[float]:
        sums, self._sums = self._sums, Sums()
        count = max(1, sums.steps)
        rest = statistics.median(self._gaps) if self._gaps else 0.0
        trip = min(self._trips) if self._trips else 0.0
        seconds, forward, backward = (value / count for value in (sums.seconds, sums.forward, sums.backward))
        numbers = [float(sums.steps), seconds, forward, backward, rest, trip, sums.canary, sums.offered, sums.left]
        latest = list(self._exchanges) if sums.steps else []
        agree = steady(latest, enough=_WINDOW)
        numbers += [-1.0 if agree is None else float(agree)]
        numbers += [statistics.median_low(latest), latest[-1]] if latest else [0.0, 0.0]
        curve = sums.curve or [0.0] * len(DENSITIES)
        return [float(self.agreement.round), float(step), *self._decided.numbers(), *numbers, *curve]

    def _note_trip(self) -> None:
        """The span of the round itself was logged with the others: it is the last that began."""
        spans = self._network.take_spans()
        if spans:
            begin, end = spans[-1]
            self._trips.append(end - begin)

    def _observation(self, step: int, rows: Sequence[Sequence[float]]) -> Observation | None:
        """All ranks as one: the slowest decides how long a step takes, who waits least how long messages do."""
        columns = list(zip(*(row[_HEAD : _HEAD + _NUMBERS] for row in rows), strict=True))
        steps, seconds, forward, backward, rest, trip, canary, offered, left, agree, exchange, _ = columns
        if not all(steps) and not all(canary):
            return None
        curve = rows[0][_HEAD + _NUMBERS :]
        return Observation(
            step=step,
            steps=int(steps[0]),
            seconds=max(seconds),
            forward=max(forward),
            backward=max(backward),
            rest=max(rest),
            exchange=min(exchange),
            steady=None if min(agree) < 0 else all(agree),
            ready=self._ready,
            trip=min(trip) or None,
            canary=min(canary) or None,
            kept=1.0 - sum(left) / sum(offered) if sum(offered) > 0 else None,
            curve=tuple(curve) if any(curve) else None,
        )

    # --------------------------------------------------------------------------------------------- what it means

    def _main(self) -> int:
        return self._ran.choice[main_kind(self._kinds)]

    def recipe(self) -> Recipe:
        """The recipe of most buckets."""
        return self.candidates[self._main()].recipe

    def ways(self) -> dict[str, Recipe]:
        """The buckets that travel by another one in this step."""
        ways, main = of_buckets(self._ran.choice, self._kinds, self._ran.canary), self._main()
        others = [(parcel, way) for parcel, way in zip(self._layout.parcels, ways, strict=True) if way != main]
        return {parcel.name: self.candidates[way].recipe for parcel, way in others}

    def moved(self, layout: Layout) -> None:
        """Buckets are others than before."""
        self._layout = layout
        self._kinds = [
            kind_of(parcel.numel, sum(self._embeddings.get(part.name, 0) for part in parcel.parts))
            for parcel in layout.parcels
        ]
        if self._controller is not None and layout.parcels:
            self._controller.meet(guess(layout, self._processors), self._kinds)

    # ------------------------------------------------------------------------------------------------- keeping

    def state(self) -> dict[str, Any]:
        """Of this rank; that of rank 0 has the controller's."""
        return {
            "decision": self.agreement.current.numbers(),
            "candidates": [one.name for one in self.candidates],
            "controller": None if self._controller is None else self._controller.state(),
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a saved decision; without one, begin anew. Every rank is given the same decision."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._sums, self._clock, self._last_end = Sums(), Clock(), None
        self._exchanges.clear()
        self._to_judge = None
        self.agreement, self._alarm = Agreement(Decision(0, (0,) * len(KINDS))), Alarm()
        self._first = state is None
        if state is not None:
            names = {one.name: number for number, one in enumerate(self.candidates)}
            saved = Decision.from_numbers(state["decision"])
            choice = tuple(names.get(state["candidates"][number], 0) for number in saved.choice)
            self.agreement = Agreement(Decision(saved.number, choice))
            if self._controller is not None and state["controller"] is not None:
                self._controller.load(state["controller"])
        self._decided = self._ran = self.agreement.current
