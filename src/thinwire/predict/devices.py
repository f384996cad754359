"""How fast a processor compresses: seconds an element for the stages of every codec, measured here or stated.

Scripts (`exchange/script.py`) say how many elements pass through which stage; this prices them.
"""

from __future__ import annotations

import functools
import itertools
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
from torch import Tensor

from ..codecs.base import Codec
from ..codecs.global_qsgd import GlobalQsgd
from ..codecs.low_rank import LowRank
from ..codecs.sparse import SparseCodec, Sparsifier
from ..errors import OptionError
from ..exchange.script import Stage, Work
from ..rng import Draw

SCHEMA = 1
_KIND = "device"
_LARGE, _SMALL = 1 << 22, 1 << 12  # more than a cache holds, as gradients are; and next to nothing
_ROUNDS, _TURNS = 3, 3
_UNKNOWN = 6.0  # passes that stand for a stage of which nothing is known
_HOOK = 11e-3  # of a step: threads, futures, gloo; what was left of 48 cells of benchmarks/plan.py, all else explained

_Stages = dict[str, tuple[Callable[[], object], int]]  # what to time, and how many elements it counts as in scripts


@dataclass(frozen=True)
class Speed:
    """seconds = messages * fixed + elements * each."""

    fixed: float
    each: float


@dataclass(frozen=True)
class Device:
    """Prices work. `speeds` by codec as it is written, and stage; a codec that is not there counts as some passes.

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

    def _speed(self, codec: Codec, stage: Stage) -> Speed:
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


def measure_device(codecs: Iterable[Codec], *, known: Device | None = None) -> Device:
    """Time the stages of codecs on this machine, in one thread; what `known` has is not timed again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        speeds = dict(known.speeds) if known is not None else {}
        for codec in dict.fromkeys(codecs):  # recipes share codecs
            if known is None or not known.knows(codec):
                speeds.update(_speeds_of(codec))
        sweep = _sweep() if known is None else known.sweep
    finally:
        torch.set_num_threads(threads)
    return Device("this machine", sweep, speeds, hook=_HOOK)


def _sweep() -> Speed:
    x = torch.zeros(_LARGE)
    out = torch.empty_like(x)
    return Speed(5e-6, _typical(lambda: out.copy_(x)) / _LARGE)


def _speeds_of(codec: Codec) -> dict[str, Speed]:
    large, small = _stages(codec, _LARGE), _stages(codec, _SMALL)
    found = {}
    for stage, (run, elements) in large.items():
        slow, quick = _typical(run), _typical(small[stage][0])
        each = max(0.0, (slow - quick) / (elements - small[stage][1]))
        found[_key(codec, stage)] = Speed(max(0.0, quick - each * small[stage][1]), each)
    return found


def _stages(codec: Codec, numel: int) -> _Stages:
    """Inputs and messages take turns, as in training: what was used last time is no longer in a cache."""
    draw, state, out = Draw(0, 0, "w", 0), codec.new_state(), torch.zeros(numel)
    given = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(_TURNS)]
    x = given[0]
    if isinstance(codec, LowRank):
        return _factor_stages(codec, x.view(_side(numel), -1), draw)
    if isinstance(codec, GlobalQsgd):
        return _global_stages(codec, x, out, draw)
    messages = itertools.cycle([codec.encode(one, draw=draw, state=state) for one in given])
    turns = itertools.cycle(given)
    kept = codec.capacity(numel) if isinstance(codec, SparseCodec) else numel
    encode = codec.encode_taking if codec.sparse else codec.encode  # sparse ones have a memory as a rule
    stages: _Stages = {
        "encode": (lambda: encode(next(turns), draw=draw, state=state), numel),
        "add": (lambda: codec.add(next(messages), out), kept),
        "put": (lambda: codec.put(next(messages), out), kept),
    }
    if isinstance(codec, Sparsifier):
        stages["select"] = (lambda: codec.pack_positions(next(turns), draw=draw, state=state), numel)
    return stages


def _global_stages(codec: GlobalQsgd, x: Tensor, out: Tensor, draw: Draw) -> _Stages:
    scale = codec.scale_from(codec.local_norm(x))
    codes = codec.to_sum(x, scale=scale, world_size=4, draw=draw)
    stages: _Stages = {
        "encode": (lambda: codec.to_sum(x, scale=scale, world_size=4, draw=draw), x.numel()),
        "put": (lambda: codec.from_sum(codes, scale=scale, world_size=4, mean=True, out=out), x.numel()),
    }
    if codec.addition == "codes":
        stages["add"] = (lambda: codec.add_codes(codes, codes, draw), x.numel())
    return stages


def _factor_stages(codec: LowRank, matrix: Tensor, draw: Draw) -> _Stages:
    state = codec.new_state()
    p = codec.orthonormal(codec.left(matrix, state=state, draw=draw))
    q = codec.right(matrix, p)
    codec.warm(state, q)
    return {
        "left": (lambda: codec.orthonormal(codec.left(matrix, state=state, draw=draw)), matrix.numel()),
        "right": (lambda: codec.right(matrix, p), matrix.numel()),
        "put": (lambda: codec.restore(p, q, tuple(matrix.shape)), matrix.numel()),
    }


def _side(numel: int) -> int:
    """Of a matrix that is nearly square."""
    return 1 << (numel.bit_length() // 2)


def _typical(run: Callable[[], object]) -> float:
    """Processor time of this thread, the median of a few: what others take of the machine is not the codec's."""
    run()
    taken = []
    for _ in range(_ROUNDS):
        begin = time.thread_time()
        run()
        taken.append(time.thread_time() - begin)
    return statistics.median(taken)


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
    return Device(name, sweep, hook=0.1e-3, stated=True)


DEVICES: Mapping[str, Device] = {
    device.name: device for device in (_gpu("t4", 0.32), _gpu("a10g", 0.6), _gpu("a100", 1.55), _gpu("h100", 3.35))
}
