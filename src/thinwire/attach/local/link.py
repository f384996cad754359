"""What `local_steps` returns: it counts optimizer steps, runs the turns, and holds statistics and state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ...comm.network import Network
from ...errors import AttachError, ExchangeError, ThinwireError
from ...recipe.compose import Recipe
from ...reduce import Meter, Reducer, Sink
from . import autosave, state
from .rounds import Outcome, Rounds, Turn
from .schedule import Schedule
from .settings import Settings
from .tensors import QuietDdp

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_VOID = (
    "round %d of local steps was not finite: it leaves no trace, and %s begin again from the parameters before it. "
    "Lower the inner learning rate, or clip gradients, if this repeats"
)


class LocalSteps:
    """Local steps of one rank, as `local_steps` returns them; a context manager that calls `finish` at its end."""

    def __init__(
        self,
        settings: Settings,
        rounds: Rounds,
        schedule: Schedule,
        quiet: QuietDdp,
        *,
        build: Callable[[Any], tuple[Reducer, Reducer]],
        autosave: str | Path | None,
    ) -> None:
        self.settings, self.rounds, self.schedule = settings, rounds, schedule
        self._quiet, self._build, self._folder = quiet, build, None if autosave is None else Path(autosave)
        self.steps = 0  # optimizer steps of this rank
        self.turns = 0  # that were exchanged
        self.void_turns = 0
        self.exposed_seconds = 0.0
        self.flight: Turn | None = None
        self._failure: ThinwireError | None = None
        self._stepped: set[int] = set()
        self._sent = -self._traffic()  # bytes by groups of before, without those of before this object
        # An optimizer keeps this object alive, as a DDP model keeps its link.
        self._hooks = [one.register_step_post_hook(self._after_step) for one in rounds.tensors.optimizers]

    # ------------------------------------------------------------------------------------------------- for users

    @property
    def recipe(self) -> Recipe:
        """How pseudo-gradients travel."""
        return self.rounds.reducer.recipe

    @property
    def reducer(self) -> Reducer:
        return self.rounds.reducer

    @property
    def meter(self) -> Meter:
        """Counts what is sent; one step of it is one turn."""
        return self.reducer.meter

    @property
    def rank(self) -> int:
        return self.reducer.rank

    @property
    def world_size(self) -> int:
        return self.reducer.world_size

    @property
    def round(self) -> int:
        """Rounds so far: every fragment was exchanged so many times."""
        return self.turns // self.settings.turns

    def residual(self, name: str) -> Tensor:
        """A copy of what is still to be sent of a parameter's pseudo-gradient."""
        return self.reducer.residual(name)

    def stats(self) -> dict[str, float]:
        """What was measured so far: `local/...` of the rounds, `comm/...` of the reducer, whose step is a turn."""
        sent = self._sent + self._traffic()
        numel = sum(tensor.numel() for tensor in self.rounds.start.values())
        return {
            **self.reducer.stats(),
            "local/steps": float(self.steps),
            "local/rounds": float(self.round),
            "local/void_turns": float(self.void_turns),
            "local/exposed_seconds": self.exposed_seconds,
            "local/bytes_total": float(sent),
            "local/bytes_per_step": sent / max(1, self.steps),
            "local/bits_per_parameter_and_step": 8 * sent / max(1, self.steps) / max(1, numel),
        }

    def observe(self, sink: Sink) -> None:
        """Send the numbers of every turn to a sink from now on."""
        self.meter.add_sink(sink)

    def finish(self) -> None:
        """A last, shorter round, after which all ranks hold the same parameters. All ranks call it at their end.

        A rank that has taken fewer steps calls it sooner: it takes part in the rounds of the others, with the steps it
        took, until all have called it.
        """
        self._check_usable()
        begin = time.perf_counter()
        if self.flight is not None:
            self._end()
        together = 0
        while together < self.settings.turns:
            self._begin(finishing=True)
            outcome = self._end()
            together = together + 1 if outcome.finishing == self.world_size else 0
        self.schedule.restart()
        self.exposed_seconds += time.perf_counter() - begin

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs beside model and optimizer to resume bit for bit, also in the middle of a round.

        It stands under the key `<rank>of<world size>`; save those of all ranks.
        """
        return state.state_of(self)

    def load_state_dict(self, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume, after model and optimizer: from this rank's own state, or from those of all ranks.

        On another number of ranks the round begins again: parameters become those of its start, and the residuals of
        the old ranks are dealt out so that their sum is kept.
        """
        self._check_usable()
        state.load(self, given)

    def move_to(self, group: Any) -> None:
        """Go on with another group of ranks, after an ExchangeError or between turns; residuals stay with their ranks.

        Call it on all ranks of the new group. An exchange that was under way begins again. A rank that was lost while
        ranks agreed may leave some of them one turn behind the others: then StateError names them, and they take the
        state and the parameters of another rank.
        """
        old = self.rounds.reducer, self.rounds.exact
        reducer, exact = self._build(group)
        state.check_same_turn(self.schedule.turn, reducer.network)
        state.carry_over(old[0], reducer)
        self._sent += self._traffic()
        self.rounds.connect(reducer, exact)
        self._sent -= self._traffic()
        for one in old:
            one.close()
        self._failure = None
        if self.flight is not None:
            self._guarded(lambda: self.rounds.begin(self._flying()))
            if not self.settings.delay:
                self._end()

    def close(self) -> None:
        """Stop counting steps, and release threads and process groups. A DDP model averages gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._quiet.restore()
        self._failure = self._failure or AttachError("local_steps was closed: call it again")
        self.rounds.reducer.close()
        self.rounds.exact.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.world_size}"
        return f"LocalSteps({self.settings}, {where}, round {self.round}, step {self.steps})"

    # ------------------------------------------------------------------------------------- called after a local step

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler leaves skipping to fused optimizers
        if found_inf is not None and bool(found_inf):
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.rounds.tensors.optimizers):
            self._stepped.clear()
            self.advance()

    def advance(self) -> None:
        """This rank has taken one local step."""
        self._check_usable()
        self.steps += 1
        self.schedule.count += 1
        if self.flight is None and not self.schedule.due:
            return
        begin = time.perf_counter()
        if self.flight is not None and self.schedule.count - self.flight.at >= self.settings.delay:
            self._end()
        if self.flight is None and self.schedule.due:
            self._begin()
            if not self.settings.delay:
                self._end()
        self.exposed_seconds += time.perf_counter() - begin

    def _begin(self, *, finishing: bool = False) -> None:
        schedule, rounds = self.schedule, self.rounds
        fragment = schedule.fragment
        keys = [key for key, every in self.settings.sync_state.items() if (self.round + 1) % every == 0]
        with torch.no_grad():
            self.flight = Turn(
                schedule.turn,
                fragment,
                schedule.taken(),
                schedule.expected(schedule.turn),
                finishing,
                rounds.pseudo_gradient(fragment),
                rounds.extra(fragment, keys),
                at=schedule.count,
            )
        schedule.begin()
        self._guarded(lambda: rounds.begin(self._flying()))

    def _end(self) -> Outcome:
        turn = self._flying()
        outcome = self._guarded(lambda: self.rounds.end(turn))
        self.flight = None
        self.schedule.end(outcome.total_steps / self.world_size)
        if outcome.total_steps:
            self.turns += 1
            if outcome.void:
                self.void_turns += 1
                _log.warning(_VOID, self.round, "all" if self.settings.turns == 1 else f"fragment {turn.fragment}")
            if self._folder is not None and turn.fragment == self.settings.turns - 1:
                autosave.save(self, self._folder)
        return outcome

    def _flying(self) -> Turn:
        assert self.flight is not None
        return self.flight

    def _guarded(self, work: Callable[[], _T]) -> _T:
        """Errors say which round it was, and end this object until it moves to another group."""
        try:
            with torch.no_grad():
                return work()
        except ExchangeError as failure:
            self._failure = ExchangeError(
                f"round {self.round} of local steps by {self.recipe} failed, and is taken back on this rank: {failure}"
            )
            raise self._failure from failure

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _traffic(self) -> int:
        networks = {id(network): network for network in self._networks()}
        return sum(network.traffic.bytes for network in networks.values())

    def _networks(self) -> list[Network]:
        return [*self.rounds.reducer.networks, *self.rounds.exact.networks]
