"""The kernel part of a proof: every kernel is covered, and a wrong bit anywhere is found."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.kernels import body_for, reference
from thinwire.lab.prove import parts
from thinwire.lab.prove.inputs import SPECIALS, TINY
from thinwire.lab.prove.kernel_cases import Case, cases
from thinwire.lab.prove.kernels import Count, check_kernels, kernel_names, runs
from thinwire.lab.prove.part import Plan, run_part


def some_cases(numel: int = 1025) -> list[Case]:
    return [case for about, special in SPECIALS.items() for case in cases(numel, seed=1, special=special, about=about)]


def body_with(**wrong: Any) -> Any:
    """The numba body, some functions of which are replaced."""
    body = body_for("cpu")
    return types.SimpleNamespace(**{name: getattr(body, name) for name in kernel_names()} | wrong)


def count_of(kernel: str, counts: list[Count]) -> Count:
    [found] = [count for count in counts if count.kernel == kernel]
    return found


def test_every_kernel_has_cases() -> None:
    covered = {case.kernel for case in cases(65, seed=0, special=TINY)}
    assert covered == set(kernel_names())
    assert len(covered) >= 31


def test_a_proof_covers_odd_lengths_and_all_special_values() -> None:
    quick = runs(quick=True)
    assert {0, 1, 63, 65, 2049, 100_003} <= {numel for numel, _, _ in quick}
    assert {about for _, _, about in quick} == set(SPECIALS)
    assert len(runs()) > 2 * len(quick)
    assert max(numel for numel, _, _ in runs(interpreted=True)) < 10_000


def test_kernels_of_this_device_equal_their_definition() -> None:
    counts = check_kernels(body_for("cpu"), "cpu", some_cases())
    assert [count.problem for count in counts if count.problem] == []
    assert all(count.cases for count in counts)


def flipped_bit(codes: Tensor, *, bits: int) -> Tensor:
    packed = reference.pack(codes, bits=bits)
    packed[-1:] ^= 1
    return packed


def negative_zero(x: Tensor, *, block: int) -> Tensor:
    found = reference.block_abs_max(x, block=block)
    return torch.where(found == 0, -0.0, found)


def wrong_in_place(out: Tensor, indices: Tensor, values: Tensor) -> None:
    reference.scatter_add(out, indices, values)
    out[-1] += 1.0


def double(x: Tensor, *, block: int) -> Tensor:
    return reference.block_abs_max(x, block=block).double()


def broken(codes: Tensor, *, bits: int) -> Tensor:
    raise RuntimeError("ptxas fatal: no such\ninstruction")


@pytest.mark.parametrize(
    ("kernel", "function", "words"),
    [
        ("pack", flipped_bit, "element"),
        ("block_abs_max", negative_zero, "is -0.0, not 0.0"),
        ("scatter_add", wrong_in_place, "an argument changed in place: element 1024"),
        ("block_abs_max", double, "torch.float64 of shape"),
        ("pack", broken, "RuntimeError: ptxas fatal: no such instruction"),
        ("all_finite", lambda x: True, "True instead of False"),
        ("threshold_count", lambda x, threshold: 7, "7 instead of"),
        ("moments", lambda x: reference.moments(x)._replace(max_abs=1.0), "1.0 instead of"),
    ],
)
def test_a_wrong_kernel_is_found(kernel: str, function: Any, words: str) -> None:
    counts = check_kernels(body_with(**{kernel: function}), "cpu", some_cases())
    wrong = count_of(kernel, counts)
    assert wrong.wrong > 0
    assert wrong.problem is not None
    assert words in wrong.problem
    assert f"{kernel} differs from its definition in {wrong.wrong} of {wrong.cases} cases" in wrong.problem
    assert [count.kernel for count in counts if count.problem] == [kernel]


def test_an_injected_failure_becomes_a_failed_part() -> None:
    """As the part does it: counts of a process, judged."""

    def work(tell: Any) -> Any:
        counts = check_kernels(body_with(pack=flipped_bit), "cpu", cases(65, seed=0, special=TINY))
        keys = {"event": "kernel", "device": "cpu", "body": "cpu"}
        told = [{**keys, "kernel": one.kernel, "cases": one.cases, "problem": one.problem} for one in counts]
        return parts.judge_kernels(told, None)

    part = run_part(Plan("kernels on the CPU", work))
    assert part.verdict == "failed"
    assert "pack differs from its definition" in part.reason
    assert len(part.details["kernels"]) == len(kernel_names())


def test_a_kernel_without_cases_is_not_proved() -> None:
    counts = check_kernels(body_for("cpu"), "cpu", [case for case in some_cases(65) if case.kernel != "rotate"])
    assert [count.problem for count in counts if count.problem] == ["no case covers rotate"]


def test_nan_equals_nan_whatever_its_payload() -> None:
    def other_nan(x: Tensor, *, block: int) -> Tensor:
        found = reference.block_abs_max(x, block=block)
        return torch.where(found.isnan(), -found, found)

    counts = check_kernels(body_with(block_abs_max=other_nan), "cpu", some_cases())
    assert count_of("block_abs_max", counts).problem is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: `make test-gpu` runs this on one")
def test_kernels_of_the_gpu_equal_their_definition() -> None:
    counts = check_kernels(body_for("cuda"), "cuda", some_cases())
    assert [count.problem for count in counts if count.problem] == []
