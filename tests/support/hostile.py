"""A result whose every string is an attack, and the numbers that every row of a report shows."""

from __future__ import annotations

from typing import Any

from support.made_up import HOSTILE, made_up_result

NUMBERS = ["step_ms", "predicted_ms", "fraction_of_no_communication", "cpu_ms", "bytes_per_step", "final_loss",
           "seconds_to_target", "speedup_over_ddp", "speedup_to_target"]  # fmt: skip


def hostile_result() -> dict[str, Any]:
    """Every string of the result is an attack."""

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()} | {}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return HOSTILE if isinstance(value, str) else value

    result = poison(made_up_result(recipes=3))
    result["settings"][HOSTILE] = HOSTILE
    result["network"]["notice"] = HOSTILE
    return {**result, "kind": "compare"}
