"""The table of `thinwire kernels`: seconds of every kernel, relative to a copy and to `e += g` in the same run.

Only times of one process are compared. Every round times the copy, the addition, each kernel and its torch counterpart
once. Each number is the best of its rounds, which is the least disturbed one on a shared machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ... import kernels
from ...errors import OptionError
from .case import Case, Data
from .cases import all_cases


@dataclass(frozen=True)
class Row:
    """One line of the table: our time, as ratios to the copy and to `e += g`; the torch code's time beside it.

    `x_torch` is how many times faster we are than the torch code. GB/s count the bytes that our kernel must move.
    """

    name: str
    density: float | None
    seconds: float
    gb_per_s: float
    x_copy: float
    x_add: float
    x_torch: float
    torch_seconds: float
    torch_gb_per_s: float
    torch_x_copy: float
    copy_seconds: float
    add_seconds: float


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _together(pool: ThreadPoolExecutor | None, parts: list[Callable[[], object]]) -> Callable[[], object]:
    """One callable that runs its parts at once, one thread each."""
    if pool is None:
        return parts[0]
    return lambda: list(pool.map(lambda part: part(), parts))


def _measure(cases: list[list[Case]], floors: Data, pool: ThreadPoolExecutor | None, rounds: int) -> Iterator[Row]:
    """Time one group of cases; `cases[t]` is the share of thread t."""
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: floors.out.copy_(floors.x),
        "add": lambda: torch.add(floors.memory, floors.x, out=floors.memory),
    }
    preparing: dict[str, Callable[[], object]] = {}
    torch_run: dict[str, str] = {}  # several cases may be compared with one and the same torch code: run it once
    for position, case in enumerate(cases[0]):
        shares = [group[position] for group in cases]
        runs[f"ours {case.name}"] = _together(pool, [share.ours for share in shares])
        preparing[f"ours {case.name}"] = _together(pool, [share.prepare for share in shares])
        first = next(other for other in cases[0] if other.torchs is case.torchs)
        torch_run[case.name] = f"torch {first.name}"
        if first is case:
            runs[torch_run[case.name]] = _together(pool, [share.torchs for share in shares])
            preparing[torch_run[case.name]] = preparing[f"ours {case.name}"]
    best = dict.fromkeys(runs, float("inf"))
    for repeat in range(rounds + 1):
        for name, run in runs.items():
            # The torch code is up to a hundred times slower: two rounds of it tell enough.
            if name.startswith("torch ") and repeat > 2:
                continue
            preparing.get(name, lambda: None)()
            elapsed = _seconds(run)
            if repeat:  # round 0 compiles and warms up
                best[name] = min(best[name], elapsed)
    numel = floors.x.numel()
    for case in cases[0]:
        ours, theirs = best[f"ours {case.name}"], best[torch_run[case.name]]
        copy, add, moved = best["copy"], best["add"], case.moved * numel / 1e9
        yield Row(
            name=case.name,
            density=case.density,
            seconds=ours,
            gb_per_s=moved / ours,
            x_copy=ours / copy,
            x_add=ours / add,
            x_torch=theirs / ours,
            torch_seconds=theirs,
            torch_gb_per_s=moved / theirs,
            torch_x_copy=theirs / copy,
            copy_seconds=copy,
            add_seconds=add,
        )


def check_run(numel: int, *, threads: int, rounds: int) -> None:
    """Refuse what cannot be timed, before anything is allocated."""
    if rounds < 1 or threads < 1:
        raise OptionError("rounds and threads start at 1")
    if numel < 1024 * threads:
        raise OptionError(f"{numel} elements are too few for {threads} thread(s): use at least {1024 * threads}")
    needed, there = 100 * numel, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise OptionError(
            f"{numel} elements need about {needed / 1e9:.0f} GB, this machine has {there / 1e9:.0f}: use fewer"
        )


def kernel_rows(
    numel: int,
    *,
    threads: int = 1,
    rounds: int = 7,
    seed: int = 0,
    on_group: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Time every kernel on `numel` float32 elements. With several threads, each takes a contiguous share.

    >>> rows = kernel_rows(4096, rounds=1)
    >>> sorted(row.name for row in rows if row.name.endswith("finite"))
    ['all_finite', 'finite']
    """
    check_run(numel, threads=threads, rounds=rounds)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    kernels.body_for("cpu")
    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    rows: list[Row] = []
    try:
        floors = Data(numel, seed)
        shares = [all_cases(numel // threads, seed=seed + part) for part in range(threads)]
        for done, groups in enumerate(zip(*shares, strict=True), start=1):
            rows.extend(_measure(list(groups), floors, pool, rounds))
            on_group(done)
    finally:
        torch.set_num_threads(before)
        if pool is not None:
            pool.shutdown()
    return rows
