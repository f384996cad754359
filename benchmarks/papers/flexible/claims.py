"""What the paper on flexible communication claims, and the verdicts that the measured figures give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..page import HOLDS, IN_PART, NOT, NOT_TESTABLE, Claim, spread
from . import choosing_claims, figures
from .figures import Found
from .training import WAYS as TOP_K

_NEGLIGIBLE = 0.05  # of a step


def all_of(parts: Mapping[str, Any]) -> list[Claim]:
    measured, trained, ruled, run = (parts[key] for key in ("collectives", "leaders", "rules", "schedules"))
    return [
        printed_winners(parts["book"]),
        shared_wins_at_high_ratios(measured),
        gather_wins_at_low_ratios(measured),
        more_workers_favour_sharing(measured),
        the_model_chooses_right(measured),
        Claim(
            "Between a ring and a tree the better all-reduce can be chosen while training",
            NOT_TESTABLE,
            "gloo adds in a ring only; NCCL has both and needs GPUs. The formulas are compared with the printed tree "
            "times above.",
        ),
        quicker_than_dense(measured),
        as_accurate_as_gather(trained),
        variance_helps(trained),
        variance_is_free(measured),
        gain_is_honest(trained),
        choosing_claims.the_choice_follows_the_network(ruled),
        choosing_claims.solver(ruled),
        choosing_claims.rule_beats_fixed(ruled),
        choosing_claims.rule_keeps_accuracy(ruled),
        choosing_claims.auto_beats_fixed(run),
    ]


# ----------------------------------------------------------------------------------------------------- collectives


def printed_winners(part: Found) -> Claim:
    rows = part["rows"]
    right = sum(row["winner"] == row["published"] for row in rows)
    in_code = sum(row["code"] == row["published"] for row in rows)
    return Claim(
        "Its cost formulas tell which of all-gather, ring and tree is fastest (Table VI)",
        figures.by_share(right, len(rows)),
        f"The formulas give the printed winner in {right} of {len(rows)} cells, if the model printed as ViT has 132.9 "
        f"M parameters; with the 304.3 M of the published code, in {in_code}. The printed times are not independent "
        "of the formulas (they differ by a few per cent), so this only shows that table and formulas agree.",
    )


def _advantages(part: Found, density: float) -> str:
    told = [
        f"{value:.2f} ({setting['network']}, {setting['workers']})"
        for setting in part["settings"]
        if (value := figures.advantage(setting, density)) is not None
    ]
    return ", ".join(told)


def shared_wins_at_high_ratios(part: Found) -> Claim:
    high = max(figures.densities(part))
    winners = [figures.faster(setting, high) for setting in part["settings"]]
    return Claim(
        "Shared Top-k with an all-reduce beats an all-gather of Top-k at high ratios (10 %)",
        figures.by_share(winners.count("STAR"), len(winners)),
        f"Faster in {winners.count('STAR')} of {len(winners)} settings, slower in {winners.count('AG')}, even in "
        f"{winners.count('even')}. Step time of the all-gather over that of sharing (network, workers): "
        f"{_advantages(part, high)}.",
    )


def gather_wins_at_low_ratios(part: Found) -> Claim:
    high, low = max(figures.densities(part)), min(figures.densities(part))
    pairs = [(figures.advantage(one, high), figures.advantage(one, low)) for one in part["settings"]]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    shrinks = sum(a > b for a, b in known)
    slowest = [one for one in part["settings"] if one["network"] == part["settings"][-1]["network"]]
    wins = [figures.faster(one, low) for one in slowest].count("AG")
    everywhere = shrinks == len(known) and wins == len(slowest)
    return Claim(
        "At low ratios and high latency the all-gather wins instead",
        HOLDS if everywhere else IN_PART if wins else NOT,
        f"From 10 to 1 % the lead of sharing shrinks in {shrinks} of {len(known)} settings; at 1 % on "
        f"{slowest[0]['network']} the all-gather wins in {wins} of {len(slowest)}. Its step time over that "
        f"of sharing at 1 %: {_advantages(part, low)}.",
    )


def more_workers_favour_sharing(part: Found) -> Claim:
    grown, told = [], []
    for network in dict.fromkeys(one["network"] for one in part["settings"]):
        same = sorted(
            (one for one in part["settings"] if one["network"] == network), key=lambda one: int(one["workers"])
        )
        for density in figures.densities(part) if len(same) > 1 else ():
            few, many = figures.advantage(same[0], density), figures.advantage(same[-1], density)
            if few is not None and many is not None:
                grown.append(many > few)
                told.append(f"{network}, {100 * density:g} %: {few:.2f} to {many:.2f}")
    return Claim(
        "The more workers, the more sharing gains over the all-gather",
        figures.by_share(sum(grown), len(grown)),
        f"From 4 to 8 workers, which share the same two cores, its lead grows in {sum(grown)} of {len(grown)} cases: "
        f"{'; '.join(told)}."
        if told
        else "Only one number of workers was run.",
    )


def the_model_chooses_right(part: Found) -> Claim:
    told = {}
    for by in ("book", "plan"):
        cells = [(one, density) for one in part["settings"] for density in figures.densities(part)]
        forecasts = [
            (figures.foretold(one, d, by=by), figures.faster(one, d), figures.regret(one, d, by=by)) for one, d in cells
        ]
        clear = [(said, was) for said, was, _ in forecasts if said is not None and was != "even"]
        costs = [cost for _, _, cost in forecasts if cost is not None]
        told[by] = (sum(said == was for said, was in clear), len(clear), max(costs, default=0.0))
    (right, decided, worst), (plan_right, plan_decided, plan_worst) = told["book"], told["plan"]
    return Claim(
        "Latency, bandwidth and a formula suffice to choose the collective",
        figures.by_share(right, decided),
        f"Where one collective is significantly faster, the formulas name it in {right} of {decided} cells (following "
        f"them costs at most {100 * worst:.0f} %). `thinwire plan`, which also counts coding, overlap and what gloo "
        f"sends, names it in {plan_right} of {plan_decided} (at most {100 * plan_worst:.0f} %).",
    )


def quicker_than_dense(part: Found) -> Claim:
    ratios = []
    for setting in part["settings"]:
        dense = figures.mean(setting["rows"]["ddp"]["ms"])
        for density in figures.densities(part):
            shared = figures.mean(figures.ms(setting, "STAR", density))
            if dense and shared:
                ratios.append(dense / shared)
    right = sum(ratio > 1 for ratio in ratios)
    return Claim(
        "AR-Topk makes steps 1.5 to 5.5 times faster than the better dense all-reduce (8 V100, 4 ms, 20 Gbit/s)",
        figures.by_share(right, len(ratios)),
        f"Another machine, so only the direction is comparable: faster in {right} of {len(ratios)} cells, "
        f"{min(ratios):.2f} to {max(ratios):.2f} times."
        if ratios
        else "Nothing was measured.",
    )


# --------------------------------------------------------------------------------------------------------- leaders


def _signed(part: Found, first: str, second: str, skew: float, density: float) -> tuple[str, int]:
    found = figures.better_by(part, TOP_K[first].format(density), TOP_K[second].format(density), skew)
    sign = 1 if found.low > 0 else -1 if found.high < 0 else 0
    shards = f"skew {skew:g}" if skew else "shards alike"
    return f"{shards}, {100 * density:g} %: {found.mean:+.1f} ± {found.half:.1f} points", sign


def as_accurate_as_gather(part: Found) -> Claim:
    told, found = [], []
    for skew in sorted({run["skew"] for run in part["runs"]}):
        for density in figures.leader_densities(part):
            told.append(_signed(part, "STAR", "AG", skew, density)[0])
            found.append(figures.better_by(part, TOP_K["STAR"].format(density), TOP_K["AG"].format(density), skew))
    worse, equal = sum(one.high < 0 for one in found), sum(one.low > -figures.MARGIN for one in found)
    return Claim(
        "AR-Topk is as accurate as Top-k by all-gather at the same ratio",
        figures.equal_or_not(found),
        f"Accuracy of STAR minus that of the all-gather: {'; '.join(told)}. Significantly worse in {worse} of "
        f"{len(found)}, within {figures.MARGIN:g} points in {equal}; undecided with these seeds in the others.",
    )


def variance_helps(part: Found) -> Claim:
    skews = sorted({run["skew"] for run in part["runs"]})
    skewed = [_signed(part, "VAR", "STAR", skews[-1], density) for density in figures.leader_densities(part)]
    alike = [_signed(part, "VAR", "STAR", skews[0], density) for density in figures.leader_densities(part)]
    better = sum(sign > 0 for _, sign in skewed)
    return Claim(
        "Choosing the leader by variance (VAR) helps where workers' data differ (a conjecture of the authors)",
        HOLDS if better == len(skewed) else IN_PART if better else NOT,
        f"Accuracy of VAR minus that of STAR: {'; '.join(one for one, _ in (*skewed, *alike))}. Significantly "
        f"better on skewed shards in {better} of {len(skewed)}; few seeds, no correction for multiple tests.",
    )


def variance_is_free(part: Found) -> Claim:
    low, shares, told = min(figures.densities(part)), [], []
    for setting in part["settings"]:
        more = spread(figures.differences(figures.ms(setting, "VAR", low), figures.ms(setting, "STAR", low)))
        base = figures.mean(figures.ms(setting, "STAR", low))
        if more.n and base:
            shares.append(more.mean / base)
            told.append(f"{setting['network']}, {setting['workers']} workers: {more.mean:+.0f} ± {more.half:.0f} ms")
    small = sum(share < _NEGLIGIBLE for share in shares)
    return Claim(
        "The extra traffic of VAR over STAR is negligible",
        figures.by_share(small, len(shares)),
        f"VAR minus STAR at 1 %: {'; '.join(told)}. Below 5 % of the step in {small} of {len(shares)}. The paper's "
        "own Table V has 12 to 13 ms, three latencies of 4 ms.",
    )


def gain_is_honest(part: Found) -> Claim:
    told, off = [], []
    for density in figures.leader_densities(part):
        for skew in sorted({run["skew"] for run in part["runs"]}):
            recipe = TOP_K["STAR"].format(density)
            said, true = (spread(figures.gains(part, recipe, skew, key)) for key in ("told", "true"))
            if said.n and true.n and true.mean > 0:
                off.append(said.mean / true.mean)
                told.append(
                    f"{100 * density:g} %, {f'skew {skew:g}' if skew else 'alike'}: {said.mean:.2f} and {true.mean:.2f}"
                )
    near = sum(1 / 1.2 <= one <= 1.2 for one in off)
    return Claim(
        "The gain that the leader measures tells how much of the gradient arrives",
        figures.by_share(near, len(off)),
        "Share of its own energy that the leader sends, and share of the mean's energy that arrives: "
        f"{'; '.join(told)}. Within a fifth in {near} of {len(off)}.",
    )
