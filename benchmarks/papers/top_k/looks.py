"""Looks at u during training: what results keep of each, and counts over many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]
_COUNTS = ("one_hump", "falls", "tests", "bell_holds", "classic_holds")


def sample_of(seen: Found, *, histogram: bool) -> dict[str, Any]:
    """What results keep of one step: the whole model in numbers, its layers as counts."""
    portrait, whole = seen["whole"], brief(seen["whole"])
    if whole["finite"]:
        whole |= {key: portrait[key] for key in ("std", "memory_share", *(("histogram",) if histogram else ()))}
        whole["out_of_place"] = portrait["hump"]["departure"]
        whole["fits"] = {name: {"ks": fit["ks"]} for name, fit in portrait["fits"].items()}
        wanted = ("density", "top_k", "random_k", "classic", "bell")
        whole["contraction"] = [{key: row[key] for key in wanted} for row in portrait["contraction"]]
    return {"step": seen["step"], "whole": whole, "layers": counted(brief(one) for one in seen["layers"].values())}


def brief(portrait: Found) -> dict[str, Any]:
    """Shape, best fit, and how many tests each bound passed."""
    if not portrait["finite"]:
        return {"finite": False}
    rows = portrait["contraction"]
    return {
        **{key: portrait[key] for key in ("finite", "numel", "kurtosis", "best")},
        "one_hump": portrait["hump"]["one"],
        "falls": portrait["falls"]["one"],
        "tests": len(rows),
        "bell_holds": sum(row["holds"]["bell"] for row in rows),
        "classic_holds": sum(row["holds"]["classic"] for row in rows),
    }


def counted(looks: Iterable[Found]) -> dict[str, Any]:
    """How many looks were finite, how many had which property, and which fit was the best how often.

    >>> look = {"finite": True, "one_hump": True, "falls": False, "tests": 6, "bell_holds": 5, "classic_holds": 6}
    >>> counted([{**look, "best": "laplace"}, {**look, "best": None}, {"finite": False}])["best"]
    {'laplace': 1}
    """
    finite = [one for one in looks if one["finite"]]
    best = Counter(one["best"] for one in finite if one["best"] is not None)
    return {"looks": len(finite), **{key: sum(one[key] for one in finite) for key in _COUNTS}, "best": dict(best)}


def added(counts: Sequence[Found]) -> dict[str, Any]:
    """The sum of several counts."""
    best: Counter[str] = Counter()
    for one in counts:
        best.update(one["best"])
    return {**{key: sum(one[key] for one in counts) for key in ("looks", *_COUNTS)}, "best": dict(best)}


def all_counts(part: Found) -> dict[str, Any]:
    """Over all runs and steps: the whole models and their layers."""
    return added([counts for run in part["runs"] for sample in run["samples"] for counts in _counts_of(sample)])


def _counts_of(sample: Found) -> Iterator[Found]:
    yield counted([sample["whole"]])
    yield sample["layers"]
