"""The link between a DDP model and a recipe: takes buckets as they come, sends parcels, keeps what must be kept."""

from __future__ import annotations

import functools
import logging
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from ..auto import Auto
from ..comm.communicator import Communicator
from ..errors import AttachError, ExchangeError, ThinwireError
from ..recipe.compose import Recipe
from ..reduce import BucketRecord, Meter, Sink, checkpoint
from ..reduce.agree import check_agreement
from ..reduce.buckets import Layout, Parameter, Parcel, as_parameter
from ..reduce.carrier import Carrier
from ..reduce.courier import Courier
from ..reduce.lanes import Conductor
from ..reduce.recipes import carried_over, checked_recipe
from ..reduce.step import Step
from .copies import Detached, warn_of_copy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from ..auto.observation import Event
    from ..auto.pareto import Point
    from ..auto.tuner import Pilot

_log = logging.getLogger(__name__)
_LANES = 2


class Scaler(Protocol):
    """What is asked of a GradScaler."""

    def get_scale(self) -> float: ...


class Link:
    """What `attach` returns: statistics, the state to save, and a way to change the recipe while training.

    `step` counts the synchronised backward passes; random draws and the turn of `shared_top_k` follow it.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        names: Mapping[int, str],
        recipe: Recipe,
        communicator: Communicator,
        *,
        seed: int,
        warmup_steps: int,
        layout: Layout,
        model: Callable[[], torch.nn.Module | None],
        finds_unused: bool,
        scaler: Scaler | None,
        meter: Meter,
        auto: Auto | None = None,
        embeddings: Mapping[str, int] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.step = 0
        self.seed = seed
        self.warmup_steps = warmup_steps
        self.layout = layout
        self.layout_is_final = False
        self.meter = meter
        self._names = dict(names)  # by id of the parameter: DDP tells no names
        self._communicator = communicator
        self._conductor: Conductor | None = None
        self._closing: Callable[[], object] = lambda: None
        self._carrier = Carrier(recipe, seed=seed)
        self._finds_unused = finds_unused
        self._scaler = scaler
        self.scale = None if scaler is None else scaler.get_scale()  # of the loss, that memories are kept at
        self._open: Step | None = None
        self._failure: ThinwireError | None = None
        self._passes = 0  # since attach, for what DDP does in its first steps only
        self._model = model  # weak: DDP's reducer keeps this link alive
        self._told_of_overflow = False
        self.pilot: Pilot | None = None
        self._agree_on(recipe, "recipe", auto)
        if auto is not None:
            from ..auto.tuner import Pilot  # and all that predicts, which others do not need

            device = self.parameters[0].device if self.parameters else torch.device("cpu")
            self.pilot = Pilot(auto, communicator, layout=layout, embeddings=embeddings or {}, device=device)
            if self._conductor is not None:
                self._conductor.log_spans()

    # ---------------------------------------------------------------------------------------------------- for users

    @property
    def recipe(self) -> Recipe:
        """How gradients travel now."""
        return self._carrier.recipe

    @property
    def world_size(self) -> int:
        return self._communicator.world_size

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def carrier(self) -> Carrier:
        """This rank's memory and codec states, by bucket."""
        return self._carrier

    def residual(self, name: str) -> Tensor:
        """A copy of what is still to be sent of a parameter, in its shape; zeros if nothing is."""
        return checkpoint.residual(self, name)

    def stats(self) -> dict[str, float]:
        """Bytes, seconds and what else was measured so far, under slashed names such as `comm/bytes_per_step`."""
        return {**self.meter.stats(), **({} if self.pilot is None else self.pilot.stats())}

    def front(self) -> list[Point]:
        """Under `auto`, on rank 0: what no other candidate beats in predicted step time and in worth at once."""
        return [] if self.pilot is None else self.pilot.front()

    def events(self) -> list[Event]:
        """Under `auto`, on rank 0: every decision so far, with its step and the words for it."""
        return [] if self.pilot is None else self.pilot.events

    def observe(self, sink: Sink) -> None:
        """Send the numbers of every step to a sink from now on.

        Gain, memory norm and agreement are among them only if some rank gave `attach` a sink: all ranks must take part.
        """
        self.meter.add_sink(sink)

    def follow(self, scaler: Scaler) -> None:
        """Let memories follow this GradScaler's scale, as `attach(..., scaler=...)` does."""
        self._scaler, self.scale = scaler, scaler.get_scale()

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Change how gradients travel, from the next step on. Call it on all ranks after the same step.

        What is remembered stays owed: a recipe without a memory sends it with its first step.
        """
        self._check_usable()
        if self._open is not None:
            raise AttachError("set_recipe was called during backward: call it between steps")
        new = checked_recipe(recipe, self.world_size)
        self._agree_on(new, "new recipe")
        self.pilot = None  # who chooses by hand goes on by hand
        self._travel_by(new)

    def _travel_by(self, new: Recipe) -> None:
        old = self._carrier
        self._carrier = Carrier(new, seed=self.seed, memory=carried_over(old, new))
        if new.codec == old.recipe.codec:
            self._carrier.states = old.states
        checkpoint.pay_back_second_shots(self, old, self._carrier)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to resume bit for bit, under the key `<rank>of<world size>`; for DCP or torch.save."""
        return checkpoint.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume: from this rank's own state, or from those of several ranks, as mapping or list.

        On another world size the old ranks' memories are dealt out to the new ones so that their sum is kept; give all
        parts, or use `load_checkpoint`.
        """
        self._check_usable()
        checkpoint.load(self, state)

    def load_checkpoint(self, folder: str, *, key: str = "link") -> None:
        """Resume from a DCP checkpoint that holds this link under `key`, saved on any number of ranks."""
        self._check_usable()
        checkpoint.load_from_dcp(self, folder, key)

    def close(self) -> None:
        """End the threads and release the process groups that attach made. The model can then no longer train."""
        self._failure = self._failure or AttachError("the link was closed: build the DDP model anew and attach to it")
        self._closing()

    def __repr__(self) -> str:
        buckets = len(self.layout.parcels)
        return f"Link({str(self.recipe)!r}, rank {self.rank} of {self.world_size}, {buckets} buckets, step {self.step})"

    def __deepcopy__(self, memo: object) -> Detached:
        warn_of_copy()
        return Detached(str(self.recipe))

    def __reduce__(self) -> tuple[Callable[[str], Detached], tuple[str]]:
        warn_of_copy()
        return Detached, (str(self.recipe),)

    # ------------------------------------------------------------------------------------------ called by the hook

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """A bucket is ready: send the parcels that are complete with it."""
        self._check_usable()
        step = self._open = self._open or self._begin()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        if not step.arrived.isdisjoint(names):
            self._fail(AttachError("backward stopped midway in an earlier step: restart from a checkpoint"))
        if self.pilot is not None:
            self.pilot.arrived(names)
        buffer = bucket.buffer()
        future = step.expect(names, buffer)
        if step.whole or buffer.is_sparse or names[0] not in self.layout.of:
            self._send_whole(step, buffer, names)
        else:
            gradients = zip(bucket.parameters(), bucket.gradients(), strict=True)
            step.views.update(zip(names, (as_parameter(*pair) for pair in gradients), strict=True))
            for parcel in {self.layout.of[name].index: self.layout.of[name] for name in names}.values():
                if all(name in step.views for name in parcel.names):
                    self._dispatch(step, parcel)
        self._end_later(step)
        return future

    def _begin(self) -> Step:
        if self._scaler is not None:
            scale = self._scaler.get_scale()
            if self.scale and scale > 0 and scale != self.scale:
                self._carrier.rescale(scale / self.scale)
            self.scale = scale
        pilot, warm = self.pilot, self.step >= self.warmup_steps
        if pilot is not None and warm:
            pilot.take(self.step)
            if pilot.recipe() != self.recipe:
                self._travel_by(pilot.recipe())
            self._carrier.travel_by(pilot.ways())
        owed = self._carrier.memory is not None
        whole = not warm or (self.recipe.dense and not owed and not self._carrier.ways)
        if not whole and self._conductor is None:
            raise AttachError("there are no lanes: this is a bug in thinwire")
        return Step(self.step, whole=whole, measures=pilot is not None and warm and pilot.samples(self.step))

    def _send_whole(self, step: Step, buffer: Tensor, names: Sequence[str]) -> None:
        """As DDP itself does it: divided, then summed in place."""
        if self.world_size > 1:
            buffer.mul_(1.0 / self.world_size)
            step.pending.append((_label(names), buffer, self._communicator.start_all_reduce(buffer)))

    def _dispatch(self, step: Step, parcel: Parcel) -> None:
        conductor = self._conductor
        assert conductor is not None
        ready = torch.cuda.Event() if parcel.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if ready is not None:
            ready.record()
        courier = Courier(self._carrier, self.meter, may_be_unused=self._finds_unused and not self._is_static())
        conductor.submit(parcel.index, functools.partial(courier.send, step, parcel, ready))

    # ------------------------------------------------------------------------------------------- the end of a step

    def _end_later(self, step: Step) -> None:
        """Finish when backward does, or now where that would be too late."""
        complete = len(step.arrived) == len(self._names)
        at_once = self._passes == 0 and self._is_static()
        # With the last bucket once more: in a reentrant checkpoint, DDP waits at the end of that inner backward.
        if not at_once and ((step.queued and not complete) or self._queue(step)):
            return
        if complete:
            self._finish(step)

    def _queue(self, step: Step) -> bool:
        """Our callback runs before the one in which DDP waits for the futures, so errors keep their type."""
        try:
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._backward_ended, step))
        except RuntimeError:  # not in a backward pass: a rank that has joined early
            return False
        step.queued = True
        return True

    def _backward_ended(self, step: Step) -> None:
        step.queued = False  # the backward of a checkpointed part ends before the whole does
        if self._open is step and len(step.arrived) == len(self._names):
            self._finish(step)

    def _finish(self, step: Step) -> None:
        begin = time.perf_counter()
        if self.pilot is not None:
            self.pilot.think()
        try:
            self._wait_for(step)
        except ThinwireError as failure:
            self._fail(failure)
        except Exception as failure:
            self._fail(ExchangeError(f"{self.recipe} failed in step {step.number}: {failure!r}"), failure)
        exposed = time.perf_counter() - begin
        finite = all(step.finite)
        if not step.whole:
            self._carrier.settle(finite=finite)
            self._carrier.drop_empty_memory()
        if not finite:
            self._tell_of_overflow()
        self.meter.finish_step(step.number, exposed_seconds=exposed, finite=finite, recipe=str(self.recipe))
        self._open = None
        self.step += 1
        self._passes += 1
        if self.pilot is not None and self.step > self.warmup_steps:
            self.pilot.note(step, self._conductor)
        self._settle_layout(step)
        if self.pilot is not None and self.step > self.warmup_steps:
            self.pilot.send(self.step)
        step.complete()

    def _wait_for(self, step: Step) -> None:
        before = self._communicator.traffic
        for label, buffer, pending in step.pending:
            try:
                pending.wait()
            except ExchangeError as failure:
                raise ExchangeError(
                    f"{label} could not be sent by {self.recipe} in step {step.number}: {failure}"
                ) from failure
            if not step.whole:  # beside parcels, whose memories depend on it
                values = buffer.coalesce().values() if buffer.is_sparse else buffer
                step.finite.append(bool(values.isfinite().all()))
        sent = self._communicator.traffic - before
        if step.pending:
            self.meter.record(BucketRecord("whole", sent.bytes, sent.bytes, 0.0, sent.seconds, 0.0))
        if self._conductor is not None:
            self._conductor.wait()

    def _settle_layout(self, step: Step) -> None:
        """Once DDP has put its buckets in order, parcels follow it: a parcel should not wait for a later bucket."""
        if self.layout_is_final or self._passes <= 1 + self._is_static():
            return
        self.layout_is_final = True
        groups = [[name for name in group if name in self.layout.of] for group in step.groups]
        groups = [group for group in groups if group]
        if not self.layout.same_groups(groups):
            checkpoint.move(self, Layout(self.parameters, groups))
            if self.pilot is not None:
                self.pilot.moved(self.layout)

    def _tell_of_overflow(self) -> None:
        if self._scaler is None and self._carrier.memory is not None and not self._told_of_overflow:
            self._told_of_overflow = True
            _log.warning(
                "a gradient was not finite in step %d; memories stay as they were. If a GradScaler changes its scale, "
                "give it to attach(..., scaler=scaler), so that they follow",
                self.step,
            )

    # -------------------------------------------------------------------------------------------------- failing

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _fail(self, failure: ThinwireError, cause: BaseException | None = None) -> None:
        """Nothing can be repaired: the ranks are no longer at the same place. Leave no thread and no socket behind."""
        self._failure = failure
        self._open = None
        _release(failure)
        self._closing()
        model = self._model()
        if model is not None:  # DDP itself would say INTERNAL ASSERT FAILED, please report a bug
            model.register_forward_pre_hook(lambda *_: self._check_usable())
        raise failure from cause

    # ------------------------------------------------------------------------------------------------- starting

    def resume_auto(self, state: Mapping[str, Any] | None) -> Carrier:
        """Let `auto` go on from its saved state, or begin anew; the carrier of what it then runs."""
        assert self.pilot is not None
        self.pilot.load(state)
        self._carrier = Carrier(self.pilot.recipe(), seed=self.seed)
        return self._carrier

    def _is_static(self) -> bool:
        """Asked at every step, as `_set_static_graph` may be called after attach."""
        return bool(getattr(self._model(), "static_graph", False))

    def agree_on_step(self, step: int) -> None:
        """Raise on all ranks if they resume after different steps: their draws and turns would not match."""
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        check_agreement(self._communicator, {"step of the state": str(step)}, device=device)

    def _agree_on(self, recipe: Recipe, fact: str, auto: Auto | None = None) -> None:
        parameters = " ".join(f"{p.name}{list(p.shape)}{'=' if p.exact else ''}" for p in self.parameters)
        facts = {fact: str(auto or recipe), "seed": str(self.seed), "warm-up": str(self.warmup_steps)}
        facts |= {"step": str(self.step), "parameters": parameters}
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        facts["sample_every"] = str(self.meter.sample_every)
        check_agreement(self._communicator, facts, device=device)
        if self.meter.sampling is None:
            watched = torch.tensor([int(self.meter.active)], dtype=torch.int32, device=device)
            self.meter.sampling = bool(self._communicator.all_reduce(watched, op="max"))
        if self._conductor is None and (auto is not None or not recipe.dense):
            lanes = [self._communicator.twin() for _ in range(min(_LANES, len(self.layout.parcels)))]
            self._conductor = Conductor(lanes)
            self._closing = weakref.finalize(self, self._conductor.close)


def _release(failure: BaseException | None) -> None:
    """Whoever keeps an exception keeps the variables of its frames, and with them the sockets of a collective."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__


def _label(names: Sequence[str]) -> str:
    return f"the bucket of {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
