"""Runs code that uses thinwire.lab.emulate in another process, without torch: seconds less, and any Python will do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import thinwire

SOURCE = Path(thinwire.__file__).parent
T = TypeVar("T")

# Empty packages in place of the real ones, as emulate/launch.py does it.
_PROLOGUE = """
import sys, types
for name in ("thinwire", "thinwire.lab", "thinwire.lab.emulate", "thinwire.predict"):
    package = types.ModuleType(name)
    package.__path__ = ["/".join([{source!r}, *name.split(".")[1:]])]
    sys.modules[name] = package
"""


def command(code: str, *, python: str = sys.executable, source: Path = SOURCE) -> list[str]:
    return [python, "-I", "-S", "-c", _PROLOGUE.format(source=str(source)) + code]


def start(code: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def eventually(measure: Callable[[], T], good: Callable[[T], bool], *, seconds: float = 60.0) -> T:
    """Measure until it is good. A busy machine spoils measurements, several in a row, but not for a whole minute."""
    end = time.monotonic() + seconds
    while not good(found := measure()) and time.monotonic() < end:
        time.sleep(0.2)
    assert good(found), found
    return found


def within(condition: Callable[[], bool], *, seconds: float = 20.0) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
