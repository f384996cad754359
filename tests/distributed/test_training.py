"""Training with every preset: replicas stay the same, the loss falls, a run repeats, and the numbers told are true."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.pool import Pool
from support.runs import ONE_OF_A_KIND
from thinwire.attach import Link
from thinwire.reduce import JsonLines, Records, Sink

Pools = Callable[[int], Pool]
Run = tuple[str, int, bool]  # preset, seed, whether a sink is told of every step
RANKS = 4
CONTEXT = 8
SETTLED = 3  # steps, after which DDP has its final buckets and so has the link
PAGE = os.sysconf("SC_PAGE_SIZE")
RANDOM = ["global-qsgd-8", "global-qsgd-exp", "qsgd-4", "two-shot-8", "two-shot-2-ef"]
STATS = {
    *("comm/steps", "comm/overflow_steps", "comm/finite"),
    *("comm/bytes_total", "comm/bytes_per_step", "comm/dense_bytes_per_step", "comm/ratio"),
    *("comm/encode_seconds", "comm/exchange_seconds", "comm/decode_seconds", "comm/exposed_seconds"),
    "comm/cpu_seconds",
}
MEASURED = {"comm/gain", "comm/agree"}  # and memory/norm, if there is a memory


# ------------------------------------------------------------------------------------------ what the ranks run


def next_byte_model(layers: int = 0) -> DistributedDataParallel:
    """Guesses a byte of source code from those before it. Biases and norms are exempt, every layer fills a bucket."""
    torch.manual_seed(0)
    stack: list[nn.Module] = [nn.Embedding(256, 8), nn.Flatten(), nn.Linear(8 * CONTEXT, 64), nn.LayerNorm(64)]
    for _ in range(layers):
        stack += [nn.ReLU(), nn.Linear(64, 64)]
    return DistributedDataParallel(nn.Sequential(*stack, nn.ReLU(), nn.Linear(64, 256)), bucket_cap_mb=0.01)


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Other text on every rank, the same in every run."""
    data = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    draws = torch.Generator().manual_seed(rank)
    while True:
        text = data[torch.randint(len(data) - CONTEXT, (32, 1), generator=draws) + torch.arange(CONTEXT + 1)]
        yield text[:, :CONTEXT], text[:, CONTEXT]


