"""Saves a reducer, loads it on any number of ranks, and moves residuals to other buckets.

Every rank saves a part of its own under `<rank>of<world size>`, by parameter name:

    info      text: recipe, step, seed, layout, and what an adapter adds (the loss scale)
    memory    parameter -> what the memory keeps of it
    buckets   bytes: what codecs carry from step to step and what second shots kept back, by bucket of that layout;
              because DCP loads tensors only into tensors of the same size, and a new reducer has another layout
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codecs.base import State
from ..errors import StateError
from ..exchange.first_shot import pieces
from ..memory import ErrorFeedback, RunningMemory
from ..recipe.compose import parse
from . import second_shots
from .agree import check_agreement
from .buckets import Bucket, Layout
from .residuals import Residuals

if TYPE_CHECKING:
    from .reducer import Reducer

_log = logging.getLogger(__name__)
_VERSION = 1
PART = re.compile(r"(\d+)of(\d+)")
_INFO = {"recipe", "rank", "step", "seed", "layout", "memory"}
Kept = dict[str, dict[str, Tensor]]  # parameter -> kind of memory -> tensor in the parameter's shape


@dataclasses.dataclass
class Saved:
    """A loaded state whose tensors the reducer has not seen yet."""

    memory: Kept = dataclasses.field(default_factory=dict)
    states: dict[str, State] = dataclasses.field(default_factory=dict)
    backs: dict[str, Tensor] = dataclasses.field(default_factory=dict)


# -------------------------------------------------------------------------------------------------- by parameter


def residual(reducer: Reducer, name: str) -> Tensor:
    """What is still to be sent of a tensor, copied; zeros if it travels exact."""
    bucket = reducer.layout.of.get(name)
    if bucket is None:
        known = ", ".join(reducer.layout.of) or "none yet"
        raise StateError(f"no tensor {name} was reduced: there are {known}")
    kept = _by_parameter(reducer.residuals, [bucket], ("residual",)).get(name)
    if kept is not None:
        return kept["residual"]
    shape = next(part.shape for part in bucket.exact if part.name == name)
    return torch.zeros(shape, device=bucket.device)


def _by_parameter(residuals: Residuals, buckets: Sequence[Bucket], keys: Sequence[str]) -> Kept:
    kept: Kept = {}
    for bucket in buckets:
        tensors = {} if residuals.memory is None else residuals.memory.tensors(bucket.name)
        for part in bucket.parts:
            kept[part.name] = {}
            for key in keys:
                flat = part.of(tensors[key].view(-1)) if key in tensors else None
                blank = torch.zeros(part.shape, dtype=torch.float32, device=bucket.device)
                kept[part.name][key] = blank if flat is None else flat.view(part.shape).clone()
    return kept


def _put(residuals: Residuals, buckets: Sequence[Bucket], kept: Kept) -> None:
    """Replace what the memory holds."""
    memory = residuals.memory
    assert memory is not None
    memory.reset()
    for bucket in buckets:
        if bucket.parts:
            memory.put(bucket.name, {key: _joined(bucket, kept, key) for key in memory.keeps})


def _joined(bucket: Bucket, kept: Kept, key: str) -> Tensor:
    flats = []
    for part in bucket.parts:
        tensor = kept.get(part.name, {}).get(key)
        blank = torch.zeros(part.stop - part.start)
        flats.append((blank if tensor is None else tensor.reshape(-1)).to(bucket.device, torch.float32))
    flat = torch.cat(flats) if flats else torch.zeros(0, device=bucket.device)
    return flat.view(bucket.parts[0].shape) if len(bucket.parts) == 1 else flat


def adopt(reducer: Reducer, bucket: Bucket) -> None:
    """A bucket is seen for the first time: give it what was loaded for it."""
    saved, residuals = reducer.saved, reducer.residuals
    if residuals.memory is not None and any(part.name in saved.memory for part in bucket.parts):
        _check_shapes(saved.memory, bucket)
        residuals.memory.put(bucket.name, {key: _joined(bucket, saved.memory, key) for key in residuals.memory.keeps})
        for part in bucket.parts:
            saved.memory.pop(part.name, None)
    if bucket.name in saved.states:
        residuals.states[bucket.name] = saved.states.pop(bucket.name)
    if bucket.name in saved.backs:
        residuals.backs[bucket.name] = saved.backs.pop(bucket.name).to(bucket.device)


def move(reducer: Reducer, layout: Layout) -> None:
    """Take over another layout; residuals go with their parameters."""
    residuals, old = reducer.residuals, reducer.layout
    second_shots.keep(reducer, residuals, residuals)
    if residuals.memory is not None:
        _put(residuals, layout.buckets, _by_parameter(residuals, old.buckets, residuals.memory.keeps))
    by_part: dict[str, State] = {}
    if residuals.recipe.codec.needs_shape:
        by_part = {part: state for states in residuals.states.values() for part, state in states.items()}
    residuals.restart()
    for bucket in layout.buckets:
        found = {part.name: by_part[part.name] for part in bucket.parts if part.name in by_part}
        if found:
            residuals.states[bucket.name] = found
    reducer.layout = layout


# -------------------------------------------------------------------------------------------------------- saving


def state_of(reducer: Reducer, extra: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part."""
    residuals, memory = reducer.residuals, reducer.residuals.memory
    chooses = reducer.policy.state_dict()
    known = [] if memory is None else memory.names()
    info = {
        "version": _VERSION,
        "recipe": str(reducer.recipe),
        "rank": reducer.rank,
        "step": reducer.step,
        "seed": reducer.seed,
        "layout": reducer.layout.groups,
        "memory": None if memory is None else memory.kind,
        "auto": chooses,
        "empty": [part.name for bucket in reducer.layout.buckets if bucket.name not in known for part in bucket.parts],
        "overrides": {name: str(recipe) for name, recipe in residuals.overrides.items()},
        **extra,
    }
    part: dict[str, Any] = {
        "info": json.dumps(info),
        "buckets": _bytes_of({"states": residuals.states, "backs": residuals.backs}),
    }
    if memory is not None or chooses is not None:  # DCP loads only what the state of the new link has too
        keys = ErrorFeedback().start().keeps if memory is None else memory.keeps
        part["memory"] = _by_parameter(residuals, reducer.layout.buckets, keys)
    return {f"{reducer.rank}of{reducer.world_size}": part}


