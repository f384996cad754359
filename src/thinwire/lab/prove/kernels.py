"""Kernels bit for bit: runs every kernel of a device on hard inputs and compares the result with the definition."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels import layout, reference
from .inputs import LARGE_SIZES, LARGEST_SIZE, SIZES, SPECIALS
from .kernel_cases import HERE, Case, cases

_LARGEST_INTERPRETED = 5_000  # elements; Triton's interpreter is slow


@dataclass
class Count:
    """What the cases of one kernel showed."""

    kernel: str
    cases: int = 0
    wrong: int = 0
    first: str = ""  # the first difference, in words

    @property
    def problem(self) -> str | None:
        if not self.cases:
            return f"no case covers {self.kernel}"
        if not self.wrong:
            return None
        return f"{self.kernel} differs from its definition in {self.wrong} of {self.cases} cases, first: {self.first}"


def kernel_names() -> list[str]:
    """Every kernel that the package offers, by its name.

    >>> {"pack", "select_ef"} <= set(kernel_names()), "packed_bytes" in kernel_names()
    (True, False)
    """
    offered = [name for name in kernels.__all__ if inspect.isfunction(getattr(reference, name, None))]
    return sorted(name for name in offered if not hasattr(layout, name))


def all_cases(*, quick: bool = False, interpreted: bool = False) -> Iterator[Case]:
    """The cases of a proof, run by run."""
    for numel, seed, about in runs(quick=quick, interpreted=interpreted):
        yield from cases(numel, seed=seed, special=SPECIALS[about], about=about)


def runs(*, quick: bool = False, interpreted: bool = False) -> list[tuple[int, int, str]]:
    """Length, seed and special values of each run: small sizes with every set of values, then larger ones.

    >>> len(runs(quick=True))
    29
    """
    seeds = range(1 if quick or interpreted else 3)
    found = [(numel, seed, about) for about, seed, numel in itertools.product(SPECIALS, seeds, SIZES)]
    large = (*LARGE_SIZES, *(() if quick else (LARGEST_SIZE,)))
    first = next(iter(SPECIALS))
    return found + [(n, n % 7, first) for n in large if not interpreted or n <= _LARGEST_INTERPRETED]


def check_kernels(
    body: Any, device: str, given: Iterable[Case], *, on_case: Callable[[Case], None] = lambda case: None
) -> list[Count]:
    """Run the cases by the functions of `body` on a device; a count for every kernel, covered or not.

    >>> from thinwire.kernels import reference
    >>> counts = check_kernels(reference, "cpu", cases(65, seed=0, special=(0.0,)))
    >>> sum(count.wrong for count in counts)
    0
    """
    counts = {name: Count(name) for name in kernel_names()}
    for case in given:
        on_case(case)
        count = counts.setdefault(case.kernel, Count(case.kernel))
        count.cases += 1
        if (difference := _difference(case, body, device)) is not None:
            count.wrong += 1
            count.first = count.first or f"{difference} ({case})"
    return list(counts.values())


def _difference(case: Case, body: Any, device: str) -> str | None:
    """How a body's result differs from the definition, in words; None if it does not."""
    here, there = torch.device("cpu"), torch.device(device)
    ours, our_options = _moved((case.args, case.options), here)
    theirs, their_options = _moved((case.args, case.options), there)
    expected = getattr(reference, case.kernel)(*ours, **our_options)
    try:
        found = getattr(body, case.kernel)(*theirs, **their_options)
    except Exception as problem:  # a kernel that does not compile is a difference, not the end of the proof
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
    changed = _unlike(ours, theirs) or _unlike(our_options, their_options)
    difference = _unlike(expected, found, case.tolerances, case.scale)
    return difference or (None if changed is None else f"an argument changed in place: {changed}")


def _moved(value: Any, device: torch.device, known: dict[int, Tensor] | None = None) -> Any:
    """Copies on a device. A tensor that is given twice stays one tensor, as when `out` is the input."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        return known.setdefault(id(value), value.to(device, copy=True))
    if isinstance(value, dict):
        return {key: _moved(item, device, known) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(_moved(item, device, known) for item in value)
    return device if value is HERE else value


def _unlike(expected: Any, found: Any, tolerances: tuple[float, ...] = (), scale: float | None = None) -> str | None:
    """The first difference. NaN equals any NaN, and 0 does not equal -0."""
    if isinstance(expected, Tensor):
        return _unlike_tensors(expected, found.cpu(), *tolerances) if isinstance(found, Tensor) else "not a tensor"
    if isinstance(expected, dict):
        expected, found = tuple(expected.values()), tuple(found.values())
    if isinstance(expected, tuple):
        if len(expected) != len(found):
            return f"{len(found)} results instead of {len(expected)}"
        each = itertools.zip_longest(expected, found, tolerances, fillvalue=0.0)
        return next((words for a, b, granted in each if (words := _unlike(a, b, (granted,), scale))), None)
    if isinstance(expected, float):
        return None if _close(expected, found, *tolerances, scale=scale) else f"{found} instead of {expected}"
    if isinstance(expected, torch.device) or expected == found:
        return None
    return f"{found} instead of {expected}"


def _close(expected: float, found: float, tolerance: float = 0.0, *, scale: float | None = None) -> bool:
    if math.isnan(expected) or math.isnan(found):
        return math.isnan(expected) and math.isnan(found)
    return expected == found or abs(expected - found) <= tolerance * max(abs(expected), scale or 0.0)


def _unlike_tensors(expected: Tensor, found: Tensor, tolerance: float = 0.0) -> str | None:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype} of shape {tuple(found.shape)}, not {expected.dtype} of {tuple(expected.shape)}"
    expected, found = expected.reshape(-1), found.reshape(-1)
    if not expected.is_floating_point():
        wrong = expected != found
    elif tolerance:
        wrong = ~torch.isclose(found, expected, rtol=tolerance, atol=0.0, equal_nan=True)
    else:
        both_nan = expected.isnan() & found.isnan()
        wrong = ~both_nan & ((expected != found) | (expected.signbit() != found.signbit()))
    if not wrong.any():
        return None
    at = int(wrong.nonzero()[0])
    return f"element {at} is {found[at].item()}, not {expected[at].item()}"


def run_task(task: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """In a process of its own: the kernels of this device, one event for each kernel and device.

    A device is `cpu`, a GPU such as `cuda:0`, or `interpreter`: the Triton body, run by Triton on the CPU.
    """
    for device in task["devices"]:
        interpreted = device == "interpreter"
        body = _interpreted_body() if interpreted else kernels.body_for(torch.device(device).type)
        seen: set[str] = set()
        last = ""

        def begin(case: Case, device: str = device, seen: set[str] = seen) -> None:
            nonlocal last
            if case.label != last:
                last = case.label
                report({"event": "run", "word": f"{device}: {case.label}"})
            if case.kernel not in seen:  # it is compiled now, which may take long
                seen.add(case.kernel)
                report({"event": "begin", "word": f"{device}: {case.kernel}"})

        given = all_cases(quick=task["quick"], interpreted=interpreted)
        where = "cpu" if interpreted else device
        for count in check_kernels(body, where, given, on_case=begin):
            found = {"kernel": count.kernel, "device": device, "cases": count.cases, "problem": count.problem}
            report({"event": "kernel", "body": body.__name__.rpartition(".")[2], **found})


def _interpreted_body() -> Any:
    """The Triton body, which the interpreter runs if TRITON_INTERPRET=1 was set before triton was imported."""
    from ...kernels import gpu

    return gpu
