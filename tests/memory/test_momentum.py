"""Momentum correction against the paper's algorithm written out naively; non-finite gradients leave no trace."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire import Draw, OptionError, StateError
from thinwire.codecs import Codec
from thinwire.memory import MomentumCorrection, MomentumMemory, momentum_correction

CODECS: list[Codec] = [
    tw.codecs.top_k(0.1),
    tw.codecs.top_k(0.1, values=tw.codecs.bf16()),
    tw.codecs.dgc_k(0.05),
    tw.codecs.trimmed_k(0.1),
    tw.codecs.random_k(0.2, scaled=False),
    tw.codecs.threshold_k(0.1, values=tw.codecs.fp16()),
]
OPTIONS = [
    MomentumCorrection(),
    MomentumCorrection(0.5, nesterov=True),
    MomentumCorrection(0.9, masking=False),
    MomentumCorrection(0.9, nesterov=True, masking=False),
    MomentumCorrection(0.0),
]
SHAPE = (24, 40)

by_spec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec())
by_options = pytest.mark.parametrize("options", OPTIONS, ids=repr)


def gradient(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).to(dtype)


def begun(memory: MomentumMemory, gradient: Tensor) -> Tensor:
    """u of the next step, of which nothing is sent yet."""
    u = gradient.to(torch.float32, copy=True)
    assert memory.begin(u, name="w").residual is None
    return u


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return bool(a.keys() == b.keys()) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@by_options
@by_spec
def test_equals_the_published_algorithm(codec: Codec, options: MomentumCorrection) -> None:
    memory = options.start()
    m, v, mu = torch.zeros(SHAPE), torch.zeros(SHAPE), options.momentum
    for step in range(8):
        g, draw = gradient(step), Draw(step=step)
        message = memory.encode(codec, g, name="w", draw=draw)
        if options.nesterov:
            m = (m + g) * mu
            v = v + (m + g)
        else:
            m = m * mu + g
            v = v + m
        if codec.name != "threshold_k":  # whose choice depends on its state
            assert torch.equal(message, codec.encode(v, draw=draw))
        sent = codec.decode(message, shape=SHAPE)
        v = v - sent
        if options.masking:
            m = torch.where(sent != 0, 0.0, m)
        assert torch.equal(memory.residual("w"), v)
        assert torch.equal(memory.momentum("w"), m)


@by_spec
def test_without_momentum_it_is_error_feedback(codec: Codec) -> None:
    ours, theirs = MomentumCorrection(0.0).start(), tw.memory.error_feedback().start()
    for step in range(5):
        draw = Draw(step=step)
        assert torch.equal(
            ours.encode(codec, gradient(step), name="w", draw=draw),
            theirs.encode(codec, gradient(step), name="w", draw=draw),
        )
    assert torch.equal(ours.residual("w"), theirs.residual("w"))


def test_without_masking_the_sum_is_that_of_momentum_sgd() -> None:
    memory, codec = MomentumCorrection(0.9, masking=False).start(), tw.codecs.top_k(0.1)
    sent, velocity, moved = torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(20):
        sent += codec.decode(memory.encode(codec, gradient(step), name="w"), shape=SHAPE)
        velocity = 0.9 * velocity + gradient(step)
        moved += velocity
    torch.testing.assert_close(sent + memory.residual("w"), moved, rtol=1e-5, atol=1e-4)


def test_rounding_of_the_values_stays() -> None:
    memory, codec = momentum_correction().start(), tw.codecs.top_k(0.5, values=tw.codecs.bf16())
    memory.encode(codec, torch.tensor([1.001, 0.5]), name="w")
    assert memory.residual("w")[0] == torch.tensor(1.001) - 1
    assert memory.momentum("w")[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan], ids=str)
@by_options
def test_non_finite_input_is_sent_and_leaves_no_trace(
    options: MomentumCorrection, poison: float, dtype: torch.dtype
) -> None:
    memory, codec = options.start(), tw.codecs.threshold_k(0.1)
    for step in range(3):
        memory.encode(codec, gradient(step, dtype), name="w")
    before, bad = memory.state_dict(), gradient(3, dtype)
    bad[1, 2] = poison
    message = memory.encode(codec, bad, name="w")
    assert not torch.isfinite(codec.decode(message)).all()
    assert same(memory.state_dict(), before)
    begun(memory, bad)
    memory.discard(name="w")
    assert same(memory.state_dict(), before)
    memory.give_back(message, name="w", codec=codec)
    assert same(memory.state_dict(), before)


@by_options
@pytest.mark.parametrize("codec", [c for c in CODECS if c.name != "threshold_k"], ids=lambda codec: codec.spec())
def test_two_steps_equal_one(codec: Codec, options: MomentumCorrection) -> None:
    fused, told = options.start(), options.start()
    for step in range(4):
        draw = Draw(step=step)
        message = fused.encode(codec, gradient(step), name="w", draw=draw)
        before = told.state_dict()
        u = begun(told, gradient(step))
        assert step == 0 or same(told.state_dict(), before)
        assert torch.equal(codec.encode(u, draw=draw), message)
        positions, _ = codec.decode_sparse(message)
        told.keep(u - codec.decode(message, shape=SHAPE), name="w", positions=positions)
        assert torch.equal(told.residual("w"), fused.residual("w"))
        assert torch.equal(told.momentum("w"), fused.momentum("w"))


@by_options
@by_spec
def test_a_resumed_run_sends_the_same_bits(codec: Codec, options: MomentumCorrection) -> None:
    memory, resumed = options.start(), options.start()
    for step in range(4):
        memory.encode(codec, gradient(step), name="w", draw=Draw(step=step))
    resumed.load_state_dict(copy.deepcopy(memory.state_dict()))
    for step in range(4, 8):
        draw = Draw(step=step)
        ours = resumed.encode(codec, gradient(step), name="w", draw=draw)
        assert torch.equal(ours, memory.encode(codec, gradient(step), name="w", draw=draw))
    assert same(resumed.state_dict(), memory.state_dict())


@by_options
@pytest.mark.parametrize("flag", [True, torch.tensor(True)], ids=["bool", "tensor"])
def test_idle_elements_keep_momentum_and_residual(options: MomentumCorrection, flag: bool | Tensor) -> None:
    """The gradient of a parameter that this rank does not use is zero: neither decays, and nothing of it is sent."""
    memory, codec = options.start(), tw.codecs.top_k(0.1)
    memory.encode(codec, gradient(0), name="w")
    residual, momentum = memory.residual("w").clone(), memory.momentum("w").clone()
    g = gradient(1)
    g[:10] = 0.0
    rest = begun(memory, g)
    rest[:10] = 0.0
    memory.keep(rest, name="w", idle=[(slice(0, 10 * SHAPE[1]), flag)])
    assert torch.equal(memory.residual("w")[:10], residual[:10])
    assert torch.equal(memory.momentum("w")[:10], momentum[:10])
    assert not torch.equal(memory.residual("w")[10:], residual[10:])


@by_options
@pytest.mark.parametrize("finite", [True, False])
def test_a_flag_on_the_device_keeps_or_discards(options: MomentumCorrection, finite: bool) -> None:
    ours, theirs, codec = options.start(), options.start(), tw.codecs.top_k(0.1)
    for step in range(3):
        skipped = step == 1 and not finite
        rest = begun(ours, gradient(step))
        positions, _ = codec.decode_sparse(codec.encode_taking(rest))
        ours.keep_if(torch.tensor(not skipped), rest, name="w", positions=positions)
        if not skipped:
            theirs.encode(codec, gradient(step), name="w")
        assert same(ours.tensors("w"), theirs.tensors("w"))


# ---------------------------------------------------------------------------------------------------------- refusals


def used() -> MomentumMemory:
    memory = momentum_correction().start()
    memory.encode(tw.codecs.top_k(0.5), torch.ones(4), name="w")
    return memory


def test_only_sparsifiers() -> None:
    memory = used()
    before = memory.state_dict()
    with pytest.raises(OptionError, match=r"use it with a sparsifier such as top_k:0\.01, or use error_feedback"):
        memory.encode(tw.codecs.bf16(), torch.ones(4), name="w")
    assert same(memory.state_dict(), before)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, math.nan])
def test_momentum_is_checked(momentum: float) -> None:
    with pytest.raises(OptionError, match="at least 0 and below 1"):
        momentum_correction(momentum)


def test_keep_needs_begin() -> None:
    memory = used()
    for _ in range(2):
        with pytest.raises(StateError, match=r"keep\(w\) follows begin\(w\).*call begin first"):
            memory.keep(torch.ones(4), name="w")
        memory.begin(torch.ones(4), name="w")
        memory.discard(name="w")


def test_a_state_with_two_shapes_for_one_parameter_is_refused() -> None:
    state = used().state_dict()
    state["kept"]["w"]["momentum"] = torch.ones(3)
    with pytest.raises(StateError, match="w has several shapes"):
        momentum_correction().start().load_state_dict(state)
