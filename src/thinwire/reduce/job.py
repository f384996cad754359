"""One bucket from gradients to means: gather, compress, exchange, scatter, and its record for the meter."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..comm import streams
from ..comm.network import Network
from ..errors import ExchangeError, ThinwireError
from ..exchange.base import ring_bytes
from ..exchange.request import Result
from ..rng import Draw
from .buckets import Bucket, InPlace, gather, scatter
from .lanes import Lane
from .meters import BucketRecord, Meter
from .residuals import Residuals
from .step import Outputs, Step


@dataclasses.dataclass(frozen=True)
class Job:
    """Runs in a lane. It holds no reference to the reducer, which may be freed meanwhile."""

    residuals: Residuals
    meter: Meter
    step: Step
    bucket: Bucket
    tensors: Mapping[str, Tensor]
    outputs: Outputs
    seed: int
    may_be_unused: bool = False
    shards: Sequence[slice] | None = None
    in_place: InPlace | None = None  # where tensors and outputs lie, if these are the same

    def __call__(self, lane: Lane) -> None:
        try:
            self._run(lane)
        except Exception as failure:
            why = str(failure) if isinstance(failure, ThinwireError) else repr(failure)
            recipe = self.residuals.recipe_of(self.bucket.name)
            raise ExchangeError(
                f"{self.bucket} could not be sent by {recipe} in step {self.step.number}: {why}"
            ) from failure

    def _run(self, lane: Lane) -> None:
        network, bucket, step = lane.network, self.bucket, self.step
        begin, before, cpu = time.perf_counter(), network.traffic, time.thread_time()
        network.begin_lap()
        result = self._exchanged(lane)
        arrived = time.perf_counter()
        self._deliver(result)
        step.finite.append(result.finite)
        if step.checks and self.shards is None:
            step.hashes[bucket.name] = _hash(result)
        sent = network.traffic - before
        encoded = (network.first_start or arrived) - begin
        decoded = time.perf_counter() - begin - encoded - sent.seconds
        record = BucketRecord(
            bucket=bucket.name,
            wire_bytes=sent.bytes,
            dense_bytes=ring_bytes((bucket.numel + bucket.exact_numel) * bucket.dtype.itemsize, network.world_size),
            encode_seconds=encoded,
            exchange_seconds=sent.seconds,
            decode_seconds=max(0.0, decoded),
        )
        if streams.resident(bucket.device):  # the host only enqueues: the network tells later how long messages took
            record.encode_seconds = record.decode_seconds = 0.0
        elif self._measures():
            self._tell_measured(record)
        if step.samples:
            record.agree = _agree(network, result, bucket.device)
        record.cpu_seconds = time.thread_time() - cpu
        self.meter.record(record)

    def _deliver(self, result: Result) -> None:
        """The means to where they belong, unless the exchange has written them there."""
        bucket = self.bucket
        if self.shards is not None:
            self.outputs[bucket.name].copy_(result.mean)
        elif self.in_place is not None:
            if isinstance(result.place, Tensor):
                self.in_place.parts.scatter(result.place)
            self.in_place.exact.scatter(result.exact)
        else:
            scatter(bucket.parts, result.mean, self.outputs)
            scatter(bucket.exact, result.exact, self.outputs)

    def _exchanged(self, lane: Lane) -> Result:
        residuals, bucket, device, where = self.residuals, self.bucket, self.bucket.device, self.in_place
        flat = residuals.buffer(bucket)
        if flat is None:
            flat = lane.scratch("u", bucket.numel, device)
        exact = lane.scratch("exact", bucket.exact_numel, device)
        request = residuals.request(
            bucket,
            flat if where is not None else gather(bucket.parts, self.tensors, flat),
            gather(bucket.exact, self.tensors, exact) if where is None else where.exact.gather(exact),
            Draw(seed=self.seed, step=self.step.number, stream=bucket.name, rank=lane.network.rank),
            out=lane.scratch("mean", bucket.numel, device),
            may_be_unused=self.may_be_unused,
            measure=self._measures() and not streams.resident(device),
            shards=self.shards,
            where=None if where is None else where.parts,
        )
        recipe = residuals.recipe_of(bucket.name)
        return residuals.received(bucket.name, recipe.exchange.mean(recipe.codec, request, lane.network))

    def _measures(self) -> bool:
        return self.step.samples or self._tells_energy()

    def _tells_energy(self) -> bool:
        """Whether this bucket should say how much of it was sent: of codecs that are not sparse it is known."""
        recipe = self.residuals.recipe_of(self.bucket.name)
        return self.step.measures and recipe.codec.sparse and recipe.exchange.measures

    def _tell_measured(self, record: BucketRecord) -> None:
        measured = self.residuals.sent[self.bucket.name].measured
        if measured is None:
            return
        if self._tells_energy():
            self.step.energies.append((measured.offered, measured.left))
        if self.step.samples:
            record.gain = measured.gain
            record.memory_norm = measured.memory_norm if self.residuals.memory is not None else None


def _hash(result: Result) -> Tensor:
    """Of both means; multiplied by an odd number, or equal changes in both could cancel."""
    return kernels.hash64(result.mean) + 3 * kernels.hash64(result.exact)


def _agree(network: Network, result: Result, device: torch.device) -> bool | None:
    """Whether all ranks have the same bits: what `comm/agree` says."""
    seen = network.all_gather(_hash(result).view(1))
    return None if streams.resident(device) else bool((seen == seen[0]).all())
