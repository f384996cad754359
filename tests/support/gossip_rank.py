"""One rank of decentralised training as a process: `python gossip_rank.py JSON`; it tells in JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import thinwire as tw
from support.crew import goals, trainer


def main(address: str, rank: int, ranks: int, steps: int, pause: float = 0.0, **options: Any) -> None:
    torch.set_num_threads(1)
    topology = getattr(tw, options.pop("topology", "ring"))()
    mail = tw.mail_at(address, rank=rank, world_size=ranks, seconds=60)
    model, optimizer = trainer(mail, goals(ranks, 256)[rank], lr=0.02, topology=topology, start_seconds=60, **options)
    print(json.dumps({"life": mail.life, "round": optimizer.stats()["gossip/round"]}), flush=True)
    while (number := optimizer.stats()["gossip/round"]) < steps:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if number % 10 == 0:
            print(json.dumps({"step": number}), flush=True)
        time.sleep(pause)
    own = model.x.detach().clone()
    with optimizer.averaged():
        mean = model.x.detach().clone()
    told = {"own": own.tolist(), "mean": mean.tolist(), "stats": optimizer.stats()}
    print(json.dumps(told), flush=True)
    optimizer.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
