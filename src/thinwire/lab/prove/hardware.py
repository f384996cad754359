"""What a proof was made on: GPUs, driver, NCCL, how the GPUs reach each other, processor and versions."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from ..compare.machine import describe_machine


def describe_software() -> dict[str, Any]:
    """Processor, cores and versions; nothing here touches a GPU.

    >>> {"processor", "torch", "cuda", "nccl", "triton"} <= describe_software().keys()
    True
    """
    triton = importlib.util.find_spec("triton") is not None
    return {
        **describe_machine(),
        "triton": _version("triton") if triton else None,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "backends": [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()],
    }


def why_no_gpu() -> str:
    """Why torch has no GPU here: there is none, or torch was built without CUDA."""
    if torch.version.cuda is None and shutil.which("nvidia-smi") is not None:
        return "no GPU for torch here (it was built without CUDA: install a CUDA build of torch)"
    return "no GPU here (torch sees no CUDA device)"


def describe_gpus(count: int) -> dict[str, Any]:
    """Every GPU, and which pairs reach each other without the host. Makes a CUDA context on each."""
    devices = []
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": found.name,
                "memory_gb": round(found.total_memory / 1e9, 1),
                "capability": f"{found.major}.{found.minor}",
            }
        )
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    reached = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    links = parse_topology(_nvidia_smi("topo", "-m"))
    return {
        "devices": devices,
        "driver": next(iter(_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()), None),
        "peer_access": [list(pair) for pair in reached],
        "pairs": len(pairs),
        "links": links,
        "nvlink": any(kind.startswith("NV") for kind in links.values()),
    }


def parse_topology(text: str) -> dict[str, str]:
    """How each pair of GPUs is connected, from `nvidia-smi topo -m`: NV4, PIX, PHB, SYS and so on.

    >>> parse_topology("        GPU0  GPU1  CPU Affinity\\nGPU0     X    NV4   0-15\\nGPU1    NV4    X    0-15\\n")
    {'0-1': 'NV4'}
    """
    rows = {}
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()  # nvidia-smi underlines its heading
        if words and re.fullmatch(r"GPU\d+", words[0]) and len(words) > 1 and not words[1].startswith("GPU"):
            rows[int(words[0][3:])] = words[1:]
    return {f"{a}-{b}": rows[a][b] for a in rows for b in rows if a < b < len(rows[a])}


def in_one_line(machine: Mapping[str, Any]) -> str:
    """The hardware in one sentence fragment.

    >>> in_one_line({"processor": "a processor", "cores": 2, "gpus": None})
    'a processor, 2 cores, no GPU'
    >>> gpu = {"name": "A100", "memory_gb": 80.0}
    >>> in_one_line({"gpus": {"devices": [gpu, gpu], "nvlink": True, "pairs": 1, "peer_access": [[0, 1]]}})
    '2 x A100 (80.0 GB), NVLink, peer access'
    """
    gpus = machine.get("gpus")
    if not gpus:
        return f"{machine['processor']}, {machine['cores']} cores, no GPU"
    words = [_counted(gpus["devices"])]
    if gpus["pairs"]:
        words.append("NVLink" if gpus["nvlink"] else "no NVLink")
        reached = len(gpus["peer_access"])
        words.append(
            "peer access" if reached == gpus["pairs"] else f"peer access in {reached} of {gpus['pairs']} pairs"
        )
    return ", ".join(words)


def _counted(devices: Sequence[Mapping[str, Any]]) -> str:
    names = Counter(f"{device['name']} ({device['memory_gb']} GB)" for device in devices)
    return ", ".join(f"{number} x {name}" for name, number in names.items())


def _nccl_version() -> str | None:
    """Asked of the library itself; a torch without CUDA has none."""
    if not torch.cuda.is_available():
        return None
    found: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints, or nothing: it is a help, not a need."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
