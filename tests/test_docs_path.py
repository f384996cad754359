"""A gradient's path in docs/architecture.md is the one that a step takes, traced in two processes."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.pool import Pool

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
RECIPE = "ef|threshold_k:0.01|bf16|all_gather"
_OURS = "/thinwire/"


def path_of_the_page() -> tuple[dict[str, str | None], dict[str, str]]:
    """Each file with the one that it is indented under, and base classes with the file that they count with."""
    block = re.search(r"^```path\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    parents: dict[str, str | None] = {}
    bases: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for number, line in enumerate(block[1].splitlines(), start=1):
        found = re.match(r" ?(\d+)( +)(\S+\.py)", line)
        assert found is not None, line
        assert int(found[1]) == number
        depth, name = len(found[2]), found[3]
        above = [one for one in above if one[0] < depth]
        assert name not in parents, f"{name} stands there twice"
        parents[name] = above[-1][1] if above else None
        above.append((depth, name))
        bases |= {base: name for base in re.findall(r"base: (\S+\.py)", line)}
    return parents, bases


def traced(rank: int, world_size: int, parents: dict[str, str | None], bases: dict[str, str]) -> set[tuple[str, str]]:
    """Which listed file enters which, through any number of files that are not listed, in one step."""
    seen: set[tuple[str, str]] = set()
    watching = False

    def listed(frame: FrameType) -> str | None:
        _, ours, name = frame.f_code.co_filename.rpartition(_OURS)
        name = bases.get(name, name)
        return name if ours and name in parents else None

    def note(frame: FrameType, event: str, argument: object) -> None:
        here = listed(frame) if watching and event == "call" else None
        caller = frame.f_back
        while here and caller is not None:
            if (found := listed(caller)) is not None:
                seen.add((found, here))
                return
            caller = caller.f_back

    threading.setprofile(note)  # lanes are threads that start with attach
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64)))
        link = tw.attach(model, RECIPE)
        for _ in range(4):
            model(torch.randn(8, 256)).square().mean().backward()
        loss = model(torch.randn(8, 256)).square().mean()
        watching = True
        sys.setprofile(note)
        loss.backward()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        watching = False
    link.close()
    return seen


def test_a_gradient_passes_the_files_that_are_listed() -> None:
    parents, bases = path_of_the_page()
    assert len(parents) <= 12
    assert f'"{RECIPE}"' in PAGE.read_text()
    pool = Pool(2)
    try:
        for seen in pool.run(traced, parents, bases):
            assert [(parent, name) for name, parent in parents.items() if parent and (parent, name) not in seen] == []
    finally:
        pool.close()