def _bytes_of(content: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def _content_of(part: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    try:
        content = torch.load(io.BytesIO(part["buckets"]), weights_only=True, map_location=device)
        return {"states": dict(content["states"]), "backs": dict(content["backs"])}
    except Exception as damage:  # of many types, whatever the unpickler met
        raise StateError(f"the saved state is damaged ({damage!r}): save it anew") from None


# ------------------------------------------------------------------------------------------------------- loading


_Prepared = tuple[Layout, RunningMemory | None, Kept | None, dict[str, Any], dict[str, Any], int]


def _prepared(reducer: Reducer, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> _Prepared:
    """All that may be refused, without any change."""
    parts, world = _parts(given)
    mine = taken_ranks(reducer, world)
    if missing := [rank for rank in mine if rank not in parts]:
        raise StateError(
            f"rank {reducer.rank} of {reducer.world_size} needs the state of rank {missing[0]} of {world}, and was "
            f"given that of {', '.join(map(str, sorted(parts)))}: save one per rank, and load all if their number "
            "changed"
        )
    infos = {rank: _info(part) for rank, part in parts.items()}
    info = infos[mine[0] if mine else min(parts)]
    if any(other["step"] != info["step"] for other in infos.values()):
        raise StateError("the states were saved after different steps: give those of one checkpoint")
    follows = reducer.policy.state_dict() is not None
    _check_fits(reducer, info, follows=follows)
    layout = reducer.layout.regrouped(info["layout"])
    # A rank that is new takes another's codec states: power iterations must start alike everywhere.
    content = _content_of(parts[mine[0] if mine else min(parts)], _device_of(layout))
    memory, same = reducer.residuals.memory, world == reducer.world_size
    if follows and info["memory"] is None:
        memory = None
    if memory is None and ((content["backs"] and not same) or (follows and info["memory"] is not None)):
        memory = ErrorFeedback().start()  # of second shots of other pieces; what policies may have kept
    kept = None if memory is None else _added(reducer, memory.keeps, layout, [parts[rank] for rank in mine], world)
    return layout, memory, kept, info, content, world


def agree(reducer: Reducer, refusal: StateError | None) -> None:
    """Raise on all ranks if any of them cannot load its state: the others would wait for it."""
    network = reducer.network
    if not network.between_processes:
        refused = [] if refusal is None else [network.rank]
    else:
        flag = torch.tensor([int(refusal is not None)], dtype=torch.int32, device=network.device)
        refused = [rank for rank, value in enumerate(network.all_gather(flag).view(-1).tolist()) if value]
    if refusal is not None:
        raise refusal
    if refused:
        raise StateError(f"rank {refused[0]} cannot load its state, so no rank does: its error says why")


def load(reducer: Reducer, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Resume from the parts given, which must hold those that are this rank's to take.

    A state is loaded whole and on all ranks, or not at all: what may fail comes first, and ranks tell each other.
    """
    refusal: StateError | None = None
    try:
        layout, memory, kept, info, content, world = _prepared(reducer, given)
    except StateError as problem:
        refusal = problem
    agree(reducer, refusal)
    same, residuals = world == reducer.world_size, reducer.residuals
    if reducer.network.between_processes:
        check_agreement(reducer.network, {"step of the state": str(info["step"])}, device=reducer.network.device)
    reducer.layout, reducer.step, reducer.seed = layout, info["step"], info["seed"]
    reducer.policy.layout_changed()
    reducer.policy.load_state_dict(info.get("auto"))
    if reducer.policy.recipe != reducer.recipe:
        reducer.residuals = residuals = Residuals(reducer.policy.recipe)
    residuals.restart()
    residuals.memory, reducer.saved = memory, Saved()
    if kept is not None and memory is not None:
        reducer.saved.memory = _without_empty(kept, info, layout, () if same else content["backs"])
        memory.reset()
    if info["recipe"] == str(reducer.recipe):
        reducer.saved.states = content["states"]
        residuals.overrides = {name: parse(text) for name, text in info.get("overrides", {}).items()}
    if same:
        reducer.saved.backs = content["backs"]
    for bucket in layout.buckets:
        adopt(reducer, bucket)
    residuals.states.update({key: state for key, state in reducer.saved.states.items() if " " in key})
    if same and info["recipe"] != str(reducer.recipe):
        second_shots.keep(reducer, residuals, residuals)
    return {key: value for key, value in info.items() if key not in _INFO | {"version", "auto", "empty", "overrides"}}


def _without_empty(kept: Kept, info: Mapping[str, Any], layout: Layout, backs: Collection[str]) -> Kept:
    """What the memory knew: buckets of which nothing was ever kept stay unknown, but for what second shots add."""
    empty = set(info.get("empty", ()))
    for bucket in layout.buckets:
        if bucket.name in backs:
            empty -= set(bucket.names)
    return {name: tensors for name, tensors in kept.items() if name not in empty}


def _device_of(layout: Layout) -> torch.device:
    return layout.buckets[0].device if layout.buckets else torch.device("cpu")


def _parts(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[dict[int, Mapping[str, Any]], int]:
    states = [given] if isinstance(given, Mapping) else list(given)
    parts: dict[int, Mapping[str, Any]] = {}
    worlds = set()
    for state in states:
        for key, part in state.items():
            match = PART.fullmatch(key)
            if match is None or not isinstance(part, Mapping) or not {"info", "buckets"} <= part.keys():
                raise StateError(f"this is not the state of a link (it has {key!r}): give what state_dict() gave")
            parts[int(match[1])] = part
            worlds.add(int(match[2]))
    if len(worlds) != 1:
        raise StateError("the states come from several runs, or there are none: give those of one checkpoint")
    return parts, worlds.pop()


def taken_ranks(reducer: Reducer, world: int) -> list[int]:
    """Which old ranks' parts this rank takes over."""
    return [rank for rank in range(world) if rank % reducer.world_size == reducer.rank]


def _info(part: Mapping[str, Any]) -> dict[str, Any]:
    try:
        info: dict[str, Any] = json.loads(part["info"])
        version = info["version"]
        if version == _VERSION and (missing := _INFO - info.keys()):
            raise KeyError(min(missing))
    except (AttributeError, KeyError, TypeError, ValueError) as damage:
        raise StateError(f"the saved state is damaged ({damage!r}): save it anew") from None
    if version != _VERSION:
        raise StateError(f"the state was saved in format {version}, this thinwire reads {_VERSION}: use that version")
    return info


def _check_fits(reducer: Reducer, info: Mapping[str, Any], *, follows: bool) -> None:
    saved = {name for group in info["layout"] for name in group}
    if reducer.layout.of and (unmatched := saved ^ set(reducer.layout.of)):
        raise StateError(
            f"the saved state and this model differ in parameter {min(unmatched)}: load the state of the same model"
        )
    if follows:
        return  # a policy takes over every memory, and chooses its recipe itself
    if info["memory"] is not None and reducer.residuals.memory is None:
        raise StateError(
            f"the state of {info['recipe']} holds residuals, and {reducer.recipe} has no memory "
            "for them: attach with a recipe that has one (ef|...), load, then call set_recipe"
        )
    if info["recipe"] != str(reducer.recipe):
        _log.warning("the state was saved with %s and is loaded into %s", info["recipe"], reducer.recipe)


def _check_shapes(kept: Kept, bucket: Bucket) -> None:
    for part in bucket.parts:
        for tensor in kept.get(part.name, {}).values():
            if tuple(tensor.shape) != part.shape:
                raise StateError(
                    f"{part.name} has shape {part.shape} here and {tuple(tensor.shape)} in the saved state: "
                    "load the state of the same model"
                )


def _added(
    reducer: Reducer, keys: Sequence[str], layout: Layout, parts: Sequence[Mapping[str, Any]], world: int
) -> Kept:
    """The sum of several old ranks' residuals; without any of them, zeros, which the sum over all ranks allows."""
    kept = _by_parameter(Residuals(reducer.recipe), layout.buckets, keys)
    planned = bool(layout.buckets)
    for part in parts:
        saved = part.get("memory", {})
        if planned and _info(part)["memory"] is not None and saved.keys() != kept.keys():
            raise StateError("the saved state is damaged (its memory is not that of the model): save it anew")
        for name, tensors in saved.items():
            for key, tensor in tensors.items():
                if key in keys:
                    _add(kept.setdefault(name, {}), name, key, tensor)
        if world != reducer.world_size:
            _add_backs(layout, part, world, kept)
    return kept


def _add(kept: dict[str, Tensor], name: str, key: str, tensor: Tensor) -> None:
    present = kept.get(key)
    if present is None:
        kept[key] = tensor.to(torch.float32, copy=True)
    elif tensor.shape != present.shape:
        raise StateError(
            f"{name} has shape {tuple(present.shape)} here and {tuple(tensor.shape)} in the saved state: "
            "load the state of the same model"
        )
    else:
        present += tensor.to(present.device)


def _add_backs(layout: Layout, part: Mapping[str, Any], world: int, kept: Kept) -> None:
    rank, backs = _info(part)["rank"], _content_of(part, torch.device("cpu"))["backs"]
    for bucket in layout.buckets:
        back = backs.get(bucket.name)
        if back is None:
            continue
        flat = torch.zeros(bucket.numel)
        flat[pieces(bucket.numel, world)[rank]] = back * world
        for one in bucket.parts:
            target = kept[one.name]["residual"]
            target += one.of(flat).view(one.shape).to(target.device)
