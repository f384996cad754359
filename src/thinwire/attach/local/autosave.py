"""Autosave: after every round, all that a rank needs to go on, in a folder; resumed on any number of ranks.

    <folder>/round-00000012/3of4.pt     state of local steps, inner optimizers, and parameters that differ by rank

A file is written whole or not at all. The last two rounds stay: a rank may have been killed while it wrote the last.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.network import Network
from ...errors import StateError
from ...reduce.checkpoint import PART, agree, taken_ranks
from .tensors import ranks_of

if TYPE_CHECKING:
    from .link import LocalSteps

_ROUND = re.compile(r"round-(\d{8})")
_KEPT = 2


def folder_of(folder: Path, network: Network) -> Path:
    """Groups that hold different shards share a folder, and have one each within it: named by their first rank."""
    ranks = ranks_of(network)
    alone = ranks is None or len(ranks) == dist.get_world_size()
    return folder if alone or ranks is None else folder / f"group-{min(ranks)}"


def save(link: LocalSteps, folder: Path) -> None:
    """This rank's file of the round that has just ended."""
    place = folder / f"round-{link.round:08}"
    place.mkdir(parents=True, exist_ok=True)
    tensors = link.rounds.tensors
    content = {
        "local": link.state_dict(),
        "parameters": tensors.parameters,  # of ranks that are in the middle of other fragments
        "buffers": tensors.buffers,
        "optimizers": [_packed(optimizer) for optimizer in tensors.optimizers],
    }
    name = f"{link.rank}of{link.world_size}.pt"
    partial = place / f".{name}.{os.getpid()}"
    torch.save(content, partial)
    partial.replace(place / name)
    for number in sorted(_rounds(folder))[:-_KEPT]:
        with contextlib.suppress(OSError):  # other ranks have files there, or are at it too
            (folder / f"round-{number:08}" / name).unlink()
            (folder / f"round-{number:08}").rmdir()


def _rounds(folder: Path) -> dict[int, Path]:
    found = [(match, path) for path in folder.glob("round-*") if (match := _ROUND.fullmatch(path.name))]
    return {int(match[1]): path for match, path in found}


def resume(link: LocalSteps, folder: Path) -> bool:
    """Go on from the last round that all ranks can read; False if there is none."""
    usable = {number: files for number, path in _rounds(folder).items() if (files := _files(link, path))}
    number = _agreed(link, usable)
    if number is None:
        return False
    refusal, parts = None, {}
    try:
        parts = {rank: _read(path) for rank, path in usable[number].items()}
    except StateError as problem:
        refusal = problem
    agree(link.reducer, refusal)
    mine = next((rank for rank in taken_ranks(link.reducer, _world(usable[number])) if rank in parts), min(parts))
    own, tensors = parts[mine], link.rounds.tensors
    with torch.no_grad():
        for live, saved in ((tensors.parameters, own["parameters"]), (tensors.buffers, own["buffers"])):
            for name, tensor in live.items():
                tensor.copy_(saved[name])
    for optimizer, state in zip(tensors.optimizers, own["optimizers"], strict=True):
        _unpack(optimizer, state)
    link.load_state_dict([part["local"] for part in parts.values()])
    return True


def _files(link: LocalSteps, place: Path) -> dict[int, Path]:
    """The files of a round that this rank needs: its own, or all of another number of ranks; none if any is missing."""
    worlds: dict[int, dict[int, Path]] = {}
    for path in place.glob("*of*.pt"):
        if (match := PART.fullmatch(path.stem)) is not None:
            worlds.setdefault(int(match[2]), {})[int(match[1])] = path
    same = worlds.get(link.world_size, {})
    if link.rank in same:
        return {link.rank: same[link.rank]}
    whole = [files for world, files in sorted(worlds.items()) if len(files) == world != link.world_size]
    return whole[-1] if whole else {}


def _world(files: Mapping[int, Path]) -> int:
    match = PART.fullmatch(next(iter(files.values())).stem)
    assert match is not None
    return int(match[2])


def _agreed(link: LocalSteps, usable: Mapping[int, Mapping[int, Path]]) -> int | None:
    """The last round that every rank can read, saved on the same number of ranks."""
    newest = sorted(usable)[-_KEPT - 1 :]
    row = torch.full((_KEPT + 1, 2), -1, dtype=torch.int64)
    for place, number in enumerate(newest):
        row[place] = torch.tensor([number, _world(usable[number])])
    rows = link.reducer.network.all_gather(row.to(link.reducer.network.device)).tolist()
    common = set.intersection(*({tuple(pair) for pair in theirs if pair[0] >= 0} for theirs in rows))
    return max(common)[0] if common else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return content
    except Exception as damage:  # of many types, whatever the unpickler met
        raise StateError(f"{path} cannot be read ({type(damage).__name__}): remove its folder") from None


# ---------------------------------------------------------------------------------- inner optimizers, also of DTensors


def _packed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state with local shards in place of DTensors, which could be read by the same ranks only."""
    state = optimizer.state_dict()
    state["state"] = {
        index: {key: getattr(value, "_local_tensor", value) for key, value in one.items()}
        for index, one in state["state"].items()
    }
    return state


def _unpack(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {key: _as_parameter(value, parameters[index]) for key, value in one.items()}
        for index, one in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _as_parameter(value: Any, parameter: Any) -> Any:
    shard = getattr(parameter, "_local_tensor", None)
    if shard is None or not isinstance(value, Tensor) or value.dim() == 0 or value.shape != shard.shape:
        return value
    return type(parameter.detach()).from_local(
        value.to(shard.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
