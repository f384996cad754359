"""One parcel from bucket to bucket: gather, carry, scatter, and what there is to tell about it. Runs in a lane."""

from __future__ import annotations

import time

import torch

from .. import kernels
from ..errors import ExchangeError, ThinwireError
from ..exchange import TwoShot
from ..exchange.base import Delivery, ring_bytes
from . import BucketRecord, Meter
from .buckets import Parcel, gather, scatter
from .carrier import Carrier
from .lanes import Lane
from .step import Step


class Courier:
    """Sends parcels by the recipe of a carrier and tells the meter."""

    def __init__(self, carrier: Carrier, meter: Meter, *, may_be_unused: bool) -> None:
        self._carrier = carrier
        self._meter = meter
        self._may_be_unused = may_be_unused

    def send(self, step: Step, parcel: Parcel, ready: torch.cuda.Event | None, lane: Lane) -> None:
        """One parcel from bucket to bucket; runs in a lane."""
        if ready is not None:
            torch.cuda.current_stream(parcel.device).wait_event(ready)
        try:
            begin, before = time.perf_counter(), lane.communicator.traffic
            lane.communicator.begin_lap()
            delivery = self._carry(step, parcel, lane)
            arrived = time.perf_counter()
            scatter(parcel.parts, delivery.mean, step.views)
            scatter(parcel.exact, delivery.exact, step.views)
            if ready is not None:
                torch.cuda.current_stream(parcel.device).synchronize()
        except Exception as failure:
            why = str(failure) if isinstance(failure, ThinwireError) else repr(failure)
            where = f"{parcel} could not be sent by {self._carrier.recipe_of(parcel.name)} in step {step.number}"
            raise ExchangeError(f"{where}: {why}") from failure
        step.finite.append(delivery.finite)
        sent = lane.communicator.traffic - before
        encoded = (lane.communicator.first_start or arrived) - begin
        decoded = time.perf_counter() - begin - encoded - sent.seconds
        record = BucketRecord(
            bucket=parcel.name,
            wire_bytes=sent.bytes,
            dense_bytes=_dense_bytes(parcel, lane.communicator.world_size),
            encode_seconds=encoded,
            exchange_seconds=sent.seconds,
            decode_seconds=max(0.0, decoded),
        )
        if self._weighs(step, parcel) and (measured := self._carrier.measured(parcel.name)) is not None:
            step.energies.append((measured.offered, measured.left))
        self._sample(step, parcel, delivery, lane, record)
        self._meter.record(record)

    def _carry(self, step: Step, parcel: Parcel, lane: Lane) -> Delivery:
        carrier, device = self._carrier, parcel.device
        remembers = carrier.remembers(parcel.name)
        flat = carrier.buffer(parcel.name, parcel.numel, device) if remembers else None
        if flat is None and remembers:
            flat = torch.empty(parcel.numel, dtype=torch.float32, device=device)  # it will hold the residual
        elif flat is None:
            flat = lane.scratch("u", parcel.numel, device)
        exact = lane.scratch("exact", parcel.exact_numel, device)
        return carrier.carry(
            parcel.name,
            gather(parcel.parts, step.views, flat),
            exact=gather(parcel.exact, step.views, exact),
            network=lane.communicator,
            step=step.number,
            parts=parcel.parts,
            out=lane.scratch("mean", parcel.numel, device),
            may_be_unused=self._may_be_unused,
            measure=self._meter.samples(step.number) or self._weighs(step, parcel),
        )

    def _weighs(self, step: Step, parcel: Parcel) -> bool:
        """Whether this parcel should say how much of it was sent: of all others it is known.

        What two_shot keeps back lies with the owner of a piece, so that a rank cannot tell.
        """
        recipe = self._carrier.recipe_of(parcel.name)
        return step.measures and recipe.codec.sparse and not isinstance(recipe.exchange, TwoShot)

    def _sample(self, step: Step, parcel: Parcel, delivery: Delivery, lane: Lane, record: BucketRecord) -> None:
        if not self._meter.samples(step.number):
            return
        measured = self._carrier.measured(parcel.name)
        if measured is not None:
            record.gain = measured.gain
            record.memory_norm = measured.memory_norm if self._carrier.memory is not None else None
        sums = [kernels.checksum(tensor.view(torch.uint8)) for tensor in (delivery.mean, delivery.exact)]
        seen = lane.communicator.all_gather(torch.tensor(sums, dtype=torch.int64, device=parcel.device))
        record.agree = bool((seen == seen[0]).all())


def _dense_bytes(parcel: Parcel, world_size: int) -> int:
    """What plain DDP would send."""
    return ring_bytes((parcel.numel + parcel.exact_numel) * parcel.dtype.itemsize, world_size)
