"""The predictions that `compare` prints beside its measurements, made before any recipe runs.

All workers at once measure the network and a step that sends nothing, as they will train. The parent prices every
recipe with these numbers. No measurement of a recipe goes into its prediction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...comm.communicator import Communicator
from ...errors import ThinwireError
from ...predict.cost import predict
from ...predict.devices import Device, measure_device, this_machine
from ...predict.network import NetworkModel
from ...predict.workload import Profile, Stopwatch, measured_profile
from ...recipe.compose import parse
from ..plan.probe import FEW_SIZES, Tell, measure
from .contenders import Contender
from .training import TrainingRun
from .workloads import Workload, workload

_WARM, _STEPS = 3, 10


def device_for(recipes: Sequence[str]) -> Device:
    """The compression overhead of this machine for the codecs of these recipes; measured now if not known yet."""
    return this_machine(codecs_of(recipes))


def codecs_of(recipes: Sequence[str]) -> list[Codec]:
    codecs: list[Codec] = []
    for name in recipes:
        if Contender.named(name).is_recipe:
            codecs += parse(name).codecs
    return codecs


def workload_profile(name: str, *, bucket_mb: float) -> Profile:
    """A workload of `compare`, timed alone on this machine."""
    work = workload(name)
    batch = work.batch(0, seed=0, rank=0, world_size=1)
    net = work.model(seed=0)
    return measured_profile(name, net, lambda model: model(*batch), bucket_mb=bucket_mb)


def measure_here(
    work: Workload,
    recipes: Sequence[str],
    everyone: Communicator,
    alone: Any,
    *,
    bucket_mb: float,
    seconds: float,
    tell: Tell,
) -> dict[str, Any]:
    """On all workers at once: the network, a step that sends nothing, and the compression overhead."""
    silent = _SilentSteps(work, everyone, alone, bucket_mb=bucket_mb)
    silent.run(_WARM + _STEPS)
    network = measure(everyone, seconds=seconds, sizes=FEW_SIZES, tell=tell) if everyone.world_size > 1 else None
    silent.run(_STEPS)  # once more: the speed of a shared machine varies
    profile = silent.profile()
    tell("codecs", 1, 1)
    everyone.all_reduce(torch.zeros(1))
    device = measure_device(codecs_of(recipes))
    told = None if network is None else network.as_dict()
    return {"network": told, "profile": profile.as_dict(), "device": device.as_dict()}


class _SilentSteps:
    """Steps that send nothing. All workers begin each step together."""

    def __init__(self, work: Workload, everyone: Communicator, alone: Any, *, bucket_mb: float) -> None:
        self._everyone = everyone
        self._run = TrainingRun(Contender.named("ddp"), work, seed=0, group=alone, bucket_mb=bucket_mb)
        model = self._run.model
        assert isinstance(model, DistributedDataParallel)
        self._watch = Stopwatch(model)
        self._slowest: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._everyone.all_reduce(torch.zeros(1))
            begin = time.perf_counter()
            self._watch.step(lambda: self._run.train(1))
            taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            self._slowest.append(float(self._everyone.all_reduce(taken, op="max")))

    def profile(self) -> Profile:
        """The mean over the workers, and the time that the slowest of them adds."""
        ranks = self._everyone.world_size
        mine = self._watch.profile(self._run.workload.name, processors=len(os.sched_getaffinity(0)) / ranks, warm=_WARM)
        numbers = [mine.forward, mine.backward, mine.rest, *(bucket.ready for bucket in mine.buckets)]
        sums = self._everyone.all_reduce(torch.tensor(numbers, dtype=torch.float64))
        forward, backward, rest, *ready = (sums / ranks).tolist()
        buckets = tuple(replace(bucket, ready=at) for bucket, at in zip(mine.buckets, ready, strict=True))
        slowest = self._slowest[_WARM:]
        waits = max(0.0, sum(slowest) / len(slowest) - forward - backward - rest)
        return replace(mine, forward=forward, backward=backward, rest=rest, buckets=buckets, meeting=waits)


def predictions(measured: dict[str, Any], recipes: Sequence[str], *, workers: int) -> dict[str, float | None]:
    """Milliseconds a step, by recipe; None if a recipe cannot be predicted."""
    profile, device = Profile.from_dict(measured["profile"]), Device.from_dict(measured["device"])
    told = measured["network"]
    network = NetworkModel.named("unshaped") if told is None else NetworkModel.from_dict(told)
    found: dict[str, float | None] = {}
    for name in recipes:
        try:
            found[name] = 1e3 * predict(name, profile, network, device, workers=workers).step
        except ThinwireError:  # torch's PowerSGD is no recipe and has no script
            found[name] = None
    return found
