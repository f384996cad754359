"""Compression overhead of a device: seconds per element for the stages of every codec, measured or from a data sheet.

Scripts (`exchange/script.py`) say how many elements pass through which stage. A device prices them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..codecs.base import Codec
from ..codecs.stages import StageName, Trials, Work
from ..comm import streams
from ..errors import OptionError
from ..rng import Draw

SCHEMA = 1
_KIND = "device"
_CPU = torch.device("cpu")
_LARGE, _SMALL = 1 << 22, 1 << 12  # more than a cache holds, as gradients are; and next to nothing
_ROUNDS, _TURNS = 3, 3
_UNKNOWN = 6.0  # passes that an unknown stage counts as
_HOOK_ON_A_GPU = 0.1e-3  # stated: nobody has measured it
_HOOK = 11e-3  # of a step: threads, futures, gloo; what 48 cells of benchmarks/scripts/plan.py leave unexplained


@dataclass(frozen=True)
class Speed:
    """seconds = messages * fixed + elements * each."""

    fixed: float
    each: float


@dataclass(frozen=True)
class Device:
    """Prices work. `speeds` is by codec text and stage; a codec that is missing there counts as several passes.

    >>> gpu = Device.named("a100")
    >>> 1e6 * gpu.seconds(Work("pass", 1_000_000)) < 50
    True
    """

    name: str
    sweep: Speed  # reading and writing every element once
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    hook: float = 0.0  # processor seconds of a step that no loop explains: threads, futures, gloo
    stated: bool = False  # by a data sheet, not measured

    def seconds(self, work: Work) -> float:
        if not work.elements:
            return 0.0
        if work.stage == "hook":
            return self.hook
        speed = self._speed(work.codec, work.stage) if work.codec is not None else self.sweep
        return work.messages * speed.fixed + work.elements * speed.each

    def _speed(self, codec: Codec, stage: StageName) -> Speed:
        unknown = Speed(self.sweep.fixed, _UNKNOWN * self.sweep.each)
        return self.speeds.get(_key(codec, stage), unknown)

    def knows(self, codec: Codec) -> bool:
        return any(_key(codec, stage) in self.speeds for stage in ("encode", "left"))

    # ------------------------------------------------------------------------------------------------- as JSON

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": _KIND,
            "name": self.name,
            "sweep": [self.sweep.fixed, self.sweep.each],
            "hook": self.hook,
            "speeds": {key: [speed.fixed, speed.each] for key, speed in self.speeds.items()},
        }

    @classmethod
    def from_dict(cls, told: Any, *, source: str = "this device") -> Device:
        try:
            if told["kind"] != _KIND or told["schema"] != SCHEMA:
                raise OptionError(f"{source} is not a device of this version of thinwire: measure it again")
            speeds = {key: Speed(*pair) for key, pair in told["speeds"].items()}
            numbers = [number for pair in (*told["speeds"].values(), told["sweep"]) for number in pair]
            if not all(0 <= number < math.inf for number in numbers):
                raise OptionError(f"{source} has speeds that nothing has: measure it again")
            return cls(told["name"], Speed(*told["sweep"]), speeds, hook=told["hook"])
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            if isinstance(problem, OptionError):
                raise
            raise OptionError(f"{source} is not a device file ({type(problem).__name__}: {problem})") from None

    @classmethod
    def named(cls, name: str) -> Device:
        """A device by name: constants from data sheets for GPUs, which nothing here has measured."""
        if name.endswith(".json"):
            try:
                return cls.from_dict(json.loads(Path(name).read_text()), source=name)
            except OSError as problem:
                raise OptionError(f"cannot read {name}: {problem.strerror}") from None
            except json.JSONDecodeError:
                raise OptionError(f"{name} is not JSON") from None
        if name not in DEVICES:
            raise OptionError(f"there is no device {name}: choose this, {', '.join(DEVICES)}, or a file")
        return DEVICES[name]


@functools.lru_cache(maxsize=4096)
def _key(codec: Codec, stage: str) -> str:
    return f"{codec.spec()} {stage}"


# ------------------------------------------------------------------------------------------------------ measured


def measure_device(codecs: Iterable[Codec], *, known: Device | None = None, on: torch.device = _CPU) -> Device:
    """Time the stages of codecs on a device, on a CPU in one thread; what `known` has is not timed again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        speeds = dict(known.speeds) if known is not None else {}
        for codec in dict.fromkeys(codecs):  # recipes share codecs
            if known is None or not known.knows(codec):
                speeds.update(_speeds_of(codec, on))
        sweep = _sweep(on) if known is None else known.sweep
    finally:
        torch.set_num_threads(threads)
    if on.type == "cuda":
        return Device(torch.cuda.get_device_name(on), sweep, speeds, hook=_HOOK_ON_A_GPU)
    return Device("this machine", sweep, speeds, hook=_HOOK)


