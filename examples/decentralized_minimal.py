"""Decentralised training of a small model: every rank exchanges messages with its two neighbours on a ring.

torchrun --nproc-per-node 4 examples/decentralized_minimal.py --algorithm dcd --codec min_max:4,block=512
"""

import argparse
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw


def main(algorithm: str, codec: str, steps: int) -> None:
    dist.init_process_group("gloo")  # torchrun sets the rank and the address of the others
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sources = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
    data = torch.tensor(list(b"".join(path.read_bytes() for path in sources)[:1_000_000]))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
    base = torch.optim.SGD(net.parameters(), lr=0.2)
    opt = tw.decentralize(net, base, algorithm=algorithm, topology=tw.topology.ring(), codec=codec)
    draws = torch.Generator().manual_seed(rank)  # every rank reads different text
    for step in range(steps + 1):
        text = data[torch.randint(len(data) - 16, (64, 1), generator=draws) + torch.arange(17)]
        loss = nn.functional.cross_entropy(net(text[:, :16]), text[:, 16])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            apart = opt.consensus_distance()  # all ranks call it after the same step
            if rank == 0:
                print(f"step {step:4}  loss {loss.item():.3f}  models {apart:.4f} apart")

    text = data[torch.arange(0, 64_000, 16)[:, None] + torch.arange(17)]
    with opt.averaged(), torch.no_grad():
        averaged = nn.functional.cross_entropy(net(text[:, :16]), text[:, 16]).item()
    if rank == 0:
        stats = opt.stats()
        print(f"{algorithm} with {codec} on {ranks} ranks: loss {averaged:.3f} of the average model")
        print(f"  {stats['gossip/sent_bytes'] / stats['gossip/round']:,.0f} bytes a step from this rank")
    opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default="dcd")
    parser.add_argument("--codec", default="min_max:4,block=512")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    try:
        main(options.algorithm, options.codec, options.steps)
    except tw.ThinwireError as refusal:
        sys.exit(str(refusal))
