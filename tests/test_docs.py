"""What README and docs say is true: code runs, numbers match, links lead somewhere, tables are what the code does."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import thinwire as tw
from thinwire.codecs import Codec
from thinwire.kernels import reference
from thinwire.recipe.presets import ABOUT
from thinwire.recipe.registry import STAGES
from thinwire.reduce import BucketRecord, Meter, Records
from thinwire.reduce.buckets import TINY, one_dimensional_or_tiny
from thinwire.reduce.hashes import said

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
FRONT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = [*(ROOT / name for name in FRONT), *sorted((ROOT / "docs").rglob("*.md"))]
DDP_PAGE = ROOT / "docs" / "ddp.md"
REDUCER_PAGE = ROOT / "docs" / "reducer.md"
KERNELS_PAGE = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "benchmarks" / "results" / "kernels.json"
CODECS = {name for name, stage in STAGES.items() if issubclass(stage, Codec)}
SHAPE = (1000, 1000)
MILLION = math.prod(SHAPE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def section(page: Path, title: str) -> str:
    _, found, rest = page.read_text().partition(f"\n## {title}\n")
    assert found, f"{page.name} has no section {title}"
    return rest.partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """The body of a Markdown table, cell by cell; `\\|` is no border."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def module_at(path: Path) -> Any:
    """A Python file that is not part of a package."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------- code and links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_they_say(page: Path, alone: None) -> None:
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for number, source in enumerate(blocks(page, "python"), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{page.name}, block {number}", "exec", dont_inherit=True), namespace)
        lines = printed.getvalue().splitlines()
        for promised in re.findall(r"^ *print\(.*\)  # -> (.*)$", source, re.MULTILINE):
            assert promised in lines
    assert not dist.is_initialized()  # who begins also ends


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, and what torchrun would say to the only rank."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}, target


def test_counts_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    exchanges = [stage for stage in STAGES.values() if issubclass(stage, tw.exchange.Exchange)]
    assert f"| codecs | {len(CODECS)}:" in readme
    assert f"| exchanges | {len(exchanges)}:" in readme
    assert f"; {len(tw.PRESETS)} presets;" in readme
    assert f"| kernels | {len(kernel_names())} loops" in readme
    assert f"All {len(CODECS)} are in" in (ROOT / "docs" / "recipes.md").read_text()


# --------------------------------------------------------------------------------------------------- architecture


def test_the_file_list_is_fresh() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "make_tree.py"), "--check"], timeout=60)
    assert done.returncode == 0, "run python docs/make_tree.py"


def test_the_tables_are_fresh() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "make_codecs.py"), "--check"], timeout=120)
    assert done.returncode == 0, "run python docs/make_codecs.py"


def test_every_module_says_what_it_is_in_one_line() -> None:
    make_tree = module_at(ROOT / "docs" / "make_tree.py")
    lines = {path: make_tree.first_line(path) for path in SOURCE.rglob("*.py") if path.name != "__main__.py"}
    assert not [path for path, line in lines.items() if not 20 <= len(line) <= 117]


def test_the_order_of_units_is_the_one_that_is_tested() -> None:
    written = [
        {unit.strip() for unit in line.split(",")}
        for line in blocks(ROOT / "docs" / "architecture.md", "text")[1].splitlines()
    ]
    tested = module_at(Path(__file__).with_name("test_imports.py")).ORDER
    there = {path.stem for path in SOURCE.iterdir()}
    assert written == [units & there for units in tested if units & there]


@pytest.mark.parametrize("group", ["dependencies", "dev"])
def test_every_dependency_has_a_reason(group: str) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] if group == "dependencies" else project["optional-dependencies"]["dev"]
    told = section(ROOT / "docs" / "architecture.md", "What it depends on")
    for requirement in listed:
        assert re.search(rf"^\|.*\b{re.split('[<>=]', requirement)[0]}\b.*\|.*\|", told, re.MULTILINE), requirement


# -------------------------------------------------------------------------------------------------------- recipes


def test_refusals_are_real() -> None:
    (text,) = blocks(ROOT / "docs" / "recipes.md", "refusals")
    told = re.findall(r"^(\S.*)\n((?: +.*\n)+)", text, re.MULTILINE)
    assert len(told) > 10
    for recipe, sentence in told:
        with pytest.raises(tw.RecipeError) as refusal:
            tw.parse(recipe)
        assert str(refusal.value) == " ".join(sentence.split())


def test_memories_and_exchanges_are_all_there() -> None:
    page = ROOT / "docs" / "recipes.md"
    for title, base in (("Memories", tw.memory.Memory), ("Exchanges", tw.exchange.Exchange)):
        named = {re.findall(r"\w+", cells[0])[0]: cells[1:] for cells in rows(section(page, title))}
        assert set(named) == {name for name, stage in STAGES.items() if issubclass(stage, base)}
        for name, (options, *_, sentence) in named.items():
            assert re.findall(r"`(\w+)=", options) == STAGES[name].option_names(), name
            assert sentence == (inspect.getdoc(STAGES[name]) or "").splitlines()[0]


def test_presets_are_those_of_the_code() -> None:
    told = [[cell.strip("`") for cell in cells] for cells in rows(section(ROOT / "docs" / "recipes.md", "Presets"))]
    assert [(name, recipe) for name, recipe, _, _ in told] == list(tw.PRESETS.items())
    for name, _, size, sentence in told:
        recipe = tw.parse(name)
        assert size == f"{recipe.exchange.sent_bytes(recipe.codec, MILLION, world_size=4, shapes=[SHAPE]):,}", name
        assert sentence == ABOUT[name]
        assert sentence.endswith(".")


# ------------------------------------------------------------------------------------------------------------ ddp


def test_arguments_are_those_of_attach() -> None:
    told = {cells[0].strip("`"): cells[1] for cells in rows(section(DDP_PAGE, "Arguments"))}
    real = inspect.signature(tw.attach).parameters
    assert list(told) == [name for name, parameter in real.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for name, default in told.items():
        if default.startswith("`"):
            assert default.strip("`") == repr(real[name].default), name
    assert told["exempt"] == f"one-dimensional or below {TINY} elements"
    assert real["exempt"].default is one_dimensional_or_tiny


def test_arguments_are_those_of_the_reducer() -> None:
    told = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(section(REDUCER_PAGE, "Arguments"))}
    real = inspect.signature(tw.Reducer).parameters
    keywords = {name: parameter for name, parameter in real.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert told == {name: repr(parameter.default) for name, parameter in keywords.items()}


def test_the_error_that_replicas_raise_is_the_one_that_is_shown() -> None:
    (shown,) = blocks(REDUCER_PAGE, "text")
    assert " ".join(shown.split()) == said(200, "layer1.weight", [5, 5, 7, 5])
    assert "no majority: rank 0, 1 against rank 2, 3" in said(1, "w", [5, 5, 7, 7])


def test_the_number_of_public_names_is_the_one_that_is_told() -> None:
    for page in (ROOT / "CHANGELOG.md", ROOT / "docs" / "architecture.md"):
        assert f"`thinwire.__all__` has {len(tw.__all__)} names" in page.read_text(), page.name


def test_every_public_name_is_in_some_page() -> None:
    written = "\n".join(page.read_text() for page in PAGES)
    assert not [name for name in tw.__all__ if name not in written and name != "__version__"]


def test_metrics_are_those_of_the_meter() -> None:
    told = {cells[0].strip("`"): cells[-1] for cells in rows(section(DDP_PAGE, "Observing"))}
    records = Records()
    meter = Meter(sinks=[records])
    measured = BucketRecord("bucket0", 1, 2, 0.0, 0.0, 0.0, gain=1.0, memory_norm=1.0)
    for bare in (BucketRecord("bucket0", 1, 2, 0.0, 0.0, 0.0), measured):
        bare.agree = None if bare.gain is None else True
        meter.record(bare)
        meter.finish_step(0, exposed_seconds=0.0, finite=True, recipe="")
        entry = {name for name in records.entries[-1] if name != "step" and not name.startswith("bucket/")}
        sampled = {name for name, where in told.items() if bare.agree is None and where.endswith("sampled")}
        assert entry == {name for name, where in told.items() if where.startswith("both")} - sampled
        assert meter.stats().keys() == told.keys() - sampled
        assert "bucket/bucket0/bytes" in records.entries[-1]


# -------------------------------------------------------------------------------------------------------- kernels


def kernel_names() -> set[str]:
    return {
        name
        for name, function in inspect.getmembers(reference, inspect.isfunction)
        if not name.startswith("_") and function.__module__ == reference.__name__
    }


def test_every_kernel_is_listed() -> None:
    listed = {name for cells in rows(section(KERNELS_PAGE, "The list")) for name in re.findall(r"`(\w+)`", cells[0])}
    assert listed == kernel_names()


def test_measured_numbers_are_those_of_the_file() -> None:
    _, found, rest = KERNELS_PAGE.read_text().partition("<!-- kernel table -->\n")
    shown, ended, _ = rest.partition("<!-- end -->")
    assert found
    assert ended
    told = list(rows(shown))
    if not told:
        pytest.skip("docs/kernels.md has no table of measured values yet")
    if not RESULTS.exists():
        pytest.skip("benchmarks/results/kernels.json is missing: nothing to compare with")
    measured = {(row["name"], row["density"]): row for row in json.loads(RESULTS.read_text())["rows"]}
    assert len(told) == len(measured)
    for name, density, milliseconds, *ratios in told:
        row = measured[name.strip("`"), float(density.rstrip("%")) / 100 if density else None]
        assert milliseconds == f"{1000 * row['seconds']:.1f}"
        assert ratios == [f"{row['x_copy']:.2f}", f"{row['x_add']:.2f}", f"{row['x_torch']:.2f}"], name


def test_readme_shows_the_newest_comparison() -> None:
    script = module_at(ROOT / "benchmarks" / "scripts" / "tables.py")
    assert script.compared_table(json.loads(script.newest().read_text())) in (ROOT / "README.md").read_text()


def test_sparse_losses_are_those_of_the_file() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "losses_sparse.json").read_text())["rows"]
    told = [cells[1:] for cells in rows(section(ROOT / "docs" / "recipes.md", "Sparse recipes under Adam"))]
    assert told == [[f"{row['held_out']:.3f}", f"{row['over_dense']:.3f}"] for row in measured]


def test_quantized_losses_are_those_of_the_file_and_four_bits_cost_less_than_one_percent() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "losses_quantized.json").read_text())["rows"]
    told = rows(section(ROOT / "docs" / "recipes.md", "Few bits under Adam"))
    assert [[cells[0].strip("`"), cells[1], cells[3]] for cells in told] == [
        [row["recipe"], f"{row['held_out']:.3f}", f"{row['over_dense']:.4f}"] for row in measured
    ]
    of_four_bits = {"global-qsgd-8", "global-qsgd-exp", "qsgd-4", "two-shot-8", "two-shot-4"}
    assert of_four_bits <= {row["recipe"] for row in measured}
    for row in measured:
        assert len(row["held_out_of_seeds"]) == 3
        if row["recipe"] in of_four_bits:
            assert row["over_dense"] < 1.01


def test_errors_of_correlated_rounding_are_those_of_the_file_and_gradients_gain_nothing() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "correlated_rounding.json").read_text())["rows"]
    told = [
        cells
        for cells in rows(section(ROOT / "docs" / "recipes.md", "One bit"))
        if len(cells) == 6 and cells[1].isdigit()
    ]
    shown = [row for row in measured if row["ranks"] in (4, 16)]
    numbers = ("independent", "shared", "stratified")
    assert told == [
        [row["inputs"], str(row["ranks"]), f"{row['alike']:.2f}", *(f"{row[name]:.3f}" for name in numbers)]
        for row in shown
    ]
    for row in measured:
        same = row["inputs"] == "the same" and row["ranks"] <= 8
        assert (row["stratified"] < row["independent"]) == same


def test_the_plan_page_shows_the_newest_proof() -> None:
    script = module_at(ROOT / "benchmarks" / "scripts" / "plan.py")
    found = json.loads(script.newest().read_text())
    assert script.table(found) in (ROOT / "docs" / "plan.md").read_text()
    assert found["cells"] >= 24
    assert len({row["network"] for row in found["rows"]}) >= 4
    assert {row["workers"] for row in found["rows"]} == {2, 4}


def test_the_script_writes_a_table_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = module_at(ROOT / "benchmarks" / "scripts" / "tables.py")
    page, results = tmp_path / "kernels.md", tmp_path / "kernels.json"
    page.write_text("before\n<!-- kernel table -->\nold\n<!-- end -->\nafter\n")
    measured = [
        {"name": "moments", "density": None, "seconds": 0.00654, "x_copy": 0.641, "x_add": 0.83, "x_torch": 12.6},
        {"name": "select_ef", "density": 0.001, "seconds": 0.0104, "x_copy": 0.98, "x_add": 1.2, "x_torch": 41.0},
    ]
    machine = {"processor": "a processor", "torch": "2", "numba": "0"}
    run = {"numel": 25_000_000, "threads": 1, "rounds": 7, "machine": machine, "rows": measured}
    results.write_text(json.dumps(run))
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "RESULTS", results)
    front = tmp_path / "README.md"
    front.write_text("before\n<!-- compare table -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(script, "README", front)
    for _ in range(2):  # writing twice changes nothing
        script.main()
        written = page.read_text()
        assert written.startswith(
            "before\n<!-- kernel table -->\n\n| kernel | density | ms | x copy | x add | x torch |"
        )
        assert "| `moments` |  | 6.5 | 0.64 | 0.83 | 12.60 |" in written
        assert "| `select_ef` | 0.1% | 10.4 | 0.98 | 1.20 | 41.00 |" in written
        assert written.endswith("<!-- end -->\nafter\n")
        compared = script.compared_table(json.loads(script.newest().read_text()))
        assert front.read_text() == f"before\n<!-- compare table -->\n{compared}<!-- end -->\nafter\n"
