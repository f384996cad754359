"""How far a proof is: a bar for the part that runs on a terminal, a line when a part begins and ends elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .words import finding, verdict


class Screen:
    """Shows the events of `prove`.

    >>> import io
    >>> with Screen(Console(file=io.StringIO())) as screen:
    ...     screen.show({"event": "part", "name": "kernels on the CPU", "units": 26})
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._live = console.is_terminal and not quiet
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description:26}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[word]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()

    def show(self, event: Mapping[str, Any]) -> None:
        """An event of `prove`."""
        kind = event["event"]
        if kind == "part":
            self._begin(event)
        elif kind == "unit" and self._task is not None:
            self._progress.update(self._task, advance=1, word=event["word"])
        elif kind == "done":
            self._end(event)

    def _begin(self, event: Mapping[str, Any]) -> None:
        if self._live:
            self._task = self._progress.add_task(event["name"], total=event["units"], word="starting")
        elif event["units"] > 1:
            self._line(f"{event['name']}: starting")

    def _end(self, event: Mapping[str, Any]) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        seconds = "" if event["verdict"] == "not here" else f" ({event['seconds']:.1f} s)"
        self._line(f"{event['name']}: {verdict(event)}: {finding(event)}{seconds}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
