"""Sinks keep what they are told: lines survive a kill, files of the user survive us, and missing packages are named."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire import OptionError, StateError
from thinwire.reduce import BucketRecord, JsonLines, Meter, Records, TensorBoard


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ JSON lines


def test_every_line_is_one_step(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first" / "metrics.jsonl"
    before = time.time()
    with JsonLines(path) as sink:
        for step in range(3):
            sink.log({"comm/ratio": 2.0**step, 'bucket/"ä"\n/bytes': 1.0}, step)
    found = lines(path)
    assert [line.pop("step") for line in found] == [0, 1, 2]
    assert all(before <= line.pop("time") <= time.time() for line in found)
    assert found == [{"comm/ratio": 2.0**step, 'bucket/"ä"\n/bytes': 1.0} for step in range(3)]


def test_lines_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLines(str(path)) as sink:
        for step in range(3):
            sink.log({"comm/ratio": 1.0}, step)
            assert len(lines(path)) == step + 1


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as sink:
        sink.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e308, "e": 3}, 0)
    (line,) = lines(path)
    assert [line[name] for name in "abcde"] == [None, None, None, 1e308, 3.0]


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "precious.jsonl"
    path.write_text("precious\n")
    with pytest.raises(OptionError, match="append=True"):
        JsonLines(path)
    assert path.read_text() == "precious\n"


def test_append_adds_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for step in range(3):
        with JsonLines(path, append=True) as sink:
            sink.log({}, step)
    assert [line["step"] for line in lines(path)] == [0, 1, 2]


def test_append_after_a_cut_line_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "comm/ra')
    with JsonLines(path, append=True) as sink:
        sink.log({}, 2)
    whole, cut, added = path.read_text().splitlines()
    assert (whole, cut) == ('{"step": 0}', '{"step": 1, "comm/ra')
    assert json.loads(added)["step"] == 2


def test_a_path_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for append in (False, True):
        with pytest.raises(OptionError, match="is a folder: give the path of a file"):
            JsonLines(tmp_path, append=append)
        with pytest.raises(OptionError, match="give another path"):
            JsonLines(tmp_path / "file" / "run.jsonl", append=append)
        with pytest.raises(OptionError, match="give another path"):
            JsonLines(tmp_path / ("x" * 300), append=append)


def test_a_closed_file_takes_no_more(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(StateError, match="append=True"):
        sink.log({}, 0)


def test_a_full_disk_costs_the_log_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")  # every write to it fails with "no space left on device"
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    meter = Meter()
    with JsonLines(full, append=True) as sink:
        meter.add_sink(sink)
        for step in range(3):
            meter.finish_step(step, exposed_seconds=0.0, finite=True, recipe="all_reduce")
    (warning,) = caplog.records
    assert "JsonLines('/dev/full')" in warning.getMessage()
    assert meter.stats()["comm/steps"] == 3.0


WRITER = """
import sys
from thinwire.reduce import BucketRecord, JsonLines, Meter

meter = Meter(sinks=[JsonLines(sys.argv[1])])
step = 0
while True:
    for bucket in range(100):  # lines beyond the size of any buffer
        meter.record(BucketRecord(f"bucket{bucket}", 100, 400, 0.1, 0.2, 0.3))
    meter.finish_step(step, exposed_seconds=0.1, finite=True, recipe="all_reduce")
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    step += 1
"""


def test_a_killed_run_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        heard = [int(writer.stdout.readline()) for _ in range(50)]
        writer.send_signal(signal.SIGKILL)
        heard += [int(line) for line in writer.stdout if line.endswith("\n")]
        assert writer.wait(timeout=30) == -signal.SIGKILL
    finally:
        writer.kill()
        writer.wait()
    *whole, cut = path.read_text().split("\n")  # after the last newline there is nothing, or a line that was not done
    assert len(whole) >= len(heard) >= 50
    found = [json.loads(line) for line in whole]
    assert [line["step"] for line in found] == list(range(len(found)))
    assert all(line["bucket/bucket99/bytes"] == 100.0 and line["comm/bytes_per_step"] == 10_000.0 for line in found)

    with JsonLines(path, append=True) as sink:  # and the run that is resumed writes on
        sink.log({"comm/ratio": 1.0}, len(found))
    resumed = path.read_text().splitlines()
    assert json.loads(resumed[-1])["step"] == len(found)
    assert len(resumed) == len(found) + 1 + bool(cut)


# ----------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'thinwire[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "runs" / "first"
    with TensorBoard(folder) as sink:
        meter = Meter(sinks=[sink])
        for step in range(3):
            meter.record(BucketRecord("b0", 100, 400 * (step + 1), 0.1, 0.2, 0.3, gain=0.5))
            meter.finish_step(step, exposed_seconds=0.1, finite=True, recipe="all_reduce")
    events = EventAccumulator(str(folder)).Reload()
    assert {"comm/ratio", "comm/gain", "bucket/b0/bytes"} <= set(events.Tags()["scalars"])
    assert [(point.step, point.value) for point in events.Scalars("comm/ratio")] == [(0, 4.0), (1, 8.0), (2, 12.0)]


def test_a_closed_tensorboard_begins_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'thinwire[tensorboard]'")
    sink = TensorBoard(tmp_path / "run")
    sink.close()
    sink.close()
    with pytest.raises(StateError, match="closed"):
        sink.log({"comm/ratio": 1.0}, 0)
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_tensorboard_on_a_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'thinwire[tensorboard]'")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="give another path"):
        TensorBoard(tmp_path / "file")


def test_a_missing_tensorboard_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # None makes its import fail
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(OptionError, match=r"pip install 'thinwire\[tensorboard\]'"):
        TensorBoard(tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------- Records


def test_records_keep_the_last_entries() -> None:
    with Records(keep=3) as sink:
        for step in range(10):
            sink.log({"even": 1.0} if step % 2 == 0 else {"odd": 1.0}, step)
    assert sink.values("step") == [7, 8, 9]
    assert sink.values("even") == [1.0]
    assert sink.values("never") == []


def test_records_keep_a_copy() -> None:
    sink = Records()
    metrics = {"a": 1.0}
    sink.log(metrics, 0)
    metrics["a"] = 2.0
    assert sink.values("a") == [1.0]


def test_records_of_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="1 or more"):
        Records(keep=0)


@pytest.mark.parametrize("build", [lambda path: Records(), lambda path: JsonLines(path / "run.jsonl")])
def test_closing_twice_is_fine(tmp_path: Path, build: Callable[[Path], Records | JsonLines]) -> None:
    with build(tmp_path) as sink:
        sink.log({"a": 1.0}, 0)
        sink.close()
    sink.close()
