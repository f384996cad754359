"""The second half of the page flexible: fronts while training, the published rule replayed, both schedules."""

from __future__ import annotations

from thinwire.lab.draw import Line, lines

from ..page import Page, finite, shown, spread
from . import figures
from .figures import Found
from .published import DELAY_SCALE, RATE_SCALE, SCHEDULES, scaled

RULE_NAMES = {"published": "published rule", "quotient": "time over gain"}
_DRAWN = ("auto", "dense", "two-shot-1", "AR 0.1", "AR 0.01", "AR 0.001", "AG 0.01")


def loss_line(name: str, runs: list[Found], *, across: str = "step") -> Line:
    """The mean loss of some runs, with its interval."""
    points = list(zip(*(run["curve"] for run in runs), strict=True))
    found = [spread([one["held_out"] for one in point]) for point in points]
    x = [spread([one[across] for one in point]).mean for point in points]
    lows = [max(0.0, one.low) for one in found]  # no loss is below zero, however far the seeds are apart
    return Line(name, x, [one.mean for one in found], lows, [one.high for one in found])


# ---------------------------------------------------------------------------------------------------------- fronts


def fronts(made: Page, part: Found, ruled: Found) -> None:
    told = []
    for name, run in part.items():
        found = figures.knees(run)
        excess = found["excess"]
        cost = "" if excess is None else f", and cost {100 * excess:.1f} % more than the knee on average"
        told.append(
            f"in {name} it was the knee in {found['agree']} of {found['told']} samples, on the front in "
            f"{found['on_front']}{cost}"
        )
    brute = ruled["brute_force"]
    made.heading("The front of progress and step time while training")
    made.text(
        "`auto` keeps the candidates on the Pareto front of predicted step time and progress per step, where a dense "
        "step makes progress 1. It takes the candidate with the least time for the same progress: the knee. It leaves "
        f"the running recipe only for a gain beyond the noise, so the running recipe is not always the knee: "
        f"{'; '.join(told)}. Front and knee equal those of brute force in {min(brute['fronts'], brute['choices'])} of "
        f"{brute['sets']} random sets of {brute['size']} candidates, and take {brute['microseconds']:.0f} µs each."
    )
    last: dict[int, Found] = {}
    for one in part["C1"]["fronts"]:
        if one["front"]:
            last[one["phase"]] = one
    series = [
        Line(
            f"{scaled(SCHEDULES['C1'][phase])}: {one['chosen']} runs",
            [point["predicted_ms"] for point in one["front"]],
            [point["progress_per_step"] for point in one["front"]],
        )
        for phase, one in sorted(last.items())
    ]
    drawing = lines(
        series, title="Fronts in the phases of C1", across="predicted step, ms", down="progress per step", log_x=True
    )
    made.chart(
        "front", drawing, caption="The last front that auto had on each network of C1; a dense step makes progress 1."
    )


# ----------------------------------------------------------------------------------------------------------- rules


def rules(made: Page, part: Found) -> None:
    (low, high), (least, most) = (figures.range_of(part, rule) for rule in ("published", "quotient"))
    made.heading("The published rule, replayed")
    made.text(
        f"Real training of {part['about']}, {part['workers']} simulated workers with batches of {part['batch']}, "
        f"{part['steps']} steps of SGD with rate {part['rate']:g} and momentum {part['momentum']:g}. Time is that of "
        "the formulas: the networks of C1 and C2 as published, a gradient as long as that of ResNet50, "
        f"{part['compute_ms']:g} ms for all but communication, and for every ratio the cheapest of the three "
        "collectives. At every change of the network, two rules choose from the gains of the leader at that step, "
        "which are free here: the published one (the knee on axes from 0 to 1), and time over gain, which `auto` uses. "
        "The target is the loss that the fixed ratio of 1 % ends with, per seed."
    )
    made.table(
        ["schedule", "policy", "seconds to the target", "seconds for all steps", "last loss", "accuracy, %"],
        [
            _replay_row(part, schedule, policy)
            for schedule in dict.fromkeys(run["schedule"] for run in part["runs"])
            for policy in figures.policies(part)
        ],
    )
    gained = [
        spread(figures.differences(*(figures.replay_times(part, schedule, rule) for rule in ("published", "quotient"))))
        for schedule in SCHEDULES
    ]
    made.text(
        f"Time over gain is significantly faster than the published rule in {sum(one.low > 0 for one in gained)} "
        f"of {len(gained)} schedules, slower in {sum(one.high < 0 for one in gained)}. For four models, all "
        "networks of both schedules, and the gains of the beginning and of the end of a training, the published rule "
        f"chooses ratios from {100 * low:.2f} to {100 * high:.2f} %, time over gain from {100 * least:.2f} to "
        f"{100 * most:.2f} %."
    )
    series = []
    for rule, name in RULE_NAMES.items():
        for run in figures.replayed(part, "C2", rule)[:1]:
            choices = run["choices"]
            series.append(Line(name, [one["phase"] + 1 for one in choices], [100 * one["ratio"] for one in choices]))
    drawing = lines(series, title="Ratio in the phases of C2", across="phase", down="ratio, %", log_y=True)
    made.chart("rules", drawing, caption="Ratios of the first seed. The network is slowest in phases 6 and 7.")


