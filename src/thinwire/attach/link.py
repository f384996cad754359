"""The link that `attach` returns: takes DDP's buckets as they come, and offers statistics, state and set_recipe."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future

from ..errors import AttachError, ThinwireError
from ..recipe.compose import Recipe
from ..reduce import Meter, Reducer, Sink
from ..reduce.buckets import Layout
from ..reduce.timeline import on_side_stream
from . import dcp
from .copies import NotCopied
from .ddp_buckets import Seen
from .model import CHANGED, OVERFLOW, Scaler, orders_differ, time_forward, trained, weights_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

_log = logging.getLogger(__name__)


class Link(NotCopied):
    """What `attach` returns: statistics, the state to save, and a way to change the recipe while training."""

    def __init__(self, ddp: DistributedDataParallel, reducer: Reducer, scaler: Scaler | None) -> None:
        self.reducer = reducer
        self._names = {id(parameter): name for name, parameter in trained(ddp).items()}  # DDP tells no names
        self._model: Callable[[], Any] = weakref.ref(ddp)  # weak: DDP's reducer keeps this link alive
        self._finds_unused = bool(ddp.find_unused_parameters)
        self.layout_is_final = False
        self._passes = 0  # since attach, for what DDP does in its first steps only
        self._told_of_overflow = False
        self._seen: dict[int, Seen] = {}  # of DDP's buckets, by their number
        self._clear()
        self._scaler, self.scale = scaler, None if scaler is None else scaler.get_scale()
        reducer.hashes.paused = orders_differ(self._model)
        reducer.hashes.weights = weights_of(self._model)  # DDP keeps them equal: what parted since the last check shows
        reducer.hashes.absent = functools.partial(_ran_out, weakref.ref(self))
        time_forward(ddp, reducer)

    def _clear(self) -> None:
        self._arrived: set[str] = set()
        self._groups: list[list[str]] = []
        self._views: dict[str, Tensor] = {}
        self._futures: list[tuple[Future[Tensor], Tensor]] = []
        self._queued = self.ran_out = False

    # ---------------------------------------------------------------------------------------------------- for users

    @property
    def recipe(self) -> Recipe:
        """How gradients travel now."""
        return self.reducer.recipe

    @property
    def step(self) -> int:
        """Synchronised backward passes so far."""
        return self.reducer.step

    @property
    def layout(self) -> Layout:
        """Which parameters travel together."""
        return self.reducer.layout

    @property
    def meter(self) -> Meter:
        """Counts what is sent."""
        return self.reducer.meter

    @property
    def rank(self) -> int:
        return self.reducer.rank

    @property
    def world_size(self) -> int:
        return self.reducer.world_size

    def residual(self, name: str) -> Tensor:
        """A copy of what is still to be sent of a parameter, in its shape; zeros if nothing is."""
        return self.reducer.residual(name)

    def stats(self) -> dict[str, float]:
        """Bytes, seconds and what else was measured so far, under slashed names such as `comm/bytes_per_step`."""
        return self.reducer.stats()

    @property
    def chooses(self) -> bool:
        """Whether a policy such as `auto` chooses the recipe."""
        return hasattr(self.reducer.policy, "front")

    def front(self) -> list[Any]:
        """Under `auto`, on rank 0: what no other candidate beats in predicted step time and in progress at once."""
        return list(getattr(self.reducer.policy, "front", list)())

    def events(self) -> list[Any]:
        """Under `auto`, on rank 0: every decision so far, with its step and the words for it."""
        return list(getattr(self.reducer.policy, "events", ()))

    def observe(self, sink: Sink) -> None:
        """Send the numbers of every step to a sink from now on.

        Gain, memory norm and agreement are among them only if some rank gave `attach` a sink: all ranks must take part.
        """
        self.reducer.meter.add_sink(sink)

    def follow(self, scaler: Scaler) -> None:
        """Let residuals follow this GradScaler's scale, as `attach(..., scaler=...)` does."""
        self._scaler, self.scale = scaler, scaler.get_scale()

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Change how gradients travel, from the next step on. Call it on all ranks after the same step.

        Residuals survive: a recipe without a memory sends them with its first step.
        """
        if self._arrived:
            raise AttachError("set_recipe was called during backward: call it between steps")
        self.reducer.set_recipe(recipe)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to resume bit for bit, under the key `<rank>of<world size>`; for DCP or torch.save."""
        return self.reducer.state_dict(scale=self.scale, layout_is_final=self.layout_is_final)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume: see `Reducer.load_state_dict`; for a checkpoint of another world size `load_checkpoint` is easier."""
        extra = self.reducer.load_state_dict(state)
        self.layout_is_final = self.layout_is_final or bool(extra.get("layout_is_final"))
        self.scale = extra.get("scale") or self.scale  # the next step follows the scaler from there

    def load_checkpoint(self, folder: str, *, key: str = "link") -> None:
        """Resume from a DCP checkpoint that holds this link under `key`, saved on any number of ranks.

        Torch unpickles the metadata of a DCP checkpoint, which can run code: load only checkpoints that you trust.
        """
        self.load_state_dict(dcp.parts_of(self.reducer, folder, key))

    def close(self) -> None:
        """End the threads and release the process groups that attach made. The model can then no longer train."""
        self.reducer.close("the link was closed: build the DDP model anew and attach to it")

    def __repr__(self) -> str:
        return f"Link{repr(self.reducer)[len('Reducer') :]}"

    # ------------------------------------------------------------------------------------------ called by the hook

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """A bucket of DDP is ready: start ours that are complete with it."""
        self.reducer.check_usable()
        if not self._arrived:
            self._follow_scale()
        names = [self._names.get(id(parameter), "") for parameter in bucket.parameters()]
        if "" in names or (bucket.is_last() and len(self._arrived) + len(names) < len(self._names)):
            # Or we would wait for gradients that DDP never gives.
            self._fail(AttachError(f"DDP reduces other parameters than require a gradient: {CHANGED}"))
        if not self._arrived.isdisjoint(names):
            self._fail(AttachError("backward stopped midway in an earlier step: restart from a checkpoint"))
        buffer = bucket.buffer()
        self._arrived.update(names)
        self._groups.append(names)
        devices: list[Any] | None = None if buffer.device.type == "cpu" else [buffer.device]
        future: Future[Tensor] = Future(devices=devices)
        self._futures.append((future, buffer))
        try:
            self._start(bucket, buffer, names)
        except ThinwireError as failure:
            self._fail(failure)
        self._end_later()
        return future

    def _start(self, bucket: GradBucket, buffer: Tensor, names: list[str]) -> None:
        layout = self.reducer.layout
        if self.reducer.begin_step(buffer.device).plain or buffer.is_sparse or names[0] not in layout.of:
            label = f"the bucket of {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
            self.reducer.start_sum(label, buffer, names)
        else:
            seen = self._seen.get(bucket.index())
            if seen is None or not seen.shows(buffer, names):
                seen = self._seen[bucket.index()] = Seen(bucket, buffer, names)
            self._views.update(seen.views)
            for ours in {layout.of[name].name: layout.of[name] for name in names}.values():
                if all(name in self._views for name in ours.names):
                    views = {name: self._views[name] for name in ours.names}
                    unused = self._finds_unused and not self._is_static()
                    where = seen.in_place(ours)
                    self.reducer.start_bucket(ours, views, views, may_be_unused=unused, in_place=where)

    def _follow_scale(self) -> None:
        if self._scaler is not None:
            scale = self._scaler.get_scale()
            if self.scale and scale > 0 and scale != self.scale:
                self.reducer.rescale(scale / self.scale)
            self.scale = scale

    def _is_static(self) -> bool:
        """Asked at every step, as `_set_static_graph` may be called after attach."""
        return bool(getattr(self._model(), "static_graph", False))

    # ------------------------------------------------------------------------------------------- the end of a step

    def _end_later(self) -> None:
        """Finish when backward does, or now where that would be too late."""
        complete = len(self._arrived) == len(self._names)
        at_once = self._passes == 0 and self._is_static()
        # With the last bucket once more: in a reentrant checkpoint, DDP waits at the end of that inner backward.
        if not at_once and ((self._queued and not complete) or self._queue()):
            return
        if complete:
            self._finish()

    def _queue(self) -> bool:
        """Our callback runs before the one in which DDP waits for the futures, so errors keep their type."""
        try:
            ended = functools.partial(self._backward_ended, self._futures)
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        except RuntimeError:  # not in a backward pass: a rank that has joined early, and keeps older weights
            self.ran_out = True
            return False
        self._queued = True
        return True

    def _backward_ended(self, futures: object) -> None:
        if futures is self._futures:  # else that step has ended already
            self._queued = False  # the backward of a checkpointed part ends before the whole does
            if len(self._arrived) == len(self._names):
                self._finish()

    def _finish(self) -> None:
        try:
            counts = self.reducer.commit()
        except ThinwireError as failure:
            self._fail(failure)
        if counts is False:
            self._tell_of_overflow()
        groups, futures = self._groups, self._futures
        self._clear()
        self._passes += 1
        self._settle_layout(groups)
        for future, buffer in futures:  # DDP may copy the buffers into the gradients
            with on_side_stream(buffer.device):
                future.set_result(buffer)

    def _settle_layout(self, groups: Sequence[Sequence[str]]) -> None:
        """Once DDP has put its buckets in order, ours follow: a bucket should not wait for a later one of DDP's."""
        if self.layout_is_final or self._passes <= 1 + self._is_static():
            return
        self.layout_is_final = True
        layout = self.reducer.layout
        ours = [[name for name in group if name in layout.of] for group in groups]
        ours = [group for group in ours if group]
        if not layout.same_groups(ours):
            self.reducer.set_layout(layout.regrouped(ours))

    def _tell_of_overflow(self) -> None:
        if self._scaler is None and self.reducer.residuals.memory is not None and not self._told_of_overflow:
            self._told_of_overflow = True
            _log.warning(OVERFLOW, self.step - 1)

    def _fail(self, failure: ThinwireError) -> None:
        """The ranks are no longer at the same place; DDP itself would say INTERNAL ASSERT FAILED at the next step."""
        self._clear()
        model, reducer = self._model(), self.reducer
        if model is not None:
            model.register_forward_pre_hook(lambda *_: reducer.check_usable())
        reducer.fail(failure)


def _ran_out(link: Callable[[], Link | None]) -> bool:
    """Whether this rank sends zeros only, under DDP's `join()`."""
    found = link()
    return found is not None and found.ran_out
