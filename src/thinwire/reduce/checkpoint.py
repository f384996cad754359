"""Saving a link, loading it on as many ranks or on others, and moving what is remembered to another layout.

Every rank saves a part of its own under `<rank>of<world size>`, by parameter name:

    info      text: recipe, step, seed, loss scale, layout
    memory    parameter -> what the memory keeps of it
    buckets   bytes: what codecs carry from step to step and what two_shot kept back, by bucket of that layout;
              because DCP loads tensors only into tensors of the same size, and a new link has another layout
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codecs.base import State
from ..errors import StateError
from ..exchange.two_shot import pieces
from ..memory import ErrorFeedback
from .buckets import Layout, Parcel
from .carrier import Carrier

if TYPE_CHECKING:
    from ..attach.link import Link

_log = logging.getLogger(__name__)
_VERSION = 1
_PART = re.compile(r"(\d+)of(\d+)")
_INFO = {"recipe", "rank", "step", "seed", "scale", "layout", "layout_is_final", "memory"}
Kept = dict[str, dict[str, Tensor]]  # parameter -> kind of memory -> tensor in the parameter's shape


# -------------------------------------------------------------------------------------------------- by parameter


def residual(link: Link, name: str) -> Tensor:
    """What is still to be sent of a parameter, copied; zeros if it travels exact."""
    known = {parameter.name: parameter for parameter in link.parameters}
    if name not in known:
        raise StateError(f"the model trains no parameter {name}: it has {', '.join(known)}")
    kept = _by_parameter(link.carrier, link.layout, ("residual",)).get(name)
    return torch.zeros(known[name].shape, device=known[name].device) if kept is None else kept["residual"]


def _by_parameter(carrier: Carrier, layout: Layout, keys: Sequence[str]) -> Kept:
    kept: Kept = {}
    for parcel in layout.parcels:
        tensors = {} if carrier.memory is None else carrier.memory.tensors(parcel.name)
        for part in parcel.parts:
            kept[part.name] = {}
            for key in keys:
                flat = tensors[key].view(-1)[part.start : part.stop] if key in tensors else None
                blank = torch.zeros(part.shape, dtype=torch.float32, device=parcel.device)
                kept[part.name][key] = blank if flat is None else flat.view(part.shape).clone()
    return kept


def _put(carrier: Carrier, layout: Layout, kept: Kept) -> None:
    """Replace what the memory holds."""
    memory = carrier.memory
    assert memory is not None
    memory.reset()
    for parcel in layout.parcels:
        if parcel.parts:
            memory.put(parcel.name, {key: _joined(parcel, kept, key) for key in memory.keeps})


def _joined(parcel: Parcel, kept: Kept, key: str) -> Tensor:
    pieces_of_it = []
    for part in parcel.parts:
        tensor = kept.get(part.name, {}).get(key)
        blank = torch.zeros(part.stop - part.start)
        pieces_of_it.append((blank if tensor is None else tensor.reshape(-1)).to(parcel.device, torch.float32))
    flat = torch.cat(pieces_of_it)
    return flat.view(parcel.parts[0].shape) if len(parcel.parts) == 1 else flat


def move(link: Link, layout: Layout) -> None:
    """Take over another layout; what is remembered goes with its parameters."""
    carrier, old = link.carrier, link.layout
    pay_back_second_shots(link, carrier, carrier)
    if carrier.memory is not None:
        _put(carrier, layout, _by_parameter(carrier, old, carrier.memory.keeps))
    by_part: dict[str, State] = {}
    if carrier.recipe.codec.needs_shape:
        by_part = {part: state for parcel_state in carrier.states.values() for part, state in parcel_state.items()}
    carrier.restart()
    for parcel in layout.parcels:
        found = {part.name: by_part[part.name] for part in parcel.parts if part.name in by_part}
        if found:
            carrier.states[parcel.name] = found
    link.layout = layout


def pay_back_second_shots(link: Link, old: Carrier, new: Carrier) -> None:
    """What a second shot kept back is owed by this rank alone; without a second shot its memory owes it.

    It is part of a mean, and a memory part of a sum: hence times the number of ranks.
    """
    backs, old.backs = old.backs, {}
    if not backs:
        return
    if new.memory is None:
        new.memory = ErrorFeedback().start()  # whose content goes with the next step
    for parcel in link.layout.parcels:
        if parcel.name in backs:
            if parcel.name not in new.memory.names():
                new.memory.put(parcel.name, {key: _joined(parcel, {}, key) for key in new.memory.keeps})
            mine = list(pieces(parcel.numel, link.world_size))[link.rank]
            new.memory.residual(parcel.name).view(-1)[mine].add_(backs[parcel.name], alpha=link.world_size)


# -------------------------------------------------------------------------------------------------------- saving


def state_of(link: Link) -> dict[str, Any]:
    """This rank's part."""
    carrier = link.carrier
    info = {
        "version": _VERSION,
        "recipe": str(link.recipe),
        "rank": link.rank,
        "step": link.step,
        "seed": link.seed,
        "scale": link.scale,
        "layout": link.layout.groups,
        "layout_is_final": link.layout_is_final,
        "memory": None if carrier.memory is None else carrier.memory.kind,
        "auto": None if link.pilot is None else link.pilot.state(),
    }
    part: dict[str, Any] = {
        "info": json.dumps(info),
        "buckets": _bytes_of({"states": carrier.states, "backs": carrier.backs}),
    }
    if carrier.memory is not None:
        part["memory"] = _by_parameter(carrier, link.layout, carrier.memory.keeps)
    return {f"{link.rank}of{link.world_size}": part}


