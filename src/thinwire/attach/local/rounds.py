"""One turn of one fragment: its pseudo-gradient is reduced, and applied by all ranks or by none.

    given   start - end of every parameter, times the weight of this rank
    mean    over the ranks, by the recipe of the reducer
    start   the outer optimizer's step with the mean: the same bits on all ranks
    end     start, or mixing * end + (1 - mixing) * start after a delay

Until ranks have agreed that everyone has the means, nothing is changed that could not be taken back: parameters, start
and residuals are those of before, and the turn can be repeated, also with other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ... import kernels
from ...comm.network import Network, Pending
from ...reduce import Reducer, Work
from ...reduce.buckets import Bucket
from .outer import OuterSteps
from .tensors import ModelTensors


@dataclasses.dataclass
class Turn:
    """An exchange under way, and what is needed to repeat it."""

    number: int
    fragment: int
    steps: int  # of this rank since the fragment's last turn
    expected: int  # of a rank that does not finish early
    finishing: bool  # this rank takes no more steps
    given: dict[str, Tensor]  # without the weight
    extra: dict[str, Tensor]  # averaged as they are: buffers, states of the inner optimizer
    at: int = 0  # steps of this rank when it began
    header: Pending | None = None
    works: list[Work] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a turn, the same on all ranks."""

    committed: bool
    void: bool  # something was not finite
    total_steps: int  # of all ranks
    finishing: int  # ranks that take no more steps


