"""Train without DDP: every rank averages its gradients with a Reducer, layer by layer, in a loop of its own.

torchrun --nproc-per-node 4 examples/reducer_minimal.py --recipe two-shot-2     (or threshold-k, dense, auto, ...)
"""

import argparse
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw


def main(recipe: str, steps: int) -> None:
    dist.init_process_group("gloo")  # torchrun sets the rank and the address of the others
    sources = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
    data = torch.tensor(list(b"".join(path.read_bytes() for path in sources)[:1_000_000]))

    torch.manual_seed(0)  # every rank starts from the same weights
    layers = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    choosing = recipe == "auto"
    reducer = tw.Reducer("dense" if choosing else recipe, policy=tw.auto() if choosing else None)
    draws = torch.Generator().manual_seed(reducer.rank)  # every rank sees other text
    for step in range(steps + 1):
        text = data[torch.randint(len(data) - 16, (64, 1), generator=draws) + torch.arange(17)]
        loss = nn.functional.cross_entropy(model(text[:, :16]), text[:, 16])
        optimizer.zero_grad()
        loss.backward()
        for number, layer in enumerate(model):  # all are in flight before the first is waited for
            grads = {f"{number}.{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
            if grads:
                biases = [name for name in grads if name.endswith("bias")]
                reducer.start(f"layer {number}", grads, exact=biases, out=grads)  # means replace the gradients
        if reducer.commit():  # waits for all of them; False: not finite on some rank, the same answer on all
            optimizer.step()
        if reducer.rank == 0 and step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")

    if reducer.rank == 0:
        stats = reducer.stats()
        print(f"{reducer.recipe} on {reducer.world_size} ranks")
        print(f"  {stats['comm/bytes_per_step']:,.0f} bytes a step, {stats['comm/ratio']:.1f} x fewer than dense")
    reducer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="two-shot-2")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    try:
        main(options.recipe, options.steps)
    except tw.ThinwireError as refusal:
        sys.exit(str(refusal))
