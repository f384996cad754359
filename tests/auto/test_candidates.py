"""The candidates, the options that select them, and their progress per step."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.auto import auto
from thinwire.auto.candidates import DELAYED, DENSITIES, all_candidates, candidate, energy_at
from thinwire.errors import OptionError

CURVE = (0.5, 0.35, 0.25, 0.15, 0.08)


def test_dense_is_always_there_and_first() -> None:
    for options in (auto(), auto(allow=["two-shot-4"]), auto(allow=[]), auto(unbiased=True)):
        assert options.allow[0].recipe.dense


def test_the_candidates_of_the_contract() -> None:
    names = {one.name for one in all_candidates()}
    assert names >= {"dense", "bf16", "global-qsgd-8", "global-qsgd-4"}
    assert names >= {f"two-shot-{bits}" for bits in (8, 4, 3, 2)}
    for density in ("10", "3.3", "1.1", "0.4", "0.1"):
        assert names >= {f"threshold-k {density} %", f"ar-top-k {density} %"}


def test_every_candidate_can_be_run_by_some_ranks() -> None:
    for one in all_candidates():
        assert one.recipe.refusal(2) is None or one.recipe.refusal(4) is None, one.name


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["two-shot"], {"dense", "two-shot-8", "two-shot-4", "two-shot-3", "two-shot-2", "two-shot-1"}),
        (["threshold-k"], {"dense", *(f"threshold-k {100 * density:.2g} %" for density in DENSITIES)}),
        (["powersgd-4", "bf16"], {"dense", "bf16", "powersgd-4"}),
        (["dgc", "bf16"], {"dense", "bf16", "dgc"}),
        (["qsgd:4,block=64|all_gather"], {"dense", "qsgd:4,block=64|all_gather"}),
    ],
)
def test_allow_takes_names_families_presets_and_recipes(words: list[str], wanted: set[str]) -> None:
    assert {one.name for one in auto(allow=words).allow} == wanted


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"allow": ["nothing"]}, "does not know nothing"),
        ({"allow": ["top_k:0.1|all_reduce"]}, "cannot allow"),
        ({"max_error": 1.0}, "max_error is a share"),
        ({"max_error": -0.1}, "max_error is a share"),
        ({"objective": "speed"}, "there is no objective speed"),
        # dgc would train without its momentum in buckets that another candidate has touched
        ({"allow": ["dgc", "threshold-k"]}, "allow recipes with the same memory"),
        ({"allow": ["ef:0.5|top_k:0.1|all_gather", "ar-top-k"]}, "allow recipes with the same memory"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        auto(**options)


def test_unbiased_excludes_biased_candidates() -> None:
    for one in auto(unbiased=True).allow:
        assert one.density is None


def test_progress_is_a_share_and_fewer_bits_make_less_progress() -> None:
    progress = {one.name: one.progress_per_step(1 << 20, workers=4, curve=CURVE) for one in all_candidates()}
    assert all(0 < share <= 1 for share in progress.values())
    assert progress["dense"] == progress["bf16"] == 1.0
    shots = [progress[f"two-shot-{bits}"] for bits in (8, 4, 3, 2, 1)]
    assert shots == sorted(shots, reverse=True)
    for name, share in zip(DENSITIES, CURVE, strict=True):
        assert progress[f"ar-top-k {100 * name:.2g} %"] == pytest.approx(DELAYED * share)


def test_energy_between_densities() -> None:
    for density, energy in zip(DENSITIES, CURVE, strict=True):
        assert energy_at(density, CURVE) == pytest.approx(energy)
    assert energy_at(1.0, CURVE) == 1.0
    between = [energy_at(10 ** (-place / 20), CURVE) for place in range(90)]
    assert between == sorted(between, reverse=True)


def test_a_candidate_knows_its_family() -> None:
    assert candidate("two-shot-4").family == "two_shot"
    assert candidate("ar-top-k").family == "shared_top_k"
