"""The step time of a recipe: buckets through lanes, with overlap, on processors and on a line that are shared.

One worker is followed through its step; the others do the same. Backward runs in one thread, each lane in another. What
they compute shares the processors of this worker; what they send shares its line, in the order in which it was started.
A message takes its turn on the line for its bytes; its latency passes while others send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import OptionError
from ..exchange.script import Op, Script, Send, Wait, Work
from ..recipe import Recipe, parse
from .devices import Device
from .network import Cost, NetworkModel
from .workload import Bucket, Profile

LANES = 2
_SLICE = 3e-3  # seconds that Linux lets a thread compute: who wakes up waits so long where processors are shared


@dataclass(frozen=True)
class Prediction:
    """A step, in seconds. The parts overlap, so that they add up to more than the step; `exposed` does not."""

    step: float
    compute: float
    coding: float  # of the lanes, as if the processors were theirs alone
    exchange: float  # of all messages, as if one after the other
    sent_bytes: int

    @property
    def exposed(self) -> float:
        """What communication adds."""
        return max(0.0, self.step - self.compute)


@dataclass
class Job:
    """One bucket: when backward has made it, what then is done with it, and in which lane."""

    ready: float  # seconds of backward, without anything beside it
    script: Script
    lane: int


def predict(
    recipe: Recipe | str, profile: Profile, network: NetworkModel, device: Device, *, workers: int
) -> Prediction:
    """The step of `workers` workers. `ddp`, `torch-fp16` and `torch-bf16` are torch's own ways.

    >>> from thinwire.plan.workload import of_size
    >>> slow, a100 = NetworkModel.named("1gbe"), Device.named("a100")
    >>> dense = predict("ddp", of_size(25_600_000, 0.12), slow, a100, workers=8)
    >>> sparse = predict("threshold-k", of_size(25_600_000, 0.12), slow, a100, workers=8)
    >>> round(dense.step, 1), round(sparse.step, 1)
    (1.5, 0.1)
    """
    jobs = jobs_of(recipe, profile, device, workers=workers)
    costs = {
        op: network.cost(op.collective, op.size, ranks=workers)
        for job in jobs
        for op in job.script
        if isinstance(op, Send)
    }
    coding = sum(device.seconds(op) for job in jobs for op in job.script if isinstance(op, Work))
    end = simulate(jobs, costs, device, backward=profile.backward, processors=profile.processors)
    sent = sum(op.sent(workers) for job in jobs for op in job.script if isinstance(op, Send))
    return Prediction(
        step=profile.forward + end + profile.rest + (profile.meeting if workers > 1 else 0.0),
        compute=profile.compute,
        coding=coding,
        exchange=sum(costs[op].seconds for job in jobs for op in job.script if isinstance(op, Send)),
        sent_bytes=sent,
    )


def jobs_of(recipe: Recipe | str, profile: Profile, device: Device, *, workers: int) -> list[Job]:
    """What each bucket of the profile has to go through."""
    if isinstance(recipe, str) and recipe in ("ddp", "torch-fp16", "torch-bf16"):
        itemsize = 4 if recipe == "ddp" else 2
        return [
            Job(bucket.ready * profile.backward, _summed(bucket, itemsize, workers), lane)
            for lane, bucket in enumerate(profile.buckets)  # torch starts them all, without a thread of its own
        ]
    checked = parse(recipe) if isinstance(recipe, str) else recipe
    if refusal := checked.refusal(workers):
        raise OptionError(refusal)
    if checked.dense:
        return jobs_of("ddp", profile, device, workers=workers)
    return [
        Job(bucket.ready * profile.backward, _carried(checked, bucket, device, workers), number % LANES)
        for number, bucket in enumerate(profile.buckets)
    ]


def _summed(bucket: Bucket, itemsize: int, workers: int) -> Script:
    """A bucket divided and added up as it is, or in half precision."""
    if workers == 1:
        return []
    casts = 1 if itemsize == 4 else 2
    work = Work("pass", casts * bucket.elements)
    after: list[Op] = [Work("pass", bucket.elements)] if itemsize < 4 else []
    return [work, Send("all_reduce", itemsize * bucket.elements, "bucket"), Wait("bucket"), *after]


def _carried(recipe: Recipe, bucket: Bucket, device: Device, workers: int) -> Script:
    """Gathered, compensated, exchanged, scattered: what a courier and a carrier do."""
    hook = Work("pass", int(device.hook / device.sweep.each)) if device.sweep.each else Work("pass", 0)
    before: list[Op] = [hook, Work("pass", bucket.elements)]
    if recipe.memory is not None:
        before.append(Work("pass", 2 * bucket.numel))
    between = recipe.exchange.script(
        recipe.codec, bucket.numel, world_size=workers, exact=bucket.exact, shapes=bucket.shapes
    )
    return [*before, *between, Work("pass", bucket.elements)]


# --------------------------------------------------------------------------------------------------- simulating


@dataclass
class _Thread:
    """A lane at its work: jobs in order, and where it is in the first of them."""

    jobs: list[Job]
    place: int = 0
    left: float = 0.0  # processor seconds of the current piece of work
    waits_until: float = 0.0
    arrivals: dict[str, float] = field(default_factory=dict)

    @property
    def computes(self) -> bool:
        return self.left > 0

    def next_op(self) -> Op | None:
        return self.jobs[0].script[self.place] if self.jobs and self.place < len(self.jobs[0].script) else None


def simulate(
    jobs: Sequence[Job], costs: dict[Send, Cost], device: Device, *, backward: float, processors: float
) -> float:
    """Seconds from the beginning of backward until all buckets are there and backward is done."""
    alone = min(1.0, processors)  # how fast one thread of this worker is while the others do the same
    wake = _SLICE * (1.0 / alone - 1.0)
    threads = {lane: _Thread([job for job in jobs if job.lane == lane]) for lane in {job.lane for job in jobs}}
    now, made, line_free = 0.0, 0.0, 0.0  # made: seconds of backward, as if nothing ran beside it
    while True:
        for thread in threads.values():
            line_free = _advance(thread, now, made, line_free, costs, device, alone, wake)
        goes_on = made < backward - 1e-12
        busy = goes_on + sum(thread.computes for thread in threads.values())
        if not goes_on and not any(thread.jobs for thread in threads.values()):
            return now
        speed = min(1.0, processors / busy) if busy else alone
        steps = [thread.left / speed for thread in threads.values() if thread.computes]
        steps += [thread.waits_until - now for thread in threads.values() if thread.waits_until > now]
        if goes_on:
            pace = speed / alone  # backward was measured at the pace of one thread
            marks = [thread.jobs[0].ready for thread in threads.values() if thread.jobs and thread.place == 0]
            steps += [(mark - made) / pace for mark in (*marks, backward) if mark > made + 1e-12]
        step = max(0.0, min(steps))
        for thread in threads.values():
            if thread.computes:
                thread.left = max(0.0, thread.left - step * speed)
                thread.left = 0.0 if thread.left < 1e-12 else thread.left
        if goes_on:
            made += step * speed / alone
            made = backward if made > backward - 1e-12 else made
        now += step


def _advance(
    thread: _Thread,
    now: float,
    made: float,
    line_free: float,
    costs: dict[Send, Cost],
    device: Device,
    alone: float,
    wake: float,
) -> float:
    """Everything that takes no time: start messages, take up work, notice arrivals. Returns when the line is free."""
    while thread.jobs and not thread.computes and thread.waits_until <= now + 1e-12:
        if thread.place == 0 and thread.jobs[0].ready > made + 1e-9:
            break
        op = thread.next_op()
        if op is None:
            thread.jobs.pop(0)
            thread.place, thread.arrivals = 0, {}
            continue
        thread.place += 1
        if isinstance(op, Work):
            # Who leads has the processors of those who wait, as far as a thread can use them.
            thread.left = device.seconds(op) * (alone if op.leads else 1.0)
        elif isinstance(op, Send):
            begin = max(now, line_free)
            line_free = begin + costs[op].transfer
            thread.arrivals[op.tag] = line_free + costs[op].latency
        else:
            thread.waits_until = max(now, thread.arrivals[op.tag]) + wake
    return line_free


def closed_form(ready: Sequence[float], sends: Sequence[float]) -> float:
    """The end of messages that share one line in order, each after its bucket is ready: max_j (ready_j + sum_{i>=j}).

    >>> closed_form([1.0, 2.0, 3.0], [1.5, 0.5, 0.5])
    3.5
    """
    return max((ready[j] + math.fsum(sends[j:]) for j in range(len(sends))), default=0.0)
