"""Error feedback with a selection is one pass in training: add, compare and take out at once, with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.ranks import noise, same_bits
from thinwire import LocalGroup, Reducer, kernels, parse
from thinwire.codecs import Codec, bf16, threshold_k, top_k
from thinwire.comm.local import LocalNetwork
from thinwire.rng import Draw

NUMEL = 40_003  # enough for top_k to sample a threshold
LONG = 100_003  # enough for the first threshold to come from a sample too
STEPS = 6
WARM_UP = 10  # steps in which a threshold may be searched once more
FUSED = ["ef|threshold_k:0.01|all_gather", "ef:0.9|top_k:0.01|bf16|all_gather", "ef:0.9|threshold_k:0.01|bf16|local"]
CODECS: list[Codec] = [threshold_k(0.01), threshold_k(0.01, values=bf16()), top_k(0.01), top_k(0.01, values=bf16())]
NAMES = ("select_ef", "select", "threshold_count", "moments", "block_abs_max")


class Calls:
    """How often kernels were called on tensors of `LONG` elements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name in NAMES:
            monkeypatch.setattr(kernels, name, self._wrapped(name, getattr(kernels, name)))

    def _wrapped(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any, **options: Any) -> Any:
            if x.numel() == LONG:
                self.seen.append(name)
            return kernel(x, *args, **options)

        return call

    def take(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


class Sums(TorchDispatchMode):
    """Counts torch's own additions, subtractions and products of `LONG` elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("add", "sub", "mul", "addcmul", "lerp") and isinstance(found, Tensor) and found.numel() == LONG:
            self.count += 1
        return found


def gaussian(*key: int) -> Tensor:
    """Without a period, which may fall in with the stride of a sample: then a threshold is searched once more."""
    seed = sum(part * 1009**place for place, part in enumerate(key))
    return torch.randn(LONG, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ one pass a step


def assert_once_each(seen: list[str], buckets: int, step: int) -> None:
    """One fused pass for every bucket, and after the warm-up no other."""
    assert seen.count("select_ef") == buckets
    assert step < WARM_UP or seen == ["select_ef"] * buckets


@pytest.mark.parametrize("text", FUSED)
def test_a_step_is_one_fused_pass_for_each_bucket(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    reducer = Reducer(text, group=LocalNetwork.alone(), check_every=0)
    for step in range(WARM_UP + STEPS):
        works = [reducer.start(name, gaussian(place, step)) for place, name in enumerate("ab")]
        for work in works:
            work.wait()
        reducer.commit()
        assert_once_each(calls.take(), 2, step)


@pytest.mark.parametrize("text", [*FUSED, "ef|dgc_k:0.01|all_gather", "ef|bf16|all_gather"])
def test_no_separate_addition_runs_where_the_pass_is_fused(text: str) -> None:
    """The last two recipes have no fused pass: there the additions are counted, so that the test can fail."""
    reducer = Reducer(text, group=LocalNetwork.alone(), check_every=0)
    for step in range(STEPS):
        gradient = gaussian(step)
        with Sums() as sums:
            reducer.reduce("w", gradient)
            reducer.commit()
        assert (sums.count == 0) == (text in FUSED)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("text", FUSED)
def test_every_rank_runs_it_once_a_step_and_bucket(text: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, group = Calls(monkeypatch), LocalGroup(parse(text), world_size)
    for step in range(WARM_UP + STEPS):
        group.mean([{name: gaussian(rank, step) for name in "abc"} for rank in range(world_size)], step)
        assert_once_each(calls.take(), 3 * world_size, step)


# ----------------------------------------------------------------------------------------------------- same bits


def both(codec: Codec, gradient: Tensor, residual: Tensor, state: Any, decay: float, seed: int) -> tuple[Any, Any]:
    """(body, rest, state) of the fused pass, and of writing the sum."""
    key, size = Draw(seed=seed).key(), codec.body_bytes(gradient.numel())
    bodies = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    fused, plain = gradient.clone(), torch.add(gradient, residual, alpha=decay)
    states = [copy.deepcopy(state) for _ in range(2)]
    codec.write_compensated(fused, residual, bodies[0], key, states[0], decay=decay)
    codec.write_taking(plain, bodies[1], key, states[1])
    return (bodies[0], fused, states[0]), (bodies[1], plain, states[1])


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numel", [1, 64, 1000, NUMEL, 65_536])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec())
def test_the_fused_pass_is_writing_the_sum_bit_for_bit(codec: Codec, numel: int, seed: int, decay: float) -> None:
    residual, state = torch.zeros(numel), codec.new_state()
    for step in range(STEPS):
        before = residual.clone()
        fused, plain = both(codec, noise(seed, step, numel=numel), residual, state, decay, seed)
        assert torch.equal(fused[0], plain[0])
        assert same_bits(fused[1], plain[1])
        assert fused[2] == plain[2]
        assert same_bits(residual, before)
        _, residual, state = fused


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec())
def test_so_it_is_for_long_tensors_once_there_is_a_threshold(codec: Codec, seed: int, decay: float) -> None:
    """The first threshold comes from another sample there: of a thinned sum, and not of the sum of all elements."""
    numel = LONG
    residual, state = torch.zeros(numel), codec.new_state()
    for step in range(STEPS):
        fused, plain = both(codec, noise(seed, step, numel=numel), residual, state, decay, seed)
        if step > 0:
            assert torch.equal(fused[0], plain[0])
            assert same_bits(fused[1], plain[1])
            assert fused[2] == plain[2]
        _, residual, state = fused


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("text", FUSED)
def test_training_gives_the_bits_of_the_plain_way(text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain = (LocalGroup(parse(text), 2, seed=seed) for _ in range(2))
    kind = type(fused.recipe.codec)
    for step in range(STEPS):
        gradients = [noise(seed, rank, step, numel=NUMEL) for rank in range(2)]
        ours = fused.mean(gradients, step)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "write_compensated", Codec.write_compensated)
            theirs = plain.mean(gradients, step)
        assert same_bits(ours, theirs)
        for one, other in zip(fused.memories, plain.memories, strict=True):
            assert same_bits(one.residual("gradient"), other.residual("gradient"))
