"""What the exchange tests share: recipes, gradients, all ranks of a recipe in threads, and runs that are made once."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import Draw, Recipe, parse
from thinwire.codecs import Codec, Shape
from thinwire.comm.local import LocalNetwork, on_all_ranks
from thinwire.comm.network import Network, Traffic
from thinwire.exchange.first_shot import pieces
from thinwire.exchange.request import Part, Result
from thinwire.reduce.buckets import Bucket
from thinwire.reduce.residuals import Residuals

FLOAT_RECIPES = [
    "all_reduce",
    "bf16|all_reduce",
    "fp16|all_reduce",
    "ef|bf16|all_reduce",
    "random_k:0.1|all_reduce",
    "ef|random_k:0.1,scaled=false|bf16|all_reduce",
    "ef|random_k:0.1,scaled=false,shared=false|all_gather",
]
GLOBAL_RECIPES = [
    "global_qsgd|all_reduce",
    "ef|global_qsgd:8,block=64|all_reduce",
    "global_qsgd:8,norm=l2|all_reduce",
    "ef|global_qsgd:8,norm=l2,block=64|all_reduce",
    "global_qsgd:8,dither=exponential|all_reduce",
    "ef|global_qsgd:8,dither=exponential,norm=l2,block=64|all_reduce",
]
FACTOR_RECIPES = [
    "low_rank:2|all_reduce",
    "ef|low_rank:2|all_reduce",
    "ef|low_rank:2,iterations=2|bf16|all_reduce",
    "ef|low_rank:2|bf16|all_gather",
]
SPARSE_RECIPES = [
    "ef|top_k:0.1|all_gather",
    "ef|threshold_k:0.1|bf16|all_gather",
    "ef|gaussian_k:0.1|all_gather",
    "ef|dgc_k:0.1|fp16|local",
    "ef|top_k:0.1|abs_max:4|all_gather",
    "dgc|top_k:0.1|bf16|all_gather",
]
SHARED_RECIPES = [
    "top_k:0.1|shared_top_k",
    "ef|top_k:0.1|bf16|shared_top_k:norm",
    "ef|threshold_k:0.1|shared_top_k:norm",
    "ef|gaussian_k:0.1|bf16|shared_top_k",
    "ef|dgc_k:0.1|shared_top_k",
    "dgc|threshold_k:0.1|bf16|shared_top_k",
]
DENSE_CODE_RECIPES = [
    "qsgd:4,block=64|all_gather",
    "ef|abs_max:4|all_gather",
    "rotated:3|all_gather",
    "ef|sign|all_gather",
    "qsgd:4,block=64|two_shot:8",
    "ef|abs_max:4|two_shot:8,feedback=true",
    "rotated:3|two_shot:4",
    "ef|rotated:2|two_shot:4,feedback=true",
    "ef|sign|two_shot",
    "ef|top_k:0.05|bf16|two_shot:feedback=true",
    "ef|threshold_k:0.1|two_shot:feedback=true",
    "min_max:8|two_shot:6,feedback=true",
]
RECIPES = [
    *FLOAT_RECIPES,
    *GLOBAL_RECIPES,
    *FACTOR_RECIPES,
    *SPARSE_RECIPES,
    *SHARED_RECIPES,
    *DENSE_CODE_RECIPES,
]
WITH_MEMORY = [text for text in RECIPES if parse(text).memory is not None]

WORLD_SIZES = (1, 2, 3, 5, 8)
# Elements to compress, in these shapes (which matter to low_rank only), and elements that travel as they are.
TENSORS: dict[int, tuple[list[tuple[int, ...]], int]] = {
    0: ([], 5),
    1: ([(1,)], 0),
    3: ([(3,)], 2),
    63: ([(7, 9)], 1),
    64: ([(8, 8)], 0),
    1000: ([(20, 50)], 9),
    1025: ([(41, 25)], 3),
    5000: ([(40, 60), (24, 5, 20), (200,)], 17),
}
EPS = 2.0**-24  # half a unit in the last place of float32, relative


def lengths_of(world_size: int) -> list[int]:
    """The lengths are spread over the world sizes, because many ranks take long."""
    return {1: [0, 1, 63, 1000], 2: [0, 3, 64, 1025], 3: [0, 1, 63, 5000], 5: [0, 3, 1025], 8: [0, 64, 5000]}[
        world_size
    ]


def parts_of(numel: int) -> list[Part]:
    parts, start = [], 0
    for i, shape in enumerate(TENSORS[numel][0]):
        parts.append(Part(f"n{numel}.{i}", shape, start, start + math.prod(shape)))
        start = parts[-1].stop
    return parts


def noise(*key: int, numel: int) -> Tensor:
    """Gaussian values that depend on the key alone, neither exactly centred nor all of one size."""
    seed = functools.reduce(lambda seed, part: 1009 * seed + part + 1, key, 0)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return x * (1 + torch.arange(numel) % 3) + 0.125


def gradient(rank: int, step: int, numel: int) -> Tensor:
    return noise(rank, step, numel, numel=numel)


def exact_elements(rank: int, step: int, numel: int) -> Tensor:
    return noise(rank, step, numel, 77, numel=TENSORS[numel][1])


def bits(x: Tensor) -> Tensor:
    """To compare: NaN equals NaN, and 0 does not equal -0."""
    return x.contiguous().view(torch.int32)


def same_bits(a: Any, b: Any) -> bool:
    """Of tensors, or of nested containers of tensors and numbers."""
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b)


def assert_all_ranks_got(results: list[Result]) -> Result:
    """The same bits; returns them."""
    first = results[0]
    for other in results[1:]:
        assert same_bits(first.mean, other.mean)
        assert same_bits(first.exact, other.exact)
        assert first.finite == other.finite
    return first


class Side:
    """One rank's side of a recipe: residuals, and exchanges with the sizes that a test wants."""

    def __init__(self, recipe: Recipe, *, seed: int = 0) -> None:
        self.residuals, self.seed = Residuals(recipe), seed

    def exchange(
        self,
        name: str,
        gradient: Tensor,
        *,
        network: Network,
        step: int,
        exact: Tensor | None = None,
        parts: Sequence[Part] | None = None,
        out: Tensor | None = None,
        may_be_unused: bool = False,
        measure: bool = False,
        shards: Sequence[slice] | None = None,
    ) -> Result:
        """The mean of flat float32 `gradient`, which is used up, and of the `exact` elements beside it."""
        exact = gradient.new_empty(0) if exact is None else exact
        parts = (Part(name, tuple(gradient.shape), 0, gradient.numel()),) if parts is None else parts
        beside = (Part("exact", tuple(exact.shape), 0, exact.numel()),)
        bucket = Bucket(name, tuple(parts), beside, gradient.dtype, gradient.device)
        draw = Draw(seed=self.seed, step=step, stream=name, rank=network.rank)
        request = self.residuals.request(
            bucket,
            gradient,
            exact,
            draw,
            out=out,
            may_be_unused=may_be_unused,
            measure=measure,
            shards=shards,
        )
        recipe = self.residuals.recipe_of(name)
        return self.residuals.received(name, recipe.exchange.mean(recipe.codec, request, network))

    def settle(self, *, finite: bool = True) -> None:
        self.residuals.settle(finite)

    def residual(self, name: str) -> Tensor:
        """What the memory holds of a tensor, flat."""
        assert self.residuals.memory is not None
        return self.residuals.memory.residual(name).view(-1)


