"""Dependencies point one way, and importing thinwire stays cheap."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire
from thinwire.codecs import Codec
from thinwire.exchange import Exchange
from thinwire.memory import Memory, RunningMemory
from thinwire.recipe.registry import STAGES

SOURCE = Path(thinwire.__file__).parent

# A unit (a package or module directly under thinwire) may import units of earlier lines only.
# A unit that is not listed may import every other, and none of these may import it.
ORDER = [
    {"errors", "rng", "theory"},
    {"kernels", "comm"},
    {"codecs"},
    {"memory"},
    {"exchange"},
    {"recipe"},
    {"reduce"},
    {"predict"},
    {"auto"},
    {"gossip", "attach"},
]
SMALL_WORDS = {"recipe/stage.py", "recipe/registry.py", "recipe/presets.py"}  # what every stage and layer may use
LEVEL = {unit: level for level, units in enumerate(ORDER) for unit in units}
TAKES_A_GROUP = {"reduce/reducer.py"}  # of torch.distributed, from a program
# Which kind of stage it is may be asked where a program hands one over, and where all registered codecs are listed.
MAY_ASK_FOR = {
    "recipe/compose.py": {"Codec", "Exchange", "Memory"},
    "gossip/absolute.py": {"Codec"},
    "lab/kernels/codec_rows.py": {"Codec"},
}
HEAVY = ["numba", "triton", "scipy", "typer", "yaml", "tensorboard", "pandas", "matplotlib"]


def _runtime(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node but those that only type checkers see."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _runtime(node.orelse)
        else:
            yield from ast.walk(node)


def _imported(path: Path) -> Iterator[str]:
    """The units that a file imports, by absolute or relative name."""
    package = ["thinwire", *path.relative_to(SOURCE).with_suffix("").parts[:-1]]
    for node in _runtime(ast.parse(path.read_text()).body):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            ours = parts[0] == "thinwire" and len(parts) > 1 and _is_unit(parts[1])
            if ours and "/".join(parts[1:3]) + ".py" not in SMALL_WORDS:
                yield parts[1]


def _is_unit(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_dependencies_point_one_way(path: Path) -> None:
    unit = path.relative_to(SOURCE).with_suffix("").parts[0]
    if unit not in LEVEL:
        return
    allowed = {other for other, level in LEVEL.items() if level < LEVEL[unit]} | {unit}
    assert set(_imported(path)) <= allowed


def test_the_import_graph_was_really_read() -> None:
    assert set(_imported(SOURCE / "recipe" / "compose.py")) >= {"codecs", "exchange", "memory"}
    assert set(_imported(SOURCE / "codecs" / "base.py")) >= {"kernels", "rng", "errors"}
    assert "recipe" not in set(_imported(SOURCE / "exchange" / "two_shot.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_comm_and_attach_know_torch_distributed(path: Path) -> None:
    unit = path.relative_to(SOURCE).with_suffix("").parts[0]
    # emulate has a backend for torch.distributed, and tells which ones there are
    if str(path.relative_to(SOURCE)) in TAKES_A_GROUP:
        return
    if LEVEL.get(unit, LEVEL["attach"]) < LEVEL["attach"] and unit not in ("comm",):
        assert "torch.distributed" not in path.read_text()


# ------------------------------------------------------------------------------- capabilities instead of classes


def _classes() -> dict[str, str]:
    """Every class of codecs, exchanges and memories, and its lower-case name -> the package that it belongs to."""
    found: dict[str, str] = {}
    for unit in ("codecs", "exchange", "memory"):
        package = importlib.import_module(f"thinwire.{unit}")
        for module in pkgutil.iter_modules(package.__path__):
            for name, value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).items():
                ours = isinstance(value, type) and issubclass(value, Codec | Exchange | Memory | RunningMemory)
                if ours and value.__module__.startswith(f"{package.__name__}."):
                    found[name] = unit
    return found


CLASSES = _classes()


def _names_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr


def _asked_for(tree: ast.Module) -> Iterator[str]:
    """The names in all that compares a type: isinstance, issubclass, `type(x) is C`, and patterns of a match."""
    renamed = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Call) and set(_names_in(node.func)) & {"isinstance", "issubclass"}:
            names = [name for argument in node.args[1:] for name in _names_in(argument)]
        elif isinstance(node, ast.Compare) and "type" in set(_names_in(node)):
            names = list(_names_in(node))
        elif isinstance(node, ast.MatchClass):
            names = list(_names_in(node.cls))
        yield from (renamed.get(name, name) for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_class_of_a_codec_exchange_or_memory_is_asked_for_outside_its_package(path: Path) -> None:
    """They declare what they can do; who asks for a class shuts out what is registered later."""
    place = str(path.relative_to(SOURCE))
    unit = path.relative_to(SOURCE).with_suffix("").parts[0]
    foreign = {name for name in _asked_for(ast.parse(path.read_text())) if CLASSES.get(name, unit) != unit}
    assert foreign <= MAY_ASK_FOR.get(place, set())


def test_what_asks_for_a_class_is_found() -> None:
    assert {"Codec", "SparseCodec", "Sparsifier", "TopK", "top_k", "TwoShot", "Memory", "RunningMemory"} <= set(CLASSES)
    source = """
from thinwire.codecs.sparsify import TopK as Largest
isinstance(codec, Largest) or isinstance(codec, (codecs.qsgd, Sparsifier)) or issubclass(kind, TwoShot | AllGather)
type(memory) is ErrorFeedbackMemory
match codec:
    case LowRank(rank=4): ...
"""
    asked = {name for name in _asked_for(ast.parse(source)) if name in CLASSES}
    assert asked == {"TopK", "qsgd", "Sparsifier", "TwoShot", "AllGather", "ErrorFeedbackMemory", "LowRank"}
    assert "Codec" in set(_asked_for(ast.parse((SOURCE / "recipe" / "compose.py").read_text())))


# -------------------------------------------------------------------------------------------------- the package


def test_importing_thinwire_is_lean() -> None:
    """No heavy module, and less than 0.3 s of work beyond torch, however busy the machine is; the best of three."""
    script = (
        "import sys, time, torch; start = time.process_time(); import thinwire;"
        f"print(time.process_time() - start, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
        elapsed, _, loaded = done.stdout.strip().partition(" ")
        assert loaded == "[]"
        seconds.append(float(elapsed))
        if seconds[-1] < 0.3:
            break
    assert min(seconds) < 0.3


def test_public_names_are_there_and_stages_are_in_their_packages() -> None:
    assert all(hasattr(thinwire, name) for name in thinwire.__all__)
    assert len(set(thinwire.__all__)) == len(thinwire.__all__)
    assert not set(STAGES) & set(thinwire.__all__)
    assert {"attach", "auto", "chain", "decentralize", "parse", "study", "Reducer"} <= set(thinwire.__all__)


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert thinwire.__version__ == version("thinwire")
