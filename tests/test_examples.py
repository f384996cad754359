"""The examples run as their first lines say, and show what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
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
