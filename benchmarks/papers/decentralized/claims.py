"""What was published about decentralised training with compression, and verdicts from what was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..page import HOLDS, IN_PART, NOT, NOT_TESTABLE, Claim, shown, spread
from . import facts

ALIKE = 1.0  # points of accuracy behind D-PSGD that still count as converging alike
FAILED = 5.0  # points behind D-PSGD from which a run counts as failed
NEAR = 0.1  # of a slope of -0.5
WORTH = 1.1  # times the value of one worker with as many examples, at most, for a linear speed-up
Row = tuple[str, str, float]


def all_of(parts: dict[str, Any]) -> list[Claim]:
    """The table at the end of the page."""
    rows = parts["convergence"]["rows"]
    return [
        eight_bits(rows),
        few_bits_ecd(rows),
        scaled_ecd(rows),
        naive(rows),
        four_bits_dcd(rows),
        choco(rows),
        sufficient(parts["noise"]["learning"]),
        limit(parts["noise"]),
        rate(parts["speedup"]),
        linear(parts["speedup"], "dcd"),
        linear(parts["speedup"], "ecd"),
        both(parts["networks"]),
        one_alone(parts["networks"]),
        Claim(
            "Accuracies and epoch times of the papers: ResNet-20 on CIFAR-10, ResNet-50 on ImageNet, 8 to 16 GPUs.",
            NOT_TESTABLE,
            "No GPU and neither data set here; models of this size would take days on two cores.",
        ),
    ]


def verdict(good: int, of: int) -> str:
    """All, some, or none."""
    if not of:
        return NOT_TESTABLE
    return HOLDS if good == of else IN_PART if good else NOT


# ------------------------------------------------------------------------------------------------------ convergence


def _behind(rows: Sequence[dict[str, Any]], wanted: Sequence[Row]) -> list[tuple[str, float, str]]:
    """Of those that were run: name, mean points behind D-PSGD, and both as text."""
    found = []
    for algorithm, codec, skew in wanted:
        points = facts.behind(rows, algorithm, codec, skew)
        if points:
            name = f"`{codec}`{', skew' if skew else ''}"
            found.append((name, spread(points).mean, f"{name} {shown(points, digits=1)}"))
    return found


def _said(found: Sequence[tuple[str, float, str]]) -> str:
    return "; ".join(text for _, _, text in found)


def _both_shards(algorithm: str, *codecs: str) -> list[Row]:
    return [(algorithm, codec, skew) for codec in codecs for skew in (0.0, 0.9)]


def eight_bits(rows: Sequence[dict[str, Any]]) -> Claim:
    dcd = _behind(rows, _both_shards("dcd", "min_max:8,block=512"))
    ecd = _behind(rows, _both_shards("ecd", "absolute:8"))
    good = sum(points <= ALIKE for _, points, _ in (*dcd, *ecd))
    why = f"Points of accuracy behind D-PSGD, at most {ALIKE:g} counts as alike. DCD {_said(dcd)}; ECD {_said(ecd)}."
    return Claim("DCD and ECD with 8 bits converge like D-PSGD in float32.", verdict(good, len(dcd) + len(ecd)), why)


def few_bits_ecd(rows: Sequence[dict[str, Any]]) -> Claim:
    found = _behind(rows, _both_shards("ecd", "absolute:4", "absolute:2"))
    other = _behind(rows, _both_shards("dcd", "min_max:4,block=512", "min_max:2,block=512"))
    good = sum(points <= FAILED for _, points, _ in found)
    why = (
        f"Points behind D-PSGD with the fixed grid that its theory requires: {_said(found)} (up to {FAILED:g} counts "
        f"as robust). DCD with blocks, of which the paper says the opposite: {_said(other)}."
    )
    return Claim("ECD is the robust one with fewer bits: it gets worse smoothly.", verdict(good, len(found)), why)


def scaled_ecd(rows: Sequence[dict[str, Any]]) -> Claim:
    codecs = ("min_max:8,block=512", "min_max:4,block=512", "min_max:2,block=512", "qsgd:8,block=0")
    found = _behind(rows, _both_shards("ecd", *codecs))
    failed = sum(points > FAILED for _, points, _ in found)
    why = f"Points behind D-PSGD: {_said(found)}; more than {FAILED:g} counts as failed, {failed} of {len(found)} do."
    said = "ECD fails with quantisers whose noise grows with what is sent (CHOCO's authors: 59 % at 8 bits, none at 4)."
    return Claim(said, verdict(failed, len(found)), why)


def naive(rows: Sequence[dict[str, Any]]) -> Claim:
    blocks = _behind(rows, _both_shards("naive", "min_max:8,block=512", "min_max:4,block=512", "min_max:2,block=512"))
    whole = _behind(rows, _both_shards("naive", "min_max:4,block=0", "min_max:2,block=0", "qsgd:8,block=0"))
    failed = sum(points > FAILED for _, points, _ in (*blocks, *whole))
    why = f"Points behind D-PSGD. One scale per 512 parameters: {_said(blocks)}. One for all: {_said(whole)}."
    return Claim(
        "Averaging quantised models does not converge without further measures.",
        verdict(failed, len(blocks) + len(whole)),
        why,
    )


def four_bits_dcd(rows: Sequence[dict[str, Any]]) -> Claim:
    norm = _behind(rows, _both_shards("dcd", "qsgd:4,block=0", "qsgd:2,block=0"))
    ranges = _behind(
        rows,
        _both_shards("dcd", "min_max:4,block=512", "min_max:2,block=512", "min_max:4,block=0", "min_max:2,block=0"),
    )
    failed = sum(points > FAILED for _, points, _ in (*norm, *ranges))
    why = (
        f"Points behind D-PSGD. QSGD with one L2 norm, as they had it for each layer: {_said(norm)}. Min-max ranges: "
        f"{_said(ranges)}. The quantiser fails at 4 bits, not DCD."
        if norm and ranges and min(one[1] for one in norm) > FAILED >= max(one[1] for one in ranges)
        else f"Points behind D-PSGD. QSGD with one L2 norm: {_said(norm)}. Min-max ranges: {_said(ranges)}."
    )
    said = "DCD fails at 4 bits and diverges at 2 (CHOCO's authors: 23.6 % and none, where D-PSGD has 92 %)."
    return Claim(said, verdict(failed, len(norm) + len(ranges)), why)


def choco(rows: Sequence[dict[str, Any]]) -> Claim:
    codecs = dict.fromkeys(row["codec"] for row in rows if row["algorithm"] == "choco")
    found = _behind(rows, _both_shards("choco", *codecs))
    good = sum(points <= FAILED for _, points, _ in found)
    why = f"Points behind D-PSGD: {_said(found)}; up to {FAILED:g} counts, after a search of its consensus step."
    return Claim("CHOCO trains with any compressor, sign and the top 1 % included.", verdict(good, len(found)), why)


# ------------------------------------------------------------------------------------------------------------ noise


def sufficient(learning: Sequence[dict[str, Any]]) -> Claim:
    under, over = facts.published_score(learning)
    kept = sum(not facts.breaks(row) for row in under)
    trains = [facts.mean(row["noise"]) / row["published"] for row in over if not facts.breaks(row)]
    why = f"{kept} of {len(under)} rows with noise below (1 - ρ)²/4μ² train."
    if trains:
        why += f" It is not necessary: {len(trains)} of {len(over)} rows above it train too, at up to "
        why += f"{max(trains):,.0f} times the bound."
    return Claim("DCD converges if its noise is below a bound given by the graph.", verdict(kept, len(under)), why)


def limit(part: dict[str, Any]) -> Claim:
    score = facts.score(part["learning"])
    talking = [row for row in part["talking"] if facts.drawn_apart(row)]
    right = sum((facts.load(row) > 1) == (facts.mean(row["growth"]) > 1) for row in talking)
    of = int(score["below"] + score["above"])
    told = int(score["below"] - score["below_broken"] + score["above_broken"])
    alone = facts.score(part["learning"], facts.load_alone)
    alone_told = int(alone["below"] - alone["below_broken"] + alone["above_broken"])
    shared = [row for row in part["talking"] if not facts.drawn_apart(row) and facts.load(row) < 1]
    grown = sum(facts.mean(row["growth"]) > 1 for row in shared)
    why = (
        f"Without gradients it is right in {right} of {len(talking)} cells, while learning in {told} of {of}: "
        f"{score['below_broken']:.0f} of {score['below']:.0f} rows below it break, {score['above_broken']:.0f} of "
        f"{score['above']:.0f} above. With the noise without gradients it is right in {alone_told} of {of}. It "
        f"assumes independent noise: with shared positions, {grown} of {len(shared)} graphs drift apart below it."
    )
    exact = right == len(talking) and told == of and not grown
    mostly = right >= 0.9 * len(talking) and told >= 0.8 * of
    said = "Ours: DCD breaks if its noise is above `noise_limit()`, and not below."
    return Claim(said, HOLDS if exact else IN_PART if mostly else NOT, why)


# --------------------------------------------------------------------------------------------------------- speed-up


def rate(part: dict[str, Any]) -> Claim:
    rows = [(row, "n") for row in part["series"] if row["algorithm"] in ("dpsgd", "dcd")]
    rows += [(row, "steps") for row in part["longer"]]
    found = []
    for row, over in rows:
        slope = facts.slopes(row["points"], over)
        name = f"{row['algorithm']} `{row['codec']}` {row['topology']} in {'T' if over == 'steps' else 'n'}"
        found.append((spread(slope).mean, f"{name} {shown(slope, digits=3)}"))
    good = sum(abs(slope + 0.5) <= NEAR for slope, _ in found)
    why = f"Slopes on logarithmic axes, -0.5 ± {NEAR:g} counts: {'; '.join(text for _, text in found)}. One worker "
    why += f"alone: {shown(facts.slopes(part['alone'], 'steps'), digits=3)} in T."
    return Claim(
        "Where gradient noise dominates, |∇f|² falls as 1/sqrt(nT) for DCD as for D-PSGD.",
        verdict(good, len(found)),
        why,
    )


def linear(part: dict[str, Any], algorithm: str) -> Claim:
    alone = {point["n"]: point["values"] for point in part["alone"]}
    found = []
    for row in (one for one in part["series"] if one["algorithm"] == algorithm):
        last = row["points"][-1]
        ratio = facts.ratios(last["values"], alone[last["n"]])
        found.append((spread(ratio).mean, f"`{row['codec']}` {row['topology']} {shown(ratio, digits=2)}"))
    good = sum(ratio <= WORTH for ratio, _ in found)
    most = part["alone"][-1]["n"]
    figures = "; ".join(text for _, text in found)
    why = f"|∇f|² of {most} workers over that of one worker with the same number of examples: {figures} "
    why += f"(up to {WORTH:g} counts)."
    return Claim(f"{algorithm.upper()} speeds up linearly in the number of workers.", verdict(good, len(found)), why)


# --------------------------------------------------------------------------------------------------------- networks


def both(part: dict[str, Any]) -> Claim:
    good, of, told = 0, 0, []
    for grid in part["grids"]:
        corner = _corners({(c["megabits"], c["latency_ms"]): facts.gain(c["step_ms"], 4) for c in grid["cells"]})
        good, of = good + (corner["both"] > max(corner["slow"], corner["late"], corner["neither"])), of + 1
        told.append(f"simulated, {grid['compute_ms']} ms steps, 4 bits: {_corner_text(corner)}")
    cells = _measured_gains(part)
    if cells:
        corner = _corners(cells)
        good, of = good + (corner["both"] > max(corner["slow"], corner["late"], corner["neither"])), of + 1
        told.append(f"measured, 8 bits: {_corner_text(corner)}")
    said = "Compressed and decentralised beats either alone, most of all where latency is high and bandwidth low."
    why = f"Largest gain over the fastest alternative with as many bits; {'; '.join(told)}."
    return Claim(said, verdict(good, of), why)


def one_alone(part: dict[str, Any]) -> Claim:
    """Where only one of latency and bandwidth is bad, the measure against that one should do."""
    gains = []
    for grid in part["grids"]:
        corner = _corners({(c["megabits"], c["latency_ms"]): facts.gain(c["step_ms"], 4) for c in grid["cells"]})
        gains += [corner["slow"], corner["late"]]
    cells = _measured_gains(part)
    if cells:
        corner = _corners(cells)
        gains += [corner["slow"], corner["late"]]
    idle = sum(gain <= WORTH for gain in gains)
    why = (
        f"Largest gains where only bandwidth or only latency is bad: {', '.join(f'{gain:.2f}' for gain in gains)} (in "
        f"the order of the row above); up to {WORTH:g} counts as none. Gossip messages overlap with the next gradient; "
        "collectives must end before it."
    )
    return Claim("Where only one of the two is bad, one of the two measures is enough.", verdict(idle, len(gains)), why)


def _measured_gains(part: dict[str, Any]) -> dict[tuple[float, float], float]:
    if part["measured"] is None:
        return {}
    return {_network(cell["network"]): facts.gain(cell["epoch_seconds"], 8) for cell in part["measured"]["cells"]}


def _network(name: str) -> tuple[float, float]:
    """Mbit/s and milliseconds of a text such as 1gbit,20ms."""
    speed, _, latency = name.partition(",")
    factor = 1000.0 if speed.endswith("gbit") else 1.0
    return factor * float(speed.rstrip("gmbit")), float(latency.removesuffix("ms"))


def _corners(gains: dict[tuple[float, float], float]) -> dict[str, float]:
    """The largest gain where bandwidth is below the best of the grid, latency above it, both, or neither."""
    fastest, least = max(speed for speed, _ in gains), min(late for _, late in gains)
    found = {"neither": 0.0, "slow": 0.0, "late": 0.0, "both": 0.0}
    for (speed, late), gain in gains.items():
        slow = speed < fastest
        where = ("both" if slow else "late") if late > least else ("slow" if slow else "neither")
        found[where] = max(found[where], gain)
    return found


def _corner_text(corner: dict[str, float]) -> str:
    return (
        f"{corner['both']:.2f} with both, {corner['slow']:.2f} with low bandwidth only, {corner['late']:.2f} with "
        f"high latency only, {corner['neither']:.2f} with neither"
    )