class Rounds:
    """The exchanges of one rank. `start` holds the parameters after the last turn of each, `buffers` the buffers."""

    def __init__(
        self,
        tensors: ModelTensors,
        fragments: Sequence[Sequence[str]],
        *,
        outer: OuterSteps,
        start: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        mixing: float,
        in_background: bool,
    ) -> None:
        self.tensors, self.fragments, self.outer = tensors, [list(names) for names in fragments], outer
        self.start, self.buffers, self.mixing, self.in_background = dict(start), dict(buffers), mixing, in_background
        self.reducer: Reducer  # by the recipe
        self.exact: Reducer  # of buffers and states, uncompressed

    def connect(self, reducer: Reducer, exact: Reducer) -> None:
        """Exchange by these from now on. Ranks compare a hash of the start too."""
        self.reducer, self.exact = reducer, exact
        kept = {name: tensor for name, tensor in self.start.items() if tensor.device == reducer.network.device}
        reducer.hashes.weights = lambda: kept

    @property
    def network(self) -> Network:
        return self.reducer.network

    # ------------------------------------------------------------------------------------------------------- begin

    def pseudo_gradient(self, fragment: int) -> dict[str, Tensor]:
        """start - end, in float32 or wider. A start that is wider than the parameter is rounded as it was."""
        found, now = {}, self.tensors.parameters
        for name in self.fragments[fragment]:
            start = self.start[name].to(now[name].device, now[name].dtype)
            found[name] = start.to(_wide(start.dtype)) - now[name]
        return found

    def begin(self, turn: Turn) -> None:
        """Start to exchange; returns at once where lanes or the network work in the background.

        Ranks tell each other how many steps they took. Without a delay they wait for that, and the weight of each is
        exact: steps * ranks / total. With a delay nobody waits: a rank weighs steps / expected, and the sum is put
        right when it has come.
        """
        network = self.network
        counts = torch.tensor([turn.steps, int(turn.finishing)], dtype=torch.int64, device=network.device)
        turn.header, turn.works = network.start_all_reduce(counts), []
        weight = turn.steps / turn.expected
        if not self.in_background:
            total = int(turn.header.wait()[0])
            if not total:
                return
            weight = turn.steps * network.world_size / total
        for bucket in self._buckets_of(turn.fragment):
            given = {name: _times(turn.given[name], weight) for name in bucket.names}
            out = {name: torch.empty_like(tensor) for name, tensor in given.items()}
            turn.works.append(self.reducer.start_bucket(bucket, given, out))
        for kind in dict.fromkeys(name.partition(" ")[0] for name in turn.extra):
            alike = {name: _times(one, weight) for name, one in turn.extra.items() if name.startswith(f"{kind} ")}
            turn.works.append(self.exact.start(f"{kind} of fragment {turn.fragment}", alike))

    def _buckets_of(self, fragment: int) -> list[Bucket]:
        names = set(self.fragments[fragment])
        return [bucket for bucket in self.reducer.layout.buckets if bucket.names[0] in names]

    # --------------------------------------------------------------------------------------------------------- end

    def end(self, turn: Turn) -> Outcome:
        """Wait for the exchange, agree, and apply it or leave no trace."""
        assert turn.header is not None
        total, finishing = (int(value) for value in turn.header.wait().tolist())
        means: dict[str, Tensor] = {}
        for work in turn.works:
            found = work.wait()
            means.update(found if isinstance(found, dict) else {next(iter(work.outputs)): found})
        self._agree(turn)
        if not total:
            if turn.works:  # what feedback has sent meanwhile is taken back
                self.reducer.commit(finite=False)
                self.exact.commit(finite=False)
            return Outcome(committed=False, void=False, total_steps=0, finishing=finishing)
        finite = all(kernels.all_finite(mean.reshape(-1).to(torch.float32)) for mean in means.values())
        committed = bool(self.reducer.commit(finite=finite))
        self.exact.commit(finite=committed)
        if committed:
            if self.in_background and turn.expected * self.network.world_size != total:
                means = {name: mean * (turn.expected * self.network.world_size / total) for name, mean in means.items()}
            self._apply(turn, means)
        else:
            self._take_back(turn)
        return Outcome(committed=committed, void=not committed, total_steps=total, finishing=finishing)

    def _agree(self, turn: Turn) -> None:
        """Everyone has the means, or nobody uses them: a rank that failed does not get here, and its peers notice."""
        here = torch.tensor([turn.number], dtype=torch.int64, device=self.network.device)
        self.network.all_reduce(here, op="max")

    def _apply(self, turn: Turn, means: Mapping[str, Tensor]) -> None:
        names, now = self.fragments[turn.fragment], self.tensors.parameters
        self.outer.step(turn.fragment, [means[name] for name in names])
        for name in names:
            new = self.start[name].to(now[name].device, now[name].dtype)
            if self.mixing:
                now[name].mul_(self.mixing).add_(new, alpha=1.0 - self.mixing)
            else:
                now[name].copy_(new)
        live = self.tensors.buffers
        for name, mean in means.items():
            if name in turn.extra:
                kind, _, key = name.partition(" ")
                target = live[key] if kind == "buffer" else self._state(kind, key)
                if target is not None:
                    target.copy_(mean)
                if kind == "buffer":
                    self.buffers[key].copy_(mean)

    def _take_back(self, turn: Turn) -> None:
        """The fragment begins anew. On a rank whose values are not finite everything does, and its inner state too."""
        spoiled = not self.tensors.all_finite()
        self.reset([*self.tensors.own] if spoiled else self.fragments[turn.fragment], buffers=spoiled)
        if spoiled:
            self.tensors.clear_state()

    def reset(self, names: Sequence[str], *, buffers: bool = True) -> None:
        """Parameters, and buffers, as after their last turn."""
        now, live = self.tensors.parameters, self.tensors.buffers
        for name in names:
            now[name].copy_(self.start[name])
        for name in live if buffers else ():
            live[name].copy_(self.buffers[name])

    # ------------------------------------------------------------------------------------------------------ beside

    def extra(self, fragment: int, state_keys: Sequence[str]) -> dict[str, Tensor]:
        """Copies of what is averaged as it is: buffers with the last fragment, and these states of the fragment."""
        found: dict[str, Tensor] = {}
        names = set(self.fragments[fragment])
        if fragment == len(self.fragments) - 1:
            found |= {f"buffer {name}": buffer.to(_wide(buffer.dtype)) for name, buffer in self.tensors.buffers.items()}
        for name, key, _ in self.tensors.state_of(state_keys):
            if name in names:
                tensor = self._state(key, name)
                blank = torch.zeros_like(self.tensors.parameters[name])
                found[f"{key} {name}"] = (blank if tensor is None else tensor).to(torch.float32)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def _state(self, key: str, name: str) -> Tensor | None:
        for found, _, state in self.tensors.state_of([key]):
            if found == name and state is not None:
                tensor: Tensor = state[key].detach()
                return getattr(tensor, "_local_tensor", tensor)
        return None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _times(tensor: Tensor, weight: float) -> Tensor:
    return tensor if weight == 1.0 else tensor * weight
