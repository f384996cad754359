"""Counts bytes and seconds: one record a bucket, one set of metrics a step, running totals."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError
from .sinks import Sink

_log = logging.getLogger(__name__)

# What a step's metrics are called where it is not simply `comm/` and the name of the value.
_STEP_NAMES = {
    "bytes": "comm/bytes_per_step",
    "dense_bytes": "comm/dense_bytes_per_step",
    "memory_norm": "memory/norm",
}
_AVERAGED = (
    "comm/bytes_per_step",
    "comm/dense_bytes_per_step",
    "comm/encode_seconds",
    "comm/exchange_seconds",
    "comm/decode_seconds",
    "comm/cpu_seconds",
    "comm/exposed_seconds",
    "comm/finite",
)
_MEASURED = ("comm/gain", "memory/norm", "comm/agree")


@dataclass(slots=True)
class BucketRecord:
    """One bucket in one step, filled by the thread that works on it. What was not measured is None.

    >>> BucketRecord("b0", 100, 400, 0.1, 0.2, 0.3).gain is None
    True
    """

    bucket: str
    wire_bytes: int  # this rank sent
    dense_bytes: int  # a plain all-reduce of the same bucket would have sent
    encode_seconds: float
    exchange_seconds: float
    decode_seconds: float
    cpu_seconds: float = 0.0  # processor time of the thread that worked on it
    gain: float | None = None  # energy of what was sent over energy of what was offered
    memory_norm: float | None = None  # of what stays behind
    agree: bool | None = None  # whether all ranks got the same bits


class Meter:
    """Counts every step, and tells its sinks about every `every`-th.

    Bytes and seconds are always counted, with or without sinks. Values that cost a pass over the data (gain, norm of
    the memory, agreement) are wanted on every `sample_every`-th step, and only if a sink listens: `samples` says when.
    Sinks see them if that step is also a multiple of `every`, so let one of the two be a multiple of the other.

    >>> from thinwire.reduce import Records
    >>> records = Records()
    >>> meter = Meter(sinks=[records], every=10)
    >>> for step in range(20):
    ...     meter.record(BucketRecord("b0", 100, 400, 0.001, 0.002, 0.001))
    ...     meter.record(BucketRecord("b1", 50, 200, 0.001, 0.002, 0.001))
    ...     meter.finish_step(step, exposed_seconds=0.003, finite=True, recipe="qsgd:8|all_gather")
    >>> meter.stats()["comm/bytes_total"], meter.stats()["comm/ratio"]
    (3000.0, 4.0)
    >>> [entry["step"] for entry in records.entries]
    [0, 10]
    """

    last: dict[str, float]  # metrics of the last finished step, without those of its buckets
    recipe: str  # what that step was sent with
    _open: list[BucketRecord]
    _steps: int
    _totals: dict[str, float]
    _measured: dict[str, float]

    def __init__(self, *, sinks: Sequence[Sink] = (), every: int = 1, sample_every: int = 50) -> None:
        if every < 1 or sample_every < 1:
            raise OptionError(
                f"every and sample_every count steps, got {every} and {sample_every}: give 1 or more; "
                "a meter without sinks tells nobody"
            )
        self.every = every
        self.sample_every = sample_every
        self.sampling: bool | None = None  # what all ranks agreed on: often only rank 0 has sinks, and all must measure
        self._lock = threading.Lock()
        self._sinks: list[Sink] = []
        for sink in sinks:
            self.add_sink(sink)
        self.reset()

    # --------------------------------------------------------------------------------------------------- sinks

    def add_sink(self, sink: Sink) -> None:
        """From now on `sink.log(metrics, step)` is called; a sink that is already here is not called twice."""
        if isinstance(sink, type) or not callable(getattr(sink, "log", None)):
            raise OptionError(f"{sink!r} is not a sink: give an object with log(metrics, step) and close()")
        with self._lock:
            if not any(known is sink for known in self._sinks):
                self._sinks.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Call this sink no more. It is not closed; nothing happens if it was not here, or was dropped."""
        with self._lock:
            self._sinks = [known for known in self._sinks if known is not sink]

    @property
    def active(self) -> bool:
        """Whether anyone listens."""
        return bool(self._sinks)

    def samples(self, step: int) -> bool:
        """Whether this step should measure what is costly.

        >>> Meter().samples(0)
        False
        """
        sampling = self.active if self.sampling is None else self.sampling
        return sampling and step % self.sample_every == 0

    # ------------------------------------------------------------------------------------------------ counting

    def record(self, record: BucketRecord) -> None:
        """Take one bucket of the step under way, from any thread. The record belongs to the meter now."""
        with self._lock:
            self._open.append(record)

    def finish_step(self, step: int, *, exposed_seconds: float, finite: bool, recipe: str) -> None:
        """Close the step: what was recorded since the last call is its buckets.

        `exposed_seconds` is the time in which training waited for the network; `finite` is False where a loss scaler
        skips the step.
        """
        with self._lock:
            records, self._open = self._open, []
            metrics = {_STEP_NAMES.get(key, f"comm/{key}"): value for key, value in _together(records).items()}
            metrics["comm/exposed_seconds"] = float(exposed_seconds)
            metrics["comm/finite"] = float(finite)
            self._steps += 1
            for name in _AVERAGED:
                self._totals[name] += metrics[name]
            self._measured.update({name: metrics[name] for name in _MEASURED if name in metrics})
            self.last, self.recipe = metrics, recipe
            sinks = list(self._sinks) if step % self.every == 0 else []
        if sinks:  # without the lock: a slow sink stops no other thread, and a sink may ask for stats()
            self._tell(sinks, {**metrics, **_by_bucket(records)}, step)

    def _tell(self, sinks: list[Sink], metrics: dict[str, float], step: int) -> None:
        for sink in sinks:
            try:
                sink.log(dict(metrics), step)  # a copy each: what one sink does to it, no other sees
            except Exception as problem:  # a full disk ends the log, not the training
                self.remove_sink(sink)
                _log.warning("sink %r failed at step %d and is told no more: %r", sink, step, problem)

    # ------------------------------------------------------------------------------------------------- reading

    def stats(self) -> dict[str, float]:
        """The run so far: means over all finished steps, totals, and of measured values the last one.

        `comm/ratio` is that of the totals, `comm/finite` the share of steps that were finite.
        """
        with self._lock:
            steps, totals = self._steps, self._totals
            return {
                "comm/steps": float(steps),
                "comm/overflow_steps": steps - totals["comm/finite"],
                "comm/bytes_total": totals["comm/bytes_per_step"],
                **{name: total / max(steps, 1) for name, total in totals.items()},
                "comm/ratio": _ratio(totals["comm/dense_bytes_per_step"], totals["comm/bytes_per_step"]),
                **self._measured,
            }

    def reset(self) -> None:
        """Count from zero; records of an unfinished step are dropped, sinks stay."""
        with self._lock:
            self._open, self._steps = [], 0
            self._totals, self._measured = dict.fromkeys(_AVERAGED, 0.0), {}
            self.last, self.recipe = {}, ""