def _bytes_of(content: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def _content_of(part: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = torch.load(io.BytesIO(part["buckets"]), weights_only=True)
        return {"states": dict(content["states"]), "backs": dict(content["backs"])}
    except Exception as damage:  # of many types, whatever the unpickler met
        raise StateError(f"the saved state is damaged ({damage!r}): save it anew") from None


# ------------------------------------------------------------------------------------------------------- loading


def load(link: Link, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Resume from the parts given, which must hold those that are this rank's to take."""
    parts, world = _parts(given)
    mine = _mine(link, world)
    if missing := [rank for rank in mine if rank not in parts]:
        raise StateError(
            f"rank {link.rank} of {link.world_size} needs the state of rank {missing[0]} of {world}, and was given "
            f"that of {', '.join(map(str, sorted(parts)))}: save one per rank, and load all if their number changed"
        )
    infos = {rank: _info(part) for rank, part in parts.items()}
    info = infos[mine[0] if mine else min(parts)]
    if any(other["step"] != info["step"] for other in infos.values()):
        raise StateError("the states were saved after different steps: give those of one checkpoint")
    _check_fits(link, info)
    # Everything that may fail comes first: a state is loaded whole or not at all.
    layout, carrier = Layout(link.parameters, info["layout"]), link.carrier
    # A rank that is new takes another's codec states: power iterations must start alike everywhere.
    content = _content_of(parts[mine[0] if mine else min(parts)])
    memory = carrier.memory
    owes = content["backs"] and world != link.world_size  # what second shots of other pieces kept back goes next
    if memory is None and (owes or (link.pilot is not None and info["memory"] is not None)):
        memory = ErrorFeedback().start()
    kept = None if memory is None else _added(link, memory.keeps, layout, [parts[rank] for rank in mine], world)
    link.agree_on_step(info["step"])
    link.layout, link.layout_is_final = layout, info["layout_is_final"] or link.layout_is_final
    link.step, link.seed = info["step"], info["seed"]
    if link.pilot is not None:
        link.pilot.moved(layout)
        carrier = link.resume_auto(info.get("auto"))
    carrier.seed = link.seed
    carrier.restart()
    if info["scale"] is not None:
        link.scale = info["scale"]  # the next step follows the scaler from there
    carrier.memory = memory
    if kept is not None:
        _put(carrier, layout, kept)
    if info["recipe"] == str(link.recipe):
        carrier.states = content["states"]
    if world == link.world_size:
        carrier.backs = content["backs"]
        if info["recipe"] != str(link.recipe):
            pay_back_second_shots(link, carrier, carrier)


def _parts(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[dict[int, Mapping[str, Any]], int]:
    states = [given] if isinstance(given, Mapping) else list(given)
    parts: dict[int, Mapping[str, Any]] = {}
    worlds = set()
    for state in states:
        for key, part in state.items():
            match = _PART.fullmatch(key)
            if match is None or not isinstance(part, Mapping) or not {"info", "buckets"} <= part.keys():
                raise StateError(f"this is not the state of a link (it has {key!r}): give what link.state_dict() gave")
            parts[int(match[1])] = part
            worlds.add(int(match[2]))
    if len(worlds) != 1:
        raise StateError("the states come from several runs, or there are none: give those of one checkpoint")
    return parts, worlds.pop()


def _mine(link: Link, world: int) -> list[int]:
    """Which old ranks' parts this rank takes over."""
    return [rank for rank in range(world) if rank % link.world_size == link.rank]


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


def _check_fits(link: Link, info: Mapping[str, Any]) -> None:
    saved = {name for group in info["layout"] for name in group}
    if unmatched := saved ^ set(link.layout.of):
        raise StateError(
            f"the saved state and this model differ in parameter {min(unmatched)}: load the state of the same model"
        )
    if link.pilot is not None:
        return  # it takes over every memory, and chooses its recipe itself
    if info["memory"] is not None and link.carrier.memory is None:
        raise StateError(
            f"the state was saved with {info['recipe']} and still owes gradients, and {link.recipe} has no memory "
            "for them: attach with a recipe that has one (ef|...), load, then call set_recipe"
        )
    if info["recipe"] != str(link.recipe):
        _log.warning("the state was saved with %s and is loaded into %s", info["recipe"], link.recipe)


def _added(link: Link, keys: Sequence[str], layout: Layout, parts: Sequence[Mapping[str, Any]], world: int) -> Kept:
    """The sum of several old ranks' memories; without any of them, zeros, which the sum over all ranks allows."""
    kept = _by_parameter(Carrier(link.recipe), layout, keys)
    for part in parts:
        saved = part.get("memory", {})
        if _info(part)["memory"] is not None and saved.keys() != kept.keys():
            raise StateError("the saved state is damaged (its memory is not that of the model): save it anew")
        for name, tensors in saved.items():
            for key, tensor in tensors.items():
                if key in kept[name]:
                    if tensor.shape != kept[name][key].shape:
                        raise StateError(
                            f"{name} has shape {tuple(kept[name][key].shape)} here and {tuple(tensor.shape)} in the "
                            "saved state: load the state of the same model"
                        )
                    kept[name][key] += tensor.to(kept[name][key].device)
        if world != link.world_size:
            _add_backs(layout, part, world, kept)
    return kept


def _add_backs(layout: Layout, part: Mapping[str, Any], world: int, kept: Kept) -> None:
    rank, backs = _info(part)["rank"], _content_of(part)["backs"]
    for parcel in layout.parcels:
        back = backs.get(parcel.name)
        if back is None:
            continue
        flat = torch.zeros(parcel.numel)
        flat[list(pieces(parcel.numel, world))[rank]] = back.cpu() * world
        for one in parcel.parts:
            target = kept[one.name]["residual"]
            target += one.of(flat).view(one.shape).to(target.device)


def load_from_dcp(link: Link, folder: str, key: str) -> None:
    """Read the parts that are this rank's to take out of a DCP checkpoint, and load them."""
    # Slow to import, and few need it.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_into

    metadata = FileSystemReader(folder).read_metadata()
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == key}
    worlds = {int(match[2]) for path in paths.values() if (match := _PART.fullmatch(str(path[1])))}
    if len(worlds) != 1:
        raise StateError(f"{folder} holds no link under {key!r}: save it with dcp.save({{{key!r}: link, ...}})")
    world = worlds.pop()
    wanted = {f"{rank}of{world}" for rank in _mine(link, world)} or {f"0of{world}"}
    template: dict[str, Any] = {}
    for name, path in paths.items():
        if path[1] in wanted:
            stored = metadata.state_dict_metadata[name]
            size, kind = getattr(stored, "size", None), getattr(stored, "properties", None)
            _set(template, path, "" if size is None or kind is None else torch.empty(size, dtype=kind.dtype))
    load_into(template, checkpoint_id=folder)
    load(link, template[key])


def _set(tree: dict[str, Any], path: Sequence[Any], value: object) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value
