"""Low rank against the singular value decomposition, its special values, its messages, and its two rounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import Draw, MessageError, OptionError, theory
from thinwire.codecs import bf16, fp16, low_rank, qsgd, top_k
from thinwire.codecs.frames import HEADER_BYTES


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lost(x: Tensor, y: Tensor) -> float:
    """Share of the energy that is missing."""
    return float((x - y).norm() ** 2 / x.norm() ** 2)


def best(x: Tensor, rank: int) -> float:
    squares = torch.linalg.svdvals(x.reshape(x.shape[0], -1)) ** 2
    return float(squares[rank:].sum() / squares.sum())


# ------------------------------------------------------------------------------------------------------------ oracle


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 6), st.integers(0, 2**31), st.integers(1, 3))
def test_a_step_is_a_projection_on_the_iterated_subspace(m: int, n: int, rank: int, seed: int, iterations: int) -> None:
    codec, x, state = (
        low_rank(rank, iterations=iterations),
        matrix(m, n, seed=seed),
        {"q": matrix(n, rank, seed=seed + 1)},
    )
    q = state["q"].double()
    message = codec.encode(x, state=state)
    assert message.numel() == codec.wire_bytes(m * n, shape=(m, n))
    decoded = codec.decode(message, shape=(m, n))
    if not codec.pays((m, n)):
        assert torch.equal(decoded, x)
        return
    for _ in range(iterations):
        p = torch.linalg.qr(x.double() @ q).Q
        q = x.double().T @ p
    torch.testing.assert_close(decoded.double(), p @ (p.T @ x.double()), rtol=1e-3, atol=1e-4)
    assert lost(x, decoded) <= 1 + 1e-6


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (16, 8, 3, 3)], ids=str)
def test_warm_start_approaches_the_best_approximation(shape: tuple[int, ...]) -> None:
    codec, x, state = low_rank(4), matrix(*shape), low_rank(4).new_state()
    losses = [lost(x, codec.decode(codec.encode(x, state=state), shape=shape)) for _ in range(200)]
    bound = 1 - theory.low_rank(shape[0], math.prod(shape[1:]), 4)
    assert losses[0] > losses[5] > losses[-1] - 1e-6
    assert losses[-1] <= best(x, 4) * 1.01 <= bound * 1.01


@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_that_rank_is_exact_at_once(rank: int) -> None:
    x = matrix(40, rank) @ matrix(rank, 30, seed=1)
    codec = low_rank(rank)
    torch.testing.assert_close(codec.decode(codec.encode(x), shape=(40, 30)), x, rtol=1e-4, atol=1e-5)


def test_deficient_rank_is_exact_too() -> None:
    x = torch.outer(matrix(40), matrix(30, seed=1))
    codec, state = low_rank(4), low_rank(4).new_state()
    for _ in range(3):
        torch.testing.assert_close(codec.decode(codec.encode(x, state=state), shape=(40, 30)), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factors", [bf16(), fp16()], ids=repr)
def test_factors_may_be_rounded(factors: bf16) -> None:
    codec, x = low_rank(4, factors=factors), matrix(64, 64)
    exact = low_rank(4)
    rounded, full = codec.decode(codec.encode(x), shape=(64, 64)), exact.decode(exact.encode(x), shape=(64, 64))
    assert lost(full, rounded) < 1e-4
    assert codec.body_bytes(64 * 64, shape=(64, 64)) * 2 == exact.body_bytes(64 * 64, shape=(64, 64))


# ---------------------------------------------------------------------------------------------------- what it states


def test_sizes() -> None:
    codec = low_rank(4)
    assert codec.body_bytes(64 * 32, shape=(64, 32)) == 4 * 4 * (64 + 32)
    assert codec.body_bytes(64 * 32) == 4 * 64 * 32
    assert codec.body_bytes(64 * 18, shape=(64, 2, 3, 3)) == 4 * 4 * (64 + 18)
    assert codec.body_bytes(0, shape=(0, 5)) == 0
    assert not codec.pays((8, 8))  # 4 (8 + 8) numbers are no fewer than 64
    assert codec.pays((9, 8, 1, 1))
    assert [codec.pays(shape) for shape in (None, (), (100,), (1, 100), (0, 100))] == [False] * 5


def test_delta() -> None:
    assert low_rank(4).delta(64 * 64, shape=(64, 64)) == 0.0
    assert low_rank(4).delta(64) == 1.0
    assert low_rank(4, factors=bf16()).delta(64) == bf16().delta(64)


@pytest.mark.parametrize("shape", [(), (1,), (100,), (1, 100), (8, 8), (0,), (0, 7)], ids=str)
def test_what_does_not_pay_is_sent_as_it_is(shape: tuple[int, ...]) -> None:
    codec, x, state = low_rank(4), matrix(*shape), low_rank(4).new_state()
    message = codec.encode(x, state=state)
    assert message.numel() == codec.wire_bytes(x.numel(), shape=shape)
    assert torch.equal(codec.decode(message, shape=shape), x)
    assert state == {}


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"rank": 2.5}, {"iterations": 0}, {"factors": qsgd(4)}, {"factors": top_k(0.1)}]
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=r"1 or more|use fp32, bf16 or fp16"):
        low_rank(**options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-40, 1e-30, 1e30])
def test_constants_come_back(value: float) -> None:
    codec, x, state = low_rank(2), torch.full((32, 32), value), low_rank(2).new_state()
    for _ in range(3):
        decoded = codec.decode(codec.encode(x, state=state), shape=(32, 32))
        torch.testing.assert_close(decoded, x, rtol=1e-3, atol=1e-43)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", [(32, 32), (8, 8), (50,)], ids=str)
def test_non_finite_input_is_seen_by_everyone_and_leaves_the_state(shape: tuple[int, ...], poison: float) -> None:
    codec, state, x = low_rank(2), low_rank(2).new_state(), matrix(*shape)
    codec.encode(x, state=state)
    before = {key: value.clone() for key, value in state.items()}
    x.view(-1)[3] = poison
    decoded = codec.decode(codec.encode(x, state=state), shape=shape)
    assert not torch.isfinite(decoded).all()
    assert not codec.pays(shape) or decoded.isnan().all()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[key], before[key]) for key in before)


def test_an_unused_parameter_keeps_its_warm_start() -> None:
    codec, x, state = low_rank(2), matrix(32, 32), low_rank(2).new_state()
    codec.encode(x, state=state)
    kept = state["q"].clone()
    assert not codec.decode(codec.encode(torch.zeros(32, 32), state=state), shape=(32, 32)).any()
    assert torch.equal(state["q"], kept)


def test_a_column_of_zeros_does_not_stay() -> None:
    codec, state = low_rank(2), low_rank(2).new_state()
    x = torch.zeros(32, 32)
    x[0, 0] = 1.0  # rank one: the second column of Q becomes zero
    codec.encode(x, state=state)
    codec.encode(x, state=state)
    for _ in range(30):
        codec.encode(matrix(32, 32), state=state)
    assert (
        lost(matrix(32, 32), codec.decode(codec.encode(matrix(32, 32), state=state), shape=(32, 32)))
        < best(matrix(32, 32), 2) * 1.05
    )


def test_any_dtype_and_layout() -> None:
    codec, x = low_rank(2), matrix(16, 8, 3, 3)
    expected = codec.encode(x)
    assert torch.equal(codec.encode(x.contiguous(memory_format=torch.channels_last)), expected)
    assert torch.equal(codec.encode(x.double()), expected)
    assert torch.equal(codec.encode(x.bfloat16()), codec.encode(x.bfloat16().float()))


# ---------------------------------------------------------------------------------------------------------- messages


def test_the_same_draw_gives_the_same_message() -> None:
    codec, x = low_rank(2), matrix(32, 32)
    assert torch.equal(codec.encode(x, draw=Draw(step=3)), codec.encode(x, draw=Draw(step=3)))
    assert not torch.equal(codec.encode(x, draw=Draw(step=3)), codec.encode(x, draw=Draw(step=4)))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.data())
def test_damaged_messages_are_refused(noise: bytes, data: st.DataObject) -> None:
    codec, message = low_rank(2), low_rank(2).encode(matrix(16, 16))
    random = torch.frombuffer(bytearray(noise), dtype=torch.uint8) if noise else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(MessageError):
        codec.decode(random, shape=(16, 16))
    with pytest.raises(MessageError):
        codec.decode(message[: data.draw(st.integers(0, message.numel() - 1))], shape=(16, 16))
    flipped = message.clone()
    flipped[data.draw(st.integers(0, message.numel() - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MessageError):
        codec.decode(flipped, shape=(16, 16))


def test_a_matrix_needs_its_shape_to_be_decoded() -> None:
    message = low_rank(2).encode(matrix(32, 32))
    with pytest.raises(MessageError):
        low_rank(2).decode(message)
    assert message.numel() == HEADER_BYTES + 4 * 2 * 64


# -------------------------------------------------------------------------------------------------------- two rounds


def test_factors_are_linear_so_that_ranks_can_average_them() -> None:
    codec, n = low_rank(3), 4
    ranks = [matrix(24, 40, seed=seed) for seed in range(n)]
    mean = torch.stack(ranks).mean(0)
    states, alone = [codec.new_state() for _ in ranks], codec.new_state()
    for step in range(5):
        draws = [Draw(step=step, stream="w", rank=rank) for rank in range(n)]
        lefts = [codec.left(x, state=s, draw=d) for x, s, d in zip(ranks, states, draws, strict=True)]
        p = codec.orthonormal(torch.stack(lefts).mean(0))
        q = torch.stack([codec.right(x, p) for x in ranks]).mean(0)
        for state in states:
            codec.warm(state, q)
        restored = codec.restore(p, q, (24, 40))
        expected = codec.decode(codec.encode(mean, state=alone, draw=draws[0]), shape=(24, 40))
        torch.testing.assert_close(restored, expected, rtol=1e-3, atol=1e-4)


def test_the_first_factor_is_the_same_on_all_ranks() -> None:
    codec, x = low_rank(2), matrix(32, 32)
    first = codec.left(x, state={}, draw=Draw(rank=0))
    assert torch.equal(codec.left(x, state={}, draw=Draw(rank=5)), first)
    assert not torch.equal(codec.left(x, state={}, draw=Draw(stream="other")), first)


def test_rounds_survive_non_finite_input() -> None:
    codec, x, state = low_rank(2), matrix(32, 32), {"q": matrix(32, 2)}
    x[0, 0] = math.inf
    p = codec.orthonormal(codec.left(x, state=state, draw=Draw()))
    q = codec.right(x, p)
    codec.warm(state, q)
    assert codec.restore(p, q, (32, 32)).isnan().all()
    assert torch.equal(state["q"], matrix(32, 2))


def test_orthonormal_of_anything() -> None:
    for p in (torch.zeros(9, 3), matrix(9, 1).expand(9, 3), matrix(9, 3) * 1e-38, matrix(9, 3) * 1e38, matrix(9, 3)):
        basis = low_rank.orthonormal(p)
        torch.testing.assert_close(basis.T @ basis, torch.eye(3), rtol=0, atol=1e-5)
