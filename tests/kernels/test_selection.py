"""Selection, error feedback and compaction: the same elements, order and rest in all bodies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.bodies import BIG, BODIES, TINY, assert_same, check, cpu, dtypes, few, gpu, mixed, seeds, sizes, specials
from thinwire.errors import OptionError
from thinwire.kernels import gpu_reduce, reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter reports inf - inf and such

DECAYS = (1.0, 0.9, 0.5, -0.25, 1e-30)
thresholds = st.sampled_from((0.0, 1e-42, 0.5, 65504.0, 3.4e38))


@few
@given(sizes, seeds, dtypes, specials, thresholds, st.sampled_from((0, 1, 10, 700, 10_000)))
def test_selection(
    numel: int, seed: int, dtype: torch.dtype, special: tuple[float, ...], threshold: float, capacity: int
) -> None:
    x = mixed(numel, seed, special, dtype)
    check("threshold_count", x, threshold)
    check("select", x, threshold, capacity=capacity)
    memory = mixed(numel, seed + 1)
    chosen = check("select_ef", memory, x, threshold, capacity=capacity)
    check("scatter_add", memory, chosen.indices.flip(0), chosen.values)


@few
@given(sizes, seeds, dtypes, specials, thresholds, st.sampled_from((0, 10, 10_000)), st.sampled_from(DECAYS))
def test_error_feedback_into_another_tensor(
    numel: int,
    seed: int,
    dtype: torch.dtype,
    special: tuple[float, ...],
    threshold: float,
    capacity: int,
    decay: float,
) -> None:
    """The memory stays as it was; what is selected and what is left add up to the bits of torch.add."""
    gradient, memory = mixed(numel, seed, special, dtype), mixed(numel, seed + 1, special)
    whole = torch.add(gradient.float(), memory, alpha=decay)
    results = []
    for body, device in ((reference, "cpu"), *BODIES):
        old, out = memory.to(device, copy=True), torch.full((numel,), 7.0, device=device)
        chosen = body.select_ef(old, gradient.to(device), threshold, capacity=capacity, out=out, decay=decay)
        assert_same(memory, old)
        results.append((*chosen, out.cpu()))
    for other in results[1:]:
        assert_same(results[0], other)
    values, indices, _, out = results[0]
    assert bool((out[indices.long()] == 0).all())
    out[indices.long()] = values
    assert_same(whole, out)


@few
@given(sizes, seeds, specials, thresholds, st.sampled_from(DECAYS), st.sampled_from(("memory", "gradient")))
def test_error_feedback_into_one_of_its_inputs(
    numel: int, seed: int, special: tuple[float, ...], threshold: float, decay: float, place: str
) -> None:
    inputs = {"memory": mixed(numel, seed), "gradient": mixed(numel, seed + 1, special)}
    expected = torch.zeros(numel)
    chosen = reference.select_ef(
        inputs["memory"], inputs["gradient"], threshold, capacity=100, out=expected, decay=decay
    )
    for body, device in ((reference, "cpu"), *BODIES):
        own = {name: tensor.to(device, copy=True) for name, tensor in inputs.items()}
        found = body.select_ef(own["memory"], own["gradient"], threshold, capacity=100, out=own[place], decay=decay)
        assert_same(tuple(chosen), tuple(found))
        assert_same({**inputs, place: expected}["memory"], own["memory"])
        assert_same({**inputs, place: expected}["gradient"], own["gradient"])


def test_an_output_that_overlaps_partly_is_refused() -> None:
    room = torch.zeros(200)
    for body in (reference, cpu, gpu):
        for out in (room[1:101], room[99:199], room.view(torch.int32)[:100], room[:200:2]):
            with pytest.raises(OptionError, match="overlap"):
                body.select_ef(room[:100], torch.ones(100), 0.5, capacity=5, out=out)
            with pytest.raises(OptionError, match="overlap"):
                body.select_ef(torch.ones(100), room[:100], 0.5, capacity=5, out=out)
        body.select_ef(torch.ones(100), room[:100], 0.5, capacity=5, out=room[100:])  # side by side is fine
        with pytest.raises(OptionError, match="length"):
            body.select_ef(room[:100], torch.ones(100), 0.5, capacity=5, out=torch.zeros(99))


def test_error_feedback_writes_into_any_dtype_and_layout() -> None:
    gradient, memory = mixed(300, 1), mixed(300, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        results = []
        for body, device in ((reference, "cpu"), *BODIES):
            out = torch.ones(600, dtype=dtype)[::2].to(device)
            chosen = body.select_ef(memory.to(device), gradient.to(device), 1.0, capacity=30, out=out, decay=0.9)
            results.append((*chosen, out))
        assert_same(results[0], results[1])
        assert_same(results[0], results[2])


def test_candidates_that_are_left_out_go_to_the_new_memory() -> None:
    """As an error-feedback step does it: the old memory is needed again if the step is taken back."""
    gradient, memory = mixed(3001, 1), mixed(3001, 2)
    results = []
    for body, device in ((reference, "cpu"), *BODIES):
        old, out = memory.to(device, copy=True), torch.empty(3001, device=device)
        found = body.select_ef(old, gradient.to(device), 0.5, capacity=3001, out=out, decay=0.9)
        values, indices, cut = body.keep_largest(found.values, found.indices, k=50, threshold=0.5, memory=out)
        assert_same(memory, old)
        whole = out.clone()
        whole[indices.long()] += values
        assert_same(torch.add(gradient, memory, alpha=0.9), whole)
        results.append((values.cpu(), indices.cpu(), cut, out.cpu()))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("window", [1, 2, 64])
def test_triton_counts_over_many_tiles(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program looks back over windows of tiles: more tiles than fit into one, and tiles with nothing."""
    monkeypatch.setattr(gpu_reduce, "_WINDOW", window)
    x = mixed(20_000, 5)
    x[4096:9000] = 0.0
    check("select", x, 0.01, capacity=20_000)
    check("select_ef", x, x, 0.01, capacity=9_000)


@few
@given(sizes, seeds, st.sampled_from((TINY, TINY + BIG)), thresholds, st.integers(1, 900))
def test_keep_largest(numel: int, seed: int, special: tuple[float, ...], threshold: float, k: int) -> None:
    x = mixed(numel, seed, special)
    found = reference.select(x, threshold, capacity=numel)
    results = []
    for body, device in ((reference, "cpu"), *BODIES):
        memory = torch.zeros(numel, device=device)
        candidates = (found.values.to(device), found.indices.to(device))
        kept = body.keep_largest(*candidates, k=k, threshold=threshold, memory=memory)
        results.append((kept[0].cpu(), kept[1].cpu(), kept[2], memory.cpu()))
    for other in results[1:]:
        assert_same(results[0], other)
    values, indices, cut, memory = results[0]
    assert values.numel() == min(k, found.values.numel())
    whole = memory.clone()
    whole[indices.long()] += values
    expected = torch.zeros(numel)
    expected[found.indices.long()] = found.values
    assert torch.equal(whole, expected)  # what is not kept is back in the memory
    if 0 < values.numel() < found.values.numel():
        assert float(values.abs().min()) >= cut
        # 31 steps above the cut are ties; below the smallest normal number a step is always 2^-149.
        assert float(memory.abs().max()) <= max(cut * (1 + 2**-16), cut + 31 * 2.0**-149)


def test_a_position_outside_is_refused() -> None:
    for position in (-1, 10):
        with pytest.raises(OptionError):
            cpu.scatter_add(torch.zeros(10), torch.tensor([position], dtype=torch.int32), torch.ones(1))
