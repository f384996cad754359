"""Error feedback against a naive step-by-step version; nothing is lost, nothing non-finite stays, runs resume."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from thinwire import Draw, OptionError, StateError
from thinwire.codecs import Codec
from thinwire.memory import ErrorFeedbackMemory, error_feedback

SPARSE: list[Codec] = [
    tw.codecs.top_k(0.1),
    tw.codecs.top_k(0.1, values=tw.codecs.bf16()),
    tw.codecs.top_k(0.1, values=tw.codecs.fp16(), indices="bitmap"),
    tw.codecs.top_k(0.2, values=tw.codecs.abs_max(4)),
    tw.codecs.gaussian_k(0.1),
    tw.codecs.dgc_k(0.1),
    tw.codecs.trimmed_k(0.1),
    tw.codecs.random_k(0.1, scaled=False),
    tw.codecs.random_k(0.3, scaled=False, shared=False, values=tw.codecs.bf16()),
    tw.codecs.threshold_k(0.1),
    tw.codecs.threshold_k(0.1, values=tw.codecs.bf16()),
]
DENSE: list[Codec] = [
    tw.codecs.fp32(),
    tw.codecs.fp16(),
    tw.codecs.bf16(),
    tw.codecs.fp8(),
    tw.codecs.qsgd(4, block=64),
    tw.codecs.natural(),
    tw.codecs.min_max(4, block=64),
    tw.codecs.abs_max(4),
    tw.codecs.sign(),
    tw.codecs.global_qsgd(8, block=64),
    tw.codecs.rotated(2),
    tw.codecs.low_rank(2),
    tw.codecs.low_rank(2, factors=tw.codecs.bf16(), iterations=2),
]
CODECS = [*SPARSE, *DENSE]
SHAPES = [(), (1,), (7,), (301,), (24, 40), (3, 5, 3, 3)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

by_spec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec())
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gradient(shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)).to(dtype)


def begun(memory: ErrorFeedbackMemory, gradient: Tensor) -> Tensor:
    """u of the next step, of which nothing is sent yet."""
    u = gradient.to(torch.float32, copy=True)
    residual, decay = memory.begin(u, name="w")
    assert residual is not None
    return torch.add(u, residual, alpha=decay)


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, for nested states."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


# ------------------------------------------------------------------------------------------------------------ oracle


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_spec
def test_equals_the_naive_version_step_by_step(codec: Codec, shape: tuple[int, ...]) -> None:
    memory = error_feedback(0.75).start()
    residual, state = torch.zeros(shape), codec.new_state()
    for step in range(6):
        g, draw = gradient(shape, step), Draw(step=step, stream="w")
        message = memory.encode(codec, g, name="w", draw=draw)
        u = (residual.double() * 0.75 + g).to(torch.float32)  # rounded once
        if codec.name == "threshold_k":  # its one-pass form may settle ties otherwise: trust the message
            sent = codec.decode(message, shape=shape)
        else:
            expected = codec.encode(u, draw=draw, state=state)
            assert torch.equal(message, expected)
            sent = codec.decode(expected, shape=shape)
        residual = u - sent
        assert torch.equal(memory.residual("w"), residual)


@by_dtype
@pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.spec())
def test_sparsifiers_lose_nothing_in_any_step(codec: Codec, dtype: torch.dtype) -> None:
    memory = error_feedback().start()
    for step in range(8):
        g = gradient((24, 40), step, dtype)
        u = begun(memory, g)
        sent = codec.decode(memory.encode(codec, g, name="w", draw=Draw(step=step)), shape=(24, 40))
        if "abs_max" in codec.spec():  # v - sent is a rounded difference there
            torch.testing.assert_close(sent + memory.residual("w"), u, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(sent + memory.residual("w"), u)
        assert memory.residual("w").dtype == torch.float32


@by_dtype
@by_spec
def test_all_that_was_sent_and_the_residual_are_all_gradients(codec: Codec, dtype: torch.dtype) -> None:
    memory = error_feedback().start()
    given_in, sent = torch.zeros(24, 40, dtype=torch.float64), torch.zeros(24, 40, dtype=torch.float64)
    for step in range(20):
        g = gradient((24, 40), step, dtype)
        given_in += g.to(torch.float32)
        sent += codec.decode(memory.encode(codec, g, name="w", draw=Draw(step=step)), shape=(24, 40))
    torch.testing.assert_close(sent + memory.residual("w"), given_in, rtol=1e-5, atol=2e-5)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(CODECS), st.integers(0, 700), st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_one_step_is_exact_for_any_size(codec: Codec, numel: int, seed: int, scale: float) -> None:
    memory = error_feedback().start()
    g = gradient((numel,), seed) * scale
    message = memory.encode(codec, g, name="w", draw=Draw(seed=seed))
    assert message.numel() == codec.wire_bytes(numel)
    assert torch.equal(memory.residual("w"), g - codec.decode(message))


def test_parameters_are_remembered_by_name() -> None:
    memory, codec = error_feedback().start(), tw.codecs.top_k(0.5)
    memory.encode(codec, torch.tensor([2.0, 1.0]), name="a")
    memory.encode(codec, torch.tensor([[3.0, 4.0, 0.0]]), name="b")
    assert memory.names() == ["a", "b"]
    assert torch.equal(memory.residual("a"), torch.tensor([0.0, 1.0]))
    assert torch.equal(memory.residual("b"), torch.tensor([[0.0, 0.0, 0.0]]))


def test_a_strided_gradient_is_the_same_as_a_contiguous_one() -> None:
    g = gradient((4, 6, 5, 5), 3)
    for codec in CODECS:
        memory, other = error_feedback().start(), error_feedback().start()
        ours = memory.encode(codec, g.contiguous(memory_format=torch.channels_last), name="w")
        assert torch.equal(ours, other.encode(codec, g, name="w"))
        assert torch.equal(memory.residual("w"), other.residual("w"))


# -------------------------------------------------------------------------------------------------------- not finite


@by_dtype
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan], ids=str)
@by_spec
def test_non_finite_input_is_sent_and_leaves_no_trace(codec: Codec, poison: float, dtype: torch.dtype) -> None:
    memory = error_feedback(0.5).start()
    for step in range(3):
        memory.encode(codec, gradient((24, 40), step, dtype), name="w", draw=Draw(step=step))
    before, bad = memory.state_dict(), gradient((24, 40), 3, dtype)
    bad[5, 7] = poison
    message = memory.encode(codec, bad, name="w", draw=Draw(step=3))
    assert not torch.isfinite(codec.decode(message, shape=(24, 40))).all()
    assert same(memory.state_dict(), before)
    u = begun(memory, bad)
    memory.discard(name="w")
    assert same(memory.state_dict(), before)
    memory.give_back(message, name="w", codec=codec)
    memory.give_back(u, name="w")
    assert same(memory.state_dict(), before)


def test_float64_beyond_float32_counts_as_not_finite() -> None:
    memory = error_feedback().start()
    memory.encode(tw.codecs.top_k(0.5), torch.tensor([1e300, 1.0], dtype=torch.float64), name="w")
    assert torch.equal(memory.residual("w"), torch.zeros(2))


@by_spec
def test_overflow_of_the_sum_is_sent_and_leaves_no_trace(codec: Codec) -> None:
    memory, huge = error_feedback().start(), torch.full((8, 64), 3e38)
    memory.put("w", {"residual": huge.clone()})
    memory.codec_state(codec, name="w")
    before = memory.state_dict()
    message = memory.encode(codec, huge, name="w")
    assert not torch.isfinite(codec.decode(message, shape=(8, 64))).all()
    assert same(memory.state_dict(), before)


# --------------------------------------------------------------------------------------- two steps, and giving back


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("codec", [c for c in CODECS if c.name != "threshold_k"], ids=lambda codec: codec.spec())
def test_two_steps_equal_one(codec: Codec, decay: float) -> None:
    fused, told = error_feedback(decay).start(), error_feedback(decay).start()
    for step in range(4):
        g, draw = gradient((24, 40), step), Draw(step=step)
        message = fused.encode(codec, g, name="w", draw=draw)
        before = told.residual("w").clone() if step else torch.zeros(24, 40)
        u = begun(told, g)
        assert torch.equal(told.residual("w"), before)
        state = told.codec_state(codec, name="w")
        assert torch.equal(codec.encode(u, draw=draw, state=state), message)
        spare = told.keep(u - codec.decode(message, shape=(24, 40)), name="w")
        assert torch.equal(spare, before)
        assert torch.equal(told.residual("w"), fused.residual("w"))


@pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.spec())
def test_what_was_not_delivered_can_be_given_back(codec: Codec) -> None:
    memory = error_feedback().start()
    memory.encode(codec, gradient((24, 40), 0), name="w")
    u = begun(memory, gradient((24, 40), 1))
    message = memory.encode(codec, gradient((24, 40), 1), name="w")
    once = copy.deepcopy(memory)
    memory.give_back(message, name="w", codec=codec)
    once.give_back(codec.decode(message, shape=(24, 40)), name="w")
    torch.testing.assert_close(memory.residual("w"), u, rtol=1e-6, atol=1e-7)
    assert torch.equal(memory.residual("w"), once.residual("w"))


def test_rescale_follows_the_loss_scale() -> None:
    memory = error_feedback().start()
    memory.keep(torch.tensor([4.0, -2.0]), name="w")
    memory.rescale(0.5)
    assert torch.equal(memory.residual("w"), torch.tensor([2.0, -1.0]))


@pytest.mark.parametrize("flag", [True, torch.tensor(True)], ids=["bool", "tensor"])
def test_residuals_of_idle_elements_were_no_part_of_u_and_stay(flag: bool | Tensor) -> None:
    memory = error_feedback().start()
    memory.keep(torch.tensor([1.0, 2.0, 3.0]), name="w")
    memory.keep(torch.tensor([5.0, 0.0, 0.0]), name="w", idle=[(slice(1, 3), flag)])
    assert torch.equal(memory.residual("w"), torch.tensor([5.0, 2.0, 3.0]))


@pytest.mark.parametrize("finite", [True, False])
def test_a_flag_on_the_device_keeps_or_discards(finite: bool) -> None:
    memory = error_feedback().start()
    memory.keep(torch.tensor([1.0, 2.0]), name="w")
    memory.keep_if(torch.tensor(finite), torch.tensor([5.0, 0.0]), name="w")
    assert torch.equal(memory.residual("w"), torch.tensor([5.0, 0.0] if finite else [1.0, 2.0]))
    memory.forget(name="w")
    assert memory.names() == []


# ------------------------------------------------------------------------------------------------------------- state


@by_spec
def test_a_resumed_run_sends_the_same_bits(codec: Codec) -> None:
    def run(memory: ErrorFeedbackMemory, steps: range) -> list[Tensor]:
        return [
            memory.encode(codec, gradient(shape, step), name=name, draw=Draw(step=step, stream=name))
            for step in steps
            for name, shape in (("w", (24, 40)), ("b", (40,)))
        ]

    memory = error_feedback(0.9).start()
    run(memory, range(5))
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    resumed = error_feedback(0.9).start()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for ours, theirs in zip(run(resumed, range(5, 10)), run(memory, range(5, 10)), strict=True):
        assert torch.equal(ours, theirs)
    assert same(resumed.state_dict(), memory.state_dict())


def test_a_saved_state_does_not_change_with_the_memory() -> None:
    memory, codec = error_feedback().start(), tw.codecs.threshold_k(0.25)
    memory.encode(codec, gradient((64,), 0), name="w")
    saved = memory.state_dict()
    kept = copy.deepcopy(saved)
    memory.encode(codec, gradient((64,), 1), name="w")
    assert same(saved, kept)
    memory.load_state_dict(saved)
    memory.encode(codec, gradient((64,), 1), name="w")
    assert same(saved, kept)


def test_another_codec_starts_with_a_state_of_its_own() -> None:
    memory = error_feedback().start()
    for codec in (tw.codecs.low_rank(2), tw.codecs.low_rank(3), tw.codecs.threshold_k(0.1), tw.codecs.low_rank(2)):
        memory.encode(codec, gradient((24, 40), 0), name="w")
        assert memory.state_dict()["codecs"]["w"]["spec"] == codec.spec()


def test_reset_forgets() -> None:
    memory = error_feedback().start()
    memory.encode(tw.codecs.top_k(0.5), torch.ones(4), name="w")
    memory.reset()
    assert memory.state_dict() == error_feedback().start().state_dict()


# ---------------------------------------------------------------------------------------------------------- refusals


def used() -> ErrorFeedbackMemory:
    memory = error_feedback().start()
    memory.encode(tw.codecs.top_k(0.5), torch.ones(4), name="w")
    return memory


def test_a_parameter_keeps_its_shape() -> None:
    memory = used()
    with pytest.raises(StateError, match=r"w was remembered in shape \(4,\) and now comes in \(2, 2\)"):
        memory.encode(tw.codecs.top_k(0.5), torch.ones(2, 2), name="w")
    with pytest.raises(StateError, match="cannot be given back"):
        memory.give_back(torch.ones(3), name="w")
    assert torch.equal(memory.residual("w"), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_integers_and_unknown_names_are_refused() -> None:
    with pytest.raises(OptionError, match="cast it first"):
        used().encode(tw.codecs.top_k(0.5), torch.ones(4, dtype=torch.int32), name="w")
    with pytest.raises(StateError, match="bias was never encoded here: the memory knows w"):
        used().residual("bias")


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.5, math.nan])
def test_decay_is_checked(decay: float) -> None:
    with pytest.raises(OptionError, match="above 0 and at most 1"):
        error_feedback(decay)


def _without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({}, "this is the state of something else"),
        (tw.memory.momentum_correction().start().state_dict(), "this is the state of momentum_correction"),
        (_without(used().state_dict(), "kept"), "damaged .*: save it anew"),
        (_without(used().state_dict(), "kept", "w", "residual"), "damaged .*: save it anew"),
        (_without(used().state_dict(), "codecs", "w", "spec"), "damaged .*: save it anew"),
        ({**used().state_dict(), "kept": {"w": {"residual": 3}}}, "damaged .*: save it anew"),
        ({**used().state_dict(), "kept": {}}, "differ in parameter w: reset"),
        ({**used().state_dict(), "kept": {"v": {"residual": torch.ones(4)}}}, "differ in parameter v: reset"),
        ({**used().state_dict(), "kept": {"w": {"residual": torch.ones(5)}}}, r"shape \(4,\) here and \(5,\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(state: dict[str, Any], sentence: str) -> None:
    memory = used()
    before = memory.state_dict()
    with pytest.raises(StateError, match=sentence):
        memory.load_state_dict(state)
    assert same(memory.state_dict(), before)
