"""Train a small model with DDP and a recipe: it guesses the next byte of Python's own source files.

torchrun --nproc-per-node 4 examples/ddp_minimal.py --recipe auto       (or threshold-k, dense, 'ef|top_k:0.01|...')
"""

import argparse
import pathlib
import sys
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def main(recipe: tw.Recipe | str, steps: int) -> None:
    dist.init_process_group("gloo")  # torchrun says which rank this is and where the others are
    sources = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
    data = torch.tensor(list(b"".join(path.read_bytes() for path in sources)[:1_000_000]))

    torch.manual_seed(0)
    layers = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.25)
    link = tw.attach(model, recipe)  # the only line that thinwire adds to a training program
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    draws = torch.Generator().manual_seed(link.rank)  # every rank sees other text
    for step in range(steps + 1):
        text = data[torch.randint(len(data) - 16, (64, 1), generator=draws) + torch.arange(17)]
        loss = nn.functional.cross_entropy(model(text[:, :16]), text[:, 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if link.rank == 0 and step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")

    checksums = [0] * link.world_size
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    dist.all_gather_object(checksums, zlib.crc32(weights.numpy().tobytes()))
    if link.rank == 0:
        stats = link.stats()
        print(f"{link.recipe} on {link.world_size} ranks")
        print(f"  {stats['comm/bytes_per_step']:,.0f} bytes a step, {stats['comm/ratio']:.1f} x fewer than plain DDP")
        print(f"  {1000 * stats['comm/exposed_seconds']:.2f} ms a step in which training waited for the network")
        print(f"  the ranks' weights {'agree' if len(set(checksums)) == 1 else 'DIFFER'}: {checksums[0]:08x}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="threshold-k")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    try:
        main("auto" if options.recipe == "auto" else tw.parse(options.recipe), options.steps)
    except tw.ThinwireError as refusal:
        sys.exit(str(refusal))
