"""Bias, variance and non-zeros of Global-QSGD on made-up gradients, by the exchanges that training uses.

Gradients are Laplace-distributed. Workers are "alike" (one gradient with a tenth of noise), of "noise" alone, or
"uneven" (noise, every worker's half as large as the one before, down to 1/64).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.scripts.results import without
from thinwire import theory
from thinwire.codecs.global_qsgd import GlobalQsgd

from ..run import Options

WORKERS = (2, 4, 8, 16, 32, 64)
DITHERS = ("linear", "exponential")
NORMS: tuple[Literal["l2", "linf"], ...] = ("l2", "linf")
_SMALLEST = 1 / 64


def gradients(kind: str, *, workers: int, numel: int, seed: int) -> list[Tensor]:
    """One tensor a worker."""
    generator = torch.Generator().manual_seed(seed * 1000 + workers)
    noise = [_laplace(numel, generator) for _ in range(workers)]
    if kind == "alike":
        common = _laplace(numel, generator)
        return [common + 0.1 * own for own in noise]
    if kind == "uneven":
        return [own * max(_SMALLEST, 0.5**rank) for rank, own in enumerate(noise)]
    return noise


def _laplace(numel: int, generator: torch.Generator) -> Tensor:
    size = torch.empty(numel).exponential_(generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < 0.5, -size, size)


def delivered(recipe: str, given: list[Tensor], *, draws: int, seed: int) -> Tensor:
    """The means that a recipe delivers for the same gradients in independent draws: `(draws, numel)`."""
    group = tw.LocalGroup(tw.parse(recipe), len(given), seed=seed)
    return torch.stack([group.mean(given, step=step) for step in range(draws)]).double()


def mean_of(given: list[Tensor]) -> Tensor:
    return torch.stack(given).double().mean(0)


def square_sum(given: list[Tensor]) -> float:
    return float(torch.stack(given).double().square().sum())


# ---------------------------------------------------------------------------------------------------------------- bias


def bias(options: Options) -> list[dict[str, Any]]:
    """The mean of many draws against the true mean: along the gradient as a share of it, and at every element."""
    numel, draws, workers = (64, 40, 4) if options.quick else (512, 500, 4)
    found = []
    for dither in DITHERS:
        for norm in NORMS:
            row: dict[str, Any] = {"dither": dither, "norm": norm, "workers": workers, "numel": numel, "draws": draws}
            row |= {"along": [], "along_error": [], "squares": [], "largest": []}
            for seed in options.all_seeds:
                given = gradients("noise", workers=workers, numel=numel, seed=seed)
                got = delivered(f"global_qsgd:8,dither={dither},norm={norm}|all_reduce", given, draws=draws, seed=seed)
                for key, value in bias_of(got, mean_of(given)).items():
                    row[key].append(value)
            found.append(row)
            print(f"  {dither} {norm}: {row['along']} of the gradient, error {row['along_error']}", flush=True)
    return found


def bias_of(got: Tensor, true: Tensor) -> dict[str, float]:
    """`along`: bias along the gradient, as a share of it, and its standard error. `squares`: the mean of (bias /
    standard error)^2 over the elements, 1 if there is no bias. `largest`: the largest |bias| / standard error."""
    draws = len(got)
    shares = (got - true) @ true / true.square().sum()
    spread = got.std(0) / math.sqrt(draws)
    varying = spread > 0
    z = (got.mean(0) - true)[varying] / spread[varying]
    return {
        "along": float(shares.mean()),
        "along_error": float(shares.std() / math.sqrt(draws)),
        "squares": float(z.square().mean()),
        "largest": float(z.abs().max()),
    }


# ------------------------------------------------------------------------------------------------------------ variance


def variance(options: Options) -> list[dict[str, Any]]:
    """Measured theta = n E|G - mean|^2 / sum |x_i|^2 beside the bound, over workers, dithers, norms and gradients."""
    numel, draws = (128, 4) if options.quick else (2048, 12)
    found = []
    for workers in WORKERS[:3] if options.quick else WORKERS:
        for kind in ("alike", "noise"):
            for case in _cases(workers, numel):
                thetas, alike = [], []
                for seed in options.all_seeds:
                    given = gradients(kind, workers=workers, numel=numel, seed=seed)
                    alike.append(alikeness(given))
                    if case["addition"] == "exact":
                        got = _added_exactly(case["recipe"], given, draws=draws, seed=seed)
                    else:
                        got = delivered(case["recipe"], given, draws=draws, seed=seed)
                    thetas.append(theta_of(got, given))
                about = {"workers": workers, "numel": numel, "gradients": kind}
                found.append({**without(case, "recipe"), **about, "theta": thetas, "alike": alike})
        print(f"  {workers} workers", flush=True)
    return found


def theta_of(got: Tensor, given: list[Tensor]) -> float:
    error = float((got - mean_of(given)).square().sum(1).mean())
    return len(given) * error / square_sum(given)


def alikeness(given: list[Tensor]) -> float:
    """|mean|^2 over the mean of |x_i|^2: 1 for equal gradients, about 1 / n for noise."""
    return len(given) * float(mean_of(given).square().sum()) / square_sum(given)


def _cases(workers: int, numel: int) -> Iterator[dict[str, Any]]:
    whole = workers * numel
    for norm in NORMS:
        codec = tw.codecs.global_qsgd(8, norm=norm)
        levels = codec.levels(workers)
        omega = theory.uniform_l2(whole, levels) if norm == "l2" else theory.uniform_linf(whole, levels)
        case = {"dither": "linear", "norm": norm, "levels": levels, "addition": "network"}
        yield {**case, "recipe": f"{codec.spec()}|all_reduce", "bound": theory.global_theta(omega, workers)}
    for norm in NORMS:
        codec = tw.codecs.global_qsgd(8, dither="exponential", norm=norm)
        levels = codec.top - codec.headroom(workers)
        omega = theory.exponential(whole, levels)
        case = {"dither": "exponential", "norm": norm, "levels": levels, "recipe": f"{codec.spec()}|all_reduce"}
        yield {**case, "addition": "exact", "bound": theory.global_theta(omega, workers)}
        yield {**case, "addition": "network", "bound": tree_theta(omega, workers)}
    independent = tw.codecs.qsgd(8)
    case = {"dither": "qsgd", "norm": "l2", "levels": independent.levels, "addition": "network"}
    yield {**case, "recipe": f"{independent.spec()}|all_gather", "bound": independent.omega(numel) / workers}


def tree_theta(omega: float, workers: int) -> float:
    """Theta when a balanced tree rounds every partial sum: 1/8 of its square on top, level by level.

    With V the variance of all partial sums of a level and Q their squares, V' <= 9/8 V + Q' / 8; Q of groups of g
    workers is at most g times the sum of squares, which gradients that are alike reach.
    """
    found, group = omega, 1
    while group < workers:
        group *= 2
        found = 9 / 8 * found + min(group, workers) / 8
    return found / workers


def _added_exactly(recipe: str, given: list[Tensor], *, draws: int, seed: int) -> Tensor:
    """As published in theory: every worker rounds once, and what is sent is added without another rounding."""
    codec = tw.parse(recipe).codec
    assert isinstance(codec, GlobalQsgd)
    workers = len(given)
    norms = torch.stack([codec.local_norm(x) for x in given])
    scale = codec.scale_from(norms.amax(0) if codec.combination == "max" else norms.sum(0))
    found = []
    for step in range(draws):
        total = torch.zeros(given[0].numel(), dtype=torch.float64)
        for rank, x in enumerate(given):
            draw = tw.Draw(seed=seed, step=step, rank=rank)
            codes = codec.codes(x, scale=scale, world_size=workers, draw=draw)
            total += codec.values(codes, scale=scale, world_size=workers).double()
        found.append(total / workers)
    return torch.stack(found)


# ------------------------------------------------------------------------------------------------------------ sparsity


def sparsity(options: Options) -> list[dict[str, Any]]:
    """At one level: elements that are not zero, of all workers together, and the variance, both against QSGD's."""
    numel, draws = (128, 4) if options.quick else (4096, 12)
    found = []
    for workers in WORKERS[:3] if options.quick else WORKERS:
        # The fewest bits that leave one level to each worker.
        codec = tw.codecs.global_qsgd(workers.bit_length() + 1, norm="l2")
        assert codec.levels(workers) == 1
        for kind in ("noise", "uneven"):
            row: dict[str, Any] = {"workers": workers, "numel": numel, "gradients": kind}
            row |= {"nonzero": [], "nonzero_qsgd": [], "theta": [], "theta_qsgd": []}
            row |= {"bound": math.sqrt(workers * numel) + 1, "bound_qsgd": workers * (math.sqrt(numel) + 1)}
            for seed in options.all_seeds:
                given = gradients(kind, workers=workers, numel=numel, seed=seed)
                row["nonzero"].append(_nonzero(codec, given, draws=draws, seed=seed))
                row["nonzero_qsgd"].append(_nonzero_of_qsgd(given, draws=draws, seed=seed))
                for key, recipe in (("theta", f"{codec.spec()}|all_reduce"), ("theta_qsgd", "qsgd:2|all_gather")):
                    row[key].append(theta_of(delivered(recipe, given, draws=draws, seed=seed), given))
            found.append(row)
        print(f"  {workers} workers", flush=True)
    return found


def _nonzero(codec: GlobalQsgd, given: list[Tensor], *, draws: int, seed: int) -> float:
    scale = codec.scale_from(torch.stack([codec.local_norm(x) for x in given]).sum(0))
    total = 0
    for step in range(draws):
        for rank, x in enumerate(given):
            draw = tw.Draw(seed=seed, step=step, rank=rank)
            total += int(codec.codes(x, scale=scale, world_size=len(given), draw=draw).count_nonzero())
    return total / draws


def _nonzero_of_qsgd(given: list[Tensor], *, draws: int, seed: int) -> float:
    codec, total = tw.codecs.qsgd(2), 0
    for step in range(draws):
        for rank, x in enumerate(given):
            sent = codec.decode(codec.encode(x, draw=tw.Draw(seed=seed, step=step, rank=rank)))
            total += int(sent.count_nonzero())
    return total / draws
