"""Predicted beside measured: what is counted, and what following the prediction would have cost."""

from __future__ import annotations

import pytest

from thinwire.errors import OptionError
from thinwire.lab.compare.verify import as_text, summary, verify


def row(recipe: str, predicted: float | None, measured: float | None, *, workers: int = 2) -> dict[str, object]:
    error = predicted / measured - 1 if predicted and measured else None
    return {
        "recipe": recipe,
        "network": "100mbit",
        "workers": workers,
        "predicted_ms": predicted,
        "measured_ms": measured,
        "error": error,
    }


ROWS = [
    row("ddp", 1000, 1100),
    row("a", 100, 130),
    row("b", 105, 100),
    row("torch-powersgd:4", None, 120),
    row("ddp", 1000, 1000, workers=4),
    row("a", 90, 100, workers=4),
]


def test_errors_are_counted_and_choices_judged() -> None:
    found = summary(ROWS)
    assert found["cells"] == 5
    assert found["within_15_percent"] == 4
    assert found["within_30_percent"] == 5
    first, second = found["choices"]
    assert (first["advised"], first["best"]) == ("a", "b")
    assert first["over_best"] == pytest.approx(0.3)
    assert second["over_best"] == 0.0


def test_the_table_has_every_row_and_no_number_where_there_is_none() -> None:
    told = as_text({"rows": ROWS, **summary(ROWS)})
    assert "+5%" in told
    assert "4 of 5 within 15 %" in told
    line = next(line for line in told.splitlines() if line.startswith("torch-powersgd:4"))
    assert line.split()[-3:] == ["-", "120", "-"]


def test_too_few_steps_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="--steps"):
        verify("100mbit", workers=[2], steps=5)
