"""docs/codecs.md is true: tables are what the registered codecs do, and its own codec runs between two processes."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from support.pool import Pool
from thinwire.codecs import Codec
from thinwire.recipe.registry import STAGES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "codecs.md"
SHAPE = (1000, 1000)
MILLION = math.prod(SHAPE)
CODECS = {name for name, stage in STAGES.items() if issubclass(stage, Codec)}


def script(name: str) -> Any:
    """A script of docs/, as a module."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


SPECIAL = script("special_values")
MAKE = script("make_codecs")


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def table(title: str) -> list[tuple[str, list[str]]]:
    """Name and further cells of every row of a table of the page."""
    _, found, rest = PAGE.read_text().partition(f"\n## {title}\n")
    assert found, title
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return [(row[0].strip("`"), row[1:]) for row in cells]


def cases(title: str) -> list[Any]:
    return [pytest.param(name, cells, id=name) for name, cells in table(title)]


def codec_of(word: str) -> Codec:
    return tw.parse(f"{word}|local").codec


# --------------------------------------------------------------------------------------------------------- tables


def test_every_codec_has_a_row() -> None:
    assert {name for name, _ in table("The list")} == CODECS
    for title in ("Size and error", "Special values"):
        assert {codec_of(word).name for word, _ in table(title)} == CODECS


@pytest.mark.parametrize(("name", "cells"), cases("The list"))
def test_options_and_sentence(name: str, cells: list[str]) -> None:
    options, _, sentence = cells
    written = dict(part.partition("=")[::2] for part in re.findall(r"`([^`]+)`", options))
    assert list(written) == STAGES[name].option_names()
    for option, default in written.items():
        real = getattr(STAGES[name], option, None)  # a field without a default is no attribute of the class
        assert (str(real) if real is not None else "") == default, option
    assert sentence == (inspect.getdoc(STAGES[name]) or "").splitlines()[0]


@pytest.mark.parametrize(("word", "cells"), cases("Size and error"))
def test_bytes_bias_bound_and_sum(word: str, cells: list[str]) -> None:
    codec = codec_of(word)
    size, bits, bias, bound, added = cells
    assert size == f"{codec.message_bytes(MILLION, shape=SHAPE):,}"
    assert float(bits) == pytest.approx(8e-6 * int(size.replace(",", "")), rel=0.01)
    assert bias == ("unbiased" if codec.unbiased else "biased")
    delta = None if codec.unbiased else codec.delta(MILLION, shape=SHAPE if codec.needs_shape else None)
    lost = codec.omega(MILLION) if codec.unbiased else None if delta is None else 1 - delta
    assert lost is not None
    assert bound == f"{lost:.3g}"
    assert added == ("-" if codec.sum_dtype is None else f"`{str(codec.sum_dtype).partition('.')[2]}`")


@pytest.mark.parametrize(("name", "cells"), cases("Formulas"))
def test_formulas_are_of_codecs_with_that_bias(name: str, cells: list[str]) -> None:
    (formula,) = cells
    words = [word for word, _ in table("Size and error") if codec_of(word).name == name]
    assert words
    for word in words:
        assert ("omega = " if codec_of(word).unbiased else "delta = ") in formula


def test_a_codec_that_a_program_registers_is_not_in_the_tables() -> None:
    namespace: dict[str, Any] = {"tw": tw, "torch": torch, "__name__": "a_program"}
    exec(compile(python_blocks()[1], PAGE.name, "exec", dont_inherit=True), namespace)
    try:
        assert "truncate" in STAGES
        assert "truncate" not in {name for name, _ in MAKE.registered(Codec)}
    finally:
        tw.codecs.unregister("truncate")


# ------------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize(("name", "cells"), cases("Special values"))
def test_zeros_constants_single_elements_and_denormals(name: str, cells: list[str]) -> None:
    codec = codec_of(name)
    *words, _ = cells
    inputs = (
        [torch.zeros(SPECIAL.GRID)],
        [torch.full(SPECIAL.GRID, value) for value in SPECIAL.CONSTANTS],
        [torch.tensor([value]) for value in SPECIAL.CONSTANTS],
        [SPECIAL.DENORMALS],
    )
    for word, given in zip(words, inputs, strict=True):
        if word == "other":  # what the page has no word for
            continue
        judge, among = SPECIAL.MEANINGS[word]
        assert among(judge(codec, x) for x in given), word


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("name", "cells"), cases("Special values"))
def test_inf_and_nan(name: str, cells: list[str], value: float) -> None:
    codec, place = codec_of(name), 30 * 64 + 10
    assert cells[-1] == SPECIAL.spoiled_by(codec, value)
    assert cells[-1] != "nothing"
    x = torch.randn(math.prod(SPECIAL.GRID), generator=torch.Generator().manual_seed(0))
    x[place] = value
    y = SPECIAL.through(codec, x.view(SPECIAL.GRID)).view(-1)
    if name in ("fp32", "fp16", "bf16") and math.isinf(value):
        assert float(y[place]) == value
    elif codec.name in dict(table("Formulas")):  # of these the page says that they send NaN
        assert y[place].isnan() or codec.name == "random_k"
    else:
        assert not y[place].isfinite() or codec.sparse
    if cells[-1].startswith("every place"):
        assert int(y.isfinite().logical_not().sum()) == codec.capacity(x.numel())
    assert not SPECIAL.through(codec, torch.tensor([value])).isfinite().any()


# ------------------------------------------------------------------------------------------------- write your own


def run_the_page(rank: int, world_size: int, source: list[str]) -> dict[str, Any]:
    """The codec of the page in all its recipes, between real processes."""
    namespace: dict[str, Any] = {"__name__": "a_program"}
    for block in source:
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), namespace)
    seen, gradient = {}, torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))
    for text in namespace["RECIPES"]:
        reducer = tw.Reducer(text, check_every=1)
        seen[text] = reducer.reduce("w", gradient).tolist()
        assert reducer.commit() is True
        reducer.close()
    tw.codecs.unregister("truncate")
    return seen


def test_the_codec_of_the_page_runs_between_processes() -> None:
    source = python_blocks()[:3]
    assert len(source[1].splitlines()) <= 30
    pool = Pool(2)
    try:
        first, second = pool.run(run_the_page, source)
    finally:
        pool.close()
    assert first == second
    assert {text.rpartition("|")[2].partition(":")[0] for text in first} == {
        "all_gather",
        "all_reduce",
        "shared_top_k",
        "two_shot",
    }
    given = [torch.randn(64, 32, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    mean = torch.stack(given).mean(0)
    for text, delivered in first.items():
        if "top_k" not in text:
            error = float((torch.tensor(delivered) - mean).norm() / mean.norm())
            assert error < (0.2 if "3" in text else 0.02), text
