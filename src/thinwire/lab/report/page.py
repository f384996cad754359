"""The whole page: the template with its style sheet, its scripts, the parts and the data put in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import OptionError
from . import bars, curves, decisions, neighbours, simulated, tables
from .markup import escape, policy, script_json, tag

SCHEMA = 1
_HOLE = re.compile(r"\{\{(\w+)\}\}")


def render_report(result: Mapping[str, Any]) -> str:
    """The report of one comparison or simulation, as the text of a self-contained HTML file.

    Args:
        result: what `thinwire compare --json` writes: `schema` 1, `kind` "compare", and its `rows`; or
            `thinwire simulate`, of kind "simulate".

    Raises:
        OptionError: this is not the result of a comparison, or one of a newer thinwire.

    >>> row = {"recipe": "ddp", "status": "finished", "step_ms": 1898.0, "curve": []}
    >>> page = render_report({"schema": 1, "kind": "compare", "headline": "2 < 3", "rows": [row]})
    >>> page.startswith("<!doctype html>"), "<h1>2 &lt; 3</h1>" in page, 'data-value="1898.0"' in page
    (True, True, True)
    """
    rows = _checked(result)
    settings = result.get("settings") or {}
    network = result.get("network") or {}
    limit = (result.get("no_communication") or {}).get("step_ms")
    styles = curves.styles(rows)
    breakdown = bars.breakdown(rows, no_communication_ms=limit)
    script = _asset("chart.js") + _asset("report.js") + _asset("theme.js")
    headline = str(result.get("headline") or "Recipes compared")
    notice = network.get("notice")
    created = str(result.get("created") or "")
    return _fill(
        _asset("page.html"),
        policy=policy(script),
        style=_asset("report.css"),
        script=script,
        title=escape(f"{headline} - thinwire"),
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


def write_report(result: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the report of one comparison to a file, and return its path.

    The file is whole or not there: it is written beside its place, then moved.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report({"schema": 1, "kind": "compare", "rows": [{"recipe": "ddp"}]}, f"{folder}/r.html").name
    'r.html'
    """
    place = Path(path)
    text = render_report(result)
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
    return place


def _checked(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if result.get("kind") not in ("compare", "simulate") or not isinstance(result.get("schema"), int):
        raise OptionError("this is not a result of thinwire compare: write one with thinwire compare --json FILE")
    if result["schema"] != SCHEMA:
        raise OptionError(f"this result has schema {result['schema']}, and this thinwire reads {SCHEMA}: run it again")
    rows = result.get("rows")
    if not isinstance(rows, list | tuple) or not rows:
        raise OptionError("this result has no rows: compare at least one recipe")
    return list(rows)


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _fill(template: str, **parts: str) -> str:
    """Fill every `{{hole}}` in one pass, so that data with braces stays as it is."""
    return _HOLE.sub(lambda hole: parts[hole[1]], template)
