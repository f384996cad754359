"""One rank's side of a recipe: what it remembers, what its codec carries on, and the step they belong to.

A step is all or nothing. What an exchange leaves behind is kept aside until `settle`: if the mean of any tensor was not
finite on any rank, the optimizer will skip the step, so every memory stays as it was before, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import State
from ..comm.network import Network
from ..exchange.base import Cargo, Delivery, Part
from ..memory import RunningMemory
from ..rng import Draw

if TYPE_CHECKING:
    from ..recipe.compose import Recipe  # recipes know exchanges, not the other way round


@dataclasses.dataclass(frozen=True)
class Measured:
    """How well a tensor came through: |u|^2, and |u - sent|^2, which is still owed."""

    offered: float
    left: float

    @property
    def gain(self) -> float:
        return 1.0 - self.left / self.offered if self.offered else 1.0

    @property
    def memory_norm(self) -> float:
        return float(self.left**0.5)


@dataclasses.dataclass
class _Carried:
    cargo: Cargo
    idle: list[Part]
    flushed: bool
    unused: list[Part]  # on all ranks
    measured: Measured | None = None


class Carrier:
    """Runs a recipe for one rank, tensor by tensor and step by step.

    Tensors are known by name; several threads may carry different names at the same time.

    >>> from thinwire import parse
    >>> from thinwire.comm.local import LocalNetwork
    >>> carrier, alone = Carrier(parse("ef|top_k:0.5|all_gather")), LocalNetwork.alone()
    >>> carrier.carry("w", torch.tensor([3.0, 1.0]), network=alone, step=0).mean
    tensor([3., 0.])
    >>> carrier.settle(finite=True)
    >>> carrier.carry("w", torch.tensor([0.0, 1.0]), network=alone, step=1).mean
    tensor([0., 2.])
    """

    def __init__(self, recipe: Recipe, *, seed: int = 0, memory: RunningMemory | None = None) -> None:
        self.recipe = recipe
        self.seed = seed
        self.memory = memory if memory is not None or recipe.memory is None else recipe.memory.start()
        self.ways: dict[str, Recipe] = {}  # tensors that travel by another recipe
        self.states: dict[str, State] = {}
        self.backs: dict[str, Tensor] = {}  # of two_shot with feedback
        self._carried: dict[str, _Carried] = {}
        self._spare: dict[str, Tensor] = {}

    # --------------------------------------------------------------------------------------------- one tensor

    def recipe_of(self, name: str) -> Recipe:
        """How a tensor travels."""
        return self.ways.get(name, self.recipe)

    def remembers(self, name: str) -> bool:
        """Whether the memory has a part in it: to keep what is not sent, or to be paid back."""
        return self.memory is not None and (self.recipe_of(name).memory is not None or name in self.memory.names())

    def flushes(self, name: str) -> bool:
        """Whether all that is owed of it goes with the next step."""
        return self.recipe_of(name).memory is None and self.remembers(name)

    def travel_by(self, ways: Mapping[str, Recipe]) -> None:
        """From the next step on, let these tensors travel by other recipes than the rest; what is owed stays owed."""
        self.ways = dict(ways)
        needed = next((way.memory for way in ways.values() if way.memory is not None), None)
        if self.memory is None and needed is not None:
            self.memory = needed.start()

    def drop_empty_memory(self) -> None:
        """Once everything is paid back to recipes that need no memory, there is none."""
        needed = self.recipe.memory is not None or any(way.memory is not None for way in self.ways.values())
        if self.memory is not None and not needed and not self.memory.names():
            self.memory = None

    def _state_key(self, name: str) -> str:
        codec = self.recipe_of(name).codec
        return name if codec == self.recipe.codec else f"{name} {codec.spec()}"

    def buffer(self, name: str, numel: int, device: torch.device) -> Tensor | None:
        """Where the next u of this name may be written: what held a residual that is no longer needed."""
        spare = self._spare.pop(name, None)
        return spare if spare is not None and spare.numel() == numel and spare.device == device else None

    def carry(
        self,
        name: str,
        gradient: Tensor,
        *,
        network: Network,
        step: int,
        exact: Tensor | None = None,
        parts: Sequence[Part] | None = None,
        out: Tensor | None = None,
        may_be_unused: bool = False,
        measure: bool = False,
    ) -> Delivery:
        """The mean of flat float32 `gradient`, which is used up, and of the `exact` elements beside it.

        `may_be_unused`: a parameter whose gradient is all zeros may be unused on every rank, and DDP then throws its
        mean away; so nothing remembered of it is sent. A recipe without a memory sends all that is given to it: what
        another one has left to be sent goes with it, and nothing is remembered. `measure`: see `measured`.
        """
        exact = gradient.new_empty(0) if exact is None else exact
        parts = (Part(name, tuple(gradient.shape), 0, gradient.numel()),) if parts is None else parts
        recipe, memory = self.recipe_of(name), self.memory if self.remembers(name) else None
        flush = self.flushes(name)
        draw = Draw(seed=self.seed, step=step, stream=name, rank=network.rank)
        state = _copied(self.states.get(self._state_key(name)) or recipe.codec.new_state())
        back = self.backs.get(name)
        remembers = measure or (memory is not None and not flush)
        cargo = Cargo(gradient, exact, parts, draw, state, remembers, out, back, may_be_unused=may_be_unused)
        idle = []
        if memory is not None and gradient.numel():
            if may_be_unused:
                idle = [part for part in parts if not part.of(gradient).any()]
            shaped = _shaped(gradient, parts)
            memory.compensate(shaped, name=name, out=shaped)
            for part in () if flush else idle:
                part.of(gradient).zero_()
        told = cargo.exact.numel()
        if memory is not None and may_be_unused:  # the ranks tell each other which parts they use
            used = torch.tensor([float(part not in idle) for part in parts], device=gradient.device)
            cargo.exact = torch.cat((cargo.exact, used))
        offered = _energy(gradient) if measure else 0.0
        delivery = recipe.exchange.mean(recipe.codec, cargo, network)
        unused = [part for part, share in zip(parts, delivery.exact[told:].tolist(), strict=False) if share == 0]
        delivery = dataclasses.replace(delivery, exact=delivery.exact[:told])
        carried = self._carried[name] = _Carried(cargo, idle, flush, unused)
        if measure and delivery.finite:
            carried.measured = Measured(offered, _energy(cargo.u))
        return delivery

    def measured(self, name: str) -> Measured | None:
        """How the tensor just carried came through, if it was carried with `measure`."""
        return self._carried[name].measured

    # ----------------------------------------------------------------------------------------------- one step

    def settle(self, *, finite: bool) -> None:
        """End the step: remember what was left of every tensor carried, or nothing if the step is not finite."""
        carried, self._carried = self._carried, {}
        for name, one in carried.items():
            cargo = one.cargo
            if finite:
                self.states[self._state_key(name)] = cargo.state
                if cargo.back is not None:
                    self.backs[name] = cargo.back
            if self.memory is None or not cargo.u.numel() or not (one.flushed or self.remembers(name)):
                continue
            if not finite:
                self.memory.discard(name=name)
                self._spare[name] = cargo.u
            elif one.flushed:
                self._forget(name, keep=one.unused)
            else:
                for part in one.idle:
                    if part in one.unused:  # whatever zeros were written as is thrown away
                        part.of(cargo.u).zero_()
                idle = [slice(part.start, part.stop) for part in one.idle]
                rest = _shaped(cargo.u, cargo.parts)
                spare = self.memory.keep(rest, name=name, positions=cargo.positions, idle=idle)
                self._spare[name] = spare.view(-1)

    def _forget(self, name: str, *, keep: Sequence[Part]) -> None:
        """All was sent but the parts that no rank used, whose mean is thrown away: they are still owed."""
        assert self.memory is not None
        owed = {key: torch.zeros_like(tensor) for key, tensor in self.memory.tensors(name).items()}
        for key, tensor in self.memory.tensors(name).items():
            for part in keep:
                part.of(owed[key].view(-1)).copy_(part.of(tensor.view(-1)))
        self.memory.forget(name=name)
        if keep:  # the same on all ranks, unlike what this one owes
            self.memory.put(name, owed)

    def restart(self) -> None:
        """Forget what codecs carry on and all buffers, but not the memory."""
        self.states.clear()
        self.backs.clear()
        self._carried.clear()
        self._spare.clear()

    def rescale(self, factor: float) -> None:
        """Follow a change of the loss scale."""
        if self.memory is not None:
            self.memory.rescale(factor)
        for back in self.backs.values():
            back.mul_(factor).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for state in self.states.values():
            self.recipe.codec.rescale_state(state, factor)


def _energy(flat: Tensor) -> float:
    return float(kernels.moments(flat).squares)


def _shaped(flat: Tensor, parts: Sequence[Part]) -> Tensor:
    """What is remembered of a single parameter has its shape; of several in one tensor it is flat."""
    return flat.view(parts[0].shape) if len(parts) == 1 else flat


def _copied(state: Mapping[str, object]) -> State:
    """Deep enough: codecs replace what is in a state, they do not change it in place."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}
