"""Does rounding that is correlated across ranks make the mean of one-bit messages more exact?

    python -m benchmarks.scripts.correlated_rounding

Writes benchmarks/results/correlated_rounding.json: the error of the mean over n ranks, |found - mean|^2 / |mean|^2,
where every rank sends one bit an element.

`independent` is the codec rotated:1: every rank rotates with signs of its own. `shared` gives all ranks the same signs.
`stratified` does too, and every rank compares an element with another quantile of a Gaussian, dealt anew for each
element: together n ranks with the same element find its place among n + 1 intervals (correlated quantisation, Suresh et
al. 2022, arXiv 2203.04925). `half stratified` halves these thresholds. Inputs: the same Gaussian vector on all ranks,
independent ones, and gradients of the workload gpt.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.scripts import results
from thinwire import Draw, kernels
from thinwire.codecs import rotated
from thinwire.lab.compare.machine import describe_machine
from thinwire.lab.compare.workloads import workload
from thinwire.reduce.buckets import one_dimensional_or_tiny

RANKS = (2, 3, 4, 5, 8, 16)
NUMEL = 1 << 17
Scheme = Callable[[Sequence[Tensor], int], Tensor]


def independent(inputs: Sequence[Tensor], draw: int) -> Tensor:
    return _mean_of_messages(inputs, [Draw(step=draw, rank=rank) for rank in range(len(inputs))])


def shared(inputs: Sequence[Tensor], draw: int) -> Tensor:
    return _mean_of_messages(inputs, [Draw(step=draw)] * len(inputs))


def _mean_of_messages(inputs: Sequence[Tensor], draws: Sequence[Draw]) -> Tensor:
    codec, total = rotated(1), torch.zeros_like(inputs[0])
    for x, one in zip(inputs, draws, strict=True):
        codec.add(codec.encode(x, draw=one), total)
    return total / len(inputs)


def stratified(share: float) -> Scheme:
    """`share` of the quantiles: 0 compares with zero, as `shared` does."""

    def mean(inputs: Sequence[Tensor], draw: int) -> Tensor:
        n, key = len(inputs), Draw(step=draw).key()
        quantiles = share * torch.special.ndtri((torch.arange(n) + 0.5) / n)
        dealt = torch.randint(n, (inputs[0].numel(),), generator=torch.Generator().manual_seed(draw))
        total = torch.zeros_like(inputs[0])
        for rank, x in enumerate(inputs):
            z = kernels.rotate(x, key=key).view(-1, kernels.ROTATION)
            squares = z.square().sum(1, keepdim=True)
            threshold = quantiles[(dealt + rank) % n].view_as(z)
            density, below = torch.exp(-threshold.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(threshold)
            above = z > threshold * (squares / kernels.ROTATION).sqrt()
            word = torch.where(above, density / (1 - below), -density / below)  # the mean of a Gaussian on that side
            total += (word * squares / (word * z).sum(1, keepdim=True)).view(-1)
        return kernels.unrotate(total / n, total.numel(), key=key)

    return mean


SCHEMES: Mapping[str, Scheme] = {
    "independent": independent,
    "shared": shared,
    "half stratified": stratified(0.5),
    "stratified": stratified(1.0),
}


def gradients(ranks: int, *, steps: int) -> list[Tensor]:
    """Of all ranks after so many dense steps, what a recipe compresses, cut to whole blocks."""
    work = workload("gpt")
    model = work.model(seed=0)
    optimizer = work.optimizer(model)
    for step in range(steps + 1):
        found = []
        for rank in range(ranks):
            model.zero_grad()
            model(*work.batch(step, seed=0, rank=rank, world_size=ranks)).backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, of_ranks in zip(model.parameters(), zip(*found, strict=True), strict=True):
            parameter.grad = torch.stack(of_ranks).mean(0)
        optimizer.step()
    keep = [i for i, (name, p) in enumerate(model.named_parameters()) if not one_dimensional_or_tiny(name, p)]
    flat = [torch.cat([of_rank[i].reshape(-1) for i in keep]) for of_rank in found]
    return [x[: x.numel() // kernels.ROTATION * kernels.ROTATION] for x in flat]


def measure(inputs: Sequence[Tensor], *, draws: int) -> dict[str, float]:
    """`alike` is |mean|^2 over the mean of |x|^2, times n: 1 for independent inputs, n for the same one on all."""
    mean = torch.stack(list(inputs)).mean(0)
    energy = float(mean.double().square().sum())
    alike = len(inputs) ** 2 * energy / sum(float(x.double().square().sum()) for x in inputs)
    errors = {
        name: sum(float((scheme(inputs, draw) - mean).double().square().sum()) for draw in range(draws))
        / (draws * energy)
        for name, scheme in SCHEMES.items()
    }
    return {"alike": alike, **errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4, help="messages of each rank (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=results.RESULTS / "correlated_rounding.json", help="the file to write"
    )
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    cases: list[tuple[str, list[Tensor]]] = []
    for ranks in RANKS:
        vectors = [torch.randn(NUMEL, generator=generator) for _ in range(ranks)]
        cases += [("the same", vectors[:1] * ranks), ("independent", vectors)]
    cases += [(f"gpt after {steps} steps", gradients(4, steps=steps)) for steps in (0, 20, 60)]
    rows = []
    for inputs, vectors in cases:
        found = measure(vectors, draws=options.draws)
        rows.append({"inputs": inputs, "ranks": len(vectors), **{name: round(x, 4) for name, x in found.items()}})
        print(rows[-1], flush=True)
    made = {"draws": options.draws, "elements": NUMEL}
    results.write(options.out, {"machine": describe_machine(), "settings": made, "rows": rows})


if __name__ == "__main__":
    main()