def policy_name(policy: str) -> str:
    """A policy of the replay as the page has it.

    >>> policy_name("0.001"), policy_name("quotient"), policy_name("dense")
    ('0.1 %', 'time over gain', 'dense')
    """
    return f"{100 * float(policy):g} %" if policy[0].isdigit() else RULE_NAMES.get(policy, policy)


def _replay_row(part: Found, schedule: str, policy: str) -> list[str]:
    runs, times = figures.replayed(part, schedule, policy), figures.replay_times(part, schedule, policy)
    reached = finite(times)
    told = shown(reached, digits=1) if reached else "not reached"
    if reached and len(reached) < len(times):
        told += f" ({len(reached)} of {len(times)} seeds)"
    return [
        schedule,
        policy_name(policy),
        told,
        shown([run["seconds"] for run in runs], digits=1),
        shown([run["curve"][-1]["held_out"] for run in runs]),
        shown([100 * run["curve"][-1]["accuracy"] for run in runs], digits=1),
    ]


# ------------------------------------------------------------------------------------------------------- schedules


def schedules(made: Page, part: Found) -> None:
    first = next(iter(part.values()))
    made.heading("Through C1 and C2, measured")
    made.text(
        f"`thinwire compare`, workload mlp ({first['parameters']:,} parameters), {first['workers']} workers on an "
        f"emulated network, one seed. Recipes take turns of {first['lap']} steps, so the network changes at about the "
        "same step for all, as the published one changes with the epoch. The clock of a recipe runs only while it "
        f"trains. Bandwidths are the published ones over {RATE_SCALE:g}, latencies over {DELAY_SCALE:g}: the gradient "
        "is shorter than that of ResNet50 by that factor, a step without communication takes "
        f"{first['no_communication_ms']:.0f} ms, and the slow network must be slow compared to it. AR is shared Top-k, "
        "AG is threshold-k by all-gather, each at a fixed ratio. There are two targets. *Early* is the loss that AR at "
        "1 % ends with. It was meant to be the only one, but it can be reached before the network changes. *Late* is "
        "the lowest loss that any fixed ratio ends with. We added it for that reason, after we had seen the results. "
        "By construction, the best ratio reaches it only with its last steps. Differences below "
        f"{100 * figures.DRIFT:.0f} % between single runs mean nothing."
    )
    for name, run in part.items():
        _schedule(made, name, run)


def _schedule(made: Page, name: str, run: Found) -> None:
    targets = figures.schedule_targets(run)
    early, late = (figures.schedule_times(run, which) for which in ("early", "late"))
    seen, phases = figures.phases_seen(run)
    aims = ", ".join(f"{which} target {loss:.3f}" for which, loss in targets.items() if loss is not None)
    made.text(f"**{name}**: `{run['network']}`; {aims}.")
    if seen < phases:
        made.text(f"**The steps ended before the schedule did: only {seen} of {phases} phases were trained in.**")
    made.table(
        ["recipe", "steps", "seconds for all steps", "last loss", "seconds to the early target", "to the late one"],
        [_schedule_row(recipe, row, (early[recipe], late[recipe])) for recipe, row in run["rows"].items()],
    )
    decided = "; ".join(f"{one['recipe']} from step {one['step']}" for one in run["decisions"])
    steps = ", ".join(map(str, figures.steps_in_phases(run, "auto", lap=run["lap"])))
    share = "" if run["deciding_share"] is None else f" Deciding took {100 * run['deciding_share']:.1f} % of its time."
    made.text(f"`auto` ran {decided or 'dense'}. Its steps per phase, in whole laps: {steps}.{share}")
    series = [
        Line(written(recipe), [one["seconds"] for one in row["curve"]], [one["held_out"] for one in row["curve"]])
        for recipe, row in run["rows"].items()
        if recipe in _DRAWN
    ]
    drawing = lines(
        series, title=f"Held-out loss through {name}", across="seconds of training", down="loss", log_x=True
    )
    made.chart(name.lower(), drawing, caption=f"Loss against each recipe's own time through {name}; one seed.")


def _schedule_row(recipe: str, row: Found, seconds: tuple[float | None, float | None]) -> list[str]:
    if not row["curve"]:
        return [written(recipe), "-", "-", "-", "-", row["problem"] or "-"]
    last = row["curve"][-1]
    loss = "not finite" if last["held_out"] is None else f"{last['held_out']:.3f}"
    reached = ["not reached" if one is None else f"{one:.1f}" for one in seconds]
    return [written(recipe), str(last["step"]), f"{last['seconds']:.1f}", loss, *reached]


def written(recipe: str) -> str:
    """A recipe of a schedule as the page has it.

    >>> written("AR 0.01"), written("two-shot-1")
    ('AR 1 %', 'two-shot-1')
    """
    way, _, ratio = recipe.partition(" ")
    return f"{way} {100 * float(ratio):g} %" if ratio else recipe
