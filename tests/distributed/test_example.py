"""The DDP example runs under torchrun, as its first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.pool import ENVIRONMENT

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_minimal.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


def example(recipe: str) -> list[str]:
    return [str(EXAMPLE), "--recipe", recipe, "--steps", "50"]


def loss_in(line: str) -> float:
    match = re.fullmatch(r"step +\d+  loss ([\d.]+)", line)
    assert match is not None, line
    return float(match[1])


def test_it_stays_small() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("recipe", "written", "at_least"),
    [
        ("threshold-k", "error_feedback|threshold_k:0.01|bf16|all_gather", 50),
        pytest.param("bf16", "bf16|all_reduce", 1.9, marks=pytest.mark.slow),
    ],
)
def test_it_trains(recipe: str, written: str, at_least: float) -> None:
    done = run(*TORCHRUN, *example(recipe))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    *losses, told, size, waited, agreement = done.stdout.splitlines()
    first, last = map(loss_in, losses)
    assert last < 0.7 * first
    assert told == f"{written} on 2 ranks"
    numbers = re.fullmatch(r"  ([\d,]+) bytes a step, ([\d.]+) x fewer than plain DDP", size)
    assert numbers is not None, size
    assert int(numbers[1].replace(",", "")) > 0
    assert float(numbers[2]) > at_least
    assert re.fullmatch(r"  [\d.]+ ms a step in which training waited for the network", waited)
    assert re.fullmatch(r"  the ranks' weights agree: [\da-f]{8}", agreement)


def test_a_bad_recipe_is_one_line() -> None:
    """Alone it is all there is; under torchrun, which adds a report of its own, one line of each rank that spoke."""
    refusal = "there is no stage topk: did you mean top_k?"
    done = run(sys.executable, *example("topk:0.01|all_gather"))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{refusal}\n")
    done = run(*TORCHRUN, *example("topk:0.01|all_gather"))
    assert done.returncode != 0
    assert refusal in done.stderr
    assert f'File "{EXAMPLE}"' not in done.stderr  # no traceback of ours


@pytest.mark.parametrize(("algorithm", "codec"), [("dcd", "min_max:4,block=512"), ("allreduce", "fp32")])
def test_the_decentralised_example_learns(algorithm: str, codec: str) -> None:
    program = EXAMPLE.with_name("decentralized_minimal.py")
    done = run(*TORCHRUN, str(program), "--algorithm", algorithm, "--codec", codec, "--steps", "100")
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = (float(loss) for loss in re.findall(r"step +(?:0|100)  loss ([\d.]+)", done.stdout))
    average = re.search(r"loss ([\d.]+) of the average model", done.stdout)
    assert average is not None
    averaged = float(average[1])
    assert last < 0.8 * first
    assert averaged < 0.8 * first
    apart = [float(one) for one in re.findall(r"models ([\d.]+) apart", done.stdout)]
    assert (max(apart) == 0) == (algorithm == "allreduce")
