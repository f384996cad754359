"""The Reducer: named tensors of all ranks become their mean by a recipe; a step is committed or leaves no trace."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import streams
from ..comm.communicator import Communicator
from ..comm.network import Network
from ..errors import AttachError, ExchangeError, OptionError, ThinwireError, release
from ..exchange import shards
from ..recipe.compose import Recipe
from . import checkpoint, plain, second_shots
from .agree import check_agreement, checked_recipe
from .buckets import Bucket, InPlace, Layout
from .hashes import HashCheck
from .job import Job
from .lanes import Inline, Lanes
from .meters import BucketRecord, Meter
from .policy import Fixed, Policy, PolicyOptions, ask
from .residuals import Residuals, carried_over
from .step import Outputs, Step, Work
from .timeline import Timeline, patience
from .warm_up import warm_up

_LANES = 2


class Reducer:
    """Averages named tensors over the ranks of a group by a recipe. All ranks make the same calls in the same order.

    Args:
        recipe: a recipe, its text, or the name of a preset.
        group: a torch.distributed group; None for the default one.
        seed: of all random draws.
        check_every: every N steps ranks compare a hash of the means, and raise if they differ; 0 for never.
        policy: chooses the recipe while training, for example `tw.auto()`; the recipe is then where it begins.
        warmup_steps: the first N steps are sent uncompressed.

    `step` counts commits; random draws and the turn of `shared_top_k` follow it.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> reducer = Reducer("ef|top_k:0.5|bf16|all_gather")
    >>> reducer.reduce("w", torch.tensor([4.0, 1.0, 2.0, 0.5]))
    tensor([4., 0., 2., 0.])
    >>> reducer.commit()
    True
    >>> reducer.residual("w")
    tensor([0.0000, 1.0000, 0.0000, 0.5000])
    >>> reducer.close(); dist.destroy_process_group()
    """

    def __init__(
        self,
        recipe: Recipe | str,
        *,
        group: dist.ProcessGroup | Network | None = None,
        seed: int = 0,
        check_every: int = 100,
        policy: PolicyOptions | None = None,
        warmup_steps: int = 0,
        meter: Meter | None = None,
        layout: Layout | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(check_every, int) or check_every < 0:
            raise OptionError(f"check_every is a number of steps, or 0 for never, not {check_every}")
        self.network = group if isinstance(group, Network) else Communicator(group)
        self.seed, self.step, self.warmup_steps = seed, 0, warmup_steps
        self.meter = Meter() if meter is None else meter
        self.layout = Layout((), ()) if layout is None else layout
        self.saved = checkpoint.Saved()  # a state that was loaded before its tensors were seen
        self._facts = dict(facts or {})
        self._open: Step | None = None
        self.timeline = Timeline(timeout=patience(self.network.timeout))
        self._failure: ThinwireError | None = None
        self.hashes = HashCheck(check_every)
        self.network.sums_messages |= check_every > 0
        self._runner: Inline | Lanes | None = None
        self._closing: Callable[[], object] = lambda: None
        checked = checked_recipe(recipe, self.network)
        self.residuals = Residuals(checked)
        self._agree({"recipe": f"{policy or checked}", "seed": str(seed), "check_every": str(check_every)})
        if self.meter.sampling is None and self.network.between_processes:
            # Often only rank 0 has sinks, and all ranks must measure.
            listens = torch.tensor([int(self.meter.active)], dtype=torch.int32, device=self.network.device)
            self.meter.sampling = bool(self.network.all_reduce(listens, op="max"))
        self.policy: Policy = Fixed(checked)
        self._prepare(checked, always=policy is not None)
        if policy is not None:
            self.policy = policy.bind(self)

    # ------------------------------------------------------------------------------------------------ reducing

    def start(
        self,
        name: str,
        tensor: Tensor | Mapping[str, Tensor],
        *,
        exact: Collection[str] = (),
        out: Mapping[str, Tensor] | None = None,
    ) -> Work:
        """Begin to average a tensor, or several that travel together; `wait()` of what is returned gives the mean.

        Any shape and float dtype. Of several tensors, those named in `exact` travel uncompressed. With `out`, means are
        written there; the tensors may be given as their own `out`. A name stands for the same shapes in every step.
        """
        single = isinstance(tensor, Tensor)
        tensors: Mapping[str, Tensor] = {name: tensor} if isinstance(tensor, Tensor) else tensor
        bucket = self._bucket(name, tensors, exact)
        if out is None:
            out = {one: torch.empty_like(given, requires_grad=False) for one, given in tensors.items()}
        return self.start_bucket(bucket, tensors, out, single=single)

    def reduce(self, name: str, tensor: Tensor) -> Tensor:
        """The mean of a tensor over the ranks: `start` and `wait`."""
        mean: Tensor = self.start(name, tensor).wait()
        return mean

    def reduce_scatter(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's shard of the mean: flat elements `shards(numel, world_size)[rank]`.

        Half of what `reduce` sends: the first shot of two_shot, the scatter of an all-reduce. Residuals of what was not
        sent are kept as by `reduce`.

        >>> from thinwire.comm.local import LocalNetwork
        >>> Reducer("bf16|all_reduce", group=LocalNetwork.alone()).reduce_scatter("w", torch.ones(2, 2))
        tensor([1., 1., 1., 1.])
        """
        bucket = self._bucket(name, {name: tensor}, ())
        cuts = shards(bucket.numel, self.world_size)
        mine = cuts[self.rank]
        out = torch.empty(mine.stop - mine.start, dtype=tensor.dtype, device=tensor.device)
        self.begin_step(tensor.device)
        recipe = self.residuals.recipe_of(name)
        if recipe.exchange.feedback:
            raise OptionError(f"{recipe} sends its sums back with feedback, and reduce_scatter has no way back")
        work: Tensor = self.start_bucket(bucket, {name: tensor}, {name: out}, single=True, cuts=cuts).wait()
        return work

    def start_bucket(
        self,
        bucket: Bucket,
        tensors: Mapping[str, Tensor],
        out: Outputs,
        *,
        single: bool = False,
        may_be_unused: bool = False,
        cuts: Sequence[slice] | None = None,
        in_place: InPlace | None = None,
    ) -> Work:
        """As `start`, for a bucket of a planned layout; `in_place` tells where `tensors`, which are `out`, lie."""
        step = self.begin_step(bucket.device)
        if bucket.name in step.works:
            raise OptionError(f"{bucket.name} was reduced in step {step.number} already: call commit() before the next")
        self.policy.arrived(bucket.names)
        work = step.works[bucket.name] = Work(bucket, out, single=single, sharded=cuts is not None)
        if step.plain:
            work.failed = f"{bucket} could not be sent by {self.recipe} in step {step.number}"
            if cuts is None:
                plain.start(work, tensors, self.network)
            else:
                plain.scatter(work, tensors[bucket.name], cuts, self.network)
            return work
        options: dict[str, Any] = {"may_be_unused": may_be_unused, "shards": cuts, "in_place": in_place}
        job = Job(self.residuals, self.meter, step, bucket, tensors, out, self.seed, **options)
        assert self._runner is not None
        try:
            self.timeline.run(work, job, tensors, self._runner)
        except ExchangeError as failure:  # of a job that ran here and now
            self.fail(failure)
        return work

    def start_sum(self, label: str, buffer: Tensor, names: Sequence[str] = ()) -> Work:
        """As DDP itself does it: divided, then summed in place, in the tensor's own dtype; it may be sparse."""
        step = self.begin_step(buffer.device)
        self.policy.arrived(names)
        bucket = Bucket(label, (), (), buffer.dtype, buffer.device)
        work = step.works[label] = Work(bucket, {label: buffer}, single=True)
        work.failed = f"{label} could not be sent by {self.recipe} in step {step.number}"
        plain.start_in_place(work, buffer, self.network)
        return work

    def _bucket(self, name: str, tensors: Mapping[str, Tensor], exact: Collection[str]) -> Bucket:
        self.check_usable()
        bucket, new = self.layout.named(name, tensors, exact)
        if new:
            checkpoint.adopt(self, bucket)
            self.policy.layout_changed()
        return bucket

    # ----------------------------------------------------------------------------------------------- one step

    def begin_step(self, device: torch.device) -> Step:
        """The step under way, or a new one for tensors on this device. An adapter may ask whether it is `plain`."""
        self.check_usable()
        if self._open is not None:
            return self._open
        warm = self.step >= self.warmup_steps
        if warm:
            ask(self, self.policy.before_step, self.step)
            if self.policy.recipe != self.recipe:
                self._travel_by(self.policy.recipe)
            second_shots.override(self, self.policy.overrides)
        step = self._open = Step(self.step, plain=not warm or self._is_plain())
        step.measures = warm and self.policy.measures(self.step)
        step.samples = self.meter.samples(self.step)
        step.checks = self.hashes.wanted(self.step, self.network)
        step.device, step.traffic = self.timeline.begin(device), self.network.traffic
        return step

    def _is_plain(self) -> bool:
        return self.recipe.dense and self.residuals.memory is None and not self.residuals.overrides

    def wait(self) -> None:
        """Wait for everything that was started, and raise what went wrong."""
        step = self._open
        if step is None:
            return
        ask(self, self.policy.before_wait)
        begin = time.perf_counter()
        try:
            for work in step.works.values():
                work.finish_sum()
                if work.is_sum and not step.plain:  # beside buckets, whose residuals depend on it
                    step.finite += [plain.finite(mean) for mean in work.outputs.values()]
            if any(work.is_sum for work in step.works.values()):
                sent = self.network.traffic - step.traffic
                self.meter.record(BucketRecord("whole", sent.bytes, sent.bytes, 0.0, sent.seconds, 0.0))
            if self._runner is not None:
                self._runner.wait()
        except ThinwireError as failure:
            self.fail(failure)
        except Exception as failure:
            self.fail(ExchangeError(f"{self.recipe} failed in step {step.number}: {failure!r}"), failure)
        step.exposed_seconds += time.perf_counter() - begin

    def commit(self, finite: bool | Tensor = True) -> bool | Tensor:
        """End the step: residuals move on, or, if anything was not finite on any rank, the step leaves no trace.

        Give `finite=False` if the optimizer will skip the step for another reason; the same on all ranks. Returns
        whether the step counts: a bool, or a flag on the device.
        """
        self.check_usable()
        step = self._open or self.begin_step(torch.device("cpu"))
        self.wait()
        counts = self.timeline.counts(step, finite)
        if not step.plain:
            self.timeline.settle(step, counts, self.residuals)
            self.residuals.drop_empty_memory()
        try:
            self.hashes.run(step, self.networks)
            self.timeline.keep_up(f"{self.recipe} in step {max(0, step.number - 2)}")
        except ExchangeError as failure:
            self.fail(failure)
        self.meter.finish_step(
            step.number,
            exposed_seconds=step.exposed_seconds,
            finite=True if isinstance(counts, Tensor) else counts,
            recipe=str(self.recipe),
        )
        self._open = None
        self.step += 1
        if step.number >= self.warmup_steps:
            ask(self, self.policy.after_step, step)
        return counts

    def rescale(self, factor: float) -> None:
        """Follow a change of the loss scale: residuals times new scale / old scale. Call it between steps."""
        with self.timeline.beside():
            self.residuals.rescale(factor)

    # ------------------------------------------------------------------------------------------- for its users

    @property
    def recipe(self) -> Recipe:
        """How tensors travel now."""
        return self.residuals.recipe

    @property
    def world_size(self) -> int:
        return self.network.world_size

    @property
    def rank(self) -> int:
        return self.network.rank

    def residual(self, name: str) -> Tensor:
        """A copy of what is still to be sent of a tensor, in its shape; zeros if nothing is."""
        with self.timeline.beside():
            return checkpoint.residual(self, name)

    def stats(self) -> dict[str, float]:
        """Bytes, seconds and what else was measured so far, under slashed names such as `comm/bytes_per_step`."""
        return {**self.meter.stats(), **self.policy.stats()}

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Change how tensors travel, from the next step on. Call it on all ranks after the same step.

        Residuals survive: a recipe without a memory sends them with its first step. A policy is asked no more.
        """
        self.check_usable()
        if self._open is not None:
            raise AttachError("set_recipe was called within a step: call it after commit")
        new = checked_recipe(recipe, self.network)
        self._agree({"new recipe": str(new), "step": str(self.step)})
        self._prepare(new)
        self.policy.close()
        self.policy = Fixed(new)
        self._travel_by(new)

    def set_layout(self, layout: Layout) -> None:
        """Take over other buckets; residuals go with their tensors."""
        with self.timeline.beside():
            checkpoint.move(self, layout)
        self.policy.layout_changed()

    def state_dict(self, **extra: Any) -> dict[str, Any]:
        """What this rank needs to resume bit for bit, under the key `<rank>of<world size>`; for DCP or torch.save."""
        with self.timeline.beside():
            return checkpoint.state_of(self, extra)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Resume: from this rank's own state, or from those of several ranks, as mapping or list.

        On another world size the old ranks' residuals are dealt out to the new ones so that their sum is kept; give all
        parts. Returns what `state_dict` was given beside.
        """
        self.check_usable()
        with self.timeline.beside():
            return checkpoint.load(self, state)

    def close(self, reason: str = "the reducer was closed: make another one") -> None:
        """End the threads and release the process groups that the reducer made. Later calls raise `reason`."""
        self._failure = self._failure or AttachError(reason)
        self._closing()
        self.policy.close()

    def __repr__(self) -> str:
        buckets = len(self.layout.buckets)
        where = f"rank {self.rank} of {self.world_size}"
        return f"Reducer({str(self.recipe)!r}, {where}, {buckets} buckets, step {self.step})"

    # ------------------------------------------------------------------------------------------------ preparing

    def _agree(self, facts: Mapping[str, str]) -> None:
        if self.network.between_processes:
            check_agreement(self.network, {**facts, **self._facts}, device=self.network.device)

    def _prepare(self, recipe: Recipe, *, always: bool = False) -> None:
        """Threads and process groups for recipes that compress; all ranks come here at the same place."""
        on_device = self.network.between_processes and streams.resident(self.network.device)
        if on_device:
            warm_up(recipe, self.network, self.network.device)
        if self._runner is not None or (recipe.dense and not always):
            return
        if on_device or not isinstance(self.network, Communicator):
            self._runner = Inline(self.network)
            return
        self._runner = Lanes([self.network.twin() for _ in range(_LANES)])
        self._closing = weakref.finalize(self, self._runner.close)

    def _travel_by(self, new: Recipe) -> None:
        old = self.residuals
        with self.timeline.beside():
            self.residuals = Residuals(new, memory=carried_over(old, new))
            if new.codec == old.recipe.codec:
                self.residuals.states = old.states
            second_shots.keep(self, old, self.residuals)

    @property
    def networks(self) -> list[Network]:
        """Every network that carries messages of this reducer: its group, and one for each lane."""
        lanes = self._runner.networks if isinstance(self._runner, Lanes) else []
        return [self.network, *lanes]

    # --------------------------------------------------------------------------------------------------- failing

    def check_usable(self) -> None:
        """Raise what ended this reducer, if anything did."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def fail(self, failure: ThinwireError, cause: BaseException | None = None) -> None:
        """Nothing can be repaired: the ranks are no longer at the same place. Leave no thread and no socket behind."""
        self._failure, self._open = failure, None
        release(failure)
        self.network.abort()
        self._closing()
        self.policy.close()
        raise failure from cause
