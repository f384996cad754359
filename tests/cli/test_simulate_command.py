"""`thinwire simulate` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.command import thinwire_here


def thinwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_run_tells_a_table_json_and_a_page(tmp_path: Path) -> None:
    out, page = tmp_path / "s.json", tmp_path / "s.html"
    options = ["--workers", "6", "--algorithm", "dpsgd,dcd:4", "--recipe", "ddp", "--topology", "ring", "--steps", "4"]
    found = thinwire(*options, "--network", "three-regions", "--quiet", "--json", str(out), "--report", str(page))
    assert found.returncode == 0, found.stderr
    told = json.loads(out.read_text())
    assert [row["recipe"] for row in told["rows"]] == ["dpsgd@ring", "dcd:4@ring", "ddp"]
    assert all(row["curve"] for row in told["rows"])
    assert "dcd:4@ring" in found.stdout
    html = page.read_text()
    assert "thinwire simulate" in html
    for row in told["rows"]:
        assert f'data-value="{row["virtual_seconds"]}"' in html
    for point in told["growth"]:
        assert f'data-workers="{point["workers"]}"' in html


def test_time_alone_of_many_workers_goes_to_standard_output() -> None:
    found = thinwire_here(
        "simulate", "--cost-only", "--workers", "2000", "--parameters", "1000000", "--steps", "3", "--json", "-"
    )
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["rows"][0]["mode"] == "cost-only"
    assert told["virtual_seconds"] > 0.3


def test_nonsense_is_one_line_and_a_code() -> None:
    for options, word in [
        (["--network", "moon"], "moon"),
        (["--workers", "0"], "worker"),
        (["--algorithm", "sgd"], "sgd"),
        (["--churn", "60/6"], "--deadline"),
        (["--recipe", "two-shot-4,nonsense"], "nonsense"),
        (["--json", "/nowhere/x.json"], "/nowhere"),
    ]:
        found = thinwire_here("simulate", *options, "--steps", "2")
        assert found.returncode == 2
        assert len(found.stderr.strip().splitlines()) == 1
        assert word in found.stderr
