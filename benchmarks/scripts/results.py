"""Benchmark results as JSON files: a layout of few lines, ten digits, and summaries in place of samples.

Every script writes through `write`, so that a new run does not bring samples or long numbers back.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 300  # characters of a line; a record of a table fits on one
_DIGITS = 10  # significant: pages round to seven at most, and runs differ in the third
_SHORT = WIDTH // 2 - 2  # items up to this length share a line


def path_of_today(kind: str, *, folder: Path = RESULTS) -> Path:
    """Where a new run goes: `benchmarks/results/<date>-<kind>.json`.

    >>> path_of_today("auto").name.endswith("-auto.json")
    True
    """
    return folder / f"{datetime.now(UTC).date().isoformat()}-{kind}.json"


def newest(kind: str, *, folder: Path = RESULTS) -> Path | None:
    """The latest file of a kind by its date, None if there is none."""
    return max(folder.glob(f"*-{kind}.json"), default=None)


def given_or_newest(path: Path, kind: str) -> Path:
    """The path that an option has, or the latest file of a kind if it is empty; ends the script if there is none."""
    found = path if path != Path() else newest(kind)
    if found is None:
        raise SystemExit(f"benchmarks/results has no *-{kind}.json yet: measure first, or name a file")
    return found


def read(path: Path) -> dict[str, Any]:
    """The content of a results file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write a results file; its folder must exist."""
    path.write_text(as_text(found))


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and count of samples: what a results file keeps of them.

    >>> summary([4.0, 1.0, 3.0, 2.0])
    {'median': 2.5, 'quartiles': [1.75, 3.25], 'count': 4}
    >>> summary([7.0])
    {'median': 7.0, 'quartiles': [7.0, 7.0], 'count': 1}
    """
    if not samples:
        return {"median": None, "quartiles": None, "count": 0}
    if len(samples) == 1:
        return {"median": samples[0], "quartiles": [samples[0], samples[0]], "count": 1}
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": statistics.median(samples), "quartiles": [low, high], "count": len(samples)}


def without(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A record without some of its keys.

    >>> without({"recipe": "dense", "samples": [1, 2]}, "samples")
    {'recipe': 'dense'}
    """
    return {key: value for key, value in record.items() if key not in keys}


def only(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Some keys of a record, in this order.

    >>> only({"recipe": "dense", "seconds": 2.0, "step_ms": 3.0}, "step_ms", "recipe")
    {'step_ms': 3.0, 'recipe': 'dense'}
    """
    return {key: record[key] for key in keys}


# -------------------------------------------------------------------------------------------------------------- layout


def as_text(found: Any) -> str:
    """Strict JSON. What fits on a line stays on a line; short items of a list share lines.

    >>> print(as_text({"rows": [{"recipe": "dense", "ms": 1 / 3}], "loss": float("nan")}), end="")
    {"rows": [{"recipe": "dense", "ms": 0.3333333333}], "loss": null}
    """
    return "\n".join(_lines(plain(found), indent="", key="")) + "\n"


def plain(value: Any) -> Any:
    """The value as JSON has it: ten significant digits, string keys, None for what is not finite.

    >>> plain({4: (1, 2.000000000001), "bytes": 19514544.0, "loss": float("inf")})
    {'4': [1, 2.0], 'bytes': 19514544.0, 'loss': None}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if value.is_integer() else float(f"{value:.{_DIGITS}g}")
    return value


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(value: Any, *, indent: str, key: str) -> list[str]:
    whole = f"{indent}{key}{_dumped(value)}"
    if len(whole) <= WIDTH or not isinstance(value, dict | list):
        return [whole]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return [f"{indent}{key}{begin}", *_inner(value, indent=f"{indent} "), f"{indent}{end}"]


def _inner(value: dict[str, Any] | list[Any], *, indent: str) -> list[str]:
    """What stands between the brackets, with commas."""
    if isinstance(value, dict):
        items = [(f"{_dumped(key)}: ", one) for key, one in value.items()]
    else:
        items = [("", one) for one in value]
    texts = [f"{key}{_dumped(one)}" for key, one in items]
    short = [len(text) <= _SHORT for text in texts]
    if isinstance(value, list) and not all(short):
        short = [False] * len(items)  # a list of records has one to a line
    found: list[str] = []
    sharing = False  # whether the last line may take one more item
    for (key, one), text, is_short in zip(items, texts, short, strict=True):
        if found:
            found[-1] += ","
        if is_short and sharing and len(found[-1]) + len(text) + 2 <= WIDTH:
            found[-1] += f" {text}"
        else:
            found += _lines(one, indent=indent, key=key)
        sharing = is_short
    return found
