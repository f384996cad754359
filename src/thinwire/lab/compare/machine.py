"""Describes the machine of a measurement: processor, cores and versions, but no host name and no user."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def describe_machine() -> dict[str, str | int]:
    """Processor, cores and versions.

    >>> sorted(describe_machine())
    ['cores', 'numba', 'numpy', 'processor', 'python', 'system', 'thinwire', 'torch']
    """
    versions = {name: _version(name) for name in ("thinwire", "torch", "numba", "numpy")}
    system = f"{platform.system()} {platform.machine()}"
    python = platform.python_version()
    return {"processor": _processor(), "cores": os.cpu_count() or 1, "system": system, "python": python, **versions}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _processor() -> str:
    """The name of the processor, if Linux tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
