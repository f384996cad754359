"""A rank is killed in the middle of a checkpoint: what is incomplete is refused, and the one before it still loads."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from support.forced_auto import EXACT
from support.pool import Pool, run_fresh
from support.runs import MANY, SAVED_AFTER, STEPS, Run, assert_same, save
from thinwire.errors import ThinwireError

Pools = Callable[[int], Pool]
RANKS, TIMEOUT, DEADLINE = 4, 20.0, 150.0
RARE = (6, 7)  # numbers of ranks that no other test needs: a pool would stay, with all its memory
FIRST, SECOND, LAST = SAVED_AFTER, SAVED_AFTER + 3, SAVED_AFTER + 6  # steps
PADDING = 1 << 20  # elements that a rank saves beside the link, so that writing takes a while
# Error feedback; residuals of second shots and no others; auto.
RECIPES = ["threshold-k", "rotated:2|two_shot:3,feedback=true", EXACT]


# ---------------------------------------------------------------------------------------------------- the kill


def write(run: Run, folder: Path) -> None:
    """A checkpoint in both ways."""
    folder.mkdir(exist_ok=True)
    torch.save({"link": run.link.state_dict(), "model": run.weights()}, folder / f"{run.rank}.pt")
    padding = {f"padding of {run.rank}": torch.full((PADDING,), float(run.rank))}
    save_distributed({"link": run.link, "model": run.net.state_dict(), **padding}, checkpoint_id=folder / "dcp")


def killed_while_saving(rank: int, world_size: int, recipe: str, folder: Path, victim: int, when: float) -> str:
    """Saves, trains on and saves again; the victim dies after `when` times the seconds that saving takes it."""
    run = Run(recipe, rank).train(FIRST)
    torch.save(run.owed(), folder / f"owed-first-{rank}.pt")
    begin = time.monotonic()
    write(run, folder / "first")
    taken = time.monotonic() - begin
    run.train(SECOND)
    torch.save(run.owed(), folder / f"owed-second-{rank}.pt")
    if rank == victim:
        timer = threading.Timer(when * taken, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    try:
        write(run, folder / "second")
    except (Exception, CheckpointException) as failure:  # the latter is no Exception
        return type(failure).__name__
    if rank == victim:
        time.sleep(10 * DEADLINE)  # it dies in here
    return "saved"


def killed(folder: Path, recipe: str, seed: int) -> None:
    """Two checkpoints in a folder: one that is whole, one whose saving was interrupted."""
    draw = random.Random(seed)
    victim, when = draw.randrange(RANKS), draw.random()
    outcomes = run_fresh(
        RANKS, killed_while_saving, recipe, folder, victim, when,
        timeout=TIMEOUT, deadline=DEADLINE, expect_death=[victim],
    )  # fmt: skip
    assert outcomes[victim] == ("died", -signal.SIGKILL), outcomes[victim]
    assert all(one[0] == "returned" for rank, one in enumerate(outcomes) if rank != victim), outcomes


# -------------------------------------------------------------------------------------------------- and after it


def readable(folder: Path) -> list[Any]:
    """The files of ranks that are whole; torch itself refuses the others."""
    found = []
    for file in sorted(folder.glob("*.pt")):
        with suppress(RuntimeError, EOFError):
            found.append(torch.load(file, weights_only=True))
    return found


def told_by(load: Callable[[], object]) -> str:
    """What a load was refused with; an error that is not ours is none of our promises."""
    try:
        load()
    except ThinwireError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return ""


def resumed(rank: int, world_size: int, recipe: str, folder: Path, way: str) -> dict[str, Any]:
    """Tries the second checkpoint; if it is refused, the same link takes the first."""
    run = Run(recipe, rank, start=1)

    def load(name: str) -> None:
        if way == "dcp":
            run.link.load_checkpoint(str(folder / name / "dcp"))
        else:
            run.link.load_state_dict([part["link"] for part in readable(folder / name)])

    name = "second"
    refused = told_by(lambda: load(name))
    if refused:
        name = "first"
        load(name)
    step, owed = run.link.step, run.owed()
    # A link that is whole has come with its weights, which lie beside it. Those of rank 0 may not.
    run.net.load_state_dict(readable(folder / name)[0]["model"])
    end = run.train(LAST).end()
    return {"refused": refused, "loaded": name, "step": step, "owed": owed, "parameters": end["parameters"]}


def total(owed: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in owed]).sum(0) for name in owed[0]}


def assert_one_sentence(told: str) -> None:
    kind, _, text = told.partition(": ")
    assert kind == "StateError", told
    assert ": " in text, f"no fix in {told}"
    assert "\n" not in text
    assert len(text) < 600


def assert_resumes(pools: Pools, folder: Path, recipe: str, world_size: int, way: str) -> str:
    """Which checkpoint was loaded."""
    if world_size in RARE:
        outcomes = run_fresh(world_size, resumed, recipe, folder, way, timeout=TIMEOUT, deadline=DEADLINE)
        assert all(one[0] == "returned" for one in outcomes), outcomes
        seen = [one[1] for one in outcomes]
    else:
        seen = pools(world_size).run(resumed, recipe, folder, way)
    loaded = {one["loaded"] for one in seen}
    assert len(loaded) == 1, "some ranks load what others refuse"
    name: str = loaded.pop()
    for one in seen:
        assert one["step"] == (SECOND if name == "second" else FIRST)
        assert_same(one["parameters"], seen[0]["parameters"])
        if name == "first":
            assert_one_sentence(one["refused"])
    expected = total([torch.load(folder / f"owed-{name}-{rank}.pt", weights_only=True) for rank in range(RANKS)])
    found = total([one["owed"] for one in seen])
    assert any(tensor.any() for tensor in expected.values())
    for parameter, tensor in expected.items():
        limit = 1e-6 * float(tensor.abs().max())
        torch.testing.assert_close(found[parameter], tensor, rtol=0.0, atol=limit, msg=f"{way}: {parameter}")
    return name


@pytest.mark.parametrize(("recipe", "seed"), [(RECIPES[0], 0), (RECIPES[1], 1)])
def test_the_checkpoint_before_still_loads(pools: Pools, tmp_path: Path, recipe: str, seed: int) -> None:
    killed(tmp_path, recipe, seed)
    for world_size, way in ((2, "dcp"), (3, "files")):
        assert_resumes(pools, tmp_path, recipe, world_size, way)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_every_number_of_ranks(pools: Pools, tmp_path: Path, recipe: str, seed: int) -> None:
    killed(tmp_path, recipe, seed)
    seen = {}
    for world_size in range(1, 9) if seed == 0 else (1, 2, 3, 5, 8):
        for way in ("dcp", "files"):
            seen[world_size, way] = assert_resumes(pools, tmp_path, recipe, world_size, way)
    for way in ("dcp", "files"):
        assert len({name for (_, other), name in seen.items() if other == way}) == 1, "it depends on the ranks"
    print(f"{recipe}, seed {seed}: {seen[1, 'dcp']} by DCP, {seen[1, 'files']} from files")


# --------------------------------------------------------------------------------------------------- cut short


def refusals(rank: int, world_size: int, recipe: str, folder: Path, cut: list[Path]) -> list[str]:
    """What every damaged checkpoint is refused with; at the end the whole one loads into the same link."""
    run = Run(recipe, rank, start=1)
    seen = [told_by(lambda damaged=damaged: run.link.load_checkpoint(str(damaged))) for damaged in cut]  # type: ignore[misc]
    assert run.link.step == 0
    run.link.load_checkpoint(str(folder))
    assert run.link.step == SAVED_AFTER
    run.train(STEPS).end()
    return seen


def cut_short(folder: Path, count: int, seed: int) -> list[Path]:
    """Copies of a checkpoint, in each of which one file ends too early, or is not there."""
    draw, copies = random.Random(seed), []
    for number in range(count):
        copy = folder.with_name(f"cut-{seed}-{number}")
        shutil.copytree(folder, copy)
        file = draw.choice(sorted(copy.iterdir()))
        if number % 8 == 7:
            file.unlink()
        else:
            os.truncate(file, draw.randrange(file.stat().st_size))
        copies.append(copy)
    return copies


@pytest.mark.parametrize(
    ("recipe", "world_size", "count"),
    [
        (RECIPES[0], 2, 12),
        *(pytest.param(recipe, ranks, 60, marks=pytest.mark.slow) for recipe in RECIPES for ranks in (1, 3, 4, 5)),
    ],
)
def test_a_checkpoint_cut_short_is_refused(
    pools: Pools, tmp_path: Path, recipe: str, world_size: int, count: int
) -> None:
    """On all ranks, also where one of them alone reads what is missing."""
    pools(RANKS).run(save, recipe, tmp_path, MANY, SAVED_AFTER)
    cut = cut_short(tmp_path / "dcp", count, seed=world_size)
    for seen in pools(world_size).run(refusals, recipe, tmp_path / "dcp", cut):
        for told, damaged in zip(seen, cut, strict=True):
            assert told, f"{damaged.name} was loaded"
            assert_one_sentence(told)
