"""The DDP contract: checks that run on every rank, by the public API alone; each returns a problem or None."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import thinwire

from .place import Place, same_bits
from .training import Training, given_gradients

Check = Callable[[str, Place], str | None]
STEPS = 6
HALF = 3  # steps after which runs are saved, spoilt or told to use another recipe


def replicas_are_equal(recipe: str, place: Place) -> str | None:
    """All ranks hold the same bits after several steps: in gradients and in weights."""
    with Training(recipe, place) as run:
        for number in range(STEPS):
            run.step(number)
            if not place.same_on_all(run.gradients()):
                return f"gradients differ between ranks in step {number}"
        if not place.same_on_all(run.weights()):
            return f"weights differ between ranks after {STEPS} steps"
        return None if run.all_finite() else "weights are not finite"


def dense_equals_ddp(recipe: str, place: Place) -> str | None:
    """A recipe that compresses nothing gives the bits of DDP without thinwire."""
    with Training(recipe, place) as ours, Training(None, place) as plain:
        for number in range(STEPS):
            ours.step(number)
            plain.step(number)
            if not same_bits(ours.gradients(), plain.gradients()):
                return f"gradients differ from plain DDP in step {number}"
        return None if same_bits(ours.weights(), plain.weights()) else "weights differ from plain DDP"


def no_sync_accumulates(recipe: str, place: Place) -> str | None:
    """Nothing travels under no_sync; the next pass reduces what has accumulated, as if it came from one pass."""
    with Training(recipe, place) as run, Training(recipe, place) as one_pass:
        alone = run.local_copy()
        for part in range(3):
            last = part == 2
            with contextlib.nullcontext() if last else run.model.no_sync():
                run.loss(run.model, part).backward()
            run.loss(alone, part).backward()
            expected = [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]
            if not last and not same_bits(run.gradients(), expected):
                return "a gradient changed under no_sync"
        if run.link is None or run.link.step != 1:
            return "a pass under no_sync was counted as a step"
        one_pass.backward_of(expected)
        if not same_bits(run.gradients(), one_pass.gradients()):
            return "accumulated gradients are reduced to other bits than the same gradients in one pass"
        return None if place.same_on_all(run.gradients()) else "gradients differ between ranks"


def overflow_leaves_no_trace(recipe: str, place: Place) -> str | None:
    """A gradient that is not finite on one rank is seen by all, changes no memory, and is gone after the step."""
    last = place.world_size - 1
    poisons = {"inf": ("middle.weight", 0, math.inf), "NaN": ("first.weight", last, math.nan)}
    ends = []
    for kind, (parameter, rank, value) in poisons.items():
        with Training(recipe, place) as run:
            assert run.link is not None
            for number in range(HALF):
                run.step(number)
            before = _without_step(run.link.state_dict())
            run.spoil(parameter, value if rank == place.rank else None)
            if run.step(HALF):
                return f"{kind} on rank {rank} was not seen by rank {place.rank}"
            if not _same(before, _without_step(run.link.state_dict())):
                return f"{kind} on rank {rank} changed what rank {place.rank} remembers"
            for number in range(HALF + 1, STEPS + 1):
                if not run.step(number):
                    return f"gradients are not finite {number - HALF} steps after {kind}"
            ends.append((run.weights(), _without_step(run.link.state_dict())))
    if not same_bits(ends[0][0], ends[1][0]) or not _same(ends[0][1], ends[1][1]):
        return "a run that met inf and one that met NaN ended in other bits"
    return None


def state_resumes(recipe: str, place: Place) -> str | None:
    """A state that was saved and loaded goes on bit for bit as the run that was not interrupted."""
    with Training(recipe, place) as run, Training(recipe, place, seed=1) as resumed:
        assert run.link is not None
        assert resumed.link is not None
        for number in range(HALF):
            run.step(number)
        saved = _through_file({"link": run.link.state_dict(), "weights": run.net.state_dict()}, place.device)
        resumed.net.load_state_dict(saved["weights"])
        resumed.link.load_state_dict(saved["link"])
        if resumed.link.step != HALF:
            return f"the loaded state is at step {resumed.link.step}, not {HALF}"
        for number in range(HALF, STEPS):
            run.step(number)
            resumed.step(number)
            if not same_bits(run.gradients(), resumed.gradients()):
                return f"gradients differ {number - HALF + 1} steps after resuming"
        return None if same_bits(run.weights(), resumed.weights()) else "weights differ after resuming"


def recipe_can_change(recipe: str, place: Place) -> str | None:
    """set_recipe in mid-run: ranks stay equal, and with error feedback no gradient gets lost."""
    with Training(recipe, place) as run:
        assert run.link is not None
        applied: list[Tensor] | None = None
        wanted: list[Tensor] | None = None
        for number in range(STEPS - 1):
            if number == HALF:
                run.link.set_recipe("dense")
            gradients = given_gradients(run.net, place, number)
            run.backward_of(gradients)
            if not place.same_on_all(run.gradients()):
                return f"gradients differ between ranks in step {number}, dense since step {HALF}"
            applied = _added(applied, run.gradients())
            wanted = _added(wanted, [place.mean_of(gradient) for gradient in gradients])
        assert applied is not None
        assert wanted is not None
        if str(thinwire.parse(recipe)).startswith("error_feedback|"):
            off = _distance(applied, wanted)
            if off > 1e-4:
                return f"error feedback lost {off:.1e} of the gradients' norm in a change to dense"
        run.link.set_recipe(recipe)
        if str(run.link.recipe) != str(thinwire.parse(recipe)):
            return f"the recipe is {run.link.recipe} after set_recipe({recipe!r})"
        for number in range(STEPS, STEPS + 2):
            run.step(number)
        return None if place.same_on_all(run.weights()) else "weights differ between ranks after two changes"


CHECKS: dict[str, Check] = {
    "replicas": replicas_are_equal,
    "plain DDP": dense_equals_ddp,
    "no_sync": no_sync_accumulates,
    "overflow": overflow_leaves_no_trace,
    "resume": state_resumes,
    "set_recipe": recipe_can_change,
}


def checks_of(recipe: str) -> list[str]:
    """The checks that a recipe must pass; only dense is compared with plain DDP.

    >>> checks_of("dense")
    ['replicas', 'plain DDP', 'no_sync', 'overflow', 'resume', 'set_recipe']
    >>> "plain DDP" in checks_of("two-shot-4")
    False
    """
    dense = str(thinwire.parse(recipe)) == str(thinwire.parse("dense"))
    return [name for name in CHECKS if dense or name != "plain DDP"]


def run_task(task: dict[str, Any], place: Place, report: Callable[[dict[str, Any]], None]) -> None:
    """All checks of all recipes on this rank. A check that raises ends the task: ranks would wait for each other."""
    for recipe in task["recipes"]:
        for check in checks_of(recipe):
            report({"event": "begin", "word": f"{recipe}, {check}"})
            try:
                problem = CHECKS[check](recipe, place)
            except Exception as failure:
                words = f"{recipe}, {check}: {type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
                report({"event": "error", "problem": words})
                raise SystemExit(1) from failure
            report({"event": "check", "recipe": recipe, "check": check, "problem": problem})


# -------------------------------------------------------------------------------------------------- states and sums


def _through_file(value: Any, device: torch.device) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location=device, weights_only=True)


def _without_step(state: Any) -> Any:
    """A saved state with copies of its tensors and without the number of steps, which an overflow also counts."""
    if isinstance(state, dict):
        return {key: _without_step(value) for key, value in state.items() if key != "step"}
    if isinstance(state, list | tuple):
        return [_without_step(value) for value in state]
    if isinstance(state, Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, bytes) and state.startswith(b"PK"):  # what torch.save wrote: equal dicts may differ in bytes
        return _without_step(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
    if isinstance(state, str) and state.startswith("{"):
        with contextlib.suppress(ValueError):
            return _without_step(json.loads(state))
    return state


def _same(some: Any, others: Any) -> bool:
    if type(some) is not type(others):
        return False
    if isinstance(some, dict):
        return some.keys() == others.keys() and all(_same(some[key], others[key]) for key in some)
    if isinstance(some, list | tuple):
        return len(some) == len(others) and all(map(_same, some, others))
    if isinstance(some, Tensor):
        alike = (some.shape, some.dtype) == (others.shape, others.dtype)
        return alike and torch.equal(_bytes_of(some), _bytes_of(others))
    return bool(some == others)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _added(total: list[Tensor] | None, more: list[Tensor]) -> list[Tensor]:
    wide = [tensor.to(torch.float64) for tensor in more]
    return wide if total is None else [a + b for a, b in zip(total, wide, strict=True)]


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to the norm of what was expected."""
    pairs = zip(found, expected, strict=True)
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(off / sum(float(tensor.square().sum()) for tensor in expected))
