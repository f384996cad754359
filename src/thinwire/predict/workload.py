"""The profile of a training step: its buckets, when each is ready, and the seconds of forward and backward."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..codecs.base import Shape
from ..comm.communicator import joined
from ..errors import OptionError
from ..reduce.buckets import FIRST_BUCKET, Layout, Parameter, one_dimensional_or_tiny
from ..reduce.buckets import Bucket as ReducedBucket

_MB = 1 << 20
BACKWARD_SHARE, FORWARD_SHARE = 0.6, 0.3  # of a step of which only the whole is known; the rest is the optimizer


@dataclass(frozen=True)
class BucketProfile:
    """Gradients that are sent together: matrices that are compressed, and `exact` elements that are not.

    `ready` is when the last of them is computed, as a share of backward.
    """

    shapes: tuple[Shape, ...]
    exact: int
    ready: float

    @classmethod
    def of(cls, bucket: ReducedBucket, ready: float) -> BucketProfile:
        return cls(tuple(part.shape for part in bucket.parts), bucket.exact_numel, ready)

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def elements(self) -> int:
        return self.numel + self.exact


@dataclass(frozen=True)
class Profile:
    """A training step without communication, in seconds of one worker while all of them compute.

    `processors` is the share of processors of one worker: 0.5 if four workers share two cores. `meeting` is the time
    that the slowest worker adds where all wait for each other.
    """

    name: str
    forward: float
    backward: float
    rest: float
    buckets: tuple[BucketProfile, ...]
    processors: float = math.inf
    meeting: float = 0.0
    measured: bool = False

    def __post_init__(self) -> None:
        if not self.buckets or not any(bucket.elements for bucket in self.buckets):
            raise OptionError(f"{self.name} has no parameters to train: there is nothing to send")
        if not all(0 <= number < math.inf for number in (self.forward, self.backward, self.rest, self.meeting)):
            raise OptionError(f"{self.name}: times are in seconds, 0 or more")
        if not self.processors > 0:
            raise OptionError(f"{self.name}: a worker needs a part of a processor, above 0, not {self.processors}")

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.rest

    @property
    def parameters(self) -> int:
        return sum(bucket.elements for bucket in self.buckets)

    def as_dict(self) -> dict[str, Any]:
        told = asdict(self)
        told["processors"] = None if math.isinf(self.processors) else self.processors
        return told

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Profile:
        buckets = tuple(
            BucketProfile(tuple(tuple(shape) for shape in one["shapes"]), one["exact"], one["ready"])
            for one in told["buckets"]
        )
        processors = math.inf if told["processors"] is None else told["processors"]
        return cls(**{**told, "buckets": buckets, "processors": processors})


def of_size(parameters: int, step_seconds: float, *, bucket_mb: float = 25.0) -> Profile:
    """A model known by its size and step time only: square matrices that become ready one after the other.

    >>> profile = of_size(25_600_000, 0.12)
    >>> len(profile.buckets), profile.parameters, round(profile.compute, 3)
    (5, 25600000, 0.12)
    """
    if parameters < 1:
        raise OptionError(f"a model has at least one parameter, not {parameters}: write --params 25.6M")
    if not 0 < step_seconds < math.inf:
        raise OptionError("a step takes longer than nothing: write --step-time 120ms")
    sizes, left, cap = list[int](), parameters, FIRST_BUCKET // 4
    while left:
        sizes.append(min(left, cap))
        left -= sizes[-1]
        cap = max(1, int(bucket_mb * _MB) // 4)
    done, buckets = 0, []
    for size in sizes:
        done += size
        buckets.append(BucketProfile(_squares(size), 0, done / parameters))
    forward, backward = FORWARD_SHARE * step_seconds, BACKWARD_SHARE * step_seconds
    rest = step_seconds - forward - backward
    return Profile(f"{parameters:,} parameters", forward, backward, rest, tuple(buckets))


def _squares(size: int, side: int = 1024) -> tuple[Shape, ...]:
    whole, rest = divmod(size, side * side)
    shapes: list[Shape] = [(side, side)] * whole
    return tuple([*shapes, (rest,)] if rest else shapes)


# ------------------------------------------------------------------------------------------------------ measured


@dataclass(frozen=True)
class _Timed:
    """One step: seconds of its parts, and for each bucket its time of arrival and its parameters."""

    forward: float
    backward: float
    whole: float
    arrived: Sequence[tuple[float, list[str]]]


def passed_on(bucket: Any) -> torch.futures.Future[Tensor]:
    """The result of a DDP hook that sends nothing: its bucket as it is."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Stopwatch:
    """Times the parts of a step of a DDP model with a hook that sends nothing."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._model = model
        self._began = self._forward_done = 0.0
        self._arrived: list[tuple[float, list[str]]] = []
        self._steps: list[_Timed] = []
        model.register_comm_hook(None, self._hook)
        model.module.register_forward_pre_hook(lambda *_: self._begin())
        model.module.register_forward_hook(lambda *_: self._forward_ended())

    def _begin(self) -> None:
        self._began, self._arrived = time.perf_counter(), []

    def _forward_ended(self) -> None:
        self._forward_done = time.perf_counter()

    def _hook(self, state: object, bucket: Any) -> Any:  # DDP checks annotations that are there
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        self._arrived.append((time.perf_counter(), names))
        return passed_on(bucket)

    _hook.__annotations__.clear()

    def step(self, step: Callable[[], object]) -> None:
        """Run a whole training step under the watch."""
        begin = time.perf_counter()
        step()
        end = time.perf_counter()
        if self._arrived:
            forward, backward = self._forward_done - self._began, self._arrived[-1][0] - self._forward_done
            self._steps.append(_Timed(forward, backward, end - begin, self._arrived))

    def profile(self, name: str, *, processors: float = math.inf, warm: int = 3) -> Profile:
        """The means over the steps after the first few, in which DDP arranges its buckets."""
        steps = self._steps[warm:] or self._steps
        if not steps:
            raise OptionError(f"{name} has no gradients to send: does its loss need any parameter?")
        forward, backward = _mean([step.forward for step in steps]), _mean([step.backward for step in steps])
        arrived, buckets = [step.arrived for step in steps if len(step.arrived) == len(steps[-1].arrived)], []
        parameters = [Parameter.of(key, p, one_dimensional_or_tiny) for key, p in self._model.module.named_parameters()]
        layout = Layout(parameters, [names for _, names in arrived[-1]])
        for number, bucket in enumerate(layout.buckets):
            at = _mean([each[number][0] - each[-1][0] for each in arrived])
            ready = min(1.0, max(0.0, 1.0 + at / backward)) if backward > 0 else 1.0
            buckets.append(BucketProfile.of(bucket, ready))
        rest = max(0.0, _mean([step.whole for step in steps]) - forward - backward)
        return Profile(name, forward, backward, rest, tuple(buckets), processors, measured=True)


def _mean(values: Sequence[float]) -> float:
    """The mean, not the median: where workers share processors, some steps take much longer, and they count too."""
    return sum(values) / len(values)


def model_named(text: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Calls `module:function`, which returns a model and a function that gives its loss on a batch.

    >>> model_named("nothing")
    Traceback (most recent call last):
    thinwire.errors.OptionError: --model is written module:function, not nothing
    """
    module_name, colon, function_name = text.partition(":")
    if not colon or not module_name or not function_name:
        raise OptionError(f"--model is written module:function, not {text}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError) as problem:
        raise OptionError(f"there is no {text} here: {problem}") from None
    except Exception as problem:
        raise OptionError(f"{text} failed: {type(problem).__name__}: {problem}") from problem
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module) and callable(found[1])):
        raise OptionError(f"{text} must return a model and a function of it that gives the loss of one batch")
    return found


def measured_profile(
    name: str, net: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, steps: int = 8, bucket_mb: float = 25.0
) -> Profile:
    """Train a few steps alone on this machine, with SGD, and time them. Needs no process group and leaves none."""
    if not any(p.requires_grad for p in net.parameters()):
        raise OptionError(f"{name} has no parameters to train: there is nothing to send")
    with joined():
        model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
        watch = Stopwatch(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        for _ in range(steps):
            watch.step(step)
        return watch.profile(name)
