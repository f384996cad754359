"""The examples run as their first lines say, and show what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_launch_line_is_on_top(path: Path) -> None:
    launcher = r"(python|torchrun --nproc-per-node \d)"
    assert re.search(rf"^{launcher} examples/{path.name}", path.read_text().split('"""')[1], re.MULTILINE)


def test_compress_one_tensor_keeps_its_promises() -> None:
    head, *rows = run("compress_one_tensor.py", "100000").splitlines()
    assert head.split()[0] == "codec"
    assert len(rows) == 8
    for row in rows:
        _, _, _, error, promised = row.split()
        assert float(error) <= 1.2 * float(promised), row  # a bound on the expectation, and this is one draw


@pytest.mark.parametrize(
    ("recipe", "written", "at_least"),
    [
        ("two-shot-2", "rotated:2|two_shot:3", 10),
        pytest.param("threshold-k", "error_feedback|threshold_k:0.01|bf16|all_gather", 50, marks=pytest.mark.slow),
        pytest.param("auto", "fp32|all_reduce", 1, marks=pytest.mark.slow),
    ],
)
def test_the_reducer_trains_without_ddp(recipe: str, written: str, at_least: float) -> None:
    shown = run("reducer_minimal.py", "--recipe", recipe, "--steps", "50", launcher=TORCHRUN)
    first, last = (float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", shown))
    assert last < 0.7 * first
    told = re.search(r"^(\S+) on 2 ranks\n  ([\d,]+) bytes a step, ([\d.]+) x fewer than dense$", shown, re.MULTILINE)
    assert told is not None, shown
    assert recipe == "auto" or told[1] == written  # auto may find that compression pays here
    assert float(told[3]) >= at_least


@pytest.mark.parametrize(
    ("preset", "at_most"),
    [("diloco-1", 0.4), pytest.param("sparseloco", 0.2, marks=pytest.mark.slow)],
)
def test_local_steps_train_and_end_alike(preset: str, at_most: float) -> None:
    shown = run("local_steps_minimal.py", "--preset", preset, "--steps", "100", launcher=TORCHRUN)
    first, *_, last = (float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", shown))
    assert last < 0.7 * first
    ends = re.findall(r"rank \d ends with weights that add up to (-?\d+\.\d+)", shown)
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert re.search(r"LocalSteps\(every=10 .*, rank 0 of 2, round 11, step 101\)", shown)
    told = re.search(r"([\d.]+) bits a parameter and step", shown)
    assert told is not None, shown
    assert float(told[1]) < at_most


@pytest.mark.slow
def test_error_feedback_loop_trains_and_needs_its_memory() -> None:
    shown = run("error_feedback_loop.py") + run("error_feedback_loop.py", "threshold_k:0.01|bf16|all_gather")
    sizes = [int(size.replace(",", "")) for size in re.findall(r": ([\d,]+) bytes", shown)]
    losses = [float(loss) for loss in re.findall(r"step 200  loss ([\d.]+)", shown)]
    starts = [float(loss) for loss in re.findall(r"step   0  loss ([\d.]+)", shown)]
    assert sizes[1] == sizes[2] < sizes[0] / 50
    dense, remembering, forgetting = losses
    assert dense < 0.1 * starts[0]
    assert remembering < 1.1 * dense
    assert forgetting > 1.2 * remembering
