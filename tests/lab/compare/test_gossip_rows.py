"""`thinwire compare --algorithms`: decentralised rows beside the others, on a real emulated network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.errors import OptionError
from thinwire.lab.compare.contenders import Contender
from thinwire.lab.compare.gossips import Gossip, gossip_names
from thinwire.lab.compare.workloads import workload
from thinwire.lab.report import render_report

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
COMMAND = [sys.executable, "-m", "thinwire", "compare", "--workload", "mlp", "--probe-seconds", "0", "--lap", "5"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("gossip") / "result.json"
    options = ["--workers", "3", "--network", "200mbit,1ms", "--steps", "10", "--json", str(file), "--extra", "0"]
    options += ["--algorithms", "allreduce,dpsgd,dcd:4,ecd,choco:sign,naive:4", "--topology", "ring"]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text())


def test_every_row_is_there_and_says_what_it_is(result: Any) -> None:
    rows = {row["recipe"]: row for row in result["rows"]}
    names = ["ddp", "allreduce", "dpsgd@ring", "dcd:4@ring", "ecd@ring", "choco:sign@ring", "naive:4@ring"]
    assert list(rows) == names
    for name, row in rows.items():
        assert row["status"] == "finished"
        assert 0 < row["accuracy"] <= 1
        assert row["final_loss"] < 3
        if name == "ddp":
            assert "algorithm" not in row
            continue
        assert row["algorithm"] == name.partition("@")[0].partition(":")[0]
        assert row["topology"] == "ring"
        assert row["averaged_loss"] == pytest.approx(row["final_loss"])
        assert row["local_loss"] > 0
        assert (row["consensus_distance"] == 0) == (name == "allreduce")
        assert all("consensus_distance" in point for point in row["curve"])


def test_fewer_bits_are_fewer_bytes(result: Any) -> None:
    sent = {row["recipe"]: row["bytes_per_step"] for row in result["rows"]}
    assert sent["dcd:4@ring"] < 0.2 * sent["dpsgd@ring"]
    assert sent["choco:sign@ring"] < 0.4 * sent["dcd:4@ring"]
    assert sent["allreduce"] < 1.2 * sent["ddp"]


def test_allreduce_learns_what_ddp_learns(result: Any) -> None:
    loss = {row["recipe"]: row["final_loss"] for row in result["rows"]}
    assert loss["allreduce"] == pytest.approx(loss["ddp"], rel=1e-3)


def test_the_report_shows_them(result: Any, tmp_path: Path) -> None:
    page = render_report(result)
    assert "Decentralised training" in page
    drawn = page.partition('id="apart"')[2].partition("</figure>")[0]
    assert drawn.count("<polyline") == 5  # allreduce has no distance to draw
    assert "local loss" in page


def test_names() -> None:
    assert Contender.named("dcd:4@ring").gossip == Gossip("dcd", "min_max:4,block=512", "ring")
    assert Contender.named("dpsgd@torus").is_recipe is False
    assert gossip_names(("dcd", "dpsgd"), topology="star", codec="sign:64") == ("dcd:sign:64@star", "dpsgd@star")
    for name, sentence in [
        ("gcd:4@ring", "there is no algorithm gcd"),
        ("dcd:4@rings", "there is no topology rings"),
        ("dcd:99@ring", "bits must be 2 to 8"),
    ]:
        with pytest.raises(OptionError, match=sentence):
            Contender.named(name)


def test_skewed_shards_share_nothing_and_differ_in_kind() -> None:
    work = workload("mlp", skew=0.9)
    shards = [work._shard(rank, 4) for rank in range(4)]
    together = torch.cat(shards)
    assert len(set(together.tolist())) == len(together) > 0.99 * work.count()
    kinds = [torch.bincount(work.kinds()[shard], minlength=10).float() for shard in shards]
    largest = [float(count.sort(descending=True).values[:3].sum() / count.sum()) for count in kinds]
    assert min(largest) > 0.8  # three of ten kinds are most of what a rank has
    seen = torch.stack([work.batch(step, seed=0, rank=2, world_size=4)[1].bincount(minlength=10) for step in range(20)])
    assert torch.allclose(seen.sum(0) / seen.sum(), kinds[2] / kinds[2].sum(), atol=0.05)
    with pytest.raises(OptionError, match="from 0 to 1"):
        workload("mlp", skew=2)
