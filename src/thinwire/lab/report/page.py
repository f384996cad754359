"""The page of a report: the template with its parts, its script and the data filled in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import OptionError
from ..draw.markup import escape, script_json, tag
from ..draw.page import THEME_BUTTON, asset, document, write_page
from ..draw.palette import styles as styles_of
from . import bars, curves, decisions, neighbours, simulated, tables

SCHEMA = 1
_HOLE = re.compile(r"\{\{(\w+)\}\}")


def render_report(result: Mapping[str, Any]) -> str:
    """The report of a comparison or a simulation, as the text of a self-contained HTML file.

    Args:
        result: the file of `thinwire compare --json` (`schema` 1, `kind` "compare", and its `rows`), or of
            `thinwire simulate --json` (`kind` "simulate").

    Raises:
        OptionError: the result is of another kind or of another schema.

    >>> row = {"recipe": "ddp", "status": "finished", "step_ms": 1898.0, "curve": []}
    >>> page = render_report({"schema": 1, "kind": "compare", "headline": "2 < 3", "rows": [row]})
    >>> page.startswith("<!doctype html>"), "<h1>2 &lt; 3</h1>" in page, 'data-value="1898.0"' in page
    (True, True, True)
    """
    rows = _checked(result)
    settings = result.get("settings") or {}
    network = result.get("network") or {}
    limit = (result.get("no_communication") or {}).get("step_ms")
    styles = styles_of(rows)
    breakdown = bars.breakdown(rows, no_communication_ms=limit)
    headline = str(result.get("headline") or "Recipes compared")
    notice = network.get("notice")
    created = str(result.get("created") or "")
    body = _fill(
        asset(__package__, "body.html"),
        theme_button=THEME_BUTTON,
        headline=escape(headline),
        created=tag("time", escape(created.replace("T", " ").replace("Z", " UTC")), datetime=created),
        settings_line=escape(tables.settings_line(settings)),
        notice=tag("p", escape(notice), class_="notice", id="notice") if notice else "",
        target=escape(tables.target_line(settings)),
        network=escape(tables.network_line(network)),
        results=tables.results(rows, styles),
        decisions=decisions.section(rows),
        neighbours=neighbours.section(rows, styles),
        simulated=simulated.section(result, styles),
        brand=f"thinwire {result['kind']}",
        breakdown=breakdown,
        whole='<li><i class="part whole"></i>step, not split</li>' if 'class="part whole"' in breakdown else "",
        bytes=bars.bytes_bars(rows, styles),
        recipes=tables.recipes(rows, styles),
        settings=tables.facts(settings),
        machine=tables.facts(result.get("machine") or {}),
        command=escape(result.get("command") or ""),
        curves=script_json(curves.drawn(rows, target=settings.get("target_loss"))),
        result=script_json(dict(result)),
    )
    script = asset(__package__, "chart.js") + asset(__package__, "report.js")
    return document(body, title=f"{headline} - thinwire", script=script)


def write_report(result: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the report of a comparison or a simulation to a file, and return its path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report({"schema": 1, "kind": "compare", "rows": [{"recipe": "ddp"}]}, f"{folder}/r.html").name
    'r.html'
    """
    return write_page(render_report(result), path)


def _checked(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if result.get("kind") not in ("compare", "simulate") or not isinstance(result.get("schema"), int):
        raise OptionError("this is not a result of thinwire compare: write one with thinwire compare --json FILE")
    if result["schema"] != SCHEMA:
        raise OptionError(f"this result has schema {result['schema']}, and this thinwire reads {SCHEMA}: run it again")
    rows = result.get("rows")
    if not isinstance(rows, list | tuple) or not rows:
        raise OptionError("this result has no rows: compare at least one recipe")
    return list(rows)


def _fill(template: str, **parts: str) -> str:
    """Fill every `{{hole}}` in one pass, so that data with braces stays as it is."""
    return _HOLE.sub(lambda hole: parts[hole[1]], template)
