"""Figures of the page on flexible communication: what the measured numbers come to, before any words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..page import HOLDS, IN_PART, NOT, NOT_TESTABLE, Spread, finite, spread
from .training import WAYS as TOP_K

Found = Mapping[str, Any]
TARGET = "0.01"  # the fixed ratio whose last loss is the target for all
MARGIN = 2.0  # points of accuracy: what still counts as equal
DRIFT = 0.05  # of a time: what the speed of a shared machine drifts


def by_share(right: int, total: int) -> str:
    """Holds where all cells agree, in part where more than half do."""
    if not total:
        return NOT_TESTABLE
    return HOLDS if right == total else IN_PART if 2 * right > total else NOT


def equal_or_not(found: Sequence[Spread]) -> str:
    """Of differences that should not be negative: seeds that are too few to tell say nothing, least of all yes."""
    worse = sum(one.high < 0 for one in found)
    equal = sum(one.low > -MARGIN for one in found)
    if worse:
        return IN_PART if equal else NOT
    return HOLDS if found and equal == len(found) else NOT_TESTABLE


# ------------------------------------------------------------------------------------------- measured collectives


def mean(values: Sequence[float | None]) -> float | None:
    known = finite(values)
    return statistics.fmean(known) if known else None


def ms(setting: Found, way: str, density: float) -> list[float | None]:
    """Of a setting: a step of Top-k at this density, with each seed."""
    found: list[float | None] = setting["rows"][TOP_K[way].format(density)]["ms"]
    return found


def differences(first: Sequence[float | None], second: Sequence[float | None]) -> list[float]:
    """Of pairs with the same seed: the first minus the second."""
    return [a - b for a, b in zip(first, second, strict=True) if a is not None and b is not None]


def faster(setting: Found, density: float) -> str:
    """AG or STAR, or even where the interval of the difference has zero in it."""
    found = spread(differences(ms(setting, "AG", density), ms(setting, "STAR", density)))
    if found.n == 0 or found.low <= 0 <= found.high:
        return "even"
    return "STAR" if found.mean > 0 else "AG"


def advantage(setting: Found, density: float) -> float | None:
    """How many times longer the all-gather takes."""
    gather, shared = mean(ms(setting, "AG", density)), mean(ms(setting, "STAR", density))
    return gather / shared if gather and shared else None


def foretold(setting: Found, density: float, *, by: str) -> str | None:
    """Who should win by the formulas (`book`) or by `plan`."""
    times: dict[str, float | None]
    if by == "book":
        times = setting["book_ms"][f"{density:g}"]
    else:
        times = {way: setting["rows"][TOP_K[way].format(density)]["predicted_ms"] for way in ("AG", "STAR")}
    known = {way: value for way, value in times.items() if value is not None}
    return min(known, key=lambda way: known[way]) if len(known) == len(times) else None


def regret(setting: Found, density: float, *, by: str) -> float | None:
    """What following the forecast costs over the faster collective, as a share of the step."""
    chosen = foretold(setting, density, by=by)
    times = {way: mean(ms(setting, way, density)) for way in ("AG", "STAR")}
    if chosen is None or any(value is None for value in times.values()):
        return None
    known = {way: float(value) for way, value in times.items() if value is not None}
    return known[chosen] / min(known.values()) - 1


def densities(part: Found) -> list[float]:
    return [float(density) for density in part["settings"][0]["book_ms"]]


# --------------------------------------------------------------------------------------------------------- leaders


def runs_of(part: Found, recipe: str, skew: float) -> list[Found]:
    found = [run for run in part["runs"] if run["recipe"] == recipe and run["skew"] == skew]
    return sorted(found, key=lambda run: int(run["seed"]))


def ends(part: Found, recipe: str, skew: float, key: str = "accuracy") -> list[float | None]:
    return [run["curve"][-1][key] for run in runs_of(part, recipe, skew)]


def better_by(part: Found, first: str, second: str, skew: float) -> Spread:
    """Accuracy of the first minus that of the second, by seed, in percentage points."""
    pairs = differences(ends(part, first, skew), ends(part, second, skew))
    return spread([100 * value for value in pairs])


def gains(part: Found, recipe: str, skew: float, key: str) -> list[float | None]:
    """The mean over a run, of each seed."""
    return [run["gains"][key] for run in runs_of(part, recipe, skew)]


def leader_densities(part: Found) -> list[float]:
    recipes = dict.fromkeys(run["recipe"] for run in part["runs"])
    prefix, suffix = TOP_K["AG"].split("{:g}")
    return [
        float(one[len(prefix) : -len(suffix)]) for one in recipes if one.startswith(prefix) and one.endswith(suffix)
    ]


# ------------------------------------------------------------------------------------------------ times to a target


def seconds_to(curve: Sequence[Mapping[str, float]], target: float) -> float | None:
    """When the loss first came down to the target, on a straight line between two looks."""
    before: Mapping[str, float] | None = None
    for point in curve:
        if point["held_out"] is not None and point["held_out"] <= target:
            if before is None or before["held_out"] is None:
                return point["seconds"]
            share = (before["held_out"] - target) / (before["held_out"] - point["held_out"])
            return before["seconds"] + share * (point["seconds"] - before["seconds"])
        before = point
    return None


def replayed(part: Found, schedule: str, policy: str) -> list[Found]:
    found = [run for run in part["runs"] if run["schedule"] == schedule and run["policy"] == policy]
    return sorted(found, key=lambda run: int(run["seed"]))


def replay_times(part: Found, schedule: str, policy: str) -> list[float | None]:
    """Seconds to the loss that the ratio of 1 % ended with, of each seed."""
    targets = [run["curve"][-1]["held_out"] for run in replayed(part, schedule, TARGET)]
    return [
        seconds_to(run["curve"], target) for run, target in zip(replayed(part, schedule, policy), targets, strict=True)
    ]


def policies(part: Found) -> list[str]:
    return list(dict.fromkeys(run["policy"] for run in part["runs"]))


def range_of(part: Found, rule: str) -> tuple[float, float]:
    """The least and the largest ratio that a rule chose for any model, network and gain curve."""
    ratios = [ratio for one in part["chosen"][rule] for ratio in one["ratios"]]
    return min(ratios), max(ratios)


def moved_by_network(part: Found, rule: str) -> float:
    """The largest factor between two ratios that differ in the network only."""
    ratios: list[list[float]] = [one["ratios"] for one in part["chosen"][rule]]
    return max(max(one) / min(one) for one in ratios)


# ------------------------------------------------------------------------------------------------------- schedules


def schedule_targets(run: Found) -> dict[str, float | None]:
    """`early`: the loss that shared Top-k at 1 % ended with; `late`: the lowest that any fixed ratio ended with."""
    ends = {name: row["curve"][-1]["held_out"] for name, row in run["rows"].items() if row["curve"]}
    ratios = finite([loss for name, loss in ends.items() if name.startswith(("AR ", "AG "))])
    return {"early": ends.get("AR 0.01"), "late": min(ratios, default=None)}


def schedule_times(run: Found, which: str) -> dict[str, float | None]:
    """Seconds of every recipe to a target; None where it did not get there."""
    target = schedule_targets(run)[which]
    return {name: None if target is None else seconds_to(row["curve"], target) for name, row in run["rows"].items()}


def first_change(run: Found) -> float | None:
    """Seconds that `auto` had trained when its last lap in the first phase ended."""
    row = run["rows"]["auto"]
    return max(
        (point["seconds"] for point, phase in zip(row["curve"], row["phases"], strict=True) if phase == 0), default=None
    )


def phases_seen(run: Found) -> tuple[int, int]:
    """In how many of its phases `auto` trained."""
    return len(set(run["rows"]["auto"]["phases"])), len(run["network"].split(";"))


def over_best(times: Mapping[str, float | None], *, ratios_only: bool) -> tuple[float | None, str | None]:
    """`auto` over the best fixed recipe, and which that is; with `ratios_only`, of the Top-k ones."""
    fixed = {
        name: value
        for name, value in times.items()
        if name != "auto" and value is not None and (not ratios_only or name.startswith(("AR ", "AG ")))
    }
    taken = times["auto"]
    if not fixed or taken is None:
        return None, None
    best = min(fixed, key=lambda name: float(fixed[name] or 0.0))
    return taken / float(fixed[best] or 1.0), best


def knees(run: Found) -> dict[str, Any]:
    """Over all fronts: how often the running recipe was the knee, and its mean cost over the knee."""
    agree, excess, told = 0, list[float](), 0
    for one in run["fronts"]:
        costs = {
            point["recipe"]: point["predicted_ms"] / point["progress_per_step"]
            for point in one["front"]
            if point["progress_per_step"]
        }
        if not costs:
            continue
        told += 1
        knee = min(costs, key=lambda name: costs[name])
        agree += one["chosen"] == knee
        if one["chosen"] in costs:
            excess.append(costs[one["chosen"]] / costs[knee] - 1)
    return {
        "told": told,
        "agree": agree,
        "on_front": len(excess),
        "excess": mean(excess),
        "most": max(excess, default=None),
    }


def steps_in_phases(run: Found, row: str, *, lap: int) -> list[int]:
    """How many steps of a recipe fell into each phase, by laps."""
    phases = run["rows"][row]["phases"]
    return [lap * phases.count(number) for number in range(max(phases, default=-1) + 1)]
