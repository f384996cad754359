"""Local steps between real processes: presets, DDP, FSDP2, resumed runs, and ranks that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.local_runs import Weights, in_threads, same, train
from support.pool import Pool

Pools = Callable[[int], Pool]


def trained(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Weights, dict[str, float]]:
    return train(rank, None, 14, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "average", "every": 4},
        {"preset": "diloco", "every": 4},
        {"preset": "diloco-1", "every": 4},
        {"preset": "sparseloco", "every": 4},
        {"preset": "diloco-1", "every": 6, "fragments": 3, "delay": 1},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_all_ranks_end_with_the_same_bits(pools: Pools, options: dict[str, Any]) -> None:
    results = pools(3).run(trained, options)
    assert all(same(results[0][0], other) for other, _ in results)
    assert results[0][1]["local/steps"] == 14
    assert results[0][1]["local/rounds"] == (3 if options["every"] == 6 else 4)


ONE_BIT = "two-shot-1"
SPARSE = "ef:0.95|chunked_top_k:0.02|bin_mean:2|all_gather"


@pytest.mark.parametrize("recipe", ["fp32|two_shot", ONE_BIT, SPARSE])
def test_threads_of_one_process_stand_for_processes(pools: Pools, recipe: str) -> None:
    """To the bit, but for what gloo adds in an order of its own: buffers, and exact parts beside an all-gather."""
    options: dict[str, Any] = {"preset": "diloco", "every": 4, "recipe": recipe, "exempt": ()}
    processes = pools(4).run(trained, options)
    threads = in_threads(4, lambda network: train(network.rank, network, 14, **options))
    for (ours, _), (theirs, _) in zip(threads, processes, strict=True):
        torch.testing.assert_close(ours.pop("mean"), theirs.pop("mean"))
        assert same(ours, theirs)
