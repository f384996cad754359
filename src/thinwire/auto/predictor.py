"""Predicts step time and progress per step of every choice on the estimated link, from scripts that it caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..exchange.script import Script, Send
from ..predict.cost import LANES, Job, Prediction, carried_script, jobs_of, predict_jobs
from ..predict.devices import Device
from ..predict.workload import BucketProfile, Profile
from ..reduce.buckets import Layout
from .choices import Choice, Choices, per_bucket
from .estimator import LinkEstimate

PRIOR = (0.45, 0.3, 0.2, 0.14, 0.09)  # energy kept at each density, before the first measurement


class StepPredictor:
    """Knows the workload and the device. The link is an argument, because it changes at every step."""

    def __init__(self, choices: Choices, device: Device, *, workers: int) -> None:
        self.choices, self.device, self.workers = choices, device, workers
        self.curve: tuple[float, ...] = PRIOR
        self.energy_kept: dict[str, float] = {}  # by family: energy really kept over what the curve says
        self._profile: Profile | None = None
        self._scripts: dict[tuple[int, int], Script] = {}  # by candidate and bucket

    @property
    def profile(self) -> Profile:
        assert self._profile is not None
        return self._profile

    def set_profile(self, profile: Profile, kinds: Sequence[str]) -> None:
        """Times may change at every step; new buckets invalidate the scripts.

        Measured times stay if the new profile has only guessed ones.
        """
        if self._profile is not None and self._profile.measured and not profile.measured:
            old = self._profile
            profile = replace(profile, forward=old.forward, backward=old.backward, rest=old.rest, measured=True)
        known = None if self._profile is None else [(b.shapes, b.exact) for b in self._profile.buckets]
        if known != [(b.shapes, b.exact) for b in profile.buckets] or list(kinds) != self.choices.kinds:
            self._scripts.clear()
        self._profile, self.choices.kinds = profile, list(kinds)

    def set_times(
        self, forward: float, backward: float, rest: float, ready: Sequence[float], *, measured: bool | None = None
    ) -> None:
        """Keep the buckets and replace the times; `measured` says where they come from, None if that stays."""
        old = self.profile
        buckets = tuple(replace(bucket, ready=at) for bucket, at in zip(old.buckets, ready, strict=True))
        known = old.measured if measured is None else measured
        new = replace(old, forward=forward, backward=backward, rest=rest, buckets=buckets, measured=known)
        self.set_profile(new, self.choices.kinds)

    # ----------------------------------------------------------------------------------------------- step time

    def predict(self, choice: Choice, link: LinkEstimate, canary: tuple[int, int] | None = None) -> Prediction:
        return predict_jobs(self._jobs(choice, canary), self.profile, link, self.device, workers=self.workers)

    def latency_share(self, choice: Choice, link: LinkEstimate) -> float:
        """The share of latency in the cost of all messages."""
        sends = [op for job in self._jobs(choice) for op in job.script if isinstance(op, Send)]
        costs = [link.cost(op.collective, op.size, ranks=self.workers) for op in sends]
        total = sum(cost.seconds for cost in costs)
        return sum(cost.latency for cost in costs) / total if total else 0.5

    def _jobs(self, choice: Choice, canary: tuple[int, int] | None = None) -> list[Job]:
        numbers, profile = per_bucket(choice, self.choices.kinds, canary), self.profile
        if all(self.choices.candidates[number].recipe.dense for number in numbers):
            return jobs_of("ddp", profile, workers=self.workers)
        return [
            Job(bucket.ready * profile.backward, self._script(number, place), place % LANES)
            for place, (number, bucket) in enumerate(zip(numbers, profile.buckets, strict=True))
        ]

    def _script(self, candidate: int, bucket: int) -> Script:
        key = (candidate, bucket)
        if key not in self._scripts:
            last = bucket == len(self.profile.buckets) - 1
            recipe = self.choices.candidates[candidate].recipe
            self._scripts[key] = carried_script(recipe, self.profile.buckets[bucket], self.workers, last=last)
        return self._scripts[key]

    # ------------------------------------------------------------------------------------------------ progress

    def progress_per_step(self, choice: Choice) -> float:
        """Progress relative to a dense step: the mean over the buckets, weighted by their elements."""
        numbers, total, weight = per_bucket(choice, self.choices.kinds), 0.0, 0
        for number, bucket in zip(numbers, self.profile.buckets, strict=True):
            candidate = self.choices.candidates[number]
            share = candidate.progress_per_step(bucket.numel, workers=self.workers, curve=self.curve)
            if candidate.density is not None:
                share = min(1.0, share * self.energy_kept.get(candidate.family, 1.0))
            total += bucket.numel * share + bucket.exact
            weight += bucket.elements
        return total / weight

    # --------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers under the keys of 0.1, so that its checkpoints load."""
        return {"curve": list(self.curve), "kept": dict(self.energy_kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curve, self.energy_kept = tuple(float(value) for value in state["curve"]), dict(state["kept"])


def assumed_profile(layout: Layout, processors: float) -> Profile:
    """The profile of a layout before the first timed step: short times, buckets ready one after the other."""
    total = max(1, sum(bucket.numel + bucket.exact_numel for bucket in layout.buckets))
    done, buckets = 0, []
    for bucket in layout.buckets:
        done += bucket.numel + bucket.exact_numel
        buckets.append(BucketProfile.of(bucket, done / total))
    return Profile("training", 0.01, 0.02, 0.001, tuple(buckets), processors)
