"""Reads a reducer's parts from a DCP checkpoint that was saved on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import StateError
from ..reduce import Reducer
from ..reduce.checkpoint import PART, taken_ranks


def parts_of(reducer: Reducer, folder: str, key: str) -> dict[str, Any]:
    """The parts that are this rank's to take, as `load_state_dict` wants them."""
    # Slow to import, and few need it.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_into

    metadata = FileSystemReader(folder).read_metadata()
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == key}
    worlds = {int(match[2]) for path in paths.values() if (match := PART.fullmatch(str(path[1])))}
    if len(worlds) != 1:
        raise StateError(f"{folder} holds no link under {key!r}: save it with dcp.save({{{key!r}: link, ...}})")
    world = worlds.pop()
    wanted = {f"{rank}of{world}" for rank in taken_ranks(reducer, world)} or {f"0of{world}"}
    template: dict[str, Any] = {}
    for name, path in paths.items():
        if path[1] in wanted:
            stored = metadata.state_dict_metadata[name]
            size, kind = getattr(stored, "size", None), getattr(stored, "properties", None)
            _set(template, path, "" if size is None or kind is None else torch.empty(size, dtype=kind.dtype))
    load_into(template, checkpoint_id=folder)
    found: dict[str, Any] = template[key]
    return found


def _set(tree: dict[str, Any], path: Sequence[Any], value: object) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value