def _ratio(dense: float, wire: float) -> float:
    """How many times less than plain DDP; a group of one rank sends nothing either way."""
    return dense / wire if wire else 1.0


def _together(records: Sequence[BucketRecord]) -> dict[str, float]:
    """What records come to; gain, norm and agreement only if one of them carries it."""
    wire = sum(record.wire_bytes for record in records)
    dense = sum(record.dense_bytes for record in records)
    found = {
        "bytes": float(wire),
        "dense_bytes": float(dense),
        "ratio": _ratio(dense, wire),
        "encode_seconds": math.fsum(record.encode_seconds for record in records),
        "exchange_seconds": math.fsum(record.exchange_seconds for record in records),
        "decode_seconds": math.fsum(record.decode_seconds for record in records),
        "cpu_seconds": math.fsum(record.cpu_seconds for record in records),
    }
    gains = [(record.gain, record.dense_bytes) for record in records if record.gain is not None]
    if gains:
        found["gain"] = _weighted_mean(gains)
    norms = [record.memory_norm for record in records if record.memory_norm is not None]
    if norms:
        found["memory_norm"] = math.hypot(*norms)
    agreements = [record.agree for record in records if record.agree is not None]
    if agreements:
        found["agree"] = float(all(agreements))
    return found


def _weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    weight = sum(weight for _, weight in pairs)
    if not weight:  # one rank: a plain all-reduce would have sent nothing
        return math.fsum(value for value, _ in pairs) / len(pairs)
    return math.fsum(value * weight for value, weight in pairs) / weight


def _by_bucket(records: Sequence[BucketRecord]) -> dict[str, float]:
    buckets: dict[str, list[BucketRecord]] = {}
    for record in records:  # a bucket that is worked on in parts is still one bucket
        buckets.setdefault(record.bucket, []).append(record)
    return {
        f"bucket/{name}/{key}": value
        for name, parts in buckets.items()
        for key, value in _together(parts).items()
        if key != "dense_bytes"
    }