class Ranks:
    """A recipe on n ranks, each with residuals of its own; one tensor, or one each of several lengths, a step."""

    def __init__(self, text: str, world_size: int, *, seed: int = 0) -> None:
        self.recipe, self.world_size = parse(text), world_size
        self.sides = [Side(self.recipe, seed=seed) for _ in range(world_size)]
        self.networks = LocalNetwork.of(world_size)

    @property
    def residuals(self) -> list[Residuals]:
        return [side.residuals for side in self.sides]

    def exchange(self, name: str, gradients: list[Tensor], step: int, **options: Any) -> Result:
        """What all ranks got of clones of these gradients; options are those of `Side.exchange`."""
        return assert_all_ranks_got(self.exchange_apart(name, gradients, step, **options))

    def exchange_apart(self, name: str, gradients: list[Tensor], step: int, **options: Any) -> list[Result]:
        """What each rank got. Options that differ between the ranks come as one list for all: `exact` and `out`."""
        apart = {key: options.pop(key) for key in ("exact", "out") if key in options}

        def work(network: LocalNetwork) -> Result:
            own = {key: of_ranks[network.rank] for key, of_ranks in apart.items()}
            given, side = gradients[network.rank].clone(), self.sides[network.rank]
            return side.exchange(name, given, network=network, step=step, **own, **options)

        return on_all_ranks(self.networks, work)

    def settle(self, *, finite: bool | Tensor = True) -> None:
        for side in self.sides:
            side.settle(finite=bool(finite))

    def step(self, gradients: list[Tensor], step: int, **options: Any) -> Tensor:
        """The mean of one tensor a rank, and the end of the step."""
        result = self.exchange("w", gradients, step, **options)
        self.settle(finite=result.finite)
        return result.mean

    def snapshot(self) -> list[dict[str, Any]]:
        """Everything that changes while training, by value."""
        return [
            copy.deepcopy(
                {
                    "memory": kept.memory.state_dict() if kept.memory is not None else {},
                    "states": kept.states,
                    "backs": kept.backs,
                }
            )
            for kept in self.residuals
        ]

    def unsent(self, name: str, numel: int) -> Tensor:
        """What all ranks together still have to send, float64: residuals, and n times what second shots left."""
        total = torch.zeros(numel, dtype=torch.float64)
        for rank, kept in enumerate(self.residuals):
            if kept.memory is not None and name in kept.memory.names():
                total += kept.memory.residual(name).view(-1)
            if name in kept.backs:
                total[pieces(numel, self.world_size)[rank]] += self.world_size * kept.backs[name]
        return total


