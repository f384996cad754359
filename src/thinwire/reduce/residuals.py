"""The state of one rank between steps: residuals, codec states and second shots, committed whole or not at all.

What an exchange leaves behind is kept aside until `settle`: if the mean of any tensor was not finite on any rank, the
optimizer will skip the step, so everything stays as it was before, bit for bit. On a device whose values must stay
there, a flag on the device selects old or new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import State
from ..comm import streams
from ..exchange.request import Flag, Part, Request, Result
from ..kernels import Spread
from ..memory import RunningMemory
from ..recipe.compose import Recipe
from ..rng import Draw
from .buckets import Bucket


@dataclasses.dataclass(frozen=True)
class Measured:
    """How well a tensor came through: |u|^2, and |u - sent|^2, which is the new residual."""

    offered: float
    left: float

    @property
    def gain(self) -> float:
        return 1.0 - self.left / self.offered if self.offered else 1.0

    @property
    def memory_norm(self) -> float:
        return float(self.left**0.5)


@dataclasses.dataclass
class Sent:
    """One bucket of the step under way."""

    bucket: Bucket
    request: Request
    flushed: bool  # the recipe has no memory, and everything that was kept went with it
    fresh: bool  # nothing was kept of it before
    idle: list[Flag]  # of each part: its gradient is zero here
    unused: list[Flag] = dataclasses.field(default_factory=list)  # and on all ranks
    offered: float = 0.0
    measured: Measured | None = None
    told: int = 0  # exact elements that belong to the bucket; the rest says which parts ranks use


class Residuals:
    """The side of one rank. Buckets are known by name; several threads may work on different ones."""

    def __init__(self, recipe: Recipe, *, memory: RunningMemory | None = None) -> None:
        self.recipe = recipe
        self.memory = memory if memory is not None or recipe.memory is None else recipe.memory.start()
        self.overrides: dict[str, Recipe] = {}  # buckets that travel by another recipe
        self.states: dict[str, State] = {}
        self.backs: dict[str, Tensor] = {}  # of exchanges with feedback
        self.sent: dict[str, Sent] = {}
        self._spare: dict[str, Tensor] = {}

    # --------------------------------------------------------------------------------------------- one tensor

    def recipe_of(self, name: str) -> Recipe:
        """How a bucket travels."""
        return self.overrides.get(name, self.recipe)

    def remembers(self, name: str) -> bool:
        """Whether the memory has a part in it: to keep what is not sent, or to be emptied."""
        return self.memory is not None and (self.recipe_of(name).memory is not None or name in self.memory.names())

    def override(self, overrides: Mapping[str, Recipe]) -> None:
        """From the next step on, let these buckets travel by other recipes; residuals stay."""
        self.overrides = dict(overrides)
        needed = next((recipe.memory for recipe in overrides.values() if recipe.memory is not None), None)
        if self.memory is None and needed is not None:
            self.memory = needed.start()

    def drop_empty_memory(self) -> None:
        """Once all residuals have gone with recipes that need no memory, there is none."""
        needed = self.recipe.memory is not None or any(one.memory is not None for one in self.overrides.values())
        if self.memory is not None and not needed and not self.memory.names():
            self.memory = None

    def _state_key(self, name: str) -> str:
        codec = self.recipe_of(name).codec
        return name if codec == self.recipe.codec else f"{name} {codec.spec()}"

    def buffer(self, bucket: Bucket) -> Tensor | None:
        """Where the next gradient of this bucket is gathered if it will hold a residual; None if it will not."""
        if not self.remembers(bucket.name):
            return None
        spare = self._spare.pop(bucket.name, None)
        if spare is not None and spare.numel() == bucket.numel and spare.device == bucket.device:
            return spare.view(-1)
        return torch.empty(bucket.numel, dtype=torch.float32, device=bucket.device)

    def request(
        self,
        bucket: Bucket,
        gradient: Tensor,
        exact: Tensor,
        draw: Draw,
        *,
        out: Tensor | None = None,
        may_be_unused: bool = False,
        measure: bool = False,
        shards: Sequence[slice] | None = None,
        where: Spread | None = None,
    ) -> Request:
        """What this rank brings to the exchange; `gradient` is used up.

        With `where` it is only room: the elements are there, and the mean may be written there.

        `may_be_unused`: a parameter whose gradient is all zeros may be unused on every rank, and DDP then throws its
        mean away; so no residual of it is sent. A recipe without a memory sends everything: residuals of another recipe
        go with it. `measure`: see `Measured`.
        """
        name, parts = bucket.name, bucket.parts
        recipe, memory = self.recipe_of(name), self.memory if self.remembers(name) else None
        flush = recipe.memory is None and memory is not None
        state = _copied(self.states.get(self._state_key(name)) or recipe.codec.new_state())
        remembers = measure or (memory is not None and not flush)
        request = Request(gradient, exact, parts, draw, state, remembers=remembers, out=out, source=where, sink=where)
        request.back, request.may_be_unused, request.shards = self.backs.get(name), may_be_unused, shards
        fresh = memory is not None and name not in memory.names()
        sent = self.sent[name] = Sent(bucket, request, flush, fresh, [], told=exact.numel())
        keeps = memory is not None or recipe.exchange.feedback
        if keeps and may_be_unused and gradient.numel():
            sent.idle = [_is_zero(part.of(request.gradient)) for part in parts]
        if memory is not None and gradient.numel():
            request.residual, request.decay = memory.begin(_shaped(request.gradient, parts), name=name)
            if request.residual is not None:
                request.residual = request.residual.view(-1)
            if sent.idle and not flush:
                for part, idle in zip(parts, sent.idle, strict=True):
                    _zero_where(idle, part.of(request.u))
        if sent.idle:  # the ranks tell each other which parts they use
            used = [torch.as_tensor(idle, device=exact.device).logical_not() for idle in sent.idle]
            request.exact = torch.cat((exact, torch.stack(used).to(torch.float32)))
        if measure:
            sent.offered = _energy(request.u)
        return request

    def received(self, name: str, result: Result) -> Result:
        """What the exchange delivered, without what ranks told each other beside it."""
        sent = self.sent[name]
        shares = result.exact[sent.told :]
        if shares.numel():
            unused = shares == 0
            sent.unused = list(unused) if streams.resident(unused.device) else unused.tolist()
        if sent.request.remembers and sent.offered and result.finite is True:
            sent.measured = Measured(sent.offered, _energy(sent.request.gradient))
        return dataclasses.replace(result, exact=result.exact[: sent.told])

    # ----------------------------------------------------------------------------------------------- one step

    def settle(self, finite: Flag) -> None:
        """End the step: keep what was left of every tensor, or nothing if the step is not finite."""
        every, self.sent = self.sent, {}
        for name, one in every.items():
            request, kept = one.request, self._state_key(name)
            if isinstance(finite, Tensor):
                self._settle_on_device(name, one, finite)
                continue
            if finite:
                self.states[kept] = request.state
                if request.back is not None:
                    self.backs[name] = _kept_back(one, self.backs.get(name))
            if self.memory is None or not request.numel or not (one.flushed or self.remembers(name)):
                continue
            if not finite:
                self.memory.discard(name=name)
                self._spare[name] = request.gradient
                if one.fresh:
                    self.memory.forget(name=name)
            elif one.flushed:
                self._forget(name, [part for part, unused in zip(request.parts, one.unused, strict=False) if unused])
            else:
                self._spare[name] = self._keep(name, one, None).view(-1)

    def _keep(self, name: str, one: Sent, finite: Tensor | None) -> Tensor:
        assert self.memory is not None
        request = one.request
        for part, here, everywhere in zip(request.parts, one.idle, one.unused, strict=False):
            _zero_where(here & everywhere, part.of(request.gradient))  # its mean is thrown away
        places = [slice(part.start, part.stop) for part in request.parts]
        idle = [(place, flag) for place, flag in zip(places, one.idle, strict=False) if flag is not False]
        rest = _shaped(request.gradient, request.parts)
        if finite is None:
            return self.memory.keep(rest, name=name, positions=request.positions, idle=idle)
        return self.memory.keep_if(finite, rest, name=name, positions=request.positions, idle=idle)

    def _settle_on_device(self, name: str, one: Sent, finite: Tensor) -> None:
        request, key = one.request, self._state_key(name)
        self.states[key] = _selected(finite, request.state, self.states.get(key, {}))
        if request.back is not None:
            old = self.backs.get(name)
            new = _kept_back(one, old)
            self.backs[name] = torch.where(finite, new, torch.zeros_like(new) if old is None else old)
        if self.memory is None or not request.numel or not (one.flushed or self.remembers(name)):
            return
        if not one.flushed:
            self._spare[name] = self._keep(name, one, finite).view(-1)
            return
        self.memory.discard(name=name)
        for tensor in self.memory.tensors(name).values():
            flat = tensor.view(-1)
            for number, part in enumerate(request.parts):
                stays = ~finite | one.unused[number] if one.unused else ~finite
                part.of(flat).mul_(stays)

    def _forget(self, name: str, keep: Sequence[Part]) -> None:
        """All was sent but the parts that no rank used, whose mean is thrown away: their residual stays."""
        assert self.memory is not None
        kept = {key: torch.zeros_like(tensor) for key, tensor in self.memory.tensors(name).items()}
        for key, tensor in self.memory.tensors(name).items():
            for part in keep:
                part.of(kept[key].view(-1)).copy_(part.of(tensor.view(-1)))
        self.memory.forget(name=name)
        if keep:  # the same on all ranks, unlike residuals
            self.memory.put(name, kept)

    def restart(self) -> None:
        """Forget what codecs carry on and all buffers, but not the memory."""
        self.states.clear()
        self.backs.clear()
        self.sent.clear()
        self._spare.clear()

    def rescale(self, factor: float) -> None:
        """Follow a change of the loss scale."""
        if self.memory is not None:
            self.memory.rescale(factor)
        for back in self.backs.values():
            back.mul_(factor).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        overridden = {one.codec.spec(): one.codec for one in self.overrides.values()}
        for key in list(self.states):
            spec = key.partition(" ")[2]  # a bucket that took another recipe has its codec in the key
            codec = overridden.get(spec) if spec else self.recipe.codec
            if codec is None:
                del self.states[key]  # of a codec that runs no more
            else:
                codec.rescale_state(self.states[key], factor)


def carried_over(old: Residuals, new: Recipe) -> RunningMemory | None:
    """The memory of the next recipe, with all residuals of the old one."""
    if old.memory is None or new.memory is None:
        return old.memory
    memory = new.memory.start()
    memory.take_over(old.memory)
    return memory


def _is_zero(flat: Tensor) -> Flag:
    any_ = flat.any()
    return ~any_ if streams.resident(flat.device) else not bool(any_)


def _zero_where(flag: Flag, flat: Tensor) -> None:
    if isinstance(flag, Tensor):
        flat.mul_(~flag)
    elif flag:
        flat.zero_()


def _kept_back(one: Sent, old: Tensor | None) -> Tensor:
    """What a second shot kept back; of parts that no rank used as it was before, because their mean is thrown away."""
    request = one.request
    assert request.back is not None
    for part, unused in zip(request.parts, one.unused, strict=False):
        start, stop = (max(0, end - request.back_start) for end in (part.start, part.stop))
        if unused is False or start >= min(stop, request.back.numel()):
            continue
        here = request.back[start:stop]
        before = torch.zeros_like(here) if old is None else old[start:stop]
        here.copy_(torch.where(unused, before, here) if isinstance(unused, Tensor) else before)
    return request.back


def _selected(finite: Tensor, new: State, old: Mapping[str, object]) -> State:
    """New tensors where the flag is set, else the old ones; on a device codecs carry no numbers that matter."""
    found: State = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict):
            found[key] = _selected(finite, value, before if isinstance(before, dict) else {})
        elif isinstance(value, Tensor):
            if not isinstance(before, Tensor) or before.shape != value.shape:
                before = torch.zeros_like(value)
            found[key] = torch.where(finite, value, before)
        else:
            found[key] = value
    return found


def _energy(flat: Tensor) -> float:
    return float(kernels.moments(flat).squares)


def _shaped(flat: Tensor, parts: Sequence[Part]) -> Tensor:
    """What is remembered of a single parameter has its shape; of several in one tensor it is flat."""
    return flat.view(parts[0].shape) if len(parts) == 1 else flat


def _copied(state: Mapping[str, object]) -> State:
    """Deep enough: codecs replace what is in a state, they do not change it in place."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}
