"""A progress bar on standard error for commands that train step by step."""

from __future__ import annotations

import sys
from typing import Any

import typer


class Bar:
    """Counts the steps of a run. It appears with the first step, so that an earlier error is one line.

    >>> with Bar("training", steps=2, shown=False) as show:
    ...     show({"event": "step"})
    """

    def __init__(self, label: str, *, steps: int, shown: bool) -> None:
        self._label, self._steps, self._shown = label, steps, shown
        self._bar: Any = None

    def __enter__(self) -> Any:
        return self._show

    def __exit__(self, *what: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*what)

    def _show(self, event: dict[str, Any]) -> None:
        if event["event"] != "step" or not self._shown:
            return
        if self._bar is None:
            self._bar = typer.progressbar(length=self._steps, label=self._label, file=sys.stderr).__enter__()
        self._bar.update(1)
