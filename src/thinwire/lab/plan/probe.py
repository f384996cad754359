"""`thinwire probe`: times every collective over sizes, on running ranks or on emulated hosts.

Collectives are measured as training uses them: one message at a time, after a pause in which TCP may fall back to slow
start. The first round goes through all sizes that fit into the time, further rounds through the fast ones again.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...comm.communicator import Communicator, joined
from ...comm.network import SMALL_SUM
from ...errors import OptionError
from ...exchange.script import Collective
from ...predict.collectives import Link, hops
from ...predict.fit import fit_line
from ...predict.network import COLLECTIVES, Fit, NetworkModel
from ..emulate.hosts import Method, emulated_hosts
from ..emulate.paced import backend_here
from ..emulate.processes import event_writer, process_events, rendezvous

SIZES = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
FEW_SIZES = (
    1 << 10,
    16 << 10,
    128 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
)  # for a comparison
_SHORT_PAUSE, _LONG_PAUSE = 0.03, 0.22  # seconds between two messages, as between two steps of training
_LONG_TRIP = 4e-3  # seconds of a small message from which on the slow start of TCP matters
_ROUNDS = 5  # over all sizes, so that a busy moment of the machine hurts no single size
_WORTH_REPEATING = 0.4  # seconds
_PAIR_SIZES = (1 << 10, 256 << 10, 2 << 20)

Points = dict[Collective, list[tuple[float, float]]]
Tell = Callable[[str, int, int], None]  # what, done, of how many


def measure(
    comm: Communicator,
    *,
    seconds: float = 45.0,
    sizes: Sequence[int] = SIZES,
    pairs: bool = False,
    device: torch.device | None = None,
    tell: Tell = lambda what, done, of: None,
) -> NetworkModel:
    """The network between the ranks of `comm`; all ranks call it and get the same. Takes about `seconds` at most."""
    if comm.world_size < 2:
        raise OptionError("a network has at least two ends: probe with 2 ranks or more")
    device = torch.device("cpu") if device is None else device
    grid = [
        (collective, size if collective != "all_gather" else max(4, size // comm.world_size))
        for size in sizes
        for collective in COLLECTIVES
        if collective != "small_sum" or size <= SMALL_SUM
    ]
    for collective in COLLECTIVES:  # the first message of each kind opens connections
        _operation(comm, collective, sizes[0], device)()
    begin, found = time.perf_counter(), dict[tuple[Collective, int], list[float]]()
    for number in range(_ROUNDS):
        for place, (collective, size) in enumerate(grid):
            tell(f"{collective} {_written(size)}", number * len(grid) + place, _ROUNDS * len(grid))
            left = seconds - (time.perf_counter() - begin)
            pause = _pause(found.get(("swap", sizes[0]), [0.0]))
            if _goes(comm, _expected(found, collective, size), device, left=left - pause, first=number == 0):
                found.setdefault((collective, size), []).append(_timed(comm, collective, size, device, pause))
    points: Points = {collective: [] for collective in COLLECTIVES}
    for (collective, size), taken in found.items():
        points[collective].append((float(size), statistics.median(taken)))
    fits = {collective: Fit.through(collective, timed) for collective, timed in points.items() if len(timed) >= 2}
    between = _pairs(comm, device) if pairs else {}
    tell("done", 1, 1)
    return NetworkModel("measured", _link_of(fits, comm.world_size), comm.world_size, fits, pairs=between)


def _written(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"


def _expected(found: dict[tuple[Collective, int], list[float]], collective: Collective, size: int) -> float:
    """Expected seconds of a message: as before, or extrapolated from the two largest sizes so far."""
    if (collective, size) in found:
        return statistics.median(found[collective, size])
    known = [(float(at), taken[0]) for (kind, at), taken in found.items() if kind == collective]
    if len(known) < 2:
        return 0.0
    latency, byte_seconds = fit_line(sorted(known)[-2:])
    return latency + 1.1 * byte_seconds * size


def _goes(comm: Communicator, expected: float, device: torch.device, *, left: float, first: bool) -> bool:
    """Whether there is time for it: rank 0 decides. After the first round, long messages are not repeated.

    The first two sizes are always measured: fewer determine no latency and rate.
    """
    goes = expected == 0.0 or (expected < left and (first or expected < _WORTH_REPEATING))
    return bool(comm.broadcast(torch.tensor([int(goes)], device=device), source=0))


def _pause(small: Sequence[float]) -> float:
    """The pause before a message. On a long link it is as long as a step, so that TCP starts slowly as in training."""
    trip = statistics.median(small)
    return _SHORT_PAUSE if trip < _LONG_TRIP else _LONG_PAUSE + 3 * trip


def _timed(comm: Communicator, collective: Collective, size: int, device: torch.device, pause: float = 0.0) -> float:
    """Seconds, mean over the ranks."""
    run = _operation(comm, collective, size, device)
    time.sleep(pause)
    comm.all_reduce(torch.zeros(1, device=device))
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mine = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
    return float(comm.all_reduce(mine)) / comm.world_size


def _operation(comm: Communicator, collective: Collective, size: int, device: torch.device) -> Callable[[], object]:
    n = comm.world_size
    tensor = torch.zeros(max(1, size // 4), device=device)
    if collective == "all_reduce":
        return lambda: comm.start_all_reduce(tensor).wait()
    if collective == "small_sum":
        return lambda: comm.all_reduce(tensor)
    if collective == "all_gather":
        out = tensor.new_empty(n, tensor.numel())
        return lambda: comm.all_gather(tensor, out=out)
    if collective == "all_to_all":
        rows = torch.zeros(n, max(1, size // 4 // n), device=device)
        out = torch.empty_like(rows)
        return lambda: comm.all_to_all(rows, out=out)
    if collective == "broadcast":
        return lambda: comm.broadcast(tensor, source=0)
    came = torch.empty_like(tensor)
    return lambda: comm.swap({(comm.rank + 1) % n: tensor}, {(comm.rank - 1) % n: came})


def _pairs(comm: Communicator, device: torch.device) -> dict[str, Link]:
    """The link between every two ranks, while the others wait."""
    found = {}
    for one in range(comm.world_size):
        for other in range(one + 1, comm.world_size):
            points = [(float(size), _between(comm, one, other, size, device)) for size in _PAIR_SIZES]
            latency, byte_seconds = fit_line(points)
            found[f"{one}-{other}"] = Link(latency, max(byte_seconds, 1e-15))
    return found


def _between(comm: Communicator, one: int, other: int, size: int, device: torch.device) -> float:
    tensor, came = torch.zeros(size // 4, device=device), torch.empty(size // 4, device=device)
    taken = []
    for _ in range(3):
        comm.all_reduce(torch.zeros(1, device=device))
        begin = time.perf_counter()
        if comm.rank in (one, other):
            peer = other if comm.rank == one else one
            comm.swap({peer: tensor}, {peer: came})
        taken.append(time.perf_counter() - begin if comm.rank == one else 0.0)
    told: list[float] = comm.all_reduce(torch.tensor(taken, dtype=torch.float64, device=device)).tolist()
    return statistics.median(told)


def _link_of(fits: dict[Collective, Fit], ranks: int) -> Link:
    """One link for the whole network: latency of the smallest and rate of the largest messages to a neighbour."""
    fit = fits.get("swap") or next(iter(fits.values()))
    trips, times = hops(fit.collective, fit.points[-1][0], ranks)
    small, large = fit.regimes[0], fit.regimes[-1]
    return Link(small.latency / trips, max(large.byte_seconds / times, 1e-15))


# --------------------------------------------------------------------------------------------- on emulated hosts


@dataclass(frozen=True)
class Task:
    """The task of every process."""

    meet_at: str
    world_size: int
    seconds: float
    pairs: bool
    rank: int = 0

    def as_text(self) -> str:
        return json.dumps(asdict(self))


def probe_emulated(
    network: str,
    *,
    workers: int,
    method: Method | None = None,
    seconds: float = 45.0,
    pairs: bool = False,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> NetworkModel:
    """An emulated network, measured by one process on each host."""
    if workers < 2:
        raise OptionError(f"a network has at least two ends: probe with 2 workers or more, not {workers}")
    with emulated_hosts(workers, network=network, method=method) as hosts:
        task = Task(rendezvous(hosts), workers, seconds, pairs)
        events = process_events(
            hosts, __name__, lambda rank: replace(task, rank=rank).as_text(), after="nothing is kept"
        )
        told = _watched(events, on_event)
        about = f"emulated {network} ({hosts.method}), {workers} workers"
    return replace(NetworkModel.from_dict(told), name=network, about=about)


def _watched(events: Iterator[dict[str, Any]], on_event: Callable[[dict[str, Any]], None]) -> Any:
    told = None
    for event in events:
        if event["event"] == "network":
            told = event["network"]
        on_event(event)
    return told


def main() -> None:
    """One process of `probe_emulated`."""
    warnings.simplefilter("ignore")
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    tell = event_writer(task.rank)
    try:
        with joined(backend_here(), meet_at=task.meet_at, rank=task.rank, world_size=task.world_size) as comm:
            found = measure(
                comm,
                seconds=task.seconds,
                pairs=task.pairs,
                tell=lambda what, done, of: tell({"event": "probing", "what": what, "done": done, "of": of}),
            )
            tell({"event": "network", "network": found.as_dict()})
    except Exception as failure:
        tell({"event": "error", "rank": task.rank, "problem": " ".join(str(failure).split())})
        raise SystemExit(1) from failure


if __name__ == "__main__":
    main()
