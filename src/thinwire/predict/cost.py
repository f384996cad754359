"""The predicted step time of a recipe: buckets through lanes, with overlap, sharing the processors and the link.

One worker is followed through its step; the others do the same. Backward runs in one thread, each lane in another. They
share the processors of this worker. Their messages share its link, in the order in which they start. A message
occupies the link for its bytes; its latency passes while others send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ..codecs.stages import Work
from ..errors import OptionError
from ..exchange.script import Collective, Op, Script, Send, Wait
from ..recipe.compose import Recipe, parse
from .collectives import Cost
from .devices import Device
from .workload import BucketProfile, Profile

LANES = 2
TORCHS_OWN = {"ddp": 4, "torch-fp16": 2, "torch-bf16": 2}  # bytes an element that is added up
_WAKE = 1.5e-3  # seconds until a thread whose message has arrived runs, if the worker has a processor of its own


@dataclass(frozen=True)
class Prediction:
    """A step, in seconds. The parts overlap, so they add up to more than the step."""

    step: float
    compute: float
    coding: float  # of the lanes, as if they had the processors to themselves
    exchange: float  # of all messages, one after the other
    sent_bytes: int
    under_way: float = 0.0  # with at least one message under way

    @property
    def exposed(self) -> float:
        """The time that communication adds to computing."""
        return max(0.0, self.step - self.compute)


@dataclass
class Job:
    """One bucket: when backward has made it, what its lane then does with it, and in which lane."""

    ready: float  # seconds of backward, if nothing runs beside it
    script: Script
    lane: int


Way: TypeAlias = Recipe | str


class Priced(Protocol):
    """A network that collectives can be priced on."""

    def cost(self, collective: Collective, size: float, *, ranks: int) -> Cost: ...


def predict(
    recipe: Way | Sequence[Way], profile: Profile, network: Priced, device: Device, *, workers: int
) -> Prediction:
    """The step of `workers` workers. `ddp`, `torch-fp16` and `torch-bf16` are torch's own ways.

    A sequence of recipes has one for each bucket.

    >>> from thinwire.predict.network import NetworkModel
    >>> from thinwire.predict.workload import of_size
    >>> slow, a100 = NetworkModel.named("1gbe"), Device.named("a100")
    >>> dense = predict("ddp", of_size(25_600_000, 0.12), slow, a100, workers=8)
    >>> sparse = predict("threshold-k", of_size(25_600_000, 0.12), slow, a100, workers=8)
    >>> round(dense.step, 1), round(sparse.step, 1)
    (1.5, 0.1)
    """
    return predict_jobs(jobs_of(recipe, profile, workers=workers), profile, network, device, workers=workers)


def predict_jobs(jobs: Sequence[Job], profile: Profile, network: Priced, device: Device, *, workers: int) -> Prediction:
    """The same for given jobs, which do not depend on the network."""
    costs = {
        op: network.cost(op.collective, op.size, ranks=workers)
        for job in jobs
        for op in job.script
        if isinstance(op, Send)
    }
    coding = sum(device.seconds(op) for job in jobs for op in job.script if isinstance(op, Work))
    end, under_way = simulate(jobs, costs, device, backward=profile.backward, processors=profile.processors)
    sent = sum(op.sent(workers) for job in jobs for op in job.script if isinstance(op, Send))
    return Prediction(
        step=profile.forward + end + profile.rest + (profile.meeting if workers > 1 else 0.0),
        compute=profile.compute,
        coding=coding,
        exchange=sum(costs[op].seconds for job in jobs for op in job.script if isinstance(op, Send)),
        sent_bytes=sent,
        under_way=under_way,
    )


def jobs_of(recipe: Way | Sequence[Way], profile: Profile, *, workers: int) -> list[Job]:
    """The jobs of all buckets of the profile."""
    if not isinstance(recipe, str | Recipe):
        if len(set(recipe)) == 1:
            return jobs_of(recipe[0], profile, workers=workers)
        return _all_carried([_checked(one, workers) for one in recipe], profile, workers)
    if isinstance(recipe, str) and recipe in TORCHS_OWN:
        return [
            Job(bucket.ready * profile.backward, _summed(bucket, TORCHS_OWN[recipe], workers), lane)
            for lane, bucket in enumerate(profile.buckets)  # torch starts them all, without a thread of its own
        ]
    checked = _checked(recipe, workers)
    if checked.dense:
        return jobs_of("ddp", profile, workers=workers)
    return _all_carried([checked] * len(profile.buckets), profile, workers)


def _checked(way: Way, workers: int) -> Recipe:
    recipe = parse(way) if isinstance(way, str) else way
    if refusal := recipe.refusal(workers):
        raise OptionError(refusal)
    return recipe


def _all_carried(recipes: Sequence[Recipe], profile: Profile, workers: int) -> list[Job]:
    last = len(profile.buckets) - 1
    return [
        Job(
            bucket.ready * profile.backward,
            carried_script(recipe, bucket, workers, last=number == last),
            number % LANES,
        )
        for number, (recipe, bucket) in enumerate(zip(recipes, profile.buckets, strict=True))
    ]


def _summed(bucket: BucketProfile, itemsize: int, workers: int) -> Script:
    """A bucket divided and added up as it is, or in half precision."""
    if workers == 1:
        return []
    casts = 1 if itemsize == 4 else 2
    work = Work("pass", casts * bucket.elements)
    after: list[Op] = [Work("pass", bucket.elements)] if itemsize < 4 else []
    return [work, Send("all_reduce", itemsize * bucket.elements, "bucket"), Wait("bucket"), *after]


def carried_script(recipe: Recipe, bucket: BucketProfile, workers: int, *, last: bool) -> Script:
    """Gather, add the residual, exchange, scatter: the work on one bucket, with the overhead of a step on the last."""
    before: list[Op] = [*([Work("hook", 1)] if last else []), Work("pass", bucket.elements)]
    if recipe.memory is not None:
        before.append(Work("pass", 3 * bucket.numel // 2))
    between = recipe.exchange.script(
        recipe.codec, bucket.numel, world_size=workers, exact=bucket.exact, shapes=bucket.shapes
    )
    return [*before, *between, Work("pass", bucket.elements)]


# --------------------------------------------------------------------------------------------------- simulating


@dataclass
class _Thread:
    """A lane: its jobs in order, and its place in the first of them."""

    jobs: list[Job]
    place: int = 0
    left: float = 0.0  # processor seconds of the current piece of work
    waits_for: str | None = None
    waits_since: float = 0.0
    arrivals: dict[str, float] = field(default_factory=dict)

    @property
    def computes(self) -> bool:
        return self.left > 0

    def next_op(self) -> Op | None:
        return self.jobs[0].script[self.place] if self.jobs and self.place < len(self.jobs[0].script) else None

    def goes_on_at(self, wake: float) -> float:
        if self.waits_for is None:
            return 0.0
        return max(self.waits_since, self.arrivals[self.waits_for]) + wake


class _Worker:
    """One worker in its backward pass: its threads, its processors, its link."""

    def __init__(self, jobs: Sequence[Job], costs: dict[Send, Cost], device: Device, processors: float) -> None:
        self.alone = min(1.0, processors)  # speed of one thread while the other workers do the same
        self.wake = _WAKE / processors
        lanes = sorted({job.lane for job in jobs})
        self.threads = [_Thread([job for job in jobs if job.lane == lane]) for lane in lanes]
        self.now = self.made = self.link_free = 0.0  # made: seconds of backward, as if nothing ran beside it
        self.under_way = self._last_arrival = 0.0
        self._costs, self._device = costs, device

    def advance(self, thread: _Thread) -> None:
        """Do everything that takes no time: start messages, take up work, notice arrivals."""
        while thread.jobs and not thread.computes and thread.goes_on_at(self.wake) <= self.now + 1e-12:
            thread.waits_for = None
            if thread.place == 0 and thread.jobs[0].ready > self.made + 1e-9:
                break
            op = thread.next_op()
            if op is None:
                thread.jobs.pop(0)
                thread.place, thread.arrivals = 0, {}
                continue
            thread.place += 1
            if isinstance(op, Work):
                # The rank that leads has the processors of the ranks that wait, as far as a thread can use them.
                thread.left = self._device.seconds(op) * (self.alone if op.leads else 1.0)
            elif isinstance(op, Send):
                self._send(thread, op)
            else:
                thread.waits_for, thread.waits_since = op.tag, self.now

    def _send(self, thread: _Thread, send: Send) -> None:
        cost = self._costs[send]
        self.link_free = max(self.now, self.link_free) + cost.transfer
        arrival = thread.arrivals[send.tag] = self.link_free + cost.latency
        self.under_way += max(0.0, arrival - max(self.now, self._last_arrival))
        self._last_arrival = max(self._last_arrival, arrival)


def simulate(
    jobs: Sequence[Job], costs: dict[Send, Cost], device: Device, *, backward: float, processors: float
) -> tuple[float, float]:
    """Seconds from the start of backward until all buckets are done, and those with a message under way."""
    worker = _Worker(jobs, costs, device, processors)
    threads = worker.threads
    while True:
        for thread in threads:
            worker.advance(thread)
        goes_on = worker.made < backward - 1e-12
        busy = goes_on + sum(thread.computes for thread in threads)
        if not goes_on and not any(thread.jobs for thread in threads):
            return worker.now, worker.under_way
        speed = min(1.0, processors / busy) if busy else worker.alone
        pace = speed / worker.alone  # backward was measured at the pace of one thread
        steps = [thread.left / speed for thread in threads if thread.computes]
        steps += [thread.goes_on_at(worker.wake) - worker.now for thread in threads if thread.waits_for is not None]
        if goes_on:
            marks = [thread.jobs[0].ready for thread in threads if thread.jobs and thread.place == 0]
            steps += [(mark - worker.made) / pace for mark in (*marks, backward) if mark > worker.made + 1e-12]
        step = max(0.0, min(steps))
        for thread in threads:
            if thread.computes:
                thread.left -= step * speed
                thread.left = 0.0 if thread.left < 1e-12 else thread.left
        if goes_on:
            worker.made += step * pace
            worker.made = backward if worker.made > backward - 1e-12 else worker.made
        worker.now += step


def closed_form(ready: Sequence[float], sends: Sequence[float]) -> float:
    """The end of messages that share one link in order, each after its bucket is ready: max_j (ready_j + sum_{i>=j}).

    >>> closed_form([1.0, 2.0, 3.0], [1.5, 0.5, 0.5])
    3.5
    """
    return max((ready[j] + math.fsum(sends[j:]) for j in range(len(sends))), default=0.0)
