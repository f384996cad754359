"""Every registered codec does what it declares: sizes, errors, sums, positions, and a mean in every exchange."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from support.inputs import NAN, assert_error_within, gaussian, hard_inputs
from support.ranks import lost, noise, same_bits, true_mean
from thinwire import LocalGroup, OptionError, Recipe, RecipeError, parse, theory
from thinwire.codecs import Codec, RoundCost, Shape, top_k
from thinwire.codecs.frames import HEADER_BYTES, padded
from thinwire.exchange import Exchange, TwoShot, all_gather, all_reduce, local, shared_top_k, two_shot
from thinwire.exchange.first_shot import pieces
from thinwire.exchange.request import Part, Request
from thinwire.memory import error_feedback
from thinwire.recipe.fits import contraction_refusal
from thinwire.recipe.registry import STAGES
from thinwire.rng import Draw, Key

CODECS = {name: stage for name, stage in STAGES.items() if issubclass(stage, Codec)}
WORDS = [word for name, stage in CODECS.items() for word in stage.examples or (name,)]
EXCHANGES: list[Exchange] = [
    all_reduce(),
    all_gather(),
    two_shot(),
    two_shot(feedback=True),
    shared_top_k(),
    shared_top_k("norm"),
]
SHAPES: list[Shape] = [(1,), (2,), (63,), (64,), (65,), (1000,), (4097,), (5, 8), (24, 40), (16, 4, 3, 3)]
NUMEL = 1024

by_word = pytest.mark.parametrize("word", WORDS)


def codec_of(word: str) -> Codec:
    return parse(f"{word}|local").codec


def data(shape: Shape) -> dict[str, Tensor]:
    """Inputs that a size must not depend on."""
    x = gaussian(math.prod(shape)).view(shape)
    spoiled = x.clone()
    spoiled.view(-1)[-1] = NAN
    return {"gaussian": x, "zeros": torch.zeros(shape), "constant": torch.full(shape, -0.3), "not finite": spoiled}


def written(codec: Codec, x: Tensor, key: Key, *, fill: int) -> tuple[Tensor, Tensor]:
    """(body, all around it): written into the middle of bytes that hold `fill`."""
    size, margin = codec.body_bytes(x.numel(), shape=tuple(x.shape)), 64
    room = torch.full((size + 2 * margin,), fill, dtype=torch.uint8)
    body = room[margin : margin + size]
    codec.write(x.clone(), body, key, codec.new_state())
    return body.clone(), torch.cat((room[:margin], room[margin + size :]))


# ------------------------------------------------------------------------------------------------------ names


def test_examples_are_words_of_their_codec() -> None:
    assert {"fp32", "global_qsgd", "low_rank", "rotated", "threshold_k"} <= set(CODECS)
    for name, stage in CODECS.items():
        for word in stage.examples or (name,):
            assert type(codec_of(word)) is stage
            assert word.partition(":")[0] == name


def test_every_registered_exchange_is_tried() -> None:
    registered = {name for name, stage in STAGES.items() if issubclass(stage, Exchange)}
    assert registered == {exchange.name for exchange in EXCHANGES} | {"local"}


# ------------------------------------------------------------------------------------------------------ sizes


@by_word
def test_body_bytes_are_exact_and_all_of_them_are_written(word: str) -> None:
    codec, key = codec_of(word), Draw(step=3).key()
    for shape in SHAPES:
        for name, x in data(shape).items():
            first, around = written(codec, x, key, fill=0x00)
            second, beside = written(codec, x, key, fill=0xFF)
            assert torch.equal(first, second), (shape, name)  # no byte is left as it was
            assert bool((around == 0x00).all() and (beside == 0xFF).all()), (shape, name)


@by_word
def test_sizes_depend_on_the_number_of_elements_only(word: str) -> None:
    codec = codec_of(word)
    for shape in SHAPES:
        numel = math.prod(shape)
        body = codec.body_bytes(numel, shape=shape)
        assert codec.message_bytes(numel, shape=shape) == padded(body)
        assert codec.wire_bytes(numel, shape=shape) == HEADER_BYTES + padded(body)
        assert codec.needs_shape or body == codec.body_bytes(numel)
        for x in data(shape).values():
            assert codec.encode(x).numel() == codec.wire_bytes(numel, shape=shape)
    assert codec.message_bytes(0) == 0


@by_word
def test_putting_is_adding_to_zeros_and_taking_leaves_the_rest(word: str) -> None:
    codec, key = codec_of(word), Draw(step=5).key()
    for shape in SHAPES:
        x = gaussian(math.prod(shape), 1).view(shape)
        body, _ = written(codec, x, key, fill=0)
        put, added = torch.full((x.numel(),), NAN), torch.zeros(x.numel())
        codec.put_body(body, put, key, shape)
        codec.add_body(body, added, key, shape)
        assert torch.equal(put, added)
        rest, taken = x.clone(), torch.zeros_like(body)
        codec.write_taking(rest, taken, key, codec.new_state())
        assert torch.equal(taken, body)
        torch.testing.assert_close(rest.view(-1) + put, x.view(-1), rtol=0, atol=1e-6 * float(put.abs().max() + 1))


# ------------------------------------------------------------------------------------------------------ errors


@by_word
def test_unbiased_codecs_have_omega_and_others_delta_or_nothing(word: str) -> None:
    codec = codec_of(word)
    for numel in (1, 64, NUMEL, 1 << 20):
        omega, delta = codec.omega(numel), codec.delta(numel)
        if codec.unbiased:
            assert omega is not None
            assert 0 <= omega < math.inf
            assert delta is None
        else:
            assert omega is None
            assert delta is None or 0 <= delta <= 1
    assert not codec.lossless or codec.omega(NUMEL) == 0


@by_word
def test_the_error_stays_within_what_is_declared(word: str) -> None:
    codec, draws = codec_of(word), 40
    for name, x in hard_inputs(NUMEL).items():
        if codec.name == "fp16" and name in ("tiny", "large"):
            continue  # outside float16's range, as its docstring says
        shape: Shape = (32, 32) if codec.needs_shape else (NUMEL,)
        samples = torch.stack(
            [codec.decode(codec.encode(x.view(shape), draw=Draw(step=step)), shape=shape) for step in range(draws)]
        )
        if codec.lossless:
            assert same_bits(samples[0].view(-1), x)
        assert_error_within(samples.view(draws, -1), x, (1 + 1e-6) * lost(codec, NUMEL, shape=shape))


@by_word
def test_the_mean_of_many_messages_is_the_tensor_if_that_is_declared(word: str) -> None:
    """Of errors that are independent, 1/n is left of n; an error that stays is a bias. Rotations have a small one."""
    codec, x, draws = codec_of(word), gaussian(NUMEL), 100
    if not codec.unbiased:
        return
    total = torch.zeros(NUMEL)
    for step in range(draws):
        codec.add(codec.encode(x, draw=Draw(step=step)), total)
    error = float((total / draws - x).square().sum() / x.square().sum())
    assert error <= 1.5 * lost(codec, NUMEL) / draws + (3e-3 if codec.name == "rotated" else 1e-9)


# ------------------------------------------------------------------------------------------------------ sums


def own_rounds(codec: Codec, x: Tensor, shape: Shape) -> tuple[list[Tensor], list[int], Tensor]:
    """(what is added, float32 bytes beside it, the mean) of one rank alone."""
    parts = [Part("w", shape, 0, x.numel())]
    rounds = codec.rounds(Request(x.clone().view(-1), x.new_empty(0), parts, Draw(), {}), 1)
    sent: list[Tensor] = []
    beside: list[int] = []
    current = next(rounds)
    while True:
        sent.append(current.tensor.clone())
        beside.append(0 if current.beside is None else 4 * current.beside.numel())
        try:
            current = rounds.send(current.tensor)
        except StopIteration as end:
            return sent, beside, end.value[0]


@by_word
def test_a_sum_dtype_is_declared_if_and_only_if_all_reduce_accepts(word: str) -> None:
    codec = codec_of(word)
    refusal = all_reduce().accepts(codec)
    assert (codec.sum_dtype is not None) == (refusal is None)
    if refusal is not None:
        assert refusal == codec.not_summable()
        with pytest.raises(RecipeError, match=refusal[:20]):
            parse(f"{word}|all_reduce")
        return
    for shape in ((1,), (65,), (1000,), (24, 40)):
        x = gaussian(math.prod(shape)).view(shape)
        sent, beside, mean = own_rounds(codec, x, shape)
        costs = [cost for cost in codec.round_costs(x.numel(), 1, [shape]) if isinstance(cost, RoundCost)]
        assert [(cost.size, cost.beside) for cost in costs] == [
            (tensor.numel() * tensor.element_size(), size) for tensor, size in zip(sent, beside, strict=True)
        ]
        in_a_tree = any(cost.tree is not None for cost in costs)
        assert in_a_tree or codec.sum_dtype in {tensor.dtype for tensor in sent}
        assert mean.shape == (x.numel(),)
        bound = math.sqrt(lost(codec, x.numel(), shape=shape)) if not codec.unbiased else math.inf
        assert float((mean - x.view(-1)).norm()) <= bound * float(x.norm()) * (1 + 1e-6)


# ------------------------------------------------------------------------------------------------- positions


def increasing(positions: Tensor, numel: int) -> bool:
    inside = positions.numel() == 0 or (int(positions[0]) >= 0 and int(positions[-1]) < numel)
    return inside and bool((positions[1:] > positions[:-1]).all()) and positions.dtype == torch.int32


@by_word
def test_sparse_codecs_send_increasing_positions_and_others_have_none(word: str) -> None:
    codec, key = codec_of(word), Draw(step=7).key()
    assert codec.sparse or not codec.chooses
    assert codec.sparse == (codec.density is not None)
    for x in (gaussian(1000), gaussian(70_001), gaussian(1000).sign(), torch.zeros(100)):
        numel = x.numel()
        if not codec.sparse:
            with pytest.raises(OptionError, match="sends all elements"):
                codec.positions_and_values(torch.empty(0, dtype=torch.uint8), numel, key)
            assert codec.capacity(numel) == numel
            continue
        body, _ = written(codec, x, key, fill=0)
        positions, values = codec.positions_and_values(body, numel, key)
        assert increasing(positions, numel)
        assert values.dtype == torch.float32
        assert positions.shape == values.shape
        assert positions.numel() <= codec.capacity(numel) <= numel
        expected, added = torch.zeros(numel), torch.zeros(numel)
        expected[positions.long()] = values
        codec.add_body(body, added, key, (numel,))
        assert torch.equal(added, expected)
        if codec.chooses:
            packed = codec.pack_positions(x, draw=Draw(step=7))
            assert packed.numel() == codec.positions_bytes(numel)
            assert torch.equal(codec.unpack_positions(packed, numel), positions)


@by_word
def test_capabilities_are_respected_where_words_are_joined(word: str) -> None:
    codec = codec_of(word)
    refusal = top_k(0.1).accepts_inner(codec)
    assert (refusal is not None) == (codec.sparse or codec.whole_tensors)
    assert not codec.needs_shape or two_shot().accepts(codec) is not None
    assert not codec.sparse or two_shot().accepts(codec) is not None
    assert all_gather().accepts(codec) is local().accepts(codec) is None
    assert parse(f"{codec.spec()}|all_gather").codec == codec


# ------------------------------------------------------------------------------------------------- exchanges


def granted(recipe: Recipe, gradients: list[Tensor], shape: Shape) -> float:
    """What |mean delivered - mean|^2 may be, in expectation: from what the codec declares."""
    codec, n, numel = recipe.codec, len(gradients), gradients[0].numel()
    mean_norm = float(true_mean(gradients).norm())
    norms = [float(x.double().norm()) for x in gradients]
    mean_of_norms, energy = sum(norms) / n, sum(norm**2 for norm in norms)
    exchange = recipe.exchange.name
    if exchange == "shared_top_k":  # what the leader does not choose is lost, of other ranks too
        return (mean_norm + (n + 1) * 2.0**-8 * mean_of_norms) ** 2
    if exchange == "two_shot":
        assert isinstance(recipe.exchange, TwoShot)
        back = recipe.exchange.codec_back(codec)
        sizes = {piece.stop - piece.start for piece in pieces(numel, n)} - {0}
        there, returned = (max(lost(each, size) for size in sizes) for each in (codec, back))
        if codec.unbiased:
            first = there * energy / n**2
            return first + returned * (mean_norm**2 + first)
        first = math.sqrt(there) * mean_of_norms
        return (first + math.sqrt(returned) * (mean_norm + first)) ** 2
    if not codec.unbiased:  # sums of narrow floats are rounded with every addition
        roundings = 1 if exchange == "all_gather" else n + 1
        return (roundings * math.sqrt(lost(codec, numel, shape=shape)) * mean_of_norms) ** 2
    if exchange == "all_gather":
        return lost(codec, numel) * energy / n**2
    costs = [cost for cost in codec.round_costs(numel, n, [shape]) if isinstance(cost, RoundCost)]
    if any(cost.tree is not None for cost in costs):  # every level of the tree rounds once more
        return ((1 + lost(codec, numel)) * theory.exponential_tree_penalty(n) - 1) * energy / n
    omega = codec.omega_of_mean(numel, n)
    assert omega is not None
    if codec.sparse:  # ranks share positions, so that errors do not average out
        omega *= n
    return omega * max(norms) ** 2


def recipe_or_none(word: str, exchange: Exchange) -> Recipe | None:
    """The recipe, if codec and exchange say that they fit; else it must not be composed."""
    codec = codec_of(word)
    refusal = exchange.accepts(codec)
    if refusal is None and exchange.feedback:
        refusal = contraction_refusal(error_feedback(), codec)
    if refusal is None:
        return parse(f"{word}|{exchange.text()}")
    with pytest.raises(RecipeError) as refused:
        parse(f"{word}|{exchange.text()}")
    assert str(refused.value) == refusal
    return None


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.text())
@by_word
def test_every_exchange_that_accepts_it_delivers_one_mean_within_the_bound(
    word: str, exchange: Exchange, world_size: int
) -> None:
    recipe, shape = recipe_or_none(word, exchange), (32, 33)
    if recipe is None:
        return
    gradients = [noise(rank, numel=32 * 33) for rank in range(world_size)]
    mean, errors = true_mean(gradients), []
    for step in range(8):
        group = LocalGroup(recipe, world_size)  # a new one: residuals of second shots stay out of it
        results = group.means([x.view(shape) for x in gradients], step)
        assert all(same_bits(result, results[0]) for result in results)
        assert results[0].shape == shape
        errors.append(float((results[0].view(-1).double() - mean).square().sum()))
    found = torch.tensor(errors, dtype=torch.float64)
    bound = granted(recipe, gradients, shape)
    chance = 4 * float(found.std()) / math.sqrt(len(errors))
    assert float(found.mean()) <= bound + chance + 1e-10 * float(mean.square().sum())
    assert recipe.codec.lossless == (float(found.max()) < 1e-10 * float(mean.square().sum()))


@pytest.mark.parametrize("word", WORDS)
def test_local_does_what_all_reduce_or_all_gather_does(word: str) -> None:
    codec = codec_of(word)
    like = "all_reduce" if codec.sum_dtype is not None else "all_gather"
    gradients = [noise(rank, numel=24 * 40).view(24, 40) for rank in range(2)]
    ours, theirs = (LocalGroup(parse(f"{word}|{exchange}"), 2).mean(gradients, 0) for exchange in ("local", like))
    assert same_bits(ours, theirs)


def test_a_codec_is_frozen_and_equal_to_its_copy() -> None:
    for word in WORDS:
        codec = codec_of(word)
        assert dataclasses.replace(codec) == codec
        assert hash(codec_of(word)) == hash(codec)
        with pytest.raises(dataclasses.FrozenInstanceError):
            codec.name = "other"  # type: ignore[misc]
