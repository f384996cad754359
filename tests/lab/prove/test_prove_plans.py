"""Which parts run on which machine, how options are checked, and what the result says in words."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from thinwire.errors import OptionError, RecipeError
from thinwire.lab.prove import hardware, words
from thinwire.lab.prove.contract import checks_of
from thinwire.lab.prove.hardware import parse_topology
from thinwire.lab.prove.part import Part
from thinwire.lab.prove.ratios import rows
from thinwire.lab.prove.run import plans, prove, result
from thinwire.lab.prove.settings import BENCHMARKED, MODELS, Settings
from thinwire.recipe.presets import PRESETS


@pytest.fixture(autouse=True)
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def machine(gpus: int, memory: float = 80.0) -> dict[str, Any]:
    device = {"name": "A100", "memory_gb": memory, "capability": "8.0"}
    return {"gpus": {"devices": [device] * gpus} if gpus else None}


def planned(gpus: int, settings: Settings | None = None) -> dict[str, str | None]:
    return {plan.name: plan.missing for plan in plans(settings or Settings(), gpus=gpus, machine=machine(gpus))}


def test_without_gpus_the_cpu_part_runs() -> None:
    found = planned(0)
    assert [name for name, missing in found.items() if missing is None] == [
        "kernels on the CPU",
        "DDP contract over gloo",
        "benchmark over gloo",
    ]
    assert {missing for missing in found.values() if missing} == {"no GPU here (torch sees no CUDA device)"}


def test_one_gpu_proves_kernels_but_not_nccl() -> None:
    found = planned(1)
    assert found["kernels on a GPU"] is None
    assert found["DDP contract over gloo"] is None
    assert found["DDP contract over NCCL"] == found["benchmark over NCCL"] == "one GPU here, and NCCL needs two"
    assert "kernels on the CPU" not in found


def test_two_gpus_prove_everything() -> None:
    assert planned(2) == {
        "kernels on a GPU": None,
        "DDP contract over NCCL": None,
        "benchmark over NCCL": None,
        "benchmark over NCCL without peer-to-peer": None,
    }


def test_a_torch_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert planned(2)["DDP contract over NCCL"] == "torch was built without NCCL"


def test_the_interpreter_only_if_asked() -> None:
    name = "Triton kernels in the interpreter"
    assert name not in planned(0)
    assert name in planned(0, Settings(interpret=True))


def test_kernels_run_on_each_model_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def run_processes(task: dict[str, Any], **options: Any) -> str:
        started.append({**task, **options})
        return "not started"

    monkeypatch.setattr("thinwire.lab.prove.parts.run_processes", run_processes)
    mixed = machine(3)
    mixed["gpus"]["devices"][1:] = [{"name": "H100", "memory_gb": 80.0, "capability": "9.0"}] * 2
    for plan in plans(Settings(), gpus=3, machine=mixed):
        assert plan.work(lambda word: None).problem == "not started"
    kernels, contract, benchmark, without_p2p = started
    assert kernels["devices"] == ["cuda:0", "cuda:1"]
    assert kernels["environment"]["TRITON_INTERPRET"] == "0"
    assert contract["processes"] == benchmark["processes"] == 3
    assert contract["device"] == benchmark["device"] == "cuda"
    assert contract["recipes"] == list(PRESETS)
    assert benchmark["recipes"] == list(BENCHMARKED)
    assert benchmark["model"] == "large"
    assert "NCCL_P2P_DISABLE" not in benchmark["environment"]
    assert without_p2p["environment"]["NCCL_P2P_DISABLE"] == "1"


def test_a_proof_on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes that only say what real ones would: every part gets its verdict, and nothing is missing."""
    gpus = {**machine(2)["gpus"], "pairs": 1, "peer_access": [[0, 1]], "nvlink": True, "links": {}, "driver": "1"}

    def run_processes(task: dict[str, Any], *, processes: int, on_event: Any, **options: Any) -> None:
        for rank in range(processes):
            for event in reports(task):
                on_event({"rank": rank, **event})

    def reports(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if task["part"] == "machine":
            yield {"event": "machine", "gpus": gpus}
        elif task["part"] == "kernels":
            yield {"event": "kernel", "kernel": "pack", "device": "cuda:0", "body": "gpu", "cases": 9, "problem": None}
        elif task["part"] == "contract":
            for recipe in task["recipes"]:
                for check in checks_of(recipe):
                    yield {"event": "check", "recipe": recipe, "check": check, "problem": None}
        else:
            for name in ("ddp", *task["recipes"]):
                yield {"event": "lap", "contender": name, "round": 0, "step_ms": 5.0}

    monkeypatch.setattr("thinwire.lab.prove.parts.run_processes", run_processes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("thinwire.lab.prove.hardware._nccl_version", lambda: "2.27.3")
    events: list[dict[str, Any]] = []
    found = prove(Settings(), on_event=events.append)
    assert found["device"] == "cuda"
    assert found["proved"] is True
    assert found["missing"] == []
    assert found["machine"]["gpus"] == gpus
    assert found["machine"]["nccl"] == "2.27.3"
    assert [part["verdict"] for part in found["parts"]] == ["proved"] * 5
    assert [event["name"] for event in events if event["event"] == "done"] == [p["name"] for p in found["parts"]]
    assert words.headline(found) == "Proved on GPUs: kernels and the DDP contract over NCCL"
    with pytest.raises(OptionError, match="--processes is 2 or less here"):
        prove(Settings(processes=4))


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(name="made up", total_memory=24 * 10**9, major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other == 2)
    said = {"topo": "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X ", "--query-gpu=driver_version": "550.1\n550.1\n"}
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda first, *more: said[first])
    found = hardware.describe_gpus(3)
    assert found["devices"] == [{"name": "made up", "memory_gb": 24.0, "capability": "8.6"}] * 3
    assert (found["driver"], found["pairs"], found["peer_access"]) == ("550.1", 3, [[0, 2], [1, 2]])
    assert (found["links"], found["nvlink"]) == ({"0-1": "PHB"}, False)


# --------------------------------------------------------------------------------------------------------- settings


def test_defaults_follow_the_hardware() -> None:
    settings = Settings()
    assert (settings.processes_on(0), settings.processes_on(1), settings.processes_on(4)) == (2, 2, 4)
    assert settings.processes_on(16) == 8
    assert Settings(processes=16).processes_on(16) == 16
    assert settings.model_on("cuda", gigabytes=80) == "large"
    assert settings.model_on("cuda", gigabytes=12) == "medium"
    assert settings.model_on("cpu") == "small"
    assert Settings(quick=True).model_on("cpu") == "tiny"
    assert Settings(model="huge").model_on("cpu") == "huge"
    assert Settings(steps=33).steps_on("cpu") == 30  # whole laps
    assert settings.contract_recipes == tuple(PRESETS)
    named = Settings(recipes=("bf16", "ef|top_k:0.1|all_gather"))
    assert named.contract_recipes == named.benchmark_recipes == named.recipes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "giant"}, "there is no model giant: choose tiny"),
        ({"steps": 3}, "--steps is 10 or more"),
        ({"processes": 1}, "--processes is from 2 to 64"),
        ({"processes": 65}, "--processes is from 2 to 64"),
        ({"timeout": 0.0}, "--timeout is from 10"),
        ({"timeout": float("nan")}, "--timeout is from 10"),
        ({"recipes": ("bf16", "bf16")}, "named twice"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Settings(**options)


def test_a_recipe_must_make_sense() -> None:
    with pytest.raises(RecipeError):
        Settings(recipes=("two-shot-5",))


def test_nccl_needs_a_gpu_for_each_process() -> None:
    with pytest.raises(OptionError, match="--processes is 2 or less here"):
        Settings(processes=3).processes_on(2)


def test_sizes_of_models_grow() -> None:
    assert list(MODELS.values()) == sorted(MODELS.values())
    assert all(width % 64 == 0 for _, width in MODELS.values())


# ------------------------------------------------------------------------------------------------------------ words


def test_what_is_missing_is_said_once_for_each_reason() -> None:
    parts = [
        Part("machine", "proved", 0.0, details={"processor": "p", "cores": 2, "gpus": None}),
        Part("kernels on a GPU", "not here", 0.0, "no GPU here"),
        Part("benchmark over NCCL", "not here", 0.0, "no GPU here"),
        Part("DDP contract over gloo", "failed", 1.0, "rank 1: x"),
    ]
    found = result(parts, device="cpu", settings=Settings())
    assert found["proved"] is False
    assert found["missing"] == ["kernels on a GPU: no GPU here", "benchmark over NCCL: no GPU here"]
    text = words.summary(found)
    assert "no GPU here: kernels on a GPU, benchmark over NCCL: not proved" in text
    assert "DDP contract over gloo: failed: rank 1: x" in text
    assert text.endswith("Not proved: DDP contract over gloo failed")


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that gets twice as slow changes times, not ratios."""
    laps = {"ddp": {n: 10.0 * 2**n for n in range(4)}, "bf16": {n: 5.0 * 2**n for n in range(4)}}
    [plain, ours] = rows(laps)
    assert plain["times_ddp"] == {"median": 1.0, "low": 1.0, "high": 1.0, "least": 1.0, "most": 1.0}
    assert ours["times_ddp"] == {"median": 2.0, "low": 2.0, "high": 2.0, "least": 2.0, "most": 2.0}
    assert ours["step_ms"]["least"] == 5.0
    assert ours["step_ms"]["most"] == 40.0


def test_the_topology_of_three_gpus() -> None:
    heads = "\t" + "\t".join(f"\x1b[4mGPU{n}" for n in range(3)) + "\tNIC0\tCPU Affinity\x1b[0m"
    lines = ["GPU0\t X \tNV4\tSYS\tPHB\t0-15", "GPU1\tNV4\t X \tPIX\tPHB\t0-15", "GPU2\tSYS\tPIX\t X \tPHB\t0-15"]
    legend = ["NIC0\tPHB\tPHB\tPHB\t X ", "", "Legend:", "  X    = Self", "  SYS  = Connection traversing PCIe"]
    assert parse_topology("\n".join([heads, *lines, *legend])) == {"0-1": "NV4", "0-2": "SYS", "1-2": "PIX"}
    assert parse_topology("") == {}
