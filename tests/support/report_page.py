"""A report in a real browser, with what tests ask of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from support.browser import Browser
from thinwire.lab.report import write_report


class Page:
    """A report in the browser, with what tests ask of it."""

    def __init__(self, browser: Browser, folder: Path, result: dict[str, Any], *, width: int = 1280) -> None:
        self.browser, self.result = browser, result
        browser.log()
        browser.devtools("Emulation.setEmulatedMedia", media="")
        browser.scheme("light")
        browser.window(width)
        browser.open(write_report(result, folder / "report.html"))
        browser.script("localStorage.clear(); delete document.documentElement.dataset.theme")

    def run(self, text: str, *arguments: Any) -> Any:
        return self.browser.script(text, *arguments)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def legend(self, recipe: str) -> None:
        self.run(
            "[...document.querySelectorAll('#legend button')].find((b) => b.dataset.recipe === arguments[0]).click()",
            recipe,
        )

    def series(self, chart: str, *, drawn: bool = False) -> list[str]:
        """The recipes of a chart; with `drawn`, those that show something."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(`#${arguments[0]} .series`)]"
            ".filter((group) => !arguments[1] || group.childElementCount).map((group) => group.dataset.recipe)",
            chart, drawn,
        )  # fmt: skip
        return found

    def tip(self, *, shown: bool = True) -> str | None:
        """What the tooltip says. Pointing reaches the page with its next frame, which a busy machine draws late."""
        said: str | None = None
        for _ in range(100):
            said = self.run("const tip = document.getElementById('tip'); return tip.hidden ? null : tip.innerText")
            if (said is not None) == shown:
                break
            time.sleep(0.05)
        return said

    def last_mark(self, chart: str) -> tuple[float, float]:
        """Where the end of the only visible line is, in the window."""
        self.run("document.getElementById(arguments[0]).scrollIntoView({ block: 'center' })", chart)
        self.browser.settle()
        box = self.run(
            "const marks = document.querySelectorAll(`#${arguments[0]} .series .mark`);"
            "const box = marks[marks.length - 1].getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]",
            chart,
        )
        return box[0], box[1]

    def quiet(self) -> None:
        """Nothing was fetched, nothing complained, nothing is wider than the window."""
        assert self.browser.log() == []
        assert self.run("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
        wide, window = self.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window
