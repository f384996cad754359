"""Makes connections and compiles kernels before the first step on a device, so that no step waits for them."""

from __future__ import annotations

import torch

from ..comm import streams
from ..comm.network import Network
from ..recipe.compose import Recipe
from ..rng import Draw

_NUMEL = 4096


def warm_up(recipe: Recipe, network: Network, device: torch.device) -> None:
    """Run every collective once with few bytes, and every stage of the recipe's codecs on few elements.

    NCCL connects ranks at the first use of each collective, which takes seconds; Triton compiles at the first launch.
    """
    with streams.active().side(device):
        row = torch.zeros(network.world_size, device=device)
        network.all_reduce(row)
        network.all_gather(row)
        network.all_to_all(torch.zeros(network.world_size, 1, device=device))
        network.broadcast(row, source=0)
        for codec in recipe.codecs:
            given = [torch.linspace(-1.0, 1.0, _NUMEL, device=device)]
            for run, _ in codec.trials(given, Draw()).values():
                run()
        done = streams.active().record(device)
    streams.active().wait(done, device)
