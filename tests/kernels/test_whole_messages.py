"""Whole messages in one pass, as several loops and in one Triton launch: the same codes and the same scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.bodies import BODIES, SIZES, assert_same, dtypes, few, keys, mixed, seeds, sizes, specials
from thinwire.kernels import blocks_of, fused, gpu_whole, packed_bytes, reference, rotated_numel
from thinwire.kernels.gpu_launch import launch
from thinwire.rng import Key

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter reports inf - inf and such

BLOCKS = (0, 64, 192, 1024, 3008, 16_384)  # a Triton program holds 8192 elements


@few
@given(
    st.sampled_from((*SIZES, 100, 200, 500, 2048, 5000)), seeds, dtypes, keys, specials, st.sampled_from((1, 2, 3, 4))
)
def test_rotated(numel: int, seed: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], bits: int) -> None:
    """Two rotations, codewords and scales at once; blocks of zeros and blocks that are not finite among them."""
    x = mixed(numel, seed, special, dtype)
    x[1024:2048] = 0.0
    boundaries, codebook = (torch.linspace(-2, 2, (1 << bits) - end) for end in (1, 0))
    options: dict[str, Any] = {"keys": (key, key.fold(1)), "codebook": codebook, "bits": bits}
    scale = torch.empty(blocks_of(numel, 1024))
    codes = torch.empty(packed_bytes(rotated_numel(numel), bits), dtype=torch.uint8)
    made = []
    for body in (reference, *(body for body, _ in BODIES)):
        scale, codes = torch.full_like(scale, 7.0), torch.zeros_like(codes)
        body.rotated_encode(x, scale, codes, boundaries=boundaries, **options)
        out = mixed(numel, seed + 1)
        body.rotated_add(codes, scale, out, **options)
        put = mixed(numel, seed + 2)
        body.rotated_add(codes, scale, put, fresh=True, **options)
        onto_zeros = torch.zeros(numel)
        body.rotated_add(codes, scale, onto_zeros, **options)
        assert_same(onto_zeros, put)
        made.append((scale, codes, out))
    for found in made[1:]:
        assert_same(made[0], found)


@few
@given(sizes, seeds, st.sampled_from(BLOCKS), dtypes, keys, specials, st.integers(2, 8))
def test_abs_max(
    numel: int, seed: int, block: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], bits: int
) -> None:
    """Steps and codes at once; blocks of zeros and blocks that are not finite among them."""
    x = mixed(numel, seed, special, dtype)
    x[64:192] = 0.0
    options: dict[str, Any] = {"levels": (1 << (bits - 1)) - 1, "bits": bits, "block": block, "key": key}
    made = []
    for body in (reference, *(body for body, _ in BODIES)):
        step = torch.full((blocks_of(numel, block),), 7.0)
        codes = torch.zeros(packed_bytes(numel, bits), dtype=torch.uint8)
        body.abs_max_encode(x, step, codes, **options)
        made.append((step, codes))
    for found in made[1:]:
        assert_same(made[0], found)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Triton kernels launched by `gpu_whole` from now on; putting a message together from loops is an error."""
    found: list[str] = []

    def record(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        found.append(kernel.fn.__name__)
        launch(kernel, programs, *args, **constants)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("several launches where one is possible")

    monkeypatch.setattr(gpu_whole, "launch", record)
    for name in ("abs_max_encode", "rotated_encode", "rotated_add"):
        monkeypatch.setattr(fused, name, refuse)
    return found


@pytest.mark.parametrize("numel", [1, 64, 1024, 2048, 2500])
def test_triton_launches_once(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(monkeypatch)
    body, device = BODIES[1]
    key, x = Key(1, 2), mixed(numel, 1).to(device)
    for block in (0, 64, 192, 1024):
        steps = torch.empty(blocks_of(numel, block), device=device)
        codes = torch.empty(packed_bytes(numel, 4), dtype=torch.uint8, device=device)
        body.abs_max_encode(x, steps, codes, levels=7, bits=4, block=block, key=key)
    assert found == ["abs_max_encode_kernel"] * 4
    scale = torch.empty(blocks_of(numel, 1024), device=device)
    codes = torch.empty(packed_bytes(rotated_numel(numel), 2), dtype=torch.uint8, device=device)
    tables = {"keys": (key, key.fold(1)), "codebook": torch.linspace(-1, 1, 4, device=device), "bits": 2}
    body.rotated_encode(x, scale, codes, boundaries=torch.linspace(-1, 1, 3, device=device), **tables)
    body.rotated_add(codes, scale, x, **tables)
    body.rotated_add(codes, scale, x, fresh=True, **tables)
    assert found[4:] == ["rotated_encode_kernel", "rotated_add_kernel", "rotated_add_kernel"]


def test_one_block_larger_than_a_program_is_put_together_from_loops() -> None:
    """With the same bits: 20,000 elements with one scale do not fit into a program."""
    x = mixed(20_000, 3)
    results = []
    for body, device in ((reference, "cpu"), *BODIES):
        step = torch.empty(1, device=device)
        codes = torch.empty(packed_bytes(20_000, 5), dtype=torch.uint8, device=device)
        body.abs_max_encode(x.to(device), step, codes, levels=15, bits=5, block=0, key=Key(3, 4))
        results.append((step.cpu(), codes.cpu()))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_scales_and_sums_of_another_layout() -> None:
    """Places that a kernel cannot write in one pass are filled all the same."""
    x, key = mixed(3001, 5), Key(5, 6)
    tables = {"keys": (key, key.fold(1)), "codebook": torch.linspace(-2, 2, 4), "bits": 2}
    results = []
    for body, _ in ((reference, "cpu"), *BODIES):
        scale, steps = torch.ones(6)[::2], torch.ones(94)[::2]
        codes = torch.empty(packed_bytes(rotated_numel(3001), 2), dtype=torch.uint8)
        few_bits = torch.empty(packed_bytes(3001, 4), dtype=torch.uint8)
        out = torch.ones(3001, dtype=torch.float64)
        body.rotated_encode(x, scale, codes, boundaries=torch.linspace(-1, 1, 3), **tables)
        body.rotated_add(codes, scale, out, **tables)
        body.abs_max_encode(x, steps, few_bits, levels=7, bits=4, block=64, key=key)
        results.append((scale, steps, codes, few_bits, out))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
