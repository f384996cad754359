"""The output of `thinwire compare`: progress bars on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .contenders import NO_COMMUNICATION


class Screen:
    """Shows the events of a comparison: on a terminal a bar a recipe, elsewhere a few lines for each."""

    def __init__(
        self, recipes: Sequence[str], *, steps: int, repeats: int, console: Console, quiet: bool = False
    ) -> None:
        self._console, self._quiet = console, quiet
        self._steps, self._total = steps, steps * repeats
        self._progress = Progress(
            TextColumn("{task.description:24}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._live = console.is_terminal and not quiet
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, int] = {}
        self._told: dict[str, int] = {}
        for name in (NO_COMMUNICATION, *recipes):
            self._tasks[name] = self._progress.add_task(name, total=self._total, told="", start=False)

    def __enter__(self) -> Screen:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars; a second call does nothing."""
        if self._live:
            self._progress.stop()

    def show(self, event: Mapping[str, Any]) -> None:
        """An event of the runner or of a worker."""
        kind = event["event"]
        if kind == "network":
            self._line(_network(event))
        elif kind == "warming up":
            self._update(event["contender"], told="compiling")
        elif kind == "probing":
            self._update(NO_COMMUNICATION, told=f"measuring the network: {event['what']}")
        elif kind == "target":
            self._line(f"target: held-out loss {event['loss']:.4f}, which ddp reached at its last step")
        elif kind == "failed":
            self._update(event["contender"], told="failed")
            self._line(f"{event['contender']} failed: {event['problem']}")
        elif kind == "lap":
            self._lap(event)

    def _lap(self, event: Mapping[str, Any]) -> None:
        name, steps = event["contender"], len(event["step_seconds"])
        self._done[name] = self._done.get(name, 0) + steps
        told = (
            f"loss {event['held_out']:.3f}  {1e3 * event['lap_seconds'] / steps:7.1f} ms/step  "
            f"{human_bytes(event['lap_bytes'] / steps)}/step"
        )
        self._update(name, told=told)
        fifth = 5 * self._done[name] // max(1, self._total)
        if not self._live and fifth > self._told.get(name, -1):
            self._told[name] = fifth
            self._line(f"{name}: step {event['step']}, {told}")

    def _update(self, name: str, *, told: str) -> None:
        task = self._tasks[name]
        self._progress.start_task(task)
        done = self._done.get(name, 0)
        self._progress.update(task, completed=done, total=max(done, self._total), told=told)

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _network(event: Mapping[str, Any]) -> str:
    measured = event["measured"]
    found = "" if not measured else f", measured {', '.join(f'{key} {value:.4g}' for key, value in measured.items())}"
    notice = f"\nnotice: {event['notice']}" if event["notice"] else ""
    return f"network {event['asked']} by {event['method']}{found}{notice}"


# ------------------------------------------------------------------------------------------------------- the table

HEADS = (
    "recipe",
    "step ms",
    "predicted",
    "of no comm.",
    "cpu ms",
    "bytes/step",
    "loss",
    "to target",
    "x DDP/step",
    "x DDP/target",
)


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table as text.

    >>> cells({"recipe": "ddp", "step_ms": 1898.04, "predicted_ms": 1850.0,
    ...        "fraction_of_no_communication": 0.0822, "cpu_ms": 13.04, "bytes_per_step": 19.8e6,
    ...        "final_loss": 2.2291, "seconds_to_target": 379.6, "speedup_over_ddp": 1.0, "speedup_to_target": 1.0})
    ('ddp', '1,898.0', '1,850', '0.08', '13.0', '19.8 MB', '2.229', '379.6 s', '1.0', '1.0')
    """
    return (
        row["recipe"],
        shown(row["step_ms"], "{:,.1f}"),
        shown(row.get("predicted_ms"), "{:,.0f}"),
        shown(row["fraction_of_no_communication"], "{:.2f}"),
        shown(row.get("cpu_ms"), "{:,.1f}"),
        "-" if row["bytes_per_step"] is None else human_bytes(row["bytes_per_step"]),
        shown(row["final_loss"], "{:.3f}"),
        shown(row["seconds_to_target"], "{:.1f} s"),
        shown(row["speedup_over_ddp"], "{:.1f}"),
        shown(row["speedup_to_target"], "{:.1f}"),
    )


def human_bytes(count: float) -> str:
    """Bytes in the unit that fits.

    >>> human_bytes(19_800_000), human_bytes(812)
    ('19.8 MB', '812 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def shown(value: float | None, form: str) -> str:
    """A formatted number, or a dash if it was not measured."""
    return "-" if value is None else form.format(value)


def print_table(result: Mapping[str, Any], console: Console) -> None:
    """The table, the step without communication, the notes, and the headline."""
    table = Table(box=None, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="left" if head == "recipe" else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(*cells(row))
    if not console.is_terminal:
        console = Console(file=console.file, width=132, color_system=None)
    console.print(table)
    alone = result["no_communication"]["step_ms"]
    if alone is not None:
        cpu = result["no_communication"].get("cpu_ms")
        told = "" if cpu is None else f", {cpu:,.1f} ms of processor time a rank, on top of which cpu ms counts"
        _say(console, f"without communication: {alone:,.1f} ms a step{told}")
    for text in _notes(result["rows"]):
        _say(console, text)
    _say(console, result["headline"])


def _notes(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for row in rows:
        if row["problem"]:
            yield f"{row['recipe']} failed: {row['problem']}"
        elif row["note"]:
            yield f"{row['recipe']}: {row['note']}"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
