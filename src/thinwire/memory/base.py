"""The base of all memories: tensors by parameter name, codec state beside them, saving and loading.

The configuration (`Memory`, a word of a recipe) is frozen data; what changes while training is a `RunningMemory`.
Parameters are known by name, never by bucket index: DDP rebuilds its buckets after the first step.

A step has two halves. `begin` says what to add to the gradient and changes nothing that is remembered; `keep` takes
what was not sent, or `discard` leaves no trace of the step.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import Codec, State
from ..errors import OptionError, StateError
from ..recipe.stage import Stage
from ..rng import Draw

Kept = dict[str, Tensor]
Idle = Sequence[tuple[slice, bool | Tensor]]  # places, each with True or a flag on the device


class Memory(Stage, ABC):
    """Keeps what was not sent, so that it is sent later. `start()` gives the memory of one training run."""

    @abstractmethod
    def start(self) -> RunningMemory:
        """A new, empty memory of this kind."""

    def accepts(self, codec: Codec) -> str | None:
        """None if this memory can serve the codec, else one sentence that says what to write instead."""
        return None


class Compensation(NamedTuple):
    """u = gradient + decay * residual is what to send. Without a residual, the gradient is u already."""

    residual: Tensor | None
    decay: float = 1.0


class RunningMemory(ABC):
    """Float32 tensors per parameter name, and the codec's state for each. A parameter never seen has zeros.

    Non-finite gradients are sent on, so that every rank learns of them, and leave no trace here.
    """

    kind: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}
        self._codecs: dict[str, tuple[str, State]] = {}

    # ------------------------------------------------------------------------------------------------- one step

    @abstractmethod
    def begin(self, gradient: Tensor, *, name: str) -> Compensation:
        """What u is, for a float32 gradient that may be overwritten; changes nothing that is remembered."""

    def keep(self, rest: Tensor, *, name: str, positions: Tensor | None = None, idle: Idle = ()) -> Tensor:
        """`rest`, what an exchange left of u, is what is remembered from now on: the tensor itself, not a copy.

        `positions` are those that a sparse codec sent; what was remembered of the `idle` elements was not part of u and
        is added. Returns the tensor that held the residual before, which may now be used for the next u. Nothing is
        checked: who calls this knows that the step was finite on all ranks.
        """
        kept = self._kept_of(name, rest)
        for part, flag in idle:
            old = kept["residual"].view(-1)[part]
            rest.view(-1)[part] += old * flag if isinstance(flag, Tensor) else old
        kept["residual"], spare = rest, kept["residual"]
        return spare

    def keep_if(
        self,
        finite: Tensor,
        rest: Tensor,
        *,
        name: str,
        positions: Tensor | None = None,
        idle: Idle = (),
    ) -> Tensor:
        """As `keep` where a flag on the device is set, else as `discard`; no value is read on the host."""
        old = {key: tensor.clone() for key, tensor in self._kept_of(name, rest).items()}
        spare = self.keep(rest, name=name, positions=positions, idle=idle)
        for key, tensor in self._kept[name].items():
            tensor.copy_(torch.where(finite, tensor, old[key]))
        return spare

    def discard(self, *, name: str) -> None:  # noqa: B027  # most memories prepare nothing
        """Forget that `begin` was called: the step is skipped, and memory stays as it is."""

    def forget(self, *, name: str) -> None:
        """Keep nothing of this name any more: all of it was sent."""
        self.discard(name=name)
        self._kept.pop(name, None)

    def encode(self, codec: Codec, gradient: Tensor, *, name: str, draw: Draw | None = None) -> Tensor:
        """The framed message of the gradient and what was remembered of `name`; what it does not carry is remembered.

        One tensor without a group; in training the Reducer does the same for all ranks.
        """
        if not gradient.is_floating_point():
            raise self._not_floating(name, gradient)
        rest = gradient.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._kept_of(name, rest)
        if not kernels.all_finite(rest):
            return codec.encode(rest, draw=draw)
        found = self.begin(rest, name=name)
        state = dict(self.codec_state(codec, name=name))
        if found.residual is None:
            message = codec.encode_taking(rest, draw=draw, state=state)
        else:
            message = codec.encode_compensated(rest, found.residual, decay=found.decay, draw=draw, state=state)
        if kernels.all_finite(rest):
            self.keep(rest, name=name, positions=codec.decode_sparse(message)[0] if codec.sparse else None)
            self._codecs[name] = (codec.spec(), state)
        else:  # a sum beyond float32: every rank learns of it, and the step leaves no trace
            self.discard(name=name)
        return message

    def give_back(self, sent: Tensor, *, name: str, codec: Codec | None = None) -> None:
        """Return what was encoded but never delivered: a message together with its codec, or the decoded tensor."""
        residual = self.residual(name)
        values = sent if codec is None else codec.decode(sent, shape=tuple(residual.shape))
        if values.shape != residual.shape:
            raise StateError(
                f"{name} has shape {tuple(residual.shape)}, {tuple(values.shape)} cannot be given back to it"
            )
        if kernels.all_finite(values):
            residual += values.detach()

    # ------------------------------------------------------------------------------------------- looking inside

    def names(self) -> list[str]:
        """The parameters seen so far."""
        return list(self._kept)

    def residual(self, name: str) -> Tensor:
        """What is still to be sent of a parameter: the live tensor, clone it to keep it."""
        if name not in self._kept:
            raise StateError(
                f"{name} was never encoded here: the memory knows {', '.join(self._kept) or 'no parameter'}"
            )
        return self._kept[name]["residual"]

    def tensors(self, name: str) -> Mapping[str, Tensor]:
        """Everything kept under a name, live; nothing if it was never seen."""
        return dict(self._kept.get(name, {}))

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep these float32 tensors of one shape, one for each of `keeps`, under a name."""
        self._kept[name] = {key: tensors[key] for key in self.keeps}

    def take_over(self, other: RunningMemory) -> None:
        """Keep another memory's residuals. What only that kind keeps is dropped; what only this one has is zero."""
        for name in other.names():
            residual = other.residual(name)
            theirs = other.tensors(name)
            self.put(name, {key: theirs.get(key, torch.zeros_like(residual)) for key in self.keeps})

    def codec_state(self, codec: Codec, *, name: str) -> State:
        """What `codec` carries from step to step for this parameter; another codec starts anew."""
        spec, state = self._codecs.get(name, ("", {}))
        if spec != codec.spec():
            state = codec.new_state()
            self._codecs[name] = (codec.spec(), state)
        return state

    def rescale(self, factor: float, *, codec: Codec | None = None) -> None:
        """Follow a change of the loss scale: everything kept times new scale / old scale, and the state of `codec`."""
        if not 0 < factor < math.inf:
            raise OptionError(f"a scale changes by a positive finite factor, not {factor}: reset() the memory instead")
        for kept in self._kept.values():
            for tensor in kept.values():
                tensor.mul_(factor).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for spec, state in self._codecs.values():
            if codec is not None and spec == codec.spec():
                codec.rescale_state(state, factor)

    def reset(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._codecs.clear()

    # ------------------------------------------------------------------------------------------- save and load

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that a resumed run needs: nested dicts of tensors, numbers and strings."""
        kept, codecs = dict(self._kept), dict(self._codecs)  # another thread may meet a new parameter meanwhile
        states = {name: {"spec": spec, "state": state} for name, (spec, state) in codecs.items()}
        return copy.deepcopy({"kind": self.kind, "kept": kept, "codecs": states})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`; a memory already in use takes only one of the same names and shapes."""
        kind = state.get("kind")
        if kind != self.kind:
            raise StateError(f"this is the state of {kind or 'something else'}, load it into that and not {self.kind}")
        try:
            kept = {
                name: {key: tensors[key].to(torch.float32, copy=True) for key in self.keeps}
                for name, tensors in state["kept"].items()
            }
            codecs = {name: (str(c["spec"]), copy.deepcopy(dict(c["state"]))) for name, c in state["codecs"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as damage:
            raise StateError(f"the state of {self.kind} is damaged ({damage!r}): save it anew") from None
        self._check_fits(kept)
        self._kept, self._codecs = kept, codecs

    def _check_fits(self, kept: dict[str, Kept]) -> None:
        for name, tensors in kept.items():
            if len({tensor.shape for tensor in tensors.values()}) > 1:
                raise StateError(f"the state of {self.kind} is damaged ({name} has several shapes): save it anew")
        if not self._kept:
            return
        if unmatched := kept.keys() ^ self._kept.keys():
            raise StateError(
                f"the saved state and this memory differ in parameter {min(unmatched)}: reset() the memory first, "
                "or load the state of the same model"
            )
        for name, tensors in kept.items():
            ours, theirs = tuple(self._kept[name]["residual"].shape), tuple(tensors["residual"].shape)
            if ours != theirs:
                raise StateError(
                    f"{name} has shape {ours} here and {theirs} in the saved state: load the state of the same model"
                )

    # ------------------------------------------------------------------------------------------------- helpers

    def _not_floating(self, name: str, gradient: Tensor) -> OptionError:
        return OptionError(f"{self.kind} remembers floating-point gradients, {name} is {gradient.dtype}: cast it first")

    def _kept_of(self, name: str, gradient: Tensor) -> Kept:
        if not gradient.is_floating_point():
            raise self._not_floating(name, gradient)
        kept = self._kept.get(name)
        if kept is None:
            kept = {key: torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device) for key in self.keeps}
            self._kept[name] = kept
        residual = kept["residual"]
        if residual.shape != gradient.shape:
            raise StateError(
                f"{name} was remembered in shape {tuple(residual.shape)} and now comes in {tuple(gradient.shape)}: "
                "give every parameter a name of its own, or reset() the memory"
            )
        if residual.device != gradient.device:  # a state loaded on the CPU follows its parameter
            for key in self.keeps:
                kept[key] = kept[key].to(gradient.device)
        return kept
