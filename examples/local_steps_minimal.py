"""Train with local steps: every rank steps alone, and once a round ranks exchange what they changed, a bit an element.

torchrun --nproc-per-node 4 examples/local_steps_minimal.py --preset diloco-1     (or average, diloco, sparseloco, ...)
"""

import argparse
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw


def main(preset: str, every: int, steps: int) -> None:
    dist.init_process_group("gloo")  # torchrun sets the rank and the address of the others
    sources = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
    data = torch.tensor(list(b"".join(path.read_bytes() for path in sources)[:1_000_000]))

    torch.manual_seed(0)  # every rank starts from the same weights
    layers = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draws = torch.Generator().manual_seed(dist.get_rank())  # every rank sees other text
    with tw.local_steps(model, optimizer, preset, every=every) as local:  # the loop does not change
        for step in range(steps + 1):
            text = data[torch.randint(len(data) - 16, (64, 1), generator=draws) + torch.arange(17)]
            loss = nn.functional.cross_entropy(model(text[:, :16]), text[:, 16])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # every `every`-th one exchanges
            if local.rank == 0 and step % 50 == 0:
                print(f"step {step:4}  loss {loss.item():.3f}")

    stats, total = local.stats(), sum(float(p.detach().double().sum()) for p in model.parameters())
    print(f"rank {local.rank} ends with weights that add up to {total:.9f}")  # the same on all of them
    if local.rank == 0:
        print(local)
        print(f"  {stats['local/bits_per_parameter_and_step']:.3f} bits a parameter and step")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="diloco-1")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    try:
        main(options.preset, options.every, options.steps)
    except tw.ThinwireError as refusal:
        sys.exit(str(refusal))
