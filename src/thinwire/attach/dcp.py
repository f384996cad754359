"""Reads a reducer's parts from a DCP checkpoint that was saved on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import StateError
from ..reduce import Reducer
from ..reduce.checkpoint import PART, agree, taken_ranks

_OLDER = "load the checkpoint before it"


def parts_of(reducer: Reducer, folder: str, key: str) -> dict[str, Any]:
    """The parts that are this rank's to take, as `load_state_dict` wants them; StateError on all ranks or on none."""
    found: dict[str, Any] = {}
    refusal: StateError | None = None
    try:
        found = _read(reducer, folder, key)
    except StateError as problem:
        refusal = problem
    agree(reducer, refusal)
    return found


def _read(reducer: Reducer, folder: str, key: str) -> dict[str, Any]:
    # Slow to import, and few need it.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_into

    try:
        metadata = FileSystemReader(folder).read_metadata()
    except FileNotFoundError:  # written last
        raise StateError(f"{folder} is no checkpoint, or its saving was cut short: {_OLDER}") from None
    except Exception as damage:  # of many types, whatever the unpickler met
        raise StateError(f"{folder} cannot be read ({_said(damage)}): {_OLDER}") from None
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == key}
    worlds = {int(match[2]) for path in paths.values() if (match := PART.fullmatch(str(path[1])))}
    if len(worlds) != 1:
        raise StateError(f"{folder} holds no link under {key!r}: save it with dcp.save({{{key!r}: link, ...}})")
    _check_lengths(folder, metadata)
    world = worlds.pop()
    wanted = {f"{rank}of{world}" for rank in taken_ranks(reducer, world)} or {f"0of{world}"}
    template: dict[str, Any] = {}
    for name, path in paths.items():
        if path[1] in wanted:
            stored = metadata.state_dict_metadata[name]
            size, kind = getattr(stored, "size", None), getattr(stored, "properties", None)
            _set(template, path, "" if size is None or kind is None else torch.empty(size, dtype=kind.dtype))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant: see `agree`
            load_into(template, checkpoint_id=folder, no_dist=True)
    except (Exception, CheckpointException) as damage:  # the latter is no Exception
        raise StateError(f"{folder} cannot be read ({_said(damage)}): {_OLDER}") from None
    found: dict[str, Any] = template[key]
    return found


def _check_lengths(folder: str, metadata: Any) -> None:
    """Of all files, also those that other ranks read: weights lie in them too, and some could seem to be whole."""
    ends: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        name = stored.relative_path
        ends[name] = max(ends.get(name, 0), stored.offset + stored.length)
    for name, end in ends.items():
        file = Path(folder, name)
        length = file.stat().st_size if file.exists() else 0
        if length < end:
            raise StateError(f"{folder} is cut short ({name} has {length} of {end} bytes): {_OLDER}")


def _said(damage: BaseException) -> str:
    """On one line, however much torch has to say."""
    words = " ".join(str(damage).split())
    return f"{type(damage).__name__}: {words[:200]}" if words else type(damage).__name__


def _set(tree: dict[str, Any], path: Sequence[Any], value: object) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value
