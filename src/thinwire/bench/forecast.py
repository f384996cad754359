"""The prediction that `compare` prints beside what it measures: made before any recipe runs.

Workers measure the network and a step that sends nothing, all of them at once as they will train; the parent prices
every recipe with that. Nothing that a recipe does in the comparison goes into its prediction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..comm import Communicator
from ..errors import ThinwireError
from ..plan.cost import predict
from ..plan.devices import Device, this_machine
from ..plan.network import NetworkModel
from ..plan.probe import Tell, measure
from ..plan.workload import Profile, Stopwatch, measured_profile
from ..recipe import parse
from .workloads import Workload, workload

_WARM, _ALONE, _TOGETHER = 3, 10, 6  # steps


def known_to_plans(name: str) -> bool:
    """torch's PowerSGD is not predicted: what it computes is not in our scripts."""
    return not name.startswith("torch-powersgd")


def device_for(recipes: Sequence[str]) -> Device:
    """The speeds of this machine for the codecs of these recipes; measured now if they are not known yet."""
    codecs = []
    for name in recipes:
        if not name.startswith(("ddp", "torch-")):
            recipe = parse(name)
            codecs.append(recipe.codec)
            back = getattr(recipe.exchange, "codec_back", None)
            codecs += [back(recipe.codec)] if back is not None else []
    return this_machine(codecs)


def workload_profile(name: str, *, bucket_mb: float) -> Profile:
    """A workload of `compare`, timed alone on this machine."""
    work = workload(name)
    batch = work.batch(0, seed=0, rank=0, world_size=1)
    net = work.model(seed=0)
    return measured_profile(name, net, lambda model: model(*batch), bucket_mb=bucket_mb)


def measure_here(
    work: Workload, everyone: Communicator, alone: Any, *, bucket_mb: float, seconds: float, tell: Tell
) -> dict[str, Any]:
    """On every worker at once: the network, and the workload without it. The same on all ranks."""
    network = measure(everyone, seconds=seconds, largest=16 << 20, tell=tell) if everyone.world_size > 1 else None
    profile = _profile(work, everyone, alone, bucket_mb=bucket_mb)
    return {"network": None if network is None else network.as_dict(), "profile": profile.as_dict()}


def _profile(work: Workload, everyone: Communicator, alone: Any, *, bucket_mb: float) -> Profile:
    rank, ranks = everyone.rank, everyone.world_size
    model = DistributedDataParallel(work.model(seed=0), process_group=alone, bucket_cap_mb=bucket_mb, init_sync=False)
    watch, optimizer, number = Stopwatch(model), work.optimizer(model), 0

    def step() -> None:
        nonlocal number
        inputs, targets = work.batch(number, seed=0, rank=rank, world_size=ranks)
        optimizer.zero_grad()
        model(inputs, targets).backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        number += 1

    everyone.all_reduce(torch.zeros(1))
    for _ in range(_WARM + _ALONE):
        watch.step(step)
    everyone.all_reduce(torch.zeros(1))
    meeting = _seconds(_meet(everyone), 5)
    together = _seconds(_meet(everyone, step), _TOGETHER)
    mine = watch.profile(work.name, processors=len(os.sched_getaffinity(0)) / ranks, warm=_WARM)
    numbers = [mine.forward, mine.backward, mine.rest, together - meeting, *(bucket.ready for bucket in mine.buckets)]
    means = (everyone.all_reduce(torch.tensor(numbers, dtype=torch.float64)) / ranks).tolist()
    forward, backward, rest, synchronous, *ready = means
    buckets = tuple(replace(bucket, ready=at) for bucket, at in zip(mine.buckets, ready, strict=True))
    waits = max(0.0, synchronous - forward - backward - rest)
    return replace(mine, forward=forward, backward=backward, rest=rest, buckets=buckets, meeting=waits)


def _meet(everyone: Communicator, before: Callable[[], None] = lambda: None) -> Callable[[], None]:
    def run() -> None:
        before()
        everyone.all_reduce(torch.zeros(1))

    return run


def _seconds(run: Callable[[], None], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begin) / times


def predictions(
    measured: dict[str, Any], recipes: Sequence[str], device: Device, *, workers: int
) -> dict[str, float | None]:
    """Milliseconds a step, by recipe; None where nothing can be said."""
    profile = Profile.from_dict(measured["profile"])
    told = measured["network"]
    network = NetworkModel.named("unshaped") if told is None else NetworkModel.from_dict(told)
    found: dict[str, float | None] = {}
    for name in recipes:
        try:
            known = known_to_plans(name)
            found[name] = 1e3 * predict(name, profile, network, device, workers=workers).step if known else None
        except ThinwireError:
            found[name] = None
    return found
