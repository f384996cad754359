"""The output files of commands: checked before minutes are spent, written in one place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..errors import OptionError


def write_json(target: str, payload: dict[str, Any]) -> None:
    """Write JSON to a file, or to standard output for `-`."""
    text = json.dumps(payload, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    write_text(target, text, option="--json")


def write_text(target: str, text: str, *, option: str) -> None:
    try:
        Path(target).write_text(text)
    except OSError as problem:
        raise OptionError(f"cannot write {target}: {problem.strerror}; choose another {option} file") from problem


def check_writable(target: str, *, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before minutes are spent on its content."""
    path = Path(target)
    if target != "-" and (not target or path.is_dir() or not path.resolve().parent.is_dir()):
        raise OptionError(f"cannot write {target or 'a file without a name'}: choose another {option} file")