def _sweep(on: torch.device) -> Speed:
    x = torch.zeros(_LARGE, device=on)
    out = torch.empty_like(x)
    return Speed(5e-6, _typical(lambda: out.copy_(x), on) / _LARGE)


def _speeds_of(codec: Codec, on: torch.device) -> dict[str, Speed]:
    large, small = _stages(codec, _LARGE, on), _stages(codec, _SMALL, on)
    found = {}
    for stage, (run, elements) in large.items():
        slow, quick = _typical(run, on), _typical(small[stage][0], on)
        each = max(0.0, (slow - quick) / (elements - small[stage][1]))
        found[_key(codec, stage)] = Speed(max(0.0, quick - each * small[stage][1]), each)
    return found


def _stages(codec: Codec, numel: int, on: torch.device) -> Trials:
    """Inputs and messages take turns, as in training: what was used last time is no longer in a cache."""
    given = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(_TURNS)]
    return codec.trials([x.to(on) for x in given], Draw(0, 0, "w", 0))


def _typical(run: Callable[[], object], on: torch.device) -> float:
    """Processor time of this thread, the median of a few: what others take of the machine is not the codec's.

    On a GPU it is the time until the device is done.
    """
    run()
    if on.type == "cuda":
        return statistics.median(_until_done(run, on) for _ in range(_ROUNDS))
    taken = []
    for _ in range(_ROUNDS):
        begin = time.thread_time()
        run()
        taken.append(time.thread_time() - begin)
    return statistics.median(taken)


def _until_done(run: Callable[[], object], on: torch.device) -> float:
    streams.finish(on)
    begin = time.perf_counter()
    run()
    streams.finish(on)
    return time.perf_counter() - begin


# --------------------------------------------------------------------------------------------------- remembered


def cache_file() -> Path:
    """Where the speeds of this machine are kept between two plans."""
    folder = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "thinwire" / "device.json"


def this_machine(codecs: Iterable[Codec]) -> Device:
    """The speeds of this machine: from the last time where they are known, else measured, which takes seconds."""
    path, wanted = cache_file(), list(codecs)
    try:
        known = Device.named(str(path))
    except OptionError:
        known = None  # none yet, or of another version
    if known is not None and all(known.knows(codec) for codec in wanted):
        return known
    device = measure_device(wanted, known=known)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(device.as_dict(), indent=1) + "\n")
    except OSError:
        pass  # a home that cannot be written to: measured again next time
    return device


def _gpu(name: str, terabytes: float) -> Device:
    """A GPU by its memory bandwidth: 8 bytes an element and pass, at two thirds of it; a launch takes 10 us."""
    sweep = Speed(10e-6, 8 / (terabytes * 1e12 * 2 / 3))
    return Device(name, sweep, hook=_HOOK_ON_A_GPU, stated=True)


DEVICES: Mapping[str, Device] = {
    device.name: device for device in (_gpu("t4", 0.32), _gpu("a10g", 0.6), _gpu("a100", 1.55), _gpu("h100", 3.35))
}
