"""What a meter counts is the sum of what it was told, whatever threads and sinks do meanwhile."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import OptionError
from thinwire.reduce import BucketRecord, Meter, Records

STEP_NAMES = {
    "comm/bytes_per_step",
    "comm/dense_bytes_per_step",
    "comm/ratio",
    "comm/encode_seconds",
    "comm/exchange_seconds",
    "comm/decode_seconds",
    "comm/cpu_seconds",
    "comm/exposed_seconds",
    "comm/finite",
}
MEASURED_NAMES = {"comm/gain", "memory/norm", "comm/agree"}
BUCKET_KEYS = {"bytes", "encode_seconds", "exchange_seconds", "decode_seconds", "cpu_seconds", "ratio"}
MEASURED_KEYS = {"gain", "memory_norm", "agree"}


def record(bucket: str = "b0", wire_bytes: int = 100, dense_bytes: int = 400, **measured: Any) -> BucketRecord:
    return BucketRecord(bucket, wire_bytes, dense_bytes, 0.25, 0.5, 0.125, 0.0625, **measured)


def finish(meter: Meter, step: int = 0, *, exposed_seconds: float = 0.0, finite: bool = True) -> None:
    meter.finish_step(step, exposed_seconds=exposed_seconds, finite=finite, recipe="qsgd:8|all_gather")


class Failing:
    """A sink whose disk is full from `good` entries on."""

    def __init__(self, good: int = 0) -> None:
        self.good = good
        self.calls = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise OSError("no space left on device")

    def close(self) -> None: ...

    def __repr__(self) -> str:
        return "Failing()"


# ------------------------------------------------------------------------------------------------------------ sums

sizes = st.integers(0, 2**40)
seconds = st.floats(0, 100)
runs = st.lists(
    st.tuples(
        st.lists(st.builds(BucketRecord, st.sampled_from("abc"), sizes, sizes, seconds, seconds, seconds), max_size=6),
        seconds,
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(runs)
def test_totals_are_the_sums_of_the_records(run: list[tuple[list[BucketRecord], float, bool]]) -> None:
    meter = Meter()
    for step, (records, exposed, finite) in enumerate(run):
        for each in records:
            meter.record(each)
        finish(meter, step, exposed_seconds=exposed, finite=finite)
    everything = [each for records, _, _ in run for each in records]
    wire = sum(each.wire_bytes for each in everything)
    dense = sum(each.dense_bytes for each in everything)
    stats = meter.stats()
    assert stats["comm/bytes_total"] == wire
    assert stats["comm/steps"] == len(run)
    assert stats["comm/overflow_steps"] == sum(not finite for _, _, finite in run)
    assert stats["comm/bytes_per_step"] == wire / len(run)
    assert stats["comm/dense_bytes_per_step"] == dense / len(run)
    assert stats["comm/ratio"] == (dense / wire if wire else 1.0)
    assert stats["comm/exposed_seconds"] == pytest.approx(sum(exposed for _, exposed, _ in run) / len(run))
    for phase in ("encode_seconds", "exchange_seconds", "decode_seconds"):
        assert stats[f"comm/{phase}"] == pytest.approx(sum(getattr(each, phase) for each in everything) / len(run))
    assert stats.keys() == STEP_NAMES | {"comm/bytes_total", "comm/steps", "comm/overflow_steps"}


def test_the_numbers_of_one_step() -> None:
    sink = Records()
    meter = Meter(sinks=[sink])
    meter.record(record("b0", 100, 400, gain=0.5, memory_norm=3.0, agree=True))
    meter.record(record("b1", 300, 1200, gain=0.9, memory_norm=4.0, agree=True))
    meter.record(record("b2", 0, 400))
    finish(meter, 7, exposed_seconds=0.75)
    step = {
        "comm/bytes_per_step": 400.0,
        "comm/dense_bytes_per_step": 2000.0,
        "comm/ratio": 5.0,
        "comm/encode_seconds": 0.75,
        "comm/exchange_seconds": 1.5,
        "comm/decode_seconds": 0.375,
        "comm/cpu_seconds": 0.1875,
        "comm/exposed_seconds": 0.75,
        "comm/gain": pytest.approx((0.5 * 400 + 0.9 * 1200) / 1600),  # b2 was not measured and has no say
        "memory/norm": 5.0,
        "comm/agree": 1.0,
        "comm/finite": 1.0,
    }
    assert meter.last == step
    (entry,) = sink.entries
    assert {name: value for name, value in entry.items() if not name.startswith("bucket/")} == {"step": 7, **step}
    assert entry["bucket/b1/bytes"] == 300.0
    assert entry["bucket/b1/ratio"] == 4.0
    assert entry["bucket/b1/gain"] == 0.9
    assert entry["bucket/b1/memory_norm"] == 4.0
    assert entry["bucket/b1/agree"] == 1.0
    assert entry["bucket/b2/ratio"] == 1.0
    assert meter.recipe == "qsgd:8|all_gather"


def test_only_what_was_measured_is_there() -> None:
    sink = Records()
    meter = Meter(sinks=[sink])
    meter.record(record("plain"))
    meter.record(record("measured", gain=0.0, memory_norm=0.0, agree=False))
    finish(meter)
    names = sink.entries[0].keys()
    assert {name for name in names if not name.startswith("bucket/")} == {"step"} | STEP_NAMES | MEASURED_NAMES
    assert {name for name in names if name.startswith("bucket/plain/")} == {f"bucket/plain/{k}" for k in BUCKET_KEYS}
    assert {name for name in names if name.startswith("bucket/measured/")} == {
        f"bucket/measured/{key}" for key in BUCKET_KEYS | MEASURED_KEYS
    }
    finish(meter, 1)
    assert meter.last.keys() == STEP_NAMES


@pytest.mark.parametrize(("wire", "dense", "ratio"), [(100, 400, 4.0), (400, 100, 0.25), (0, 400, 1.0), (0, 0, 1.0)])
def test_ratio_is_dense_over_wire(wire: int, dense: int, ratio: float) -> None:
    meter = Meter()
    meter.record(record(wire_bytes=wire, dense_bytes=dense))
    finish(meter)
    assert meter.last["comm/ratio"] == meter.stats()["comm/ratio"] == ratio


def test_a_big_step_counts_more_in_the_ratio_of_the_run() -> None:
    meter = Meter()
    for step, wire in enumerate((1000, 10)):
        meter.record(record(wire_bytes=wire, dense_bytes=1000))
        finish(meter, step)
    assert meter.stats()["comm/ratio"] == 2000 / 1010


def test_one_disagreeing_bucket_is_a_disagreeing_step() -> None:
    meter = Meter()
    meter.record(record("b0", agree=True))
    meter.record(record("b1", agree=False))
    finish(meter)
    assert meter.last["comm/agree"] == 0.0


def test_gain_of_a_single_rank_has_no_weights() -> None:
    meter = Meter()
    meter.record(record("b0", 0, 0, gain=0.5))
    meter.record(record("b1", 0, 0, gain=1.0))
    finish(meter)
    assert meter.last["comm/gain"] == 0.75


def test_the_norm_of_huge_memories_does_not_overflow() -> None:
    meter = Meter()
    meter.record(record("b0", memory_norm=3e200))
    meter.record(record("b1", memory_norm=4e200))
    finish(meter)
    assert meter.last["memory/norm"] == pytest.approx(5e200)


def test_parts_of_one_bucket_are_one_bucket() -> None:
    sink = Records()
    meter = Meter(sinks=[sink])
    meter.record(record("b0", 100, 400))
    meter.record(record("b0", 100, 800))
    finish(meter)
    assert sink.entries[0]["bucket/b0/bytes"] == 200.0
    assert sink.entries[0]["bucket/b0/ratio"] == 6.0


def test_stats_remember_the_last_measurement() -> None:
    meter = Meter()
    meter.record(record(gain=0.25, memory_norm=2.0, agree=False))
    finish(meter, 0)
    meter.record(record(gain=0.5, agree=True))
    finish(meter, 1)
    meter.record(record())
    finish(meter, 2)
    stats = meter.stats()
    assert (stats["comm/gain"], stats["memory/norm"], stats["comm/agree"]) == (0.5, 2.0, 1.0)


def test_a_meter_that_saw_nothing_has_numbers() -> None:
    stats = Meter().stats()
    assert stats["comm/ratio"] == 1.0
    assert all(math.isfinite(value) for value in stats.values())
    assert stats["comm/steps"] == stats["comm/bytes_per_step"] == stats["comm/overflow_steps"] == 0.0


def test_a_step_that_overflowed_is_counted_and_told() -> None:
    sink = Records()
    meter = Meter(sinks=[sink])
    for step, finite in enumerate((True, False, True, True)):
        finish(meter, step, finite=finite)
    assert meter.stats()["comm/overflow_steps"] == 1.0
    assert meter.stats()["comm/finite"] == 0.75
    assert sink.values("comm/finite") == [1.0, 0.0, 1.0, 1.0]


def test_a_new_step_starts_empty() -> None:
    meter = Meter()
    meter.record(record())
    finish(meter, 0)
    finish(meter, 1)
    assert meter.last["comm/bytes_per_step"] == 0.0


def test_reset_forgets_all_but_the_sinks() -> None:
    sink = Records()
    meter = Meter(sinks=[sink])
    meter.record(record(gain=0.5))
    finish(meter)
    meter.record(record())
    meter.reset()
    assert meter.stats() == Meter().stats()
    assert meter.last == {}
    assert meter.recipe == ""
    finish(meter, 1)
    assert sink.values("comm/bytes_per_step") == [100.0, 0.0]


# --------------------------------------------------------------------------------------------------------- threads


def test_threads_lose_no_record() -> None:
    meter = Meter()
    begin = threading.Barrier(9)
    interval = sys.getswitchinterval()

    def lane(number: int) -> None:
        begin.wait()
        for _ in range(1000):
            meter.record(record(f"lane{number}", 1, 4))

    lanes = [threading.Thread(target=lane, args=(number,)) for number in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for each in lanes:
            each.start()
        begin.wait()
        for step in range(50):  # closing steps meanwhile
            finish(meter, step)
        for each in lanes:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    finish(meter, 50)
    assert meter.stats()["comm/bytes_total"] == 8000
    assert meter.stats()["comm/steps"] == 51


def test_a_step_is_not_closed_while_a_record_comes_in() -> None:
    """CPython may happen to append without interruption; this holds where it does not."""
    begun = threading.Event()

    class SlowList(list[BucketRecord]):
        def append(self, each: BucketRecord) -> None:
            begun.set()
            time.sleep(0.05)
            super().append(each)

    meter = Meter()
    meter._open = SlowList()
    lane = threading.Thread(target=meter.record, args=(record(),))
    lane.start()
    assert begun.wait(timeout=10)
    finish(meter)
    lane.join()
    assert meter.stats()["comm/bytes_total"] == 100.0


def test_a_sink_may_ask_the_meter() -> None:
    class Asking(Records):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            super().log(meter.stats(), step)
            meter.record(record())  # must not wait for the step that is being told
            meter.remove_sink(self)

    sink = Asking()
    meter = Meter(sinks=[sink])
    worker = threading.Thread(target=finish, args=(meter,), daemon=True)
    worker.start()
    worker.join(timeout=10)
    assert not worker.is_alive()
    assert sink.values("comm/steps") == [1.0]
    assert not meter.active


def test_memory_does_not_grow_with_steps() -> None:
    meter = Meter(sinks=[Records(keep=10)], sample_every=1)

    def run(steps: int) -> int:
        for step in range(steps):
            for bucket in range(4):
                meter.record(record(f"b{bucket}", gain=0.5, memory_norm=1.0, agree=True))
            finish(meter, step, finite=step % 2 == 0)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = run(100)
        grown = run(2000) - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # ten bytes a step would be that much


# ----------------------------------------------------------------------------------------------------------- sinks


def test_sinks_hear_every_nth_step_and_stats_count_all() -> None:
    sink = Records()
    meter = Meter(sinks=[sink], every=3)
    for step in range(8):
        meter.record(record())
        finish(meter, step)
    assert sink.values("step") == [0, 3, 6]
    assert meter.stats()["comm/bytes_total"] == 800.0


def test_samples_are_wanted_if_someone_listens() -> None:
    meter = Meter(sample_every=4)
    assert not meter.active
    assert not any(meter.samples(step) for step in range(10))
    sink = Records()
    meter.add_sink(sink)
    assert meter.active
    assert [step for step in range(10) if meter.samples(step)] == [0, 4, 8]
    meter.remove_sink(sink)
    assert not meter.active


def test_a_sink_is_there_once_and_can_be_removed_twice() -> None:
    sink, equal = Records(), Records()
    meter = Meter(sinks=[sink])
    meter.add_sink(sink)
    meter.add_sink(equal)
    finish(meter, 0)
    meter.remove_sink(sink)
    meter.remove_sink(sink)
    finish(meter, 1)
    assert (len(sink.entries), len(equal.entries)) == (1, 2)


def test_a_failing_sink_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    before, failing, after = Records(), Failing(good=1), Records()
    meter = Meter(sinks=[before, failing, after])
    with caplog.at_level(logging.DEBUG):
        for step in range(5):
            meter.record(record())
            finish(meter, step)
    assert failing.calls == 2
    assert len(before.entries) == len(after.entries) == 5
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("thinwire.reduce.meters", "WARNING")
    assert "Failing()" in warning.getMessage()
    assert "no space left" in warning.getMessage()
    assert meter.stats()["comm/bytes_total"] == 500.0
    meter.remove_sink(failing)  # its owner need not know


def test_what_a_sink_does_to_its_metrics_no_other_sees() -> None:
    class Clearing(Records):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            assert isinstance(metrics, dict)
            metrics.clear()

    sink = Records()
    meter = Meter(sinks=[Clearing(), sink])
    finish(meter)
    assert sink.entries[0].keys() >= STEP_NAMES
    assert meter.last.keys() == STEP_NAMES


@pytest.mark.parametrize("options", [{"every": 0}, {"sample_every": 0}, {"every": -1}])
def test_steps_are_counted_from_one(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="1 or more"):
        Meter(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mistake", [Records, "run.jsonl", None])
def test_what_is_no_sink_is_refused_at_once(mistake: Any) -> None:
    with pytest.raises(OptionError, match=r"log\(metrics, step\)"):
        Meter(sinks=[mistake])


def test_observing_loads_no_tensorboard() -> None:
    script = "import sys, thinwire.reduce; print([m for m in sys.modules if 'tensorboard' in m or 'tensorflow' in m])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
