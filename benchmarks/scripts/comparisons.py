"""What results keep of `thinwire compare`: figures, curves and fits; of step times only summaries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.scripts.results import summary, without

Found = Mapping[str, Any]


def brief_comparison(found: Found) -> dict[str, Any]:
    """A comparison without the time of every step and the points behind the forecast."""
    kept = dict(found)
    if "forecast" in kept:
        kept["forecast"] = brief_forecast(kept["forecast"])
    kept["no_communication"] = _brief_row(kept["no_communication"])
    kept["rows"] = [_brief_row(row) for row in kept["rows"]]
    return kept


def brief_forecast(forecast: Found) -> dict[str, Any]:
    """A forecast with its fitted network, without the measured points, shapes and kernel speeds behind it."""
    kept = dict(forecast)
    if "network" in kept:
        fits = [without(fit, "points") for fit in kept["network"]["fits"]]
        kept["network"] = {**kept["network"], "fits": fits}
    if "profile" in kept:
        buckets = [
            {"elements": sum(math.prod(shape) for shape in bucket["shapes"]), **without(bucket, "shapes")}
            for bucket in kept["profile"]["buckets"]
        ]
        kept["profile"] = {**kept["profile"], "buckets": buckets}
    if "device" in kept:
        kept["device"] = without(kept["device"], "speeds")
    return kept


def _brief_row(row: Found) -> dict[str, Any]:
    """A row keeps its own curve, the mean of its repeats."""
    return {**row, "repeats": [_brief_repeat(one) for one in row["repeats"]]}


def _brief_repeat(repeat: Found) -> dict[str, Any]:
    kept = without(repeat, "lap_seconds", "step_seconds", "curve")
    if "step_seconds" in repeat:
        kept["step_seconds"] = summary([seconds for lap in repeat["step_seconds"] for seconds in lap])
    return kept