@dataclasses.dataclass
class Exchanged:
    """One tensor of one step of a run: what went in, what all ranks got, what they sent."""

    gradients: list[Tensor]
    exact: list[Tensor]
    results: list[Result]
    sent_bytes: list[int]
    calls: list[dict[str, int]]  # of each collective


@dataclasses.dataclass
class Run:
    ranks: Ranks
    steps: list[dict[int, Exchanged]]


@functools.cache
def run(text: str, world_size: int) -> Run:
    """A few steps of a recipe with tensors of many lengths, made once and looked at by many tests."""
    ranks, steps = Ranks(text, world_size), []
    for step in range(3 if world_size == 3 else 2):
        exchanged = {
            numel: Exchanged(
                [gradient(rank, step, numel) for rank in range(world_size)],
                [exact_elements(rank, step, numel) for rank in range(world_size)],
                [],
                [],
                [],
            )
            for numel in lengths_of(world_size)
        }

        def work(network: LocalNetwork, step: int = step, exchanged: dict[int, Exchanged] = exchanged) -> list[Any]:
            side, results = ranks.sides[network.rank], []
            for numel, one in exchanged.items():
                before, by_kind = network.traffic, network.traffic_by_kind()
                given, exact = one.gradients[network.rank].clone(), one.exact[network.rank].clone()
                result = side.exchange(
                    f"n{numel}", given, network=network, step=step, exact=exact, parts=parts_of(numel)
                )
                calls = {
                    kind: now.calls - by_kind.get(kind, Traffic()).calls
                    for kind, now in network.traffic_by_kind().items()
                }
                results.append((result, (network.traffic - before).bytes, calls))
            side.settle(finite=all(result.finite for result, *_ in results))
            return results

        for results in on_all_ranks(ranks.networks, work):
            for one, (result, sent, calls) in zip(exchanged.values(), results, strict=True):
                one.results.append(result)
                one.sent_bytes.append(sent)
                one.calls.append({kind: count for kind, count in calls.items() if count})
        steps.append(exchanged)
    return Run(ranks, steps)


def true_mean(gradients: list[Tensor]) -> Tensor:
    """In float64."""
    return torch.stack(gradients).double().mean(0)


def summation_error(gradients: list[Tensor]) -> Tensor:
    """How far a float32 mean may be off, elementwise: 1/n, n products and n - 1 additions are rounded once each."""
    n = len(gradients)
    return (n + 1) * EPS * torch.stack(gradients).double().abs().mean(0) + 2.0**-149


def lost(codec: Codec, numel: int, *, shape: Shape | None = None) -> float:
    """E|C(x) - x|^2 / |x|^2 at most, as the codec declares it."""
    omega, delta = codec.omega(numel), codec.delta(numel, shape=shape)
    found = omega if codec.unbiased else None if delta is None else 1 - delta
    assert found is not None
    return found
