"""Calibration before the first step: times a few messages, compiles the candidates and times their codecs."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..comm import streams
from ..comm.network import Network
from ..exchange.script import Collective
from ..predict.collectives import hops
from ..predict.devices import Device, Speed, measure_device, this_machine
from ..reduce.local_group import LocalGroup
from .candidates import Candidate
from .estimator import FACTORS, LinkEstimator

_LARGE, _MIDDLE, _TINY = 1 << 19, 1 << 18, 1 << 10  # bytes of the messages
_QUICK, _LONGER = 0.01, 16  # if a large message takes fewer seconds, messages are sent again, this many times longer
_PATIENCE = 0.05  # seconds above which a message is not repeated


@dataclass(frozen=True)
class Calibration:
    """Timings of a few messages: the latency of a tiny one, and size and seconds by collective."""

    ranks: int
    latency: float
    seconds: Mapping[Collective, tuple[int, float]]

    def estimator(self) -> LinkEstimator:
        """A first estimate of the link, and the factor by which each collective differs from its formula."""
        size, taken = self.seconds["all_reduce"]
        trips, times = hops("all_reduce", size, self.ranks)
        small_trips, _ = hops("all_gather", _TINY, self.ranks)
        latency = self.latency / max(1.0, small_trips)
        transfer = max(taken - trips * latency, 0.2 * taken)
        estimator = LinkEstimator(latency=min(latency, taken / trips), byte_seconds=transfer / (times * size))
        link, (low, high) = estimator.link(), FACTORS
        for collective, (amount, seconds) in self.seconds.items():
            formula = link.cost(collective, amount, ranks=self.ranks).seconds
            estimator.collectives[collective] = min(max(seconds / formula, low), high)
        return estimator


def calibrate(network: Network, device: torch.device) -> LinkEstimator:
    """Time a few messages. This takes a second on a link of 20 Mbit/s or of 1 Gbit/s, and less in between.

    A fast link gets longer messages too, because traffic shaping lets the first megabyte pass at full speed.
    """
    tiny = lambda: network.all_gather(_blank(_TINY, device))  # noqa: E731
    latency = _fastest(tiny, tiny, network, device, times=4)
    seconds = _timed(_messages(network, device, 1), tiny, network, device)
    if seconds["all_reduce"][1] < _QUICK:
        seconds |= _timed(_messages(network, device, _LONGER), tiny, network, device)
    network.take_spans()
    return Calibration(network.world_size, latency, seconds).estimator()


_Messages = dict[Collective, tuple[int, Callable[[], object]]]


def _messages(network: Network, device: torch.device, longer: int) -> _Messages:
    """Size and function by collective. Small sums and broadcasts have one length."""
    ranks, large, middle = network.world_size, _LARGE * longer, _MIDDLE * longer
    # Allocated before timing: page faults take as long as sending over a fast link.
    summed, mine, gathered = _blank(large, device), _blank(middle, device), _blank(middle * ranks, device)
    rows, received = (_blank(middle, device)[: middle // 4 // ranks * ranks].view(ranks, -1) for _ in range(2))
    found: _Messages = {
        "all_reduce": (large, lambda: network.start_all_reduce(summed).wait()),
        "all_gather": (middle, lambda: network.all_gather(mine, out=gathered)),
        "all_to_all": (middle, lambda: network.all_to_all(rows, out=received)),
    }
    if longer == 1:
        found["small_sum"] = (_MIDDLE // 4, lambda: network.all_reduce(_blank(_MIDDLE // 4, device)))
        found["broadcast"] = (_MIDDLE // 4, lambda: network.broadcast(_blank(_MIDDLE // 4, device), source=0))
    return found


def _timed(
    messages: _Messages, barrier: Callable[[], object], network: Network, device: torch.device
) -> dict[Collective, tuple[int, float]]:
    return {name: (size, _fastest(run, barrier, network, device)) for name, (size, run) in messages.items()}


def _fastest(
    run: Callable[[], object], barrier: Callable[[], object], network: Network, device: torch.device, *, times: int = 3
) -> float:
    """The minimum over the ranks, because the last rank to arrive waits for nobody, and over a few repetitions."""
    best = math.inf
    for _ in range(times):
        barrier()
        begin = time.perf_counter()
        run()
        streams.finish(device)
        mine = torch.tensor([begin - time.perf_counter()], dtype=torch.float64, device=device)
        best = min(best, -float(network.all_reduce(mine, op="max")))
        if best > _PATIENCE:
            break
    return max(best, 1e-6)


def _blank(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size // 4, device=device)


def prepare(candidates: Sequence[Candidate], network: Network, device: torch.device) -> Device | None:
    """Compile or load the kernels of all candidates before the first step; on rank 0, return codec speeds.

    Rank 0 goes first: nothing disturbs its timings, and the other ranks load what it compiled from disk. Ranks meet
    after each candidate, so that no message waits longer than the timeout of the group.
    """
    first, speeds = network.rank == 0, dict[str, Speed]()
    found: Device | None = None
    for one in candidates:
        codecs = () if one.recipe.dense else one.recipe.codecs
        if first and device.type == "cuda":
            found = measure_device(codecs, known=found, on=device)
        elif first:
            _run_once(one)
            found = this_machine(codecs)
            speeds |= found.speeds
        network.all_gather(_blank(_TINY, device))
    if not first:
        for one in candidates:
            if device.type == "cuda":
                measure_device(() if one.recipe.dense else one.recipe.codecs, on=device)  # compiles its kernels
            else:
                _run_once(one)
    network.all_gather(_blank(_TINY, device))
    return replace(found, speeds={**found.speeds, **speeds}) if found is not None else None


def _run_once(candidate: Candidate) -> None:
    group = LocalGroup(candidate.recipe, world_size=2)
    for step in range(2):
        group.mean([torch.ones(_TINY), torch.ones(_TINY)], step=step)


def processors_per_rank(network: Network, device: torch.device) -> float:
    """The processors of this machine divided by the number of ranks on it."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = os.uname().nodename
    mine = torch.tensor([_hash_of(machine)], dtype=torch.int64, device=device)
    here = int((network.all_gather(mine) == mine).sum())
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return count / here


def _hash_of(text: str) -> int:
    """A hash that is the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=7).digest(), "big")