def steps_of(model: DistributedDataParallel, rank: int, steps: int) -> Iterator[float]:
    """The loss of every step, plain SGD: momentum_correction replaces momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, (text, expected) in zip(range(steps), batches(rank), strict=False):
        loss = cross_entropy(model(text), expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def digest(model: nn.Module) -> str:
    flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    return hashlib.blake2s(flat.numpy().tobytes()).hexdigest()


def predicted_bytes(link: Link) -> int:
    """What the exchange says that this layout costs, before running."""
    recipe = link.recipe
    return sum(
        recipe.exchange.sent_bytes(
            recipe.codec,
            bucket.numel,
            world_size=link.world_size,
            exact=bucket.exact_numel,
            shapes=[part.shape for part in bucket.parts],
        )
        for bucket in link.layout.buckets
    )


def train(rank: int, world_size: int, recipe: str, steps: int, **options: Any) -> dict[str, Any]:
    """A run, and what it looks like from this rank. The meter counts from when the buckets have settled."""
    model = next_byte_model()
    link = tw.attach(model, recipe, **options)
    losses = []
    for loss in steps_of(model, rank, steps):
        losses.append(loss)
        if len(losses) == SETTLED:
            link.meter.reset()
    told = {
        "losses": losses,
        "digest": digest(model),
        "stats": link.stats(),
        "predicted": predicted_bytes(link),
        "buckets": len(link.layout.buckets),
        "exact": sum(bucket.exact_numel for bucket in link.layout.buckets),
        "steps": link.step,
    }
    link.close()
    return told


def observed(rank: int, world_size: int, recipe: str, steps: int, file: str) -> dict[str, Any]:
    """Rank 0 has a file and a list, the others have nothing: no rank may wait for another because of that."""
    records = Records()
    sinks: list[Sink] = [JsonLines(file), records] if rank == 0 else []
    told = train(rank, world_size, recipe, steps, sinks=sinks, sample_every=1)
    for sink in sinks:
        sink.close()
    return {**told, "entries": list(records.entries)}


def digests(rank: int, world_size: int, runs: Sequence[Run]) -> dict[Run, str]:
    """Several short runs one after another; also a test that links leave nothing behind for the next."""
    found = {}
    for preset, seed, watched in runs:
        sinks = [Records()] if watched else []
        told = train(rank, world_size, preset, 6, seed=seed, sinks=sinks, sample_every=1)
        found[preset, seed, watched] = told["digest"]
    return found


def resources() -> dict[str, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return {"bytes": resident, "tasks": tasks, "threads": threading.active_count(), "files": files}


def endure(rank: int, world_size: int, recipe: str) -> dict[str, Any]:
    model = next_byte_model(layers=7)
    records = Records(keep=500)
    link = tw.attach(model, recipe, sinks=[records], log_every=50, sample_every=50)
    losses, used = [], {}
    for loss in steps_of(model, rank, 500):
        losses.append(loss)
        if len(losses) % 100 == 0:
            used[len(losses)] = resources()
    told = {"losses": losses, "digest": digest(model), "used": used, "buckets": len(link.layout.buckets)}
    link.close()
    return {**told, "agree": records.values("comm/agree")}


# --------------------------------------------------------------------------------------------------- the tests


def assert_learned(ranks: Sequence[dict[str, Any]], share: float = 0.8) -> None:
    start = sum(told["losses"][0] for told in ranks) / len(ranks)
    end = [sum(told["losses"][-20:]) / 20 for told in ranks]
    assert all(math.isfinite(loss) for told in ranks for loss in told["losses"])
    assert sum(end) / len(ranks) < share * start, (start, end)


def assert_same(ranks: Sequence[dict[str, Any]]) -> None:
    assert len({told["digest"] for told in ranks}) == 1


TRAINED = [
    pytest.param(preset, steps, marks=[] if steps == 40 and preset in ONE_OF_A_KIND else [pytest.mark.slow])
    for preset in tw.PRESETS
    for steps in (40, 200)
]


@pytest.mark.parametrize(("preset", "steps"), TRAINED)
def test_every_preset_trains(pools: Pools, preset: str, steps: int) -> None:
    ranks = pools(RANKS).run(train, preset, steps)
    assert_same(ranks)
    assert_learned(ranks, 0.8 if steps == 200 else 0.95)
    for told in ranks:
        assert told["steps"] == steps
        assert told["buckets"] >= 3
        assert told["exact"] > 0
        stats = told["stats"]
        assert STATS <= stats.keys() <= STATS | MEASURED | {"memory/norm"}
        assert stats["comm/steps"] == steps - SETTLED
        assert stats["comm/bytes_per_step"] == told["predicted"]
        assert stats["comm/bytes_total"] == told["predicted"] * (steps - SETTLED)
        assert stats["comm/ratio"] == stats["comm/dense_bytes_per_step"] / stats["comm/bytes_per_step"]
        assert (stats["comm/ratio"] == 1.0) == (preset == "dense")
        assert (stats["comm/finite"], stats["comm/overflow_steps"]) == (1.0, 0.0)


@pytest.fixture(scope="module")
def short_runs(pools: Pools) -> list[dict[Run, str]]:
    """What the weights were at the end, by rank and run."""
    runs = [(preset, 0, watched) for watched in (False, True) for preset in tw.PRESETS]
    return pools(RANKS).run(digests, runs + [(preset, 1, False) for preset in RANDOM])


def test_all_ranks_end_with_the_same_weights(short_runs: list[dict[Run, str]]) -> None:
    assert all(rank == short_runs[0] for rank in short_runs)


@pytest.mark.parametrize("preset", tw.PRESETS)
def test_a_run_repeats_bit_for_bit_and_observing_it_changes_nothing(
    short_runs: list[dict[Run, str]], preset: str
) -> None:
    assert short_runs[0][preset, 0, False] == short_runs[0][preset, 0, True]


@pytest.mark.parametrize("preset", RANDOM)
def test_another_seed_is_another_run(short_runs: list[dict[Run, str]], preset: str) -> None:
    assert short_runs[0][preset, 0, False] != short_runs[0][preset, 1, False]


def test_no_preset_does_what_another_does(short_runs: list[dict[Run, str]]) -> None:
    assert len({short_runs[0][preset, 0, False] for preset in tw.PRESETS}) == len(tw.PRESETS)


@pytest.mark.parametrize("preset", ["threshold-k", "two-shot-3", "dense"])
def test_what_rank_0_writes_down(pools: Pools, preset: str, tmp_path: Path) -> None:
    steps, file = 30, tmp_path / "run.jsonl"
    ranks = pools(RANKS).run(observed, preset, steps, str(file))
    assert_same(ranks)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(steps))
    assert [{key: value for key, value in line.items() if key != "time"} for line in lines] == ranks[0]["entries"]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    for line in lines[SETTLED:]:
        assert line["comm/bytes_per_step"] == ranks[0]["predicted"]
    if preset == "dense":
        return
    measured = MEASURED | ({"memory/norm"} if tw.parse(preset).memory is not None else set())
    assert ranks[0]["stats"].keys() == STATS | measured
    for line in lines:
        assert line["comm/agree"] == 1.0
        assert -0.1 < line["comm/gain"] <= 1.0
        assert ("memory/norm" in line) == ("memory/norm" in measured)
        for place in range(ranks[0]["buckets"]):
            assert line[f"bucket/bucket{place}/agree"] == 1.0
            assert line[f"bucket/bucket{place}/bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("preset", tw.PRESETS)
def test_ten_buckets_for_500_steps(pools: Pools, preset: str) -> None:
    """No mismatch, no hang, and after step 100 no growth."""
    ranks = pools(RANKS).run(endure, preset, deadline=1200.0)
    assert_same(ranks)
    assert_learned(ranks)
    for told in ranks:
        assert told["buckets"] >= 10
        assert set(told["agree"]) <= {1.0}
        assert len(told["agree"]) == (0 if preset == "dense" else 10)
        early, late = told["used"][100], told["used"][500]
        assert late["bytes"] - early["bytes"] < 8 << 20, told["used"]
        for what in ("tasks", "threads", "files"):
            assert late[what] <= early[what], told["used"]  # less: what an earlier job left was collected
