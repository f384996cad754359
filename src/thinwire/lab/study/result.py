"""The result of a study, as data and in words, for a user's own model and for `thinwire study gradients`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..compare.machine import describe_machine

SCHEMA = 1
KIND = "study"
ASKED = 0.01  # the density that words and tables speak of, or the one nearest to it
WORDS = {"gaussian": "Gaussian", "laplace": "Laplace", "student_t": "Student t", None: "none"}


def result_of(
    rows: Sequence[dict[str, Any]], *, settings: Mapping[str, Any], command: str = "", workload: str | None = None
) -> dict[str, Any]:
    """The whole result; each row has a `recipe` and its `samples`.

    >>> import torch
    >>> from thinwire.lab.study.portrait import Lens, look
    >>> sample = look([("w", torch.randn(5000, generator=torch.Generator().manual_seed(0)), None)], step=0, lens=Lens())
    >>> found = result_of([{"recipe": "dense", "samples": [sample]}], settings={})
    >>> found["kind"], found["findings"]["best"], found["findings"]["bell_holds"] == found["findings"]["bell_of"]
    ('study', {'gaussian': 2}, True)
    """
    findings = _findings(rows)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": command,
        "workload": workload,
        "settings": dict(settings),
        "machine": describe_machine(),
        "headline": _headline(rows, findings),
        "findings": findings,
        "rows": list(rows),
    }


def portraits(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """All descriptions: of every recipe, step and layer, and of the whole model; without those that are not finite."""
    for row in rows:
        for sample in row["samples"]:
            for one in (sample["whole"], *sample["layers"].values()):
                if one["finite"]:
                    yield one


def at_density(portrait: Mapping[str, Any], density: float = ASKED) -> Mapping[str, Any] | None:
    """The contraction at the density that is nearest to the given one."""
    rows: Sequence[Mapping[str, Any]] = portrait.get("contraction") or ()
    return min(rows, key=lambda row: abs(float(row["density"]) - density), default=None)


def _findings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    all_of_them = list(portraits(rows))
    tested = [one for portrait in all_of_them for one in portrait["contraction"]]
    falls = [portrait for portrait in all_of_them if portrait["falls"]["one"] and portrait["contraction"]]
    kept = [all(one["holds"]["bell"] for one in portrait["contraction"]) for portrait in falls]
    return {
        "looks": len(all_of_them),
        "best": dict(Counter(portrait["best"] for portrait in all_of_them if portrait["best"]).most_common()),
        "one_hump": sum(portrait["hump"]["one"] for portrait in all_of_them),
        "falls": sum(portrait["falls"]["one"] for portrait in all_of_them),
        "bell_of": len(tested),
        "bell_holds": sum(one["holds"]["bell"] for one in tested),
        "classic_holds": sum(one["holds"]["classic"] for one in tested),
        "falling_looks": len(falls),
        "falling_and_bell": sum(kept),
        "not_finite": sum(
            not one["finite"]
            for row in rows
            for sample in row["samples"]
            for one in (sample["whole"], *sample["layers"].values())
        ),
    }


def _headline(rows: Sequence[Mapping[str, Any]], findings: Mapping[str, Any]) -> str:
    """The energy that Top-k keeps of the last recipe at its last step."""
    whole = rows[-1]["samples"][-1]["whole"]
    one = at_density(whole) if whole["finite"] else None
    if one is None:
        return f"{findings['looks']} looks at u"
    holds = "all" if findings["bell_holds"] == findings["bell_of"] else f"{findings['bell_holds']}"
    return (
        f"Top-k of {percent(one['density'])} keeps {percent(one['delta']['top_k'])} of |u|²; "
        f"the bell bound holds in {holds} of {findings['bell_of']} tests"
    )


def percent(share: float) -> str:
    """A percentage with two significant digits.

    >>> percent(0.01), percent(0.3456), percent(0.00123)
    ('1 %', '35 %', '0.12 %')
    """
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.3g} %"


HEADS = ("recipe", "step", "memory", "kurtosis", "best fit", "KS", "out of place", "top-k leaves", "1-k/d", "(1-k/d)²")


def lines(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table of the whole model, a line for each recipe and step, in the order of `HEADS`."""
    for row in result["rows"]:
        for sample in row["samples"]:
            yield (str(row["recipe"]), f"{sample['step']:,}", *_cells(sample["whole"]))


def _cells(whole: Mapping[str, Any]) -> tuple[str, ...]:
    if not whole["finite"]:
        return ("-", "not finite", *["-"] * 6)
    one = at_density(whole)
    fit = whole["fits"].get(whole["best"], {})
    name = WORDS[whole["best"]]
    if whole["best"] == "student_t":
        name += f" {fit['freedom']:.1f}"
    told = ("-",) * 3 if one is None else tuple(f"{one[key]:.4f}" for key in ("top_k", "classic", "bell"))
    ks = f"{fit['ks']:.3f}" if fit else "-"
    moved = f"{whole['hump']['departure']:.1%}"
    return (f"{whole['memory_share']:.0%}", f"{whole['kurtosis']:,.1f}", name, ks, moved, *told)


def sentences(result: Mapping[str, Any]) -> list[str]:
    """The findings, one sentence each."""
    found = result["findings"]
    best = ", ".join(f"{WORDS[name]} {count}" for name, count in found["best"].items())
    said = [
        f"{found['looks']} looks at u, of the whole model and of its layers. The density that fits best: {best}.",
        f"{found['one_hump']} of them have one hump; in {found['falls']} the density of |u| falls from 0 on.",
        f"1 - k/d holds in {found['classic_holds']} of {found['bell_of']} tests (looks times densities), "
        f"(1 - k/d)² in {found['bell_holds']}.",
        f"Of the {found['falling_looks']} looks whose density falls, "
        f"(1 - k/d)² holds at all densities in {found['falling_and_bell']}.",
    ]
    if found["not_finite"]:
        said.append(f"{found['not_finite']} looks met inf or NaN and say nothing.")
    return said


def summary(result: Mapping[str, Any]) -> str:
    """The table and the sentences, as text for a terminal."""
    table = [HEADS, *lines(result)]
    widths = [max(len(line[place]) for line in table) for place in range(len(HEADS))]
    shown = [
        "  ".join(f"{cell:{'<' if place == 0 else '>'}{widths[place]}}" for place, cell in enumerate(line)).rstrip()
        for line in table
    ]
    density = next((at_density(one) for one in portraits(result["rows"]) if one["contraction"]), None)
    which = "" if density is None else f"\nThe whole model; top-k keeps {percent(density['density'])} of the elements."
    return "\n".join([*shown, which, *sentences(result)])
