"""Simulates a training on a changing network without processes: hidden truth, noisy and late observations.

The truth differs from the controller's assumptions. Every family has its own factor, codecs are faster or slower than
measured, steps are noisy with outliers, and the energy kept changes while training.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from thinwire.auto import Auto, auto
from thinwire.auto.agreement import Agreement
from thinwire.auto.alarm import Alarm, steady
from thinwire.auto.candidates import DENSITIES
from thinwire.auto.choices import Choices, uniform
from thinwire.auto.controller import Controller
from thinwire.auto.estimator import LinkEstimate, LinkEstimator
from thinwire.auto.observation import Observation
from thinwire.auto.predictor import StepPredictor
from thinwire.predict.devices import Device, Speed
from thinwire.predict.workload import Profile, of_size

GPU, CPU = Speed(10e-6, 8e-12), Speed(5e-6, 0.8e-9)
Link = tuple[float, float]  # latency in seconds, seconds per byte


@dataclass
class Scenario:
    """A training: workload, network, factors and noise, all from a seed."""

    seed: int
    steps: int = 600
    workers: int = 4
    profile: Profile = field(init=False)
    trace: list[Link] = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.workers = self.dice.choice([2, 4, 8, 16])
        parameters = int(10 ** self.dice.uniform(6, 8))
        step = parameters / 10 ** self.dice.uniform(7.3, 8.7)
        self.profile = replace(of_size(parameters, step), processors=self.dice.choice([0.5, 1.0, math.inf]))
        sweep = GPU if self.profile.processors == math.inf else CPU
        self.assumed = Device("assumed", sweep, hook=1e-4)
        speed = self.dice.uniform(0.6, 1.6)
        self.real = Device("real", Speed(sweep.fixed * speed, sweep.each * speed), hook=1e-4)
        self.trace = self._trace()
        self.factors = {
            family: math.exp(self.dice.gauss(0, 0.2))
            for family in ("all_reduce", "two_shot", "all_gather", "shared_top_k")
        }
        self.power = self.dice.uniform(0.15, 0.5)
        self.noise = self.dice.choice([0.02, 0.05, 0.1])
        self.outliers = self.dice.choice([0.0, 0.01])

    def _trace(self) -> list[Link]:
        dice, steps = self.dice, self.steps
        kind = dice.choice(["static", "steps", "walk", "there and back"])

        def draw() -> Link:
            return 10 ** dice.uniform(-4, -1.7), 8 / 10 ** dice.uniform(7.3, 10)

        if kind == "static":
            return [draw()] * steps
        if kind == "there and back":
            one, other = draw(), draw()
            return [other if steps // 3 <= step < 2 * steps // 3 else one for step in range(steps)]
        if kind == "steps":
            phases = [draw() for _ in range(dice.randint(3, 5))]
            return [phases[step * len(phases) // steps] for step in range(steps)]
        latency, byte_seconds = draw()
        found = []
        for step in range(steps):
            if step % 10 == 0:
                latency *= math.exp(dice.gauss(0, 0.1))
                byte_seconds *= math.exp(
                    dice.gauss(0, 0.1) + (1.5 * dice.choice([-1, 1]) if dice.random() < 0.03 else 0)
                )
                byte_seconds = min(max(byte_seconds, 8 / 2e10), 8 / 1e7)
            found.append((latency, byte_seconds))
        return found

    def curve(self, step: int) -> tuple[float, ...]:
        power = self.power * (1 - 0.3 * step / self.steps)
        return tuple(density**power for density in DENSITIES)


class World:
    """The truth of a scenario, for a set of candidates."""

    def __init__(self, scenario: Scenario, options: Auto | None = None) -> None:
        self.scenario, self.options = scenario, options or auto()
        self.candidates = self.options.for_ranks(scenario.workers)
        self.truth = StepPredictor(Choices(self.candidates), scenario.real, workers=scenario.workers)
        kinds = ["large"] * len(scenario.profile.buckets)
        self.truth.set_profile(scenario.profile, kinds)
        self.kinds = kinds
        self._known: dict[object, tuple[float, float]] = {}

    def link(self, step: int, choice: int) -> LinkEstimate:
        latency, byte_seconds = self.scenario.trace[step]
        factor = self.scenario.factors[self.candidates[choice].recipe.exchange.name]
        return LinkEstimate(latency, byte_seconds, {}, factor)

    def step(self, step: int, choice: int, canary: tuple[int, int] | None = None) -> tuple[float, float]:
        """Seconds of the whole step, and with messages under way; without noise."""
        key = (self.scenario.trace[step], choice, canary)
        if key not in self._known:
            link = self.link(step, choice if canary is None else canary[0])
            found = self.truth.predict(uniform(choice), link, canary)
            self._known[key] = (found.step, found.under_way)
        return self._known[key]

    def progress(self, step: int, choice: int) -> float:
        self.truth.curve = self.scenario.curve(step)
        return self.truth.progress_per_step(uniform(choice))

    def fixed(self, choice: int) -> float:
        """The cost of running one candidate in all steps."""
        return sum(self.step(step, choice)[0] / self.progress(step, choice) for step in range(self.scenario.steps))

    def run(self) -> Run:
        """Train under `auto`."""
        scenario = self.scenario
        dice = random.Random(scenario.seed + 1)

        def noise() -> float:
            return math.exp(dice.gauss(0, scenario.noise))

        latency, byte_seconds = scenario.trace[0]
        estimator = LinkEstimator(
            latency=latency * noise(), byte_seconds=byte_seconds * scenario.factors["all_reduce"] * noise()
        )
        controller = Controller(self.options, scenario.assumed, estimator, workers=scenario.workers, clock=lambda: 0.0)
        controller.set_workload(scenario.profile, self.kinds)
        run, agreement, alarm = Run(controller), Agreement(controller.decision), Alarm()
        agreement.adopt(0, 0, controller.decide_first(scenario.profile.forward))
        decided, ran, steps = controller.decision, agreement.for_step(0), list[Step]()
        latest: deque[float] = deque(maxlen=3)
        for step in range(scenario.steps):
            if agreement.needs_round(step):
                seen, said = self._seen(step, steps, latest, noise), decided
                hurry = alarm.update([latest[-1] if latest else 0.0], step=seen.seconds)
                controller.observe(seen, ran=ran)
                decided, steps = controller.decide(step), []
                if agreement.adopt(agreement.round, step, decided if hurry else said, hurry=hurry):
                    latest.clear()
            now = agreement.for_step(step)
            ran = now if now.canary is not None or not steps else ran
            choice = now.choice[0]
            seconds, under_way = self.step(step, choice, now.canary)
            pause = 3.0 if dice.random() < scenario.outliers else 1.0
            taken = seconds * noise() * pause
            run.costs.append(seconds / self.progress(step, choice))  # without noise, which affects all choices alike
            run.seconds += taken
            run.choices.append(choice)
            steps.append(Step(taken, under_way * noise() * pause, canary=now.canary is not None))
            if now.canary is None:
                latest.append(steps[-1].exchange)
        return run

    def _seen(self, step: int, steps: list[Step], latest: deque[float], noise: Callable[[], float]) -> Observation:
        """The combined reports of the ranks on the steps before this one."""
        profile, plain = self.scenario.profile, [one for one in steps if not one.canary]
        canaries = [one.exchange for one in steps if one.canary]
        count = max(1, len(plain))
        return Observation(
            step=step,
            steps=len(plain),
            seconds=sum(one.seconds for one in plain) / count - profile.rest,
            forward=profile.forward * noise(),
            backward=profile.backward * noise(),
            rest=profile.rest,
            exchange=statistics.median_low(latest) if plain else 0.0,
            steady=steady(latest),
            ready=tuple(bucket.ready for bucket in profile.buckets),
            latency=self.scenario.trace[step - 1][0] * noise(),
            canary=canaries[0] if canaries else None,
            curve=self.scenario.curve(step) if any(one % 25 == 0 for one in range(step - len(steps), step)) else None,
        )


@dataclass
class Step:
    """One measured step."""

    seconds: float
    exchange: float
    canary: bool


@dataclass
class Run:
    """A simulated training."""

    controller: Controller
    costs: list[float] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cost(self) -> float:
        return sum(self.costs)

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.choices, self.choices[1:], strict=False))
