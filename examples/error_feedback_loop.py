"""Train a small model with four simulated ranks: dense, then 1 % of the gradient with error feedback.

python examples/error_feedback_loop.py [recipe ...]     for instance 'top_k:0.01|bf16|all_gather', without the memory
"""

import sys

import torch
from torch import Tensor, nn

import thinwire as tw

RECIPES = ["all_reduce", "ef|threshold_k:0.01|bf16|all_gather"]
RANKS, STEPS, SHOWN, RATE = 4, 200, 50, 0.1


def make_data() -> list[tuple[Tensor, Tensor]]:
    """One share a rank: what a fixed random network says of random inputs."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(32, 16, generator=generator), torch.randn(16, 1, generator=generator)
    inputs = torch.randn(RANKS, 256, 32, generator=generator)
    return [(x, torch.tanh(x @ first / 6) @ second) for x in inputs]


def train(recipe: tw.Recipe, shares: list[tuple[Tensor, Tensor]]) -> None:
    """Plain SGD on the mean that the recipe delivers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    weights = dict(model.named_parameters())
    sent = sum(recipe.wire_bytes(weight.numel(), shape=tuple(weight.shape)) for weight in weights.values())
    print(f"{recipe}: {sent:,} bytes a rank and step")
    group = tw.LocalGroup(recipe, RANKS)
    for step in range(STEPS + 1):
        losses = [(model(x) - y).square().mean() for x, y in shares]
        if step % SHOWN == 0:
            print(f"  step {step:3}  loss {torch.stack(losses).mean().item():.4f}")
        # What every rank computes by itself, and what all of them end with.
        gradients = [dict(zip(weights, torch.autograd.grad(loss, [*weights.values()]), strict=True)) for loss in losses]
        mean = group.mean(gradients, step)
        with torch.no_grad():
            for name, weight in weights.items():
                weight -= RATE * mean[name]


if __name__ == "__main__":
    data = make_data()
    for text in sys.argv[1:] or RECIPES:
        train(tw.parse(text), data)
