"""Networks measured by real processes; profiles of real models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.errors import OptionError
from thinwire.lab.plan.probe import probe_emulated
from thinwire.predict.network import COLLECTIVES, NetworkModel
from thinwire.predict.workload import Profile, measured_profile, model_named
from thinwire.reduce.buckets import Layout, Parameter, one_dimensional_or_tiny


def test_an_emulated_network_is_measured() -> None:
    """Paced, so that it runs everywhere: collectives there end when the book says."""
    for seconds in (12, 40):  # a busy machine gets no further than small messages in the usual time
        events = list[str]()
        network = probe_emulated(
            "50mbit,5ms",
            workers=2,
            method="paced",
            seconds=seconds,
            pairs=True,
            on_event=lambda event: events.append(event["event"]),  # noqa: B023 (called before the next turn)
        )
        if network.fits["swap"].points[-1][0] >= 1 << 20:
            break
    assert network.ranks == 2
    assert set(network.fits) == set(COLLECTIVES)
    swap = network.fits["swap"]
    assert swap.points[0][0] == 1024
    assert swap.points[-1][0] >= 1 << 20
    rate = 8e-6 / network.fits["all_reduce"].regimes[-1].byte_seconds
    assert (
        25 < rate < 75
    )  # of 50: with two ranks a ring sends each byte once; what a busy machine adds is not the network's
    assert list(network.pairs) == ["0-1"]
    assert events.count("network") == 1
    assert events.count("probing") > 20
    again = NetworkModel.from_dict(network.as_dict())
    assert again.cost("all_gather", 1e5, ranks=2) == network.cost("all_gather", 1e5, ranks=2)


def test_torchrun_measures_its_ranks(tmp_path: Path) -> None:
    out = tmp_path / "network.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire"]
    done = subprocess.run(
        [*command, "probe", "--seconds", "3", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    network = NetworkModel.load(str(out))
    assert network.ranks == 2
    assert done.stdout.count("written to") == 1  # by one rank


def test_one_rank_is_no_network() -> None:
    with pytest.raises(OptionError, match="at least two ends"):
        probe_emulated("50mbit,5ms", workers=1)


# ----------------------------------------------------------------------------------------------------- profiles


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).square().mean()
        return out


def test_a_profile_has_the_buckets_of_ddp_and_all_parameters() -> None:
    x = torch.randn(64, 512)
    profile = measured_profile("net", Net(), lambda model: model(x), bucket_mb=1.0)
    assert profile.measured
    assert profile.parameters == 4 * (512 * 512 + 512)
    assert len(profile.buckets) >= 3
    ready = [bucket.ready for bucket in profile.buckets]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0
    assert ready[0] < 0.95
    assert profile.forward > 0
    assert profile.backward > 0
    assert sum(bucket.exact for bucket in profile.buckets) == 4 * 512
    assert Profile.from_dict(json.loads(json.dumps(profile.as_dict()))) == profile
    known = [Parameter.of(name, tensor, one_dimensional_or_tiny) for name, tensor in Net().named_parameters()]
    planned = Layout.planned(known, first=1 << 20, cap=1 << 20)
    assert sum(bucket.numel + bucket.exact_numel for bucket in planned.buckets) == profile.parameters


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(OptionError, match="no parameters"):
        measured_profile("nothing", nn.Identity(), lambda model: torch.zeros(1, requires_grad=True).sum())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def build(): return 5", "must return a model and a function"),
        ("def build(): raise KeyError('x')", "failed: KeyError"),
        ("def other(): pass", "there is no"),
        ("import nothing_like_this", "there is no"),
    ],
)
def test_a_model_function_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    name = f"made_up_{abs(hash(source)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(source + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=said):
        model_named(f"{name}:build")
