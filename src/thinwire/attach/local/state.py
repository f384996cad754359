"""State of local steps: saved in the middle of a round, loaded on any number of ranks, carried to another group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...comm.network import Network
from ...errors import StateError
from ...reduce import Reducer, second_shots
from ...reduce.checkpoint import PART, agree, taken_ranks
from .rounds import Turn

if TYPE_CHECKING:
    from .link import LocalSteps

_KEY = "local_steps"  # beside what the reducer keeps
_COUNTS = ("steps", "turns", "void_turns")
_OF_TURN = ("number", "fragment", "steps", "expected", "finishing", "given", "extra", "at")


def state_of(link: LocalSteps) -> dict[str, Any]:
    """This rank's part: that of the reducer, and what local steps keep."""
    ((key, part),) = link.reducer.state_dict().items()
    flight = None if link.flight is None else {name: getattr(link.flight, name) for name in _OF_TURN}
    own = {
        "settings": str(link.settings),
        "start": dict(link.rounds.start),
        "buffers": dict(link.rounds.buffers),
        "outer": link.rounds.outer.state_dict(),
        "schedule": link.schedule.state_dict(),
        "counts": {name: getattr(link, name) for name in _COUNTS},
        "flight": flight,
    }
    return {key: {**part, _KEY: _cloned(own)}}


def load(link: LocalSteps, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """On all ranks, or on none."""
    refusal: StateError | None = None
    own: Mapping[str, Any] = {}
    same = False
    try:
        own, same = _own_part(link, given)
        _check(link, own)
    except StateError as problem:
        refusal = problem
    agree(link.reducer, refusal)
    link.reducer.load_state_dict(given)
    rounds = link.rounds
    with torch.no_grad():
        for kind, saved in (("start", own["start"]), ("buffers", own["buffers"])):
            for name, tensor in getattr(rounds, kind).items():
                tensor.copy_(saved[name])
    rounds.outer.load_state_dict(own["outer"])
    link.schedule.load_state_dict(own["schedule"])
    for name in _COUNTS:
        setattr(link, name, own["counts"][name])
    link.flight = None
    if not same:
        with torch.no_grad():
            rounds.reset([*rounds.start])
        link.schedule.restart()
    elif own["flight"] is not None:
        link.flight = Turn(**_cloned(own["flight"]))
        rounds.begin(link.flight)


def _own_part(
    link: LocalSteps, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], bool]:
    """What this rank takes over of local steps, and whether it was saved on as many ranks."""
    parts: dict[int, Mapping[str, Any]] = {}
    world = 0
    for one in [given] if isinstance(given, Mapping) else given:
        for key, part in one.items():
            match = PART.fullmatch(key)
            if match is None or not isinstance(part, Mapping) or _KEY not in part:
                raise StateError(f"this is not the state of local_steps (it has {key!r}): give what state_dict() gave")
            parts[int(match[1])], world = part[_KEY], int(match[2])
    mine = next((rank for rank in taken_ranks(link.reducer, world) if rank in parts), None)
    if not parts or (world == link.world_size and link.rank not in parts):
        raise StateError(f"rank {link.rank} of {link.world_size} needs its own part: load the state that it saved")
    return parts[min(parts) if mine is None else mine], world == link.world_size


def _check(link: LocalSteps, own: Mapping[str, Any]) -> None:
    for kind, ours in (("start", link.rounds.start), ("buffers", link.rounds.buffers)):
        theirs = own[kind]
        if unmatched := ours.keys() ^ theirs.keys():
            raise StateError(f"the state and this model differ in {min(unmatched)}: load the state of the same model")
        for name, tensor in ours.items():
            if theirs[name].shape != tensor.shape:
                raise StateError(
                    f"{name} has shape {tuple(tensor.shape)} here and {tuple(theirs[name].shape)} in the state: "
                    "load the state of the same model, sharded alike"
                )
    if len(own["outer"]) != link.settings.turns:
        raise StateError(f"the state has {len(own['outer'])} fragments, here are {link.settings.turns}: use as many")


def check_same_turn(turn: int, network: Network) -> None:
    """Raise on all ranks if some have ended a turn that others have not."""
    mine = torch.tensor([turn], dtype=torch.int64, device=network.device)
    turns = network.all_gather(mine).view(-1).tolist()
    if behind := [rank for rank, one in enumerate(turns) if one < max(turns)]:
        raise StateError(
            f"rank {behind[0]} has ended {turns[behind[0]]} turns of local steps and rank {turns.index(max(turns))} "
            f"{max(turns)}: let ranks {behind} take the parameters and the state of that rank first"
        )


def carry_over(old: Reducer, new: Reducer) -> None:
    """Residuals and codec states of this rank go on in a reducer of another group; the step goes on too."""
    changed = (old.rank, old.world_size) != (new.rank, new.world_size)
    if changed:  # second shots are of other pieces now
        second_shots.keep(old, old.residuals, old.residuals)
    new.residuals.memory, new.residuals.states = old.residuals.memory, old.residuals.states
    new.residuals.backs, new.step = old.residuals.backs, old.step


def _cloned(value: Any) -> Any:
    """A deep copy: tensors detached, and on their device."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _cloned(one) for key, one in value.items()}
    return [_cloned(one) for one in value] if isinstance(value, list | tuple) else value
