"""States that cannot be resumed from: a StateError that says what to do, and a link that is as it was."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from support.forced_auto import EXACT
from support.pool import Pool
from support.runs import MANY, SAVED_AFTER, STEPS, Run, assert_same, parts_in, save
from thinwire.errors import ThinwireError

Pools = Callable[[int], Pool]


def changed(state: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    [(key, part)] = state.items()
    return {key: {name: value for name, value in (part | changes).items() if value is not None}}


def refusals(rank: int, world_size: int, recipe: str, two: Path, four: Path) -> dict[str, str]:
    """Every bad state, and what came of it. A refused state must change nothing."""
    states, of_four = ([part["link"] for part in parts_in(folder)] for folder in (two, four))
    own = states[rank]
    [part] = own.values()
    info, memory = json.loads(part["info"]), part["memory"]
    wide, forgetful, narrow = (
        Run(one, rank, width=width).train(3) for one, width in ((recipe, 96), ("two-shot-8", 96), (recipe, 80))
    )
    bad: dict[str, Any] = {
        "another rank's": states[1 - rank],
        "two of four": of_four[:2],
        "one of four": of_four[rank],
        "of two runs": [own, of_four[rank]],
        "of two steps": [own, changed(states[1 - rank], info=json.dumps(info | {"rank": 1 - rank, "step": 3}))],
        "nothing": [],
        "something else": {"weight": torch.zeros(3)},
        "another version": changed(own, info=json.dumps(info | {"version": 99})),
        "no text": changed(own, info="not json"),
        "a number": changed(own, info="3"),
        "no layout": changed(own, info=json.dumps({k: v for k, v in info.items() if k != "layout"})),
        "no step": changed(own, info=json.dumps({k: v for k, v in info.items() if k != "step"})),
        "buckets cut short": changed(own, buckets=part["buckets"][:100]),
        "no buckets": changed(own, buckets=None),
        "no memory": changed(own, memory=None),
        "memory of one less": changed(own, memory={k: v for k, v in memory.items() if k != "first.weight"}),
        "memory of one more": changed(own, memory=memory | {"other.weight": {"residual": torch.zeros(3)}}),
        "another shape": changed(own, memory=memory | {"first.weight": {"residual": torch.zeros(3, 3)}}),
        "another model": changed(own, info=json.dumps(info | {"layout": [["other.weight", "first.weight"]]})),
    }
    loads: dict[str, Callable[[], object]] = {
        name: functools.partial(wide.link.load_state_dict, state) for name, state in bad.items()
    }
    loads["into no memory"] = lambda: forgetful.link.load_state_dict(own)
    loads["into a narrower model"] = lambda: narrow.link.load_state_dict(own)
    loads["another key"] = lambda: wide.link.load_checkpoint(str(two / "dcp"), key="other")
    loads["dcp.load of four"] = lambda: load_distributed({"link": wide.link}, checkpoint_id=four / "dcp")
    seen = {}
    links = [run.link for run in (wide, forgetful, narrow)]
    for name, load in loads.items():
        before = [link.state_dict() for link in links]
        try:
            load()
            seen[name] = "nothing was said"
        except BaseException as error:  # as DCP's are
            seen[name] = f"{type(error).__name__}: {error}"
        for was, link in zip(before, links, strict=True):
            try:
                assert_same(link.state_dict(), was)
            except AssertionError:
                seen[name] += " (half loaded)"
                link.load_state_dict(was)
    for run in (wide, forgetful, narrow):
        run.train(STEPS).end()
    return seen


@pytest.mark.parametrize("recipe", ["top-k", EXACT])
def test_refusals(pools: Pools, tmp_path: Path, recipe: str) -> None:
    folders = {world_size: tmp_path / str(world_size) for world_size in (2, 4)}
    for world_size, folder in folders.items():
        folder.mkdir()
        pools(world_size).run(save, recipe, folder, MANY, SAVED_AFTER)
    for rank, seen in enumerate(pools(2).run(refusals, recipe, folders[2], folders[4])):
        assert "Missing key" in seen.pop("dcp.load of four")
        wrong = {name: what for name, what in seen.items() if not what.startswith("StateError: ") or "half" in what}
        assert wrong == {}
        assert f"rank {rank} of 2 needs the state of rank {rank} of 2" in seen["another rank's"]
        assert f"needs the state of rank {rank + 2} of 4" in seen["two of four"]
        assert "load all if their number changed" in seen["one of four"]
        assert "load, then call set_recipe" in seen["into no memory"]
        assert "weight has shape (" in seen["into a narrower model"]
        assert "first.weight" in seen["another shape"]
        assert "save it with dcp.save({'other': link, ...})" in seen["another key"]
        for what in seen.values():
            assert ": " in what.removeprefix("StateError: "), f"no fix in {what}"


def resume_at_different_steps(rank: int, world_size: int, recipe: str) -> str:
    """Rank 0 has lost its newest file and takes the one before."""
    run = Run(recipe, rank).train(SAVED_AFTER)
    older = run.link.state_dict()
    state = run.train(SAVED_AFTER + 1).link.state_dict()
    new = Run(recipe, rank, start=1)
    try:
        new.link.load_state_dict(older if rank == 0 else state)
        new.train(new.link.step + 1)
    except ThinwireError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("recipe", ["top-k", "two-shot-8", EXACT])
def test_ranks_that_resume_at_different_steps_are_told(pools: Pools, recipe: str) -> None:
    """Draws, turns and debts would no longer belong together, and no number would look wrong."""
    for told in pools(2).run(resume_at_different_steps, recipe):
        assert "step" in told
