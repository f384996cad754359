"""A codec that a user writes: registered by one decorator, used by text in every exchange that it declares to fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import thinwire as tw
from support.ranks import noise, same_bits, true_mean
from thinwire import LocalGroup, OptionError, RecipeError, parse
from thinwire.codecs import Codec, Shape, State, register, unregister
from thinwire.exchange.first_shot import pieces
from thinwire.recipe.registry import STAGES
from thinwire.rng import Key


@pytest.fixture
def chopped() -> Iterator[type[Codec]]:
    @register
    class Chopped(Codec):
        """Cuts float32 off after some bits of the mantissa."""

        name = "chopped"
        examples = ("chopped", "chopped:3")
        sum_dtype = torch.bfloat16
        bits: int = 7

        def __post_init__(self) -> None:
            self._require(1 <= self.bits <= 7, f"bits must be 1 to 7, got {self.bits}")

        def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
            return 2 * numel

        def delta(self, numel: int, *, shape: Shape | None = None) -> float:
            return 1 - 4.0**-self.bits

        def to_sum(self, x: Tensor) -> Tensor:
            kept = x.reshape(-1).view(torch.int32) & -(1 << (23 - self.bits))
            return kept.view(torch.float32).to(torch.bfloat16)

        def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
            body.view(torch.bfloat16).copy_(self.to_sum(x))

        def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
            out += body.view(torch.bfloat16)

    yield Chopped
    unregister("chopped")


@pytest.fixture
def every_other() -> Iterator[type[Codec]]:
    @register
    class EveryOther(Codec):
        """Sends every second element, beginning with the first or the second by turns: sparse, without a choice."""

        name = "every_other"
        sparse = True
        density = 0.5

        def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
            return 4 * self.capacity(numel)

        def capacity(self, numel: int) -> int:
            return (numel + 1) // 2

        def delta(self, numel: int, *, shape: Shape | None = None) -> float:
            return 0.0

        def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
            values = x.reshape(-1)[key.k0 & 1 :: 2]
            body.view(torch.float32).zero_()[: values.numel()] = values

        def positions_and_values(self, body: Tensor, numel: int, key: Key) -> tuple[Tensor, Tensor]:
            positions = torch.arange(key.k0 & 1, numel, 2, dtype=torch.int32)
            return positions, body.view(torch.float32)[: positions.numel()]

        def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
            positions, values = self.positions_and_values(body, out.numel(), key)
            out[positions.long()] += values

    yield EveryOther
    unregister("every_other")


def unsent(group: LocalGroup, numel: int) -> Tensor:
    """Residuals of all ranks, and n times what second shots left."""
    total = torch.zeros(numel, dtype=torch.float64)
    for rank, reducer in enumerate(group.reducers):
        if reducer.residuals.memory is not None:
            total += reducer.residuals.memory.residual("gradient").view(-1)
        for back in reducer.residuals.backs.values():
            total[pieces(numel, group.world_size)[rank]] += group.world_size * back
    return total


def run(text: str, world_size: int, *, steps: int = 4, numel: int = 1030) -> tuple[float, float, float]:
    """Error of the first mean and what got lost over the steps, relative to what was given; sent bytes a step."""
    group = LocalGroup(parse(text), world_size)
    before = sum(network.traffic.bytes for network in group.networks)
    given, delivered = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    error = 0.0
    for step in range(steps):
        gradients = [noise(rank, step, numel=numel) for rank in range(world_size)]
        means = group.means(gradients, step)
        assert all(same_bits(mean, means[0]) for mean in means)
        given += torch.stack(gradients).double().sum(0)
        delivered += world_size * means[0].double()
        mean = true_mean(gradients)
        error = error or float((means[0].double() - mean).norm() / mean.norm())
    lost = float((delivered + unsent(group, numel) - given).norm() / given.norm())
    sent = sum(network.traffic.bytes for network in group.networks) - before
    return error, lost, sent / steps / world_size


EXCHANGES = ["all_gather", "local", "all_reduce", "two_shot", "two_shot:3", "two_shot:feedback=true"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("word", ["chopped", "chopped:3"])
def test_its_name_works_in_every_exchange(chopped: type[Codec], word: str, exchange: str, world_size: int) -> None:
    error, _, _ = run(f"{word}|{exchange}", world_size)
    bits = 3 if "3" in word + exchange else 7
    assert 0 < error <= 4 * 2.0**-bits


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_with_error_feedback_nothing_is_lost(chopped: type[Codec], exchange: str, world_size: int) -> None:
    """But what a sum in bfloat16 or a second shot without feedback rounds away."""
    _, lost, _ = run(f"ef|chopped:3|{exchange}", world_size)
    rounds_twice = exchange in ("two_shot", "two_shot:3") or (exchange in ("all_reduce", "local") and world_size > 1)
    assert lost < (0.1 if rounds_twice else 1e-6)


def test_it_is_what_its_declaration_allows_inside_other_codecs(chopped: type[Codec]) -> None:
    for text in (
        "ef|top_k:0.1|chopped|all_gather",
        "ef|threshold_k:0.1|chopped:3|shared_top_k",
        "ef|low_rank:2|chopped|all_reduce",
        "random_k:0.1|chopped|all_reduce",
    ):
        error, lost, _ = run(text, 2)
        assert 0 < error < 10
        assert lost < 1 or not text.startswith("ef")
    assert parse("top_k:0.1|chopped|all_gather").codec.values_codec == chopped()


def test_its_bytes_are_those_that_it_declares(chopped: type[Codec]) -> None:
    assert [run(f"chopped|{exchange}", 3)[2] for exchange in ("all_gather", "all_reduce")] == [2 * 2060, 4 * 2060 // 3]


def test_it_prints_and_parses_like_any_other(chopped: type[Codec]) -> None:
    recipe = parse("ef | chopped:3 | all_gather")
    assert repr(recipe) == "chain(error_feedback(), chopped(3), all_gather())"
    assert tw.Recipe.from_yaml(recipe.to_yaml()) == recipe == parse(str(recipe))
    assert tw.codecs.chopped is chopped
    assert recipe.wire_bytes(1001) == 2004
    assert "Cuts float32 off after some bits of the mantissa." in recipe.describe()
    with pytest.raises(RecipeError, match="chopped: bits must be 1 to 7, got 9"):
        parse("chopped:9|all_gather")
    with pytest.raises(RecipeError, match="did you mean chopped"):
        parse("choped|all_gather")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["all_gather", "local", "two_shot:feedback=true"])
def test_a_sparse_one_needs_nothing_but_its_declaration(
    every_other: type[Codec], exchange: str, world_size: int
) -> None:
    _, lost, _ = run(f"ef|every_other|{exchange}", world_size)
    assert lost < 1e-6
    for refused, fix in (("all_reduce", "use global_qsgd"), ("two_shot", "feedback=true"), ("shared_top_k", "leader")):
        with pytest.raises(RecipeError, match=fix):
            parse(f"every_other|{refused}")
    run(f"momentum_correction|every_other|{exchange}", world_size)


def test_a_sum_that_is_declared_and_not_defined_names_the_fix() -> None:
    @register
    class Undefined(Codec):
        """Says that it may be added, and does not say how."""

        name = "undefined"
        sum_dtype = torch.float16

        def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
            return 4 * numel

        def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
            body.view(torch.float32).copy_(x.reshape(-1))

        def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
            out += body.view(torch.float32)

    try:
        run("undefined|all_gather", 2)
        with pytest.raises(tw.ExchangeError, match="define to_sum and from_sum"):
            run("undefined|all_reduce", 2)
        with pytest.raises(RecipeError, match="error_feedback needs a contraction"):
            parse("ef|undefined|all_gather")  # it declares no delta
    finally:
        unregister("undefined")


# ------------------------------------------------------------------------------------------------------- names


def named(name: object) -> type[Codec]:
    class Other(tw.codecs.bf16):
        pass

    Other.name = name  # type: ignore[assignment]
    return Other


@pytest.mark.parametrize("name", ["top_k", "fp32", "all_gather", "error_feedback", "ef", "dense", "none"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    before = dict(STAGES)
    with pytest.raises(OptionError, match=f"there is a stage {name} already: choose another name for Other"):
        register(named(name))
    assert dict(STAGES) == before


@pytest.mark.parametrize("name", ["", "Top", "top-k", "2bit", "a b", "x|y", 3, None])
def test_names_that_no_recipe_can_spell_are_refused(name: object) -> None:
    with pytest.raises(OptionError, match="needs a name of lower-case letters, digits and _"):
        register(named(name))


def test_a_class_may_be_registered_again_and_is_gone_afterwards(chopped: type[Codec]) -> None:
    assert register(chopped) is chopped
    with pytest.raises(OptionError, match="there is a stage chopped already"):
        register(named("chopped"))
    unregister("chopped")
    assert "chopped" not in STAGES
    with pytest.raises(RecipeError, match="there is no stage chopped"):
        parse("chopped|all_gather")
    with pytest.raises(AttributeError):
        _ = tw.codecs.chopped
