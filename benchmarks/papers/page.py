"""A page as it grows: paragraphs, tables, charts and claims, written as Markdown with SVG files beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

HOLDS, IN_PART, NOT, NOT_TESTABLE = "holds", "holds in part", "does not hold", "not testable here"
VERDICTS = (HOLDS, IN_PART, NOT, NOT_TESTABLE)

# The 97.5 % points of Student's t for 1 to 10 degrees of freedom; beyond, the series below is good to three digits.
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


class Spread(NamedTuple):
    """A mean with its 95 % interval; of a single value the interval is that value."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Claim:
    """What a paper says in our own words, whether it is so here, and by which figures."""

    said: str
    verdict: str
    why: str

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"a verdict is one of {', '.join(VERDICTS)}, got {self.verdict}")


def student(degrees: int) -> float:
    """The 97.5 % point of Student's t."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def finite(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and 95 % interval (Student's t over seeds) of the finite values; NaN where there are none."""
    kept = finite(values)
    if not kept:
        return Spread(math.nan, math.nan, math.nan, 0)
    mean = statistics.fmean(kept)
    if len(kept) == 1:
        return Spread(mean, mean, mean, 1)
    half = student(len(kept) - 1) * statistics.stdev(kept) / math.sqrt(len(kept))
    return Spread(mean, mean - half, mean + half, len(kept))


def shown(values: Sequence[float | None], *, digits: int = 2, unit: str = "") -> str:
    """`84.7 ± 0.9` (mean, half the 95 % interval), `84.7` for one value, `-` for none; says if not all are finite."""
    if not values:
        return "-"
    found = spread(values)
    if not found.n:
        return "not finite"
    said = _decimals(found.mean, digits)
    if found.n > 1:
        said += f" ± {_decimals(found.half, digits)}"
    if unit:
        said += f" {unit}"
    return said if found.n == len(values) else f"{said} ({found.n} of {len(values)} finite)"


def _decimals(value: float, digits: int) -> str:
    """Fixed decimals; two significant digits for what these would round to nothing or let run far."""
    if value and not 0.5 * 10**-digits <= abs(value) < 1e7:
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{value:,.{digits}f}"


class Page:
    """One page; every method adds to its end."""

    def __init__(self, title: str, *, paper: str, name: str) -> None:
        self.name = name
        self.charts: dict[str, str] = {}
        self._blocks = [f"# {title}", paper]

    @classmethod
    def for_run(cls, found: Mapping[str, Any], *, title: str, paper: str) -> Self:
        """A page that begins with what was run: command, file, time of each part, seeds, machine."""
        page = cls(title, paper=paper, name=found["name"])
        page.text(ran(found))
        return page

    def text(self, markdown: str) -> None:
        self._blocks.append(markdown.strip())

    def heading(self, text: str) -> None:
        self._blocks.append(f"## {text}")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Cells are Markdown; columns of numbers stand to the right."""
        body = [[_cell(cell) for cell in row] for row in rows]
        for row in body:
            if len(row) != len(heads):
                raise ValueError(f"a row has {len(row)} cells under {len(heads)} heads: {row}")
        right = [all(_is_number(row[place]) for row in body) for place in range(len(heads))]
        lines = [_row(_cell(head) for head in heads), "|" + "|".join("---:" if one else "---" for one in right) + "|"]
        self._blocks.append("\n".join([*lines, *(_row(row) for row in body)]))

    def chart(self, key: str, svg: str, *, caption: str) -> None:
        """A drawing in a file of its own, with a sentence below that says what to see in it."""
        file = f"{self.name}-{key}.svg"
        if file in self.charts:
            raise ValueError(f"{self.name} has two charts named {key}: give the second another name")
        self.charts[file] = svg
        alternative = caption.replace("[", "(").replace("]", ")").replace("`", "")
        self._blocks.append(f"![{alternative}]({file})\n\n*{caption}*")

    def claims(self, claims: Sequence[Claim]) -> None:
        """The table that a page ends with, and how often each verdict was given."""
        self.heading("What was claimed, and what was found")
        self.table(["claim", "verdict", "why"], [[one.said, f"**{one.verdict}**", one.why] for one in claims])
        counts = {verdict: sum(one.verdict == verdict for one in claims) for verdict in VERDICTS}
        said = ", ".join(f"{count} {_counted(verdict, count)}" for verdict, count in counts.items() if count)
        self.text(f"Of {len(claims)} claims: {said}.")

    def markdown(self) -> str:
        return "\n\n".join(self._blocks) + "\n"

    def write(self, folder: Path) -> Path:
        """The page and its charts; charts of an earlier page of this name go."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{self.name}-*.svg"):
            if old.name not in self.charts:
                old.unlink()
        for file, svg in self.charts.items():
            (folder / file).write_text(svg)
        place = folder / f"{self.name}.md"
        place.write_text(self.markdown())
        return place


def ran(found: Mapping[str, Any]) -> str:
    """What was run, for how long, with which seeds, on which machine, by which command."""
    seconds, machine = found["seconds"], found["machine"]
    seeds = found["seeds"] if isinstance(found["seeds"], list) else list(range(found["seeds"]))
    parts = ", ".join(f"{part} {_time(time)}" for part, time in seconds.items())
    file = f"; they are in `benchmarks/results/{found['file']}`" if found.get("file") else ""
    date = f" on {found['date']}" if found.get("date") else ""
    lines = [
        f"`make reproduce-{found['name']}` measured the numbers below{date} in {_time(sum(seconds.values()))} "
        f"({parts}){file}.",
        f"{'Seeds' if len(seeds) > 1 else 'Seed'} {', '.join(map(str, seeds))}. "
        "± is half of the 95 % interval of the mean over seeds (Student's t); bands and whiskers show that interval.",
        f"Machine: {machine['processor']}, {machine['cores']} cores, no GPU used, torch {machine['torch']}.",
    ]
    if found.get("quick"):
        lines.insert(0, "**Sizes for tests only: the numbers on this page mean nothing.**")
    return " ".join(lines)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min"


def _counted(verdict: str, count: int) -> str:
    if count == 1:
        return verdict
    return {HOLDS: "hold", IN_PART: "hold in part", NOT: "do not hold"}.get(verdict, verdict)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_number(cell: str) -> bool:
    bare = cell.strip("*+−-~< ")
    return bare[:1].isdigit() or cell in ("-", "", "–", "not finite")
