"""How ranks meet before the first step under `auto`: what a few messages take, and what each has to compute with."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..comm.network import Network
from ..exchange.script import Collective
from ..predict.devices import Device, Speed, this_machine
from ..reduce.local_group import LocalGroup
from .candidates import Candidate
from .learner import Greeting, Learner

_LARGE, _MIDDLE, _TINY = 1 << 19, 1 << 18, 1 << 10  # bytes of the messages
_QUICK, _LONGER = 0.01, 16  # seconds of a large message below which all are sent once more, so many times longer
_PATIENCE = 0.05  # seconds of a message above which it is not sent twice


def greet(network: Network, device: torch.device) -> Learner:
    """A few messages before the first step: a second on a line of 20 Mbit/s or 1 Gbit/s, less between.

    A line that seems quick is tried with longer messages: shaped ones let the first megabyte pass at full speed.
    """
    tiny = lambda: network.all_gather(_blank(_TINY, device))  # noqa: E731
    trip = _fastest(tiny, tiny, network, device, times=4)
    seconds = _timed(_messages(network, device, 1), tiny, network, device)
    if seconds["all_reduce"][1] < _QUICK:
        seconds |= _timed(_messages(network, device, _LONGER), tiny, network, device)
    network.take_spans()
    return Greeting(network.world_size, trip, seconds).learner()


_Messages = dict[Collective, tuple[int, Callable[[], object]]]


def _messages(network: Network, device: torch.device, longer: int) -> _Messages:
    """By collective: how many bytes, and what sends them. Small sums and broadcasts have one length."""
    ranks, large, middle = network.world_size, _LARGE * longer, _MIDDLE * longer
    # Made before they are timed: the first touch of so much memory takes as long as sending it over a fast line.
    summed, mine, gathered = _blank(large, device), _blank(middle, device), _blank(middle * ranks, device)
    rows, came = (_blank(middle, device)[: middle // 4 // ranks * ranks].view(ranks, -1) for _ in range(2))
    found: _Messages = {
        "all_reduce": (large, lambda: network.start_all_reduce(summed).wait()),
        "all_gather": (middle, lambda: network.all_gather(mine, out=gathered)),
        "all_to_all": (middle, lambda: network.all_to_all(rows, out=came)),
    }
    if longer == 1:
        found["small_sum"] = (_MIDDLE // 4, lambda: network.all_reduce(_blank(_MIDDLE // 4, device)))
        found["broadcast"] = (_MIDDLE // 4, lambda: network.broadcast(_blank(_MIDDLE // 4, device), source=0))
    return found


def _timed(
    messages: _Messages, meet: Callable[[], object], network: Network, device: torch.device
) -> dict[Collective, tuple[int, float]]:
    return {name: (size, _fastest(run, meet, network, device)) for name, (size, run) in messages.items()}


def _fastest(
    run: Callable[[], object], meet: Callable[[], object], network: Network, device: torch.device, *, times: int = 3
) -> float:
    """The least over the ranks, of whom the last to come waits for nobody, and over a few times if they are short."""
    best = math.inf
    for _ in range(times):
        meet()
        begin = time.perf_counter()
        run()
        mine = torch.tensor([begin - time.perf_counter()], dtype=torch.float64, device=device)
        best = min(best, -float(network.all_reduce(mine, op="max")))
        if best > _PATIENCE:
            break
    return max(best, 1e-6)


def _blank(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size // 4, device=device)


def prepare(candidates: Sequence[Candidate], network: Network, device: torch.device) -> Device | None:
    """Compile or load what candidates call, so that no step has to; on rank 0 also how fast it is.

    Rank 0 comes first, so that nothing runs beside what it times and the others find what it compiled on disk. They
    meet after each candidate: no message may wait for longer than a group allows.
    """
    first, speeds = network.rank == 0, dict[str, Speed]()
    if device.type == "cuda":  # by its data sheet; what is measured while training corrects it
        return Device.named("a100") if first else None
    for one in candidates:
        if first:
            _run_once(one)
            found = this_machine(() if one.recipe.dense else one.recipe.codecs)
            speeds |= found.speeds
        network.all_gather(_blank(_TINY, device))
    if not first:
        for one in candidates:
            _run_once(one)
    network.all_gather(_blank(_TINY, device))
    return replace(found, speeds=speeds) if first else None


def _run_once(candidate: Candidate) -> None:
    group = LocalGroup(candidate.recipe, world_size=2)
    for step in range(2):
        group.mean([torch.ones(_TINY), torch.ones(_TINY)], step=step)


def processors_here(network: Network, device: torch.device) -> float:
    """What this rank has for itself of its machine, which may hold several."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = os.uname().nodename
    mine = torch.tensor([_hash_of(machine)], dtype=torch.int64, device=device)
    here = int((network.all_gather(mine) == mine).sum())
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return count / here


def _hash_of(text: str) -> int:
    """The same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=7).digest(), "big")
