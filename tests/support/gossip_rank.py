"""One rank of decentralised training as a process: `python gossip_rank.py JSON`; it reports in JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from support.gossip_threads import goals, trainer
from thinwire.comm.peers import peers_at
from thinwire.gossip.topology import named_topology


def main(
    address: str, rank: int, ranks: int, steps: int, pause: float = 0.0, start_seconds: float = 60, **options: Any
) -> None:
    torch.set_num_threads(1)
    topology = named_topology(options.pop("topology", "ring"))
    transport = peers_at(address, rank=rank, world_size=ranks, seconds=60)
    goal = goals(ranks, 256)[rank]
    model, optimizer = trainer(transport, goal, lr=0.02, topology=topology, start_seconds=start_seconds, **options)
    report(
        {"incarnation": transport.incarnation, "round": optimizer.stats()["gossip/round"]}
        | {"neighbours": list(optimizer.neighbours)}
    )
    while (number := optimizer.stats()["gossip/round"]) < steps:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if number % 10 == 0:
            report({"step": number})
        time.sleep(pause)
    own = model.value()
    with optimizer.averaged():
        mean = model.value()
    report({"own": own.tolist(), "mean": mean.tolist(), "stats": optimizer.stats()})
    optimizer.close()


def report(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
