"""Sinks of metrics: a file of JSON lines, TensorBoard, or the memory of this process."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, Self

from ..errors import OptionError, StateError


class Sink(Protocol):
    """What a `Meter` tells its metrics to; any object with these two methods will do."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of one step."""

    def close(self) -> None:
        """Finish writing; closing again does nothing."""


class _Closing(ABC):
    """Closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class JsonLines(_Closing):
    """One JSON object a line: `step`, `time` in Unix seconds, and the metrics; NaN and infinity become null.

    Every line is handed to the system at once, so a killed run keeps its lines. An existing file is only ever added
    to, and only with `append=True`. Each rank needs a path of its own, or let rank 0 alone have a file.

    >>> import json, tempfile
    >>> path = Path(tempfile.mkdtemp()) / "new" / "run.jsonl"
    >>> with JsonLines(path) as sink:
    ...     sink.log({"comm/ratio": 16.0, "comm/gain": float("nan")}, step=3)
    >>> line = json.loads(path.read_text())
    >>> line["step"], line["comm/ratio"], line["comm/gain"]
    (3, 16.0, None)
    >>> JsonLines(path)
    Traceback (most recent call last):
    thinwire.errors.OptionError: ...run.jsonl exists: give another path, or add to it with append=True
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.path = Path(path)
        self._file = _opened(self.path, append=append)
        if append:
            self._end_cut_line()

    def _end_cut_line(self) -> None:
        """A line that a killed run did not finish must not swallow the first of ours."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line."""
        if self._file.closed:
            raise StateError(f"{self!r} is closed: open it again with append=True")
        values = {name: float(value) for name, value in metrics.items()}
        valid = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **valid}, allow_nan=False)
        rest = memoryview(f"{line}\n".encode())
        while rest:  # a nearly full disk takes a part, and refuses the rest with an error
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def _opened(path: Path, *, append: bool) -> FileIO:
    """Unbuffered: one write a line, and nothing left over that could fail again when the file is closed."""
    if os.path.isdir(path):
        raise OptionError(f"{path} is a folder: give the path of a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise OptionError(f"{path.parent} cannot be a folder ({problem}): give another path") from problem
    try:
        return open(path, "a+b" if append else "xb", buffering=0)
    except FileExistsError:
        raise OptionError(f"{path} exists: give another path, or add to it with append=True") from None
    except OSError as problem:
        raise OptionError(f"{path} cannot be written ({problem}): give another path") from problem


class TensorBoard(_Closing):
    """Event files in `folder` for TensorBoard; those of earlier runs stay beside them.

    A number costs about 0.1 ms here, and a step has five or more for each bucket: a `Meter` with `every=10` or more
    keeps that out of the training time.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            torch_side = importlib.import_module("torch.utils.tensorboard")  # only here: most runs never need it
        except ImportError as problem:
            raise OptionError(
                f"TensorBoard needs the package tensorboard ({problem}): pip install 'thinwire[tensorboard]'"
            ) from problem
        try:
            self._writer: Any = torch_side.SummaryWriter(str(self.folder))
        except OSError as problem:
            raise OptionError(f"{self.folder} cannot be a folder ({problem}): give another path") from problem
        self._closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one point to the curve of each metric."""
        if self._closed:  # torch would begin another event file
            raise StateError(f"{self!r} is closed: build a new one on the same folder")
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still queued, and close the event file."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"


class Records(_Closing):
    """The last `keep` steps in this process, for notebooks and tests: `pandas.DataFrame(records.entries)` is a table.

    >>> records = Records(keep=2)
    >>> for step in range(5):
    ...     records.log({"comm/ratio": 10.0 + step}, step)
    >>> list(records.entries)
    [{'step': 3, 'comm/ratio': 13.0}, {'step': 4, 'comm/ratio': 14.0}]
    >>> records.values("comm/ratio")
    [13.0, 14.0]
    """

    def __init__(self, *, keep: int = 1000) -> None:
        if keep < 1:
            raise OptionError(f"Records keeps at least 1 step, got keep={keep}: give 1 or more")
        self.entries: deque[dict[str, float]] = deque(maxlen=keep)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep a copy."""
        self.entries.append({"step": step, **metrics})

    def values(self, name: str) -> list[float]:
        """One metric over the steps that have it."""
        return [entry[name] for entry in self.entries if name in entry]

    def close(self) -> None:
        """Nothing to finish; the entries stay readable."""

    def __repr__(self) -> str:
        return f"Records(keep={self.entries.maxlen})"
