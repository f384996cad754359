"""Claims about choosing while training: the published rule, the solver, fixed ratios, and `auto` of thinwire."""

from __future__ import annotations

from ..page import HOLDS, IN_PART, NOT, NOT_TESTABLE, Claim, finite, shown, spread
from . import figures
from .choosing import policy_name, written
from .figures import Found
from .rules import WEIGHTS

# ----------------------------------------------------------------------------------------------------------- rules


def the_choice_follows_the_network(part: Found) -> Claim:
    published, quotient = (figures.moved_by_network(part, rule) for rule in ("published", "quotient"))
    low, high = figures.range_of(part, "published")
    ours = figures.range_of(part, "quotient")
    return Claim(
        "The multi-objective optimum adapts the ratio to the network",
        NOT if published < 2 else IN_PART if published < quotient else HOLDS,
        "Over four models, all networks of both schedules and two measured gain curves it stays between "
        f"{100 * low:.2f} and {100 * high:.2f} %; the network alone changes it by a factor of {published:.2f} at most. "
        "Both axes run from 0 to 1 on every network, so a network ten times as slow has the same knee. Time over "
        f"gain, from the same numbers, goes from {100 * ours[0]:.2f} to {100 * ours[1]:.2f} %.",
    )


def solver(part: Found) -> Claim:
    brute = part["brute_force"]
    right = min(brute["fronts"], brute["choices"], brute["on_front"])
    return Claim(
        "NSGA-II (pymoo) finds the optimum",
        NOT_TESTABLE,
        f"Not run: pymoo is no dependency, and there is nothing to search. thinwire evaluates all {brute['size']} "
        f"candidates: front and choice equal brute force in {right} of {brute['sets']} random sets and take "
        f"{brute['microseconds']:.0f} µs. The rule itself ({WEIGHTS[0]:g} time, {WEIGHTS[1]:g} gain) was replayed on "
        "a fine grid, where no solver finds a better point.",
    )


def rule_beats_fixed(part: Found) -> Claim:
    won, total, told = 0, 0, []
    for schedule in dict.fromkeys(run["schedule"] for run in part["runs"]):
        mine = figures.replay_times(part, schedule, "published")
        for policy in figures.policies(part):
            if policy in ("published", "quotient", "dense"):
                continue
            theirs = figures.replay_times(part, schedule, policy)
            pairs = figures.differences(theirs, mine)
            total += 1
            beaten = len(finite(mine)) == len(mine) and (len(finite(theirs)) < len(theirs) or spread(pairs).low > 0)
            won += beaten
        told.append(f"{schedule}: {_times(part, schedule)}")
    return Claim(
        "A ratio chosen anew for every network beats fixed ratios",
        figures.by_share(won, total),
        f"Seconds by the formulas to the loss that 1 % ends with, {'; '.join(told)}. The published rule is "
        f"significantly faster than a fixed ratio in {won} of {total} cases. The paper reports no time to an accuracy.",
    )


def _times(part: Found, schedule: str) -> str:
    said = []
    for policy in figures.policies(part):
        times = figures.replay_times(part, schedule, policy)
        reached = finite(times)
        said.append(
            f"{policy_name(policy)} {shown(reached, digits=1) if len(reached) == len(times) else 'not reached'}"
        )
    return ", ".join(said)


def rule_keeps_accuracy(part: Found) -> Claim:
    told, differences = [], []
    for schedule in dict.fromkeys(run["schedule"] for run in part["runs"]):
        ends = {
            policy: [100 * run["curve"][-1]["accuracy"] for run in figures.replayed(part, schedule, policy)]
            for policy in figures.policies(part)
        }
        fixed = {policy: values for policy, values in ends.items() if policy[0].isdigit()}
        best = max(fixed, key=lambda policy: figures.mean(fixed[policy]) or 0.0)
        differences.append(spread(figures.differences(ends["published"], fixed[best])))
        told.append(
            f"{schedule}: {shown(ends['published'], digits=1)} %, best ratio {100 * float(best):g} % "
            f"{shown(fixed[best], digits=1)} %"
        )
    return Claim(
        "The adapted ratio ends as accurate as the best fixed ratio, or more so",
        figures.equal_or_not(differences),
        f"Accuracy of the published rule after the same number of steps, {'; '.join(told)}. By the paper's own tables, "
        "two of its four models end below the ratio of 10 %.",
    )


# ------------------------------------------------------------------------------------------------------- schedules


def auto_beats_fixed(part: Found) -> Claim:
    """By the late target, as the early one may come before any change. One seed is never more than a part."""
    won, total, told = 0, 0, []
    for name, run in part.items():
        early, late = figures.schedule_times(run, "early"), figures.schedule_times(run, "late")
        mine, change = late["auto"], figures.first_change(run)
        for other, value in late.items():
            if other.startswith(("AR ", "AG ")):
                total += 1
                won += mine is not None and (value is None or mine < value)
        seen, phases = figures.phases_seen(run)
        said = [f"{name}, {seen} of {phases} phases: {'not reached' if mine is None else f'{mine:.1f} s'}"]
        for only in (True, False):
            ratio, best = figures.over_best(late, ratios_only=only)
            if ratio is not None and best is not None:
                said.append(f"{ratio:.2f} times that of the best {'ratio' if only else 'recipe'} ({written(best)})")
        if early["auto"] is not None and change is not None:
            before = "before" if early["auto"] <= change else "after"
            said.append(f"the early target came {before} the first change")
        told.append(", ".join(said))
    verdict = figures.by_share(won, total)
    return Claim(
        "Adapting while training beats every fixed ratio as the network changes (C1, C2)",
        IN_PART if verdict == HOLDS else verdict,
        "`auto` of thinwire on emulated networks, one seed, to the lowest loss that any fixed ratio ended with: "
        f"{'; '.join(told)}. Faster than {won} of {total} fixed ratios. Unlike the published controller it may leave "
        "Top-k, so this does not test an adapted ratio.",
    )
