"""The pipeline of buckets against a simulation in small ticks, against closed forms, and monotonic where it must be."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from thinwire.codecs.stages import Work
from thinwire.errors import ThinwireError
from thinwire.exchange.script import Op, Send, Wait
from thinwire.predict.collectives import Cost, Link
from thinwire.predict.cost import Job, closed_form, predict, simulate
from thinwire.predict.devices import Device, Speed
from thinwire.predict.network import NetworkModel
from thinwire.predict.workload import BucketProfile, Profile, of_size
from thinwire.recipe.presets import PRESETS

UNIT = Device("unit", Speed(0.0, 1e-3))  # a millisecond an element
TICK = 1e-4


def in_ticks(jobs: list[Job], costs: dict[Send, Cost], *, backward: float, processors: float) -> float:
    """The same story told naively: time goes on in ticks, and everybody does what they can in each."""
    alone = min(1.0, processors)
    wake = 1.5e-3 / processors
    lanes = {lane: [job for job in jobs if job.lane == lane] for lane in {job.lane for job in jobs}}
    at = {lane: [0, 0, 0.0] for lane in lanes}  # job, operation, work left
    arrives: dict[tuple[int, int, str], float] = {}
    began: dict[tuple[int, int, str], float] = {}
    now = made = line_free = 0.0
    while True:
        for lane, queue in lanes.items():
            place = at[lane]
            while place[0] < len(queue) and place[2] <= 0:
                job = queue[int(place[0])]
                if place[1] == 0 and job.ready > made + 1e-9:
                    break
                if place[1] == len(job.script):
                    place[0], place[1] = place[0] + 1, 0
                    continue
                op = job.script[int(place[1])]
                if isinstance(op, Wait):
                    key = (lane, int(place[0]), op.tag)
                    if max(began.setdefault(key, now), arrives[key]) + wake > now + 1e-9:
                        break
                elif isinstance(op, Send):
                    line_free = max(now, line_free) + costs[op].transfer
                    key = (lane, int(place[0]), op.tag)
                    arrives[key] = line_free + costs[op].latency
                else:
                    place[2] = UNIT.seconds(op)
                place[1] += 1
        goes_on = made < backward - 1e-9
        busy = goes_on + sum(place[2] > 0 for place in at.values())
        if not goes_on and all(place[0] == len(lanes[lane]) for lane, place in at.items()):
            return now
        speed = min(1.0, processors / busy) if busy else alone
        for place in at.values():
            place[2] = max(0.0, place[2] - TICK * speed)
        made += TICK * speed / alone if goes_on else 0.0
        now += TICK


def random_jobs(draw: random.Random) -> tuple[list[Job], dict[Send, Cost], float]:
    backward, costs, jobs = 0.2, {}, []
    ready = sorted(round(draw.uniform(0, backward), 3) for _ in range(draw.randint(1, 5)))
    for number, at in enumerate(ready):
        ops: list[Op] = []
        waiting: list[str] = []
        for step in range(draw.randint(1, 4)):
            ops.append(Work("pass", draw.randint(1, 40)))
            send = Send("swap", 1000 * number + step + 1, f"s{step}")
            latency, transfer = draw.choice([0.0, 0.005, 0.03]), round(draw.uniform(0, 0.06), 3)
            costs[send] = Cost(latency, transfer)
            ops.append(send)
            waiting.append(send.tag)
            if draw.random() < 0.6:
                ops.append(Wait(waiting.pop(0)))
        ops += [Wait(tag) for tag in waiting]
        jobs.append(Job(at, [*ops, Work("pass", draw.randint(1, 20))], number % 2))
    return jobs, costs, backward


@pytest.mark.parametrize("processors", [0.5, 1.0, 1.5, 8.0])
@pytest.mark.parametrize("seed", range(8))
def test_the_pipeline_ends_when_a_simulation_in_ticks_does(seed: int, processors: float) -> None:
    jobs, costs, backward = random_jobs(random.Random(seed))
    found, _ = simulate(jobs, costs, UNIT, backward=backward, processors=processors)
    events = sum(len(job.script) for job in jobs)
    assert found == pytest.approx(
        in_ticks(jobs, costs, backward=backward, processors=processors), abs=(events + 2) * 2 * TICK
    )


@pytest.mark.parametrize("seed", range(5))
def test_without_work_it_is_the_closed_form(seed: int) -> None:
    draw = random.Random(seed)
    ready = sorted(draw.uniform(0, 0.1) for _ in range(6))
    sends = [draw.uniform(0, 0.05) for _ in ready]
    jobs, costs = [], {}
    for lane, (at, seconds) in enumerate(zip(ready, sends, strict=True)):
        send = Send("all_reduce", lane + 1, "bucket")
        costs[send] = Cost(0.0, seconds)
        jobs.append(Job(at, [send, Wait("bucket")], lane))
    found, _ = simulate(jobs, costs, UNIT, backward=0.1, processors=math.inf)
    assert found == pytest.approx(max(0.1, closed_form(ready, sends)), abs=1e-6)


def test_sharing_processors_slows_both_by_what_they_take() -> None:
    """One processor: backward of 100 ms and 50 ms of coding beside it take 150 ms together."""
    jobs = [Job(0.0, [Work("pass", 50)], 0)]
    assert simulate(jobs, {}, UNIT, backward=0.1, processors=1.0)[0] == pytest.approx(0.15)
    assert simulate(jobs, {}, UNIT, backward=0.1, processors=2.0)[0] == pytest.approx(0.1)
    # Half a processor each: backward was measured so, coding was not.
    assert simulate(jobs, {}, UNIT, backward=0.1, processors=0.5)[0] == pytest.approx(0.2)


PROFILE = of_size(5_000_000, 0.1)
FAST = Device("fast", Speed(0.0, 1e-10))


@pytest.mark.parametrize("recipe", ["ddp", "torch-fp16", *PRESETS])
def test_slower_networks_and_more_latency_never_help(recipe: str) -> None:
    steps = [
        [
            predict(recipe, PROFILE, NetworkModel("", Link(latency, 8 / bits)), FAST, workers=4).step
            for bits in (1e10, 1e9, 1e8, 1e7)
        ]
        for latency in (0.0, 1e-3, 2e-2)
    ]
    for row in steps:
        assert row == sorted(row)
    for column in zip(*steps, strict=True):
        assert list(column) == sorted(column)


@pytest.mark.parametrize("recipe", ["ddp", "two-shot-4", "threshold-k", "qsgd-4"])
def test_more_workers_never_help(recipe: str) -> None:
    network = NetworkModel("", Link(1e-3, 8e-8))
    steps = [predict(recipe, PROFILE, network, FAST, workers=workers).step for workers in (2, 3, 4, 8, 16, 64)]
    assert steps == sorted(steps)


def test_sent_bytes_are_those_of_the_recipe() -> None:
    network = NetworkModel.named("1gbe")
    for name, workers in itertools.product(("two-shot-4", "threshold-k", "bf16", "powersgd-4"), (2, 4)):
        from thinwire import parse

        recipe = parse(name)
        expected = sum(
            recipe.exchange.sent_bytes(
                recipe.codec, bucket.numel, world_size=workers, exact=bucket.exact, shapes=bucket.shapes
            )
            for bucket in PROFILE.buckets
        )
        assert predict(name, PROFILE, network, FAST, workers=workers).sent_bytes == expected


def test_one_worker_computes_and_nothing_else() -> None:
    assert predict("ddp", PROFILE, NetworkModel.named("1gbe"), FAST, workers=1).step == pytest.approx(0.1)


def test_a_recipe_that_so_many_cannot_run_is_refused() -> None:
    with pytest.raises(ThinwireError):
        predict("global-qsgd-8", PROFILE, NetworkModel.named("1gbe"), FAST, workers=200)


def test_profiles_that_cannot_be_are_refused() -> None:
    bucket = BucketProfile(((8, 8),), 0, 1.0)
    for broken in (
        dict(buckets=()),
        dict(buckets=(BucketProfile((), 0, 1.0),)),
        dict(forward=-1.0),
        dict(backward=float("nan")),
        dict(processors=0.0),
    ):
        given = {"name": "m", "forward": 0.1, "backward": 0.1, "rest": 0.0, "buckets": (bucket,), **broken}
        with pytest.raises(ThinwireError):
            Profile(**given)  # type: ignore[arg-type]
    with pytest.raises(ThinwireError):
        of_size(0, 0.1)
    with pytest.raises(ThinwireError):
        of_size(100, 0.0)
