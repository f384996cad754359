"""What every choice would take and be worth now: scripts that are written once, priced on the line as it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..exchange.script import Script, Send
from ..predict.cost import LANES, Job, Prediction, carried_script, jobs_of, predict_jobs
from ..predict.devices import Device
from ..predict.workload import Profile
from .agreement import KINDS, of_buckets
from .candidates import Candidate
from .learner import Learnt

PRIOR = (0.45, 0.3, 0.2, 0.14, 0.09)  # energy kept at each density, before anything was measured


def kind_of(numel: int, embedding: int, *, small: int = 1 << 16) -> str:
    """What a bucket is: `embedding` of its elements belong to tables of embeddings.

    >>> kind_of(1_000_000, 0), kind_of(1_000_000, 900_000), kind_of(1000, 0)
    ('large', 'embeddings', 'small')
    """
    if numel < small:
        return "small"
    return "embeddings" if 2 * embedding > numel else "large"


class Outlook:
    """Predicts choices: one candidate for each kind of bucket."""

    def __init__(self, candidates: Sequence[Candidate], device: Device, *, workers: int) -> None:
        self.candidates, self.device, self.workers = list(candidates), device, workers
        self.curve: tuple[float, ...] = PRIOR
        self.kept: dict[str, float] = {}  # by family: energy really kept over what the curve says
        self.kinds: list[str] = []
        self._profile: Profile | None = None
        self._scripts: dict[tuple[int, int], Script] = {}

    @property
    def profile(self) -> Profile:
        assert self._profile is not None
        return self._profile

    def set_profile(self, profile: Profile, kinds: Sequence[str]) -> None:
        """Times may change at every step; scripts are written anew only for other buckets.

        Times that were measured stay when only guesses come with other buckets.
        """
        if self._profile is not None and self._profile.measured and not profile.measured:
            old = self._profile
            profile = replace(profile, forward=old.forward, backward=old.backward, rest=old.rest, measured=True)
        known = None if self._profile is None else [(b.shapes, b.exact) for b in self._profile.buckets]
        if known != [(b.shapes, b.exact) for b in profile.buckets] or list(kinds) != self.kinds:
            self._scripts.clear()
        self._profile, self.kinds = profile, list(kinds)

    def present(self) -> list[int]:
        """The kinds that there are, by number: large ones first."""
        return [number for number, kind in enumerate(KINDS) if kind in self.kinds]

    # ----------------------------------------------------------------------------------------------------- time

    def predict(self, choice: Sequence[int], line: Learnt, canary: tuple[int, int] | None = None) -> Prediction:
        return predict_jobs(self._jobs(choice, canary), self.profile, line, self.device, workers=self.workers)

    def latency_share(self, choice: Sequence[int], line: Learnt) -> float:
        """How much of what its messages take is latency."""
        sends = [op for job in self._jobs(choice) for op in job.script if isinstance(op, Send)]
        costs = [line.cost(op.collective, op.size, ranks=self.workers) for op in sends]
        total = sum(cost.seconds for cost in costs)
        return sum(cost.latency for cost in costs) / total if total else 0.5

    def _jobs(self, choice: Sequence[int], canary: tuple[int, int] | None = None) -> list[Job]:
        ways, profile = of_buckets(choice, self.kinds, canary), self.profile
        if all(self.candidates[way].recipe.dense for way in ways):
            return jobs_of("ddp", profile, workers=self.workers)
        return [
            Job(bucket.ready * profile.backward, self._script(way, number), number % LANES)
            for number, (way, bucket) in enumerate(zip(ways, profile.buckets, strict=True))
        ]

    def _script(self, candidate: int, bucket: int) -> Script:
        key = (candidate, bucket)
        if key not in self._scripts:
            last = bucket == len(self.profile.buckets) - 1
            recipe = self.candidates[candidate].recipe
            self._scripts[key] = carried_script(recipe, self.profile.buckets[bucket], self.workers, last=last)
        return self._scripts[key]

    # ---------------------------------------------------------------------------------------------------- worth

    def worth(self, choice: Sequence[int]) -> float:
        """The mean over the elements of what each bucket's candidate is worth."""
        ways, total, weight = of_buckets(choice, self.kinds), 0.0, 0
        for way, bucket in zip(ways, self.profile.buckets, strict=True):
            candidate = self.candidates[way]
            share = candidate.worth(bucket.numel, workers=self.workers, curve=self.curve)
            if candidate.density is not None:
                share = min(1.0, share * self.kept.get(candidate.family, 1.0))
            total += bucket.numel * share + bucket.exact
            weight += bucket.elements
        return total / weight

    def at_pace(self, forward: float, backward: float, rest: float, ready: Sequence[float]) -> Profile:
        """The profile with other times."""
        buckets = tuple(replace(bucket, ready=at) for bucket, at in zip(self.profile.buckets, ready, strict=True))
        return replace(self.profile, forward=forward, backward=backward, rest=rest, buckets=buckets)

    def state(self) -> dict[str, Any]:
        return {"curve": list(self.curve), "kept": dict(self.kept)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.curve, self.kept = tuple(float(value) for value in state["curve"]), dict(state["kept"])
